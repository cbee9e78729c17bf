"""The commands of a contributor: `nox -l` lists them, `nox -s lint tests` runs two. .ci/run runs them, too.

They run in the environment that is active, and install there what they need; with `--no-install` they take it for
installed. `nox` is in the extra `dev`. What stands after `--` goes to the program: `nox -s tests -- -x`.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "tests"]
# Two processes of one thread each are a third faster on two cores than one process of two threads.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
TWO_AT_A_TIME = ("--quiet", "-n", "2", "--dist", "worksteal")
HERE = {**os.environ, "PYTHONPATH": "."}
# Files with tests that run other libraries' unmodified code on these layers.
INTEGRATIONS = (
    *("hugging_face", "conversion_blocks", "peft", "stand_in"),
    *("from_meta", "identity", "recompute_by_pytorch", "user_benches", "launchers", "generator_peers"),
    "deepspeed_zero",
)
CLANG_FORMAT = "clang-format==23.1.5"  # each version formats a little differently


def _paths(names: Iterable[str]) -> list[str]:
    """The files of tests by these names, whatever room they are in."""
    return [str(path) for name in names for path in Path("tests").rglob(f"test_{name}.py")]


def _install(session: nox.Session, *wanted: str) -> None:
    if "--no-install" not in sys.argv:  # nox itself heeds it in environments that it has made
        session.run("python", "-m", "pip", "install", "--quiet", *wanted)


def _kernels() -> list[str]:
    return sorted(map(str, Path("optimized").rglob("*.cu*")))


@nox.session
def lint(session: nox.Session) -> None:
    """The linter, the style of Python and of the kernels, the type checker, and who imports whom."""
    _install(session, "ruff", CLANG_FORMAT, "mypy", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("clang-format", "--dry-run", "-Werror", *_kernels())
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def format(session: nox.Session) -> None:
    """Python and kernels in the style that `lint` checks."""
    _install(session, "ruff", CLANG_FORMAT)
    session.run("ruff", "format", ".")
    session.run("clang-format", "-i", *_kernels())


@nox.session
def tests(session: nox.Session) -> None:
    """The fast tests, two at a time."""
    _install(session, "-e", ".[dev]")
    session.run("pytest", "-n", "2", "-m", "not slow", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """The exhaustive tests: minutes to hours."""
    _install(session, "-e", ".[dev]")
    session.run("pytest", "-n", "2", "-m", "slow", *session.posargs)


@nox.session
def simulated(session: nox.Session) -> None:
    """Every kernel on the CPU (docs/simulator.md)."""
    _install(session, "-e", ".[dev]")
    which = ("--simulate", "-m", "simulated and not slow")
    session.run("pytest", *TWO_AT_A_TIME, *which, *session.posargs, env=ONE_THREAD)


@nox.session
def integrations(session: nox.Session) -> None:
    """transformers, accelerate, peft and lightning as they are, and the lesson that needs them."""
    _install(session, "-e", ".[dev,integrations,notebooks]")
    files = [*_paths(INTEGRATIONS), "notebooks/16_other_peoples_models.ipynb"]
    which = ("-p", "nbmake", "--nbmake", "-m", "integration and not slow")
    session.run("pytest", *TWO_AT_A_TIME, *which, *files, *session.posargs, env=ONE_THREAD)


@nox.session
def notebooks(session: nox.Session) -> None:
    """Every lesson, run from its first cell to its last, and with each change that it suggests.

    Those that suggest none run in Jupyter; `-- notebooks/*.ipynb` runs all there, without changes.
    """
    _install(session, "-e", ".[dev,notebooks]")
    lessons = sorted(Path("notebooks").glob("*.ipynb"))
    unchanged = [str(one) for one in lessons if '"changes"' not in one.read_text("utf-8")]
    which = session.posargs or ["tests/pages/test_changes.py", *unchanged]
    session.run("pytest", *TWO_AT_A_TIME, "-p", "nbmake", "--nbmake", *which, env=ONE_THREAD)


@nox.session
def site(session: nox.Session) -> None:
    """The site, in site/; a broken link fails. `-- -k whole` visits all pages in Chromium, minutes."""
    _install(session, "-e", ".[dev,site]")
    session.run("mkdocs", "build", "--strict")
    which = session.posargs or ["-k", "not whole"]
    session.run("pytest", "--quiet", "tests/pages/test_site.py", "--site", "site", *which)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Random schedules, checkpoints, files and commands, ten minutes each; `-- --fuzz-seed N` repeats one."""
    _install(session, "-e", ".[dev]")
    files = _paths(f"fuzz_{name}" for name in ("layers", "storage", "commands"))
    session.run("pytest", "-m", "slow", *files, *(session.posargs or ["--fuzz-seconds", "600"]), env=ONE_THREAD)


@nox.session
def mutation(session: nox.Session) -> None:
    """Changes of the source that the tests must notice: hours."""
    _install(session, "-e", ".[dev,mutation]")
    session.run("python", "tests/tools/mutation.py", *(session.posargs or ["--count", "300", "--seed", "1"]), env=HERE)


@nox.session
def gpu(session: nox.Session) -> None:
    """The GPU suite on a Hopper GPU, and its summary in docs/results."""
    _install(session, "-e", ".[gpu,dev]")
    session.run("python", "tests/tools/gpu_suite.py", *session.posargs, env=HERE)


@nox.session
def tables(session: nox.Session) -> None:
    """The tables of README and docs/, from docs/results."""
    session.run("python", "-m", "optimized.commands.tables", env=HERE)
