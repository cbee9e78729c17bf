"""reference.support.numba_jit: what is kept of compiled code, when it is stale; importing and computing need
nothing."""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numba
import numpy as np
import pytest
from shared import processes

import reference
from reference.numbers import elementary
from reference.support import files, numba_jit

ROOT = Path(__file__).parents[2]
# The words of a softmax, whose compiled code holds that of elementary.exp.
SOFTMAX = (
    "import torch\n"
    "import reference\n"
    "x = torch.linspace(-3, 0, 64).view(1, 1, 4, 16)\n"
    "print(torch.ops.twin.softmax(x, 1.0, 'none', None).view(torch.int32).sum().item())\n"
)


# One small function, where any that is compiled will do.
POWER = (
    "import numpy as np\n"
    "from reference import elementary\n"
    "print(elementary.power_on_grid(np.float32(1.5), elementary.powers_of_two()))\n"
)


def power_here() -> str:
    """What that program prints."""
    return f"{elementary.power_on_grid(np.float32(1.5), elementary.powers_of_two())}\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, in a folder of its own."""
    folder = tmp_path / "install"
    shutil.copytree(ROOT / "reference", folder / "reference", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(
    folder: Path, cache: Path | None, program: str = SOFTMAX, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A program on the copy; without a cache, one that has no place to be."""
    home = {"XDG_CACHE_HOME": str(cache), "HOME": str(cache)} if cache else {"HOME": "/dev/null"}
    kept = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "HOME")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **home},
        cwd="/",
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_an_edit_of_what_is_called_is_not_missed(package: Path, tmp_path: Path) -> None:
    """softmax.py stays; elementary.py, whose exp its code holds, changes, but for size and time (wheels give one)."""
    path = package / "reference/numbers/elementary.py"
    text = path.read_text()
    assert "LN2_LOW = _F(-1.90465429995776788e-9)" in text
    os.utime(path, (1e9, 1e9))
    before = run(package, tmp_path / "cache")
    path.write_text(text.replace("LN2_LOW = _F(-1.90465429995776788e-9)", "LN2_LOW = _F(-1.90465429995776788e-3)"))
    os.utime(path, (1e9, 1e9))
    after = run(package, tmp_path / "cache")
    anew = run(package, tmp_path / "another cache")
    assert after.stdout == anew.stdout != before.stdout


def test_an_install_that_nothing_can_be_written_to_computes(package: Path) -> None:
    """No __pycache__, no cache folder, no home."""
    for folder in package.rglob("*"):
        if folder.is_dir():
            (folder / "__pycache__").write_text("a file, so that no folder can be made, whoever asks")
    (package / "reference/numbers/.#elementary.py").symlink_to("an editor's lock")
    done = run(package, None, POWER)
    assert (done.returncode, done.stdout) == (0, power_here()), done.stderr
    (said,) = done.stderr.splitlines()
    assert said.startswith(
        "What is compiled is not stored, and every process compiles it: /dev/null/.cache/twin-engine/"
    )
    assert said.endswith("was not written: Not a directory (said once).")


def test_a_user_without_a_home_computes() -> None:
    """As for a number without a name, of which containers are fond: HOME is not set, and no file says where it is."""
    homeless = (
        "import os, pathlib\n"
        "for name in ('HOME', 'XDG_CACHE_HOME'):\n    os.environ.pop(name, None)\n"
        "def homeless(cls):\n    raise RuntimeError('Could not determine home directory.')\n"
        "pathlib.Path.home = classmethod(homeless)\n"
    )
    done = processes.run(homeless + POWER)
    assert (done.returncode, done.stdout) == (0, power_here()), done.stderr
    (said,) = done.stderr.splitlines()
    assert said.endswith("this user has no home folder, and $XDG_CACHE_HOME names no absolute path (said once).")


# Two small functions, for two types each.
COUNTED = (
    "import sys\n"
    "import numpy as np\n"
    "from reference.ops.vocabulary.cross_entropy import halve\n"
    "from reference.ops.attentions.softmax import tree\n"
    "for dtype in (np.float32, np.float64):\n"
    "    numbers = np.sqrt(np.arange(256)).astype(dtype)\n"
    "    print(tree(numbers.copy().reshape(32, 8)), halve(numbers.copy(), 256))\n"
    "print(*(sum(f.stats.cache_hits.values()) for f in (halve, tree)), file=sys.stderr)\n"
)


@pytest.fixture(scope="module")
def compiled_by_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A cache that one process has filled by `COUNTED`: (package, cache, what it printed)."""
    folder = tmp_path_factory.mktemp("jit")
    shutil.copytree(ROOT / "reference", folder / "reference", ignore=shutil.ignore_patterns("__pycache__"))
    done = run(folder, folder / "cache", COUNTED)
    assert done.stderr == "0 0\n"
    return folder, folder / "cache", done.stdout


def test_the_second_process_compiles_nothing(compiled_by_one: tuple[Path, Path, str]) -> None:
    """One entry for each function and signature: both functions have two."""
    package, cache, output = compiled_by_one
    done = run(package, cache, COUNTED)
    assert (done.stdout, done.stderr) == (output, "2 2\n")
    entries = (cache / "twin-engine" / "numba").iterdir()
    assert sorted(path.name.rsplit("-", 1)[0] for path in entries) == ["halve", "halve", "tree", "tree"]


@pytest.mark.slow
def test_damaged_code_is_said_and_compiled_anew(compiled_by_one: tuple[Path, Path, str], tmp_path: Path) -> None:
    package, cache, output = compiled_by_one
    cache = Path(shutil.copytree(cache, tmp_path / "cache"))
    flipped, cut, empty, folder = paths = sorted((cache / "twin-engine" / "numba").iterdir())
    content = bytearray(flipped.read_bytes())
    content[-len(content) // 3] ^= 0x10
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    empty.write_bytes(b"")
    folder.unlink()
    folder.mkdir()
    again = run(package, cache, COUNTED)
    assert again.stdout == output
    *said, counts = again.stderr.splitlines()
    assert counts == "0 0"
    wanted = [f"{path} is damaged: it is compiled anew (said once)." for path in paths[:3]]
    wanted.append(f"{folder} cannot be read (Is a directory): it is compiled anew (said once).")
    (unwritten,) = set(said) - set(wanted)
    assert set(wanted) < set(said)
    assert f"{folder} was not written: it is there, and it is not a file" in unwritten
    assert run(package, cache, COUNTED).stderr.splitlines()[-1] == "2 1"


@pytest.mark.slow
def test_processes_at_once(compiled_by_one: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Two signatures of one function in numba's own cache could end as each other's code."""
    package, _, output = compiled_by_one
    environment = {**os.environ, "PYTHONPATH": str(package), "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", COUNTED], env=environment, cwd="/", stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert {process.communicate()[0] for process in processes} == {output}
    assert run(package, tmp_path, COUNTED).stderr == "2 2\n"


# --- what the stamp covers -----------------------------------------------------------------------------------

PACKAGE = Path(reference.__file__).parent
MODULES = [
    importlib.import_module(".".join(("reference", *path.relative_to(PACKAGE).with_suffix("").parts)))
    for path in sorted(PACKAGE.rglob("*.py"))
    if "from reference.support.numba_jit import" in path.read_text("utf-8")
]
STAMPED = (*MODULES, numba_jit)  # which has operations that numba lacks


def compiled(module: types.ModuleType) -> list[types.FunctionType]:
    """The Python functions that a module has compiled."""
    found = (value for value in vars(module).values() if hasattr(value, "py_func"))
    return [value.py_func for value in found if value.py_func.__module__ == module.__name__]


def test_every_module_with_compiled_code_is_in_the_stamp() -> None:
    with_code = set()
    for entry in pkgutil.walk_packages(reference.__path__, "reference."):
        __import__(entry.name)
        if any(isinstance(value, numba.core.dispatcher.Dispatcher) for value in vars(sys.modules[entry.name]).values()):
            with_code.add(entry.name)
    assert with_code == {module.__name__ for module in MODULES}
    assert all(map(compiled, MODULES))
    for module in STAMPED:
        assert b"reference.support.numba_jit" in Path(str(module.__file__)).read_bytes()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_compiled_code_takes_nothing_from_elsewhere(module: types.ModuleType) -> None:
    """A constant of a module that is not in the stamp could change without the code being compiled anew."""
    tree = ast.parse(inspect.getsource(module))
    origin = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for function in compiled(module):
        for name in function.__code__.co_names:
            if name in function.__globals__ and name in origin:
                source = str(origin[name])
                stamped = source in {module.__name__ for module in STAMPED}
                assert stamped or not source.startswith("reference"), f"{function.__name__} uses {name} of {source}"


def test_one_module_calls_numba() -> None:
    for folder in ("reference", "optimized"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != Path(numba_jit.__file__):
                assert not re.search(r"njit|numba\.jit|\bcache=True", path.read_text("utf-8")), path


def test_code_whose_source_is_not_at_hand_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    space: dict[str, object] = {}
    exec("def twice(x):\n    return x + x\n", space)
    addend = 3

    def closure(x: int) -> int:
        return x + addend

    for function, result in ((space["twice"], 4), (closure, 5)):
        assert numba_jit.jit(function)(2) == result
    assert not files.cache_folder("numba").exists()
