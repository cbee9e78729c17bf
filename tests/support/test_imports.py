"""How files import each other: no circle, not even one of types or of imports inside of functions; no test another."""

import ast
import re
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


def bound(path: Path, package: str) -> set[str]:
    """The names that a package's `__init__.py` binds, other than to its own modules."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module != package:
            found |= {one.asname or one.name for one in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def hidden_modules(root: Path, *packages: str) -> set[str]:
    """Modules whose package has something else by their name.

    Python sets that name to the module each time that it is imported anew: which of the two it is then depends on who
    imports what, and by which of its names.
    """
    files = modules(root, packages)
    return {
        f"{name}.{other}"
        for name, path in files.items()
        if path.name == "__init__.py"
        for other in bound(path, name)
        if f"{name}.{other}" in files
    }


def test_no_package_has_something_else_by_the_name_of_its_module() -> None:
    assert not hidden_modules(ROOT, "reference", "optimized")


def test_a_hidden_module_would_be_found(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in "abcd":
        (package / f"{name}.py").write_text("")
    package.joinpath("__init__.py").write_text(
        "from package import a\nfrom package.b import b\ndef c(): ...\nd, e = 1, 2\n"
    )
    assert hidden_modules(tmp_path, "package") == {"package.b", "package.c", "package.d"}


def imported_tests(root: Path) -> set[tuple[str, str]]:
    """Files in the folder `root`, and the tests that they import, by any path; what two tests use is in `shared`."""
    files = list(root.rglob("*.py"))
    tests = {path.stem for path in files if path.stem.startswith("test_")}
    found = set()
    for path in files:
        text = path.read_text("utf-8")
        named = tests & set(re.findall(r"test_\w+", text))  # most files name none, and need not be parsed
        for node in ast.walk(ast.parse(text)) if named else ():
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [*(one.name for one in node.names), getattr(node, "module", None) or ""]
                found |= {(path.stem, part) for name in names for part in name.split(".") if part in named}
    return found


def test_no_test_imports_another() -> None:
    assert not imported_tests(ROOT / "tests")


def test_a_test_that_imports_another_would_be_found(tmp_path: Path) -> None:
    for name in "abcde":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text("import test_elsewhere\n")
    assert not imported_tests(tmp_path)
    (tmp_path / "a" / "test_a.py").write_text("import test_b\n")
    (tmp_path / "b" / "test_b.py").write_text("def test() -> None:\n    from tests.c.test_c import x\n")
    (tmp_path / "c" / "test_c.py").write_text("from d import (\n    test_d,\n)\n")
    (tmp_path / "d" / "test_d.py").write_text("from .. import e\nfrom ..e.test_e import x\n")
    assert imported_tests(tmp_path) == {(f"test_{a}", f"test_{b}") for a, b in ("ab", "bc", "cd", "de")}
