"""How files import each other: no circle, not even one of types or of imports inside of functions."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules(root: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    """Module name → file, of packages in the folder `root`."""
    found = {}
    for path in (path for package in packages for path in (root / package).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: set[str]) -> set[str]:
    """The known modules that a file names in an import, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{one.name}" for one in node.names}
            found |= (inner & known) or {node.module}
    return found & known


def circle(root: Path, *packages: str) -> list[str]:
    """The modules of a circle, or nothing."""
    files = modules(root, packages)
    assert files
    try:
        TopologicalSorter({name: imports(path, set(files)) - {name} for name, path in files.items()}).prepare()
    except CycleError as found:
        return list(found.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not circle(ROOT, "reference", "optimized")


def test_a_circle_would_be_found(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from package import b\n")
    (package / "b.py").write_text("import typing\nif typing.TYPE_CHECKING:\n    from package.c import C\n")
    (package / "c.py").write_text("def f():\n    from package.a import x\n")
    assert set(circle(tmp_path, "package")) == {"package.a", "package.b", "package.c"}
    (package / "c.py").write_text("C = None\n")
    assert not circle(tmp_path, "package")
