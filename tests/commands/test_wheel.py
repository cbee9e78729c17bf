"""A wheel, built and installed as a user does: everything is in it, under one name, and works from any folder."""

import ast
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import optimized
import reference as te
from optimized import defaults, measure
from optimized.commands import main
from optimized.cuda import compiler, wheel_cubins
from reference.numbers import philox
from reference.support import files, notice

ROOT = Path(__file__).parents[2]
NEEDED = ("reference", "optimized", "docs/results", ".wheel")  # and files at the top
KERNELS: list[tuple[str, dict[str, int | str]]] = [("amax", {"WIDE": 1}), ("norm_total", {"WIDE": 1})]


def _load(name: str) -> ModuleType:
    """A file of .wheel/, which hatchling loads by its path, too."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".wheel" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


long_names: Any = _load("long_names")


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("import reference", "from twin_engine import reference"),
        ("import optimized as te  # x", "import twin_engine.optimized as te  # x"),
        ("import reference.ops.casts.cast as c", "import twin_engine.reference.ops.casts.cast as c"),
        ("import reference.ops", "import twin_engine.reference.ops; from twin_engine import reference"),
        ("from reference import files", "from twin_engine.reference import files"),
        ("from  optimized.ops import (\n    cast,\n)", "from twin_engine.optimized.ops import (\n    cast,\n)"),
        ("def f():\n    from reference import a", "def f():\n    from twin_engine.reference import a"),
        ("é = 1; from reference import a", "é = 1; from twin_engine.reference import a"),
        *((same, same) for same in ("from . import reference", "import references", "import torch, os")),
        *((same, same) for same in ("reference = 1", "'from reference import a'", "from .reference import a")),
    ],
)
def test_imports_get_long_names_and_nothing_else_changes(short: str, long: str) -> None:
    assert long_names.rewritten(short, "a.py") == long


def test_an_import_of_several_modules_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a\.py, line 2: `import` names several modules, one of them ours; one a"):
        long_names.rewritten("\nimport os, reference", "a.py")


def test_no_module_of_ours_is_named_in_a_string() -> None:
    """A string that is imported, such as "optimized.bench", would not be rewritten."""
    found = set()
    for path in (path for folder in long_names.SHORT for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if re.fullmatch(r"(reference|optimized)(\.\w*)+", node.value) else set()
    assert found == {
        "reference.support.not_offered",
        "reference.support.older_names",
        "reference.ops.library",
    }  # endings of names


def test_the_page_of_the_package_has_no_link_into_a_clone() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    relative = re.compile(r"\]\((?!https?:|#)")
    assert relative.search(readme)
    for source in (None, "https://example.org/blob/main/"):
        page = long_names.page(readme, source)
        assert not relative.search(page)
        assert "import twin_engine as te" in page
        assert page.startswith("# Twin Engine\n\n> This page")
        assert ("](https://example.org/raw/main/docs/speed.png)" in page) == (source is not None)
        assert ("](https://example.org/blob/main/docs/README.md)" in page) == (source is not None)
        assert ("![" in page) == (source is not None)
        assert page.count("\n| ") == readme.count("\n| ")  # the tables


def test_the_long_name_has_what_the_short_one_has() -> None:
    names = long_names.exported((ROOT / "reference" / "__init__.py").read_text("utf-8"))
    assert names == te.__all__ == optimized.__all__


def _run(program: list[str], path: Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that finds what is installed in `path`, with no cache of compiled kernels."""
    given = {**os.environ, "PYTHONPATH": str(path), "XDG_CACHE_HOME": str(cwd / "cache"), **environment}
    return subprocess.run(program, cwd=cwd, env=given, capture_output=True, text=True)


def _python(code: str, path: Path, cwd: Path, **environment: str) -> str:
    done = _run([sys.executable, "-c", code], path, cwd, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _pip(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build needs of the repository, with the binaries of two kernels."""
    folder = tmp_path_factory.mktemp("clone")
    for name in NEEDED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "cubins"))
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "ROOT", folder)
        patch.setattr(defaults, "configurations", lambda: KERNELS)
        assert main(["compile", "--wheel"]) == 0
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = _pip("wheel", "--no-deps", "--wheel-dir", folder, clone)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pip does: a wheel of plain Python is unpacked where Python finds it."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    (about,) = folder.glob("*.dist-info")
    assert "Root-Is-Purelib: true" in (about / "WHEEL").read_text("utf-8")
    return folder


def test_a_wheel_has_every_file_under_one_name(wheel: Path, clone: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    version = te.__version__
    assert {name.split("/")[0] for name in names} == {"twin_engine", f"twin_engine-{version}.dist-info"}
    wanted = {"twin_engine/__init__.py", "twin_engine/py.typed"}
    for folder in ("reference", "optimized"):
        every = (path for path in (clone / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        wanted |= {f"twin_engine/{path.relative_to(clone).as_posix()}" for path in every}
    wanted |= {f"twin_engine/optimized/cubins/{path.name}" for path in (clone / ".wheel" / "cubins").iterdir()}
    wanted |= {f"twin_engine/optimized/results/{path.name}" for path in (clone / "docs" / "results").glob("*.json")}
    assert {name for name in names if name.startswith("twin_engine/")} == wanted
    assert {"twin_engine/optimized/cubins/amax.tar.xz", "twin_engine/optimized/recordings/data/parity_h200.npz"} < names


def test_the_command_works_from_any_folder(session: "Session") -> None:
    """By the entry point of which pip makes the program `twin`."""
    assert session.said["bench"].count("20") >= 19  # years
    for line in session.said["bench"].splitlines():
        recorded = (ROOT / "docs" / "results" / f"{line.split()[0]}.json").is_file()
        assert line.endswith("not measured") != recorded or line.startswith("*"), line


CHECKPOINT = """
import sys, torch
import twin_engine.reference as te
import twin_engine
layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
layer.load_state_dict(torch.load("model.pt", weights_only=True), strict=True)
with te.autocast(recipe=te.DelayedScaling()):
    y = layer(torch.load("x.pt"))
torch.save(y.detach(), "y.pt")
assert issubclass(twin_engine.Linear, te.Linear) and twin_engine.recipe.DelayedScaling is te.DelayedScaling
from twin_engine.recipe import DelayedScaling
assert hasattr(torch.ops.twin, "cast")
for missing in ("GroupedLinear", "recipe.CustomRecipe", "ops.AllReduce"):
    try:
        eval(f"twin_engine.{missing}")
    except AttributeError as error:
        print(error)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("reference", "optimized")))
"""
# What an installed wheel is asked, one part after the other in one process. Kernels come first: nothing else may have
# compiled any.
PARTS = {
    "kernels": f"""
import hashlib
from twin_engine.optimized import compiler
from twin_engine.optimized.commands import main
for kernel, defines in {KERNELS!r}:
    assert compiler.is_built(kernel, defines)
    print(hashlib.sha256(compiler.cubin(kernel, defines)).hexdigest())
assert compiler.compiled == [], compiler.compiled
assert not compiler.is_built("amax", {{"WIDE": 0}})
main(["info"])
""",
    "parity": """
from twin_engine.optimized.commands import main
assert main(["parity", "--replay", "--op", "scale_update"]) == 0
""",
    "bench": """
import sys
from importlib import metadata
(twin,) = (one for one in metadata.distribution("twin-engine").entry_points if one.name == "twin")
assert twin.group == "console_scripts"
sys.argv[1:] = ["bench"]
assert not twin.load()()
""",
    "version": """
from twin_engine.optimized.commands import main
try:
    main(["--version"])
except SystemExit as end:
    assert end.code in (None, 0)
""",
    "refused": """
from contextlib import redirect_stderr
import sys
from twin_engine.optimized.commands import main
with redirect_stderr(sys.stdout):
    assert main(["compile", "--wheel"]) == main(["parity", "--replay", "--write"]) == 2
""",
    "checkpoint": CHECKPOINT,
    "the other name": """
try:
    import reference
except ImportError as error:
    print(error)
""",
}
SESSION = """
import contextlib, io, json, sys
found = {}
for name, program in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {"__name__": name})
    found[name] = out.getvalue()
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Session:
    """A process in which an installed wheel has been asked everything."""

    said: dict[str, str]
    folder: Path
    y: torch.Tensor


@pytest.fixture(scope="module")
def session(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Also: a checkpoint that is written here is loaded there."""
    folder = tmp_path_factory.mktemp("session")
    layer, x = te.Linear(32, 16, params_dtype=torch.bfloat16), philox.normal((8, 32), seed=3).bfloat16()
    with te.autocast(recipe=te.DelayedScaling()):
        layer(x)
        torch.save(layer.state_dict(), folder / "model.pt")
        y = layer(x)
    torch.save(x, folder / "x.pt")
    program = [sys.executable, "-c", SESSION, json.dumps(PARTS)]
    path = Path(f"{installed}{os.pathsep}{ROOT}")
    done = _run(program, path, folder, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    return Session(json.loads(done.stdout), folder, y)


def test_the_installed_package_says_its_version(session: Session) -> None:
    assert session.said["version"] == f"twin {te.__version__}\n"


def test_the_installed_package_replays_recordings(session: Session) -> None:
    assert re.search(r"scale_update +│ +232 +│ +0", session.said["parity"])


def test_a_checkpoint_of_a_clone_is_one_of_the_wheel(session: Session, same_bits) -> None:  # type: ignore[no-untyped-def]
    """The names of ops and of a checkpoint's entries do not depend on the packages' name."""
    out = session.said["checkpoint"].splitlines()
    same_bits(session.y, torch.load(session.folder / "y.pt"))
    assert [line.split(":")[0] for line in out[:3]] == [
        "te.GroupedLinear is not offered by Twin Engine",
        "recipe.CustomRecipe is not offered by Twin Engine",
        "ops.AllReduce is not offered by Twin Engine",
    ]
    assert out[3:] == ["[]"]


def said_of_both_names(line: str) -> bool:
    """Whether it is the sentence of a process that imports the package under its second name."""
    return bool(
        line.startswith("Twin Engine is imported twice, as '")
        and line.count("library.py") == 2
        and line.endswith("or a clone's `reference` and `optimized`, not both.")
    )


def test_both_names_in_one_process_are_refused(session: Session) -> None:
    """The long one first; `test_importing_is_quick…` has the other order."""
    assert said_of_both_names(session.said["the other name"].strip())


def test_kernels_come_from_the_wheel(session: Session) -> None:
    """Nothing is compiled, and nothing is stored: the wheel's binaries are those that this machine compiles."""
    out = session.said["kernels"]
    assert out.split()[:2] == [hashlib.sha256(compiler.cubin(*one)).hexdigest() for one in KERNELS]
    assert re.search(rf"compiled kernels +2 in the package, by NVRTC {compiler.nvrtc_version()} ", out)
    assert not (session.folder / "cache" / "twin-engine" / "cubin").exists()


def test_what_is_written_in_a_clone_is_refused_by_a_wheel(session: Session) -> None:
    for line in (lines := session.said["refused"].splitlines()):
        assert re.match(r"--\w+: it is written in a clone of the repository, and .*twin_engine is an inst", line)
    assert len(lines) == 2


def test_a_wheel_of_other_kernels_is_not_built(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binaries that are never found would make a wheel larger, and first steps as slow as before."""
    interfaces = {"builders.hooks": "BuildHookInterface", "metadata": "MetadataHookInterface"}
    for place, name in interfaces.items():  # hatchling is there while a wheel is built
        module: Any = ModuleType("interface")
        setattr(module, name, object)
        monkeypatch.setitem(sys.modules, f"hatchling.{place}.plugin.interface", module)
    for package in ("", ".builders", ".builders.hooks", ".builders.hooks.plugin", ".metadata", ".metadata.plugin"):
        monkeypatch.setitem(sys.modules, f"hatchling{package}", ModuleType("package"))
    hook: Any = _load("hook")
    monkeypatch.setattr(hook, "HERE", clone / ".wheel")
    for changed in (False, True):
        made = Path(shutil.copytree(clone / "optimized", tmp_path / f"{changed}"))
        if not changed:
            hook._copy_binaries(made)
            assert (made / "cubins" / "amax.tar.xz").is_file()
            continue
        with (made / "kernels" / "ptx" / "add.cuh").open("a") as file:
            file.write("// changed\n")
        with pytest.raises(RuntimeError, match=r"\.wheel/cubins does not have the binaries of these kernels, or not"):
            hook._copy_binaries(made)


def test_a_damaged_archive_is_said_once_and_its_kernels_are_compiled(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(clone / ".wheel" / "cubins", tmp_path / "cubins"))
    monkeypatch.setattr(wheel_cubins, "FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheel_cubins._entries.cache_clear()
    assert compiler.is_built(*KERNELS[0])
    path = folder / "amax.tar.xz"
    whole = path.read_bytes()
    for damaged in (whole[:-20], b"no archive", whole[:200] + b"\0\0\0\0" + whole[204:]):
        files.write(path, damaged)
        wheel_cubins._entries.cache_clear()
        notice._said.clear()
        caplog.clear()
        assert not compiler.is_built(*KERNELS[0])
        assert not compiler.is_built(*KERNELS[0])
        (record,) = caplog.records
        assert re.search(r"amax\.tar\.xz is damaged \(.+\): its kernels are compiled anew", record.getMessage())
    assert compiler.is_built(*KERNELS[1])
    wheel_cubins._entries.cache_clear()


EDITABLE = """
import twin_engine.optimized.commands as commands
import twin_engine as te, twin_engine.reference.ops.casts.cast
import reference, optimized.commands, reference.ops.casts.cast
from twin_engine.recipe import DelayedScaling
assert commands is optimized.commands and commands.__spec__.name == "optimized.commands"
assert twin_engine.reference.ops.casts.cast is reference.ops.casts.cast and te.Linear is optimized.Linear
assert sys.modules["twin_engine.reference"] is reference and DelayedScaling is reference.DelayedScaling
try:
    import twin_engine.reference.nothing
except ModuleNotFoundError as error:
    print(error)
try:
    te.GroupedLinear
except AttributeError as error:
    print(error)
"""


def test_importing_is_quick_and_loads_no_more_than_it_needs(installed: Path, tmp_path: Path) -> None:
    """It takes about half of torch's own time, most of that numba's. It needs no CuPy, and so no GPU.

    What Python takes to compile source whose bytecode is not kept is left out.

    A second copy under the long name is refused, and an editable install's long name is of the same modules.
    """
    (tmp_path / "twin_engine").mkdir()
    shutil.copyfile(ROOT / ".wheel" / "checkout.py", tmp_path / "twin_engine" / "__init__.py")
    code = f"""
import importlib.machinery, sys, time
compile, compiling = importlib.machinery.SourceFileLoader.source_to_code, []
def source_to_code(*args, **options):
    begun = time.process_time()
    try:
        return compile(*args, **options)
    finally:
        compiling.append(time.process_time() - begun)
importlib.machinery.SourceFileLoader.source_to_code = source_to_code
def seconds():
    return time.process_time() - sum(compiling)
begun = seconds()
import torch
torchs = seconds() - begun
sys.modules["cupy"] = None
begun = seconds()
import optimized
print((seconds() - begun) / torchs)
others = ("matplotlib", "rich", "cupy_backends", "transformers", "torch._dynamo", "sympy")
print([name for name in others if name in sys.modules])
print(optimized.Linear(16, 16, device="cpu"))
from optimized.commands import main
main(["bench"])
print("matplotlib" in sys.modules)
sys.path.insert(0, {str(installed)!r})
try:
    import twin_engine.reference
except ImportError as error:
    print(error)
for name in [name for name in sys.modules if name.split(".")[0] == "twin_engine"]:
    del sys.modules[name]
sys.path[0] = {str(tmp_path)!r}
"""
    share, loaded, layer, *_, drawn, twice, missing, elsewhere = _python(code + EDITABLE, ROOT, tmp_path).splitlines()
    assert float(share) < 0.75
    assert loaded == "[]"
    assert "in_features=16" in layer
    assert drawn == "False"
    assert said_of_both_names(twice)
    assert missing == "No module named 'reference.nothing'"
    assert elsewhere.startswith("te.GroupedLinear is not offered by Twin Engine")


def test_in_a_clone_results_are_docs_results() -> None:
    assert not measure.INSTALLED
    assert measure.RESULTS == ROOT / "docs" / "results"
    assert measure.repository("it") == ROOT
