"""How much the tests see: mutants of `reference` and `optimized`'s Python, drawn by cosmic-ray, and which survive.

    pip install -e ".[dev,mutation]"
    PYTHONPATH=. python tests/tools/mutation.py --count 300 --seed 1          # an hour on two cores

A mutant is one change of one place (a number, an operator, a condition). cosmic-ray lists all of them; `--count` are
drawn of those that compile and may change what a program does (`changes_nothing` says of which kinds none is). First
all fast tests of CI, those in the simulator too, run once in a copy of the checkout, and coverage notes which execute
what (`--map` keeps it). Then each mutant is judged in a copy by the tests that execute the changed statement, one of
each test function before the second of any, and stops at the first that fails: a test that never executes a statement
does not see its change. Those that a minute of tests does not kill are judged again, last, by ten minutes of the
others that execute the statement, or else anything of its module (`--budget`). A mutant survives if all pass; a test
that takes many times as long as it did is a kill, and noted as one by time. At the end the tests that killed run
without a mutation: one that fails then has killed nothing.

Numbers and names at a module's top are executed by its import. They are judged by the tests of the functions that name
them, and what numba compiles by the tests that call it, or what calls it.

This process imports torch, numba and pytest, and none of the project: each judging is a fork of it.

Each outcome is added to `--log` at once, and what is there is not judged again. At the end all go to
docs/results/mutation.json, every survivor with its change and, from `--judged`, a JSON file of sentences by change, why
it is left.
"""

import argparse
import ast
import collections
import contextlib
import ctypes
import faulthandler
import gzip
import itertools
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import coverage
import numba
import pytest

ROOT = Path(__file__).parents[2]
# All that CI runs: the fast suite, and the kernels' tests in the simulator.
WHICH = ("-m", "not slow and (not gpu or simulated)", "--simulate")
FAST = ("-q", *WHICH, "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov", "-p", "no:benchmark")
# A busy machine fails these, so they are no judges.
OF_TIME = (
    "::test_importing_is_quick_and_loads_no_more_than_it_needs",
    "::test_1024_cubed_takes_at_most_20_times_numpys_fp32_product",
)
PATIENCE = (120.0, 20.0)  # a test is stopped after so many seconds and so many times its time
# Annotations are full of `X | None`, each of which dies at its import under all eleven of these.
SKIPPED = ("core/ReplaceBinaryOperator_BitOr_",)
# Types, None, names that are interned and small numbers are one object where they are equal.
SAME = tuple(f"core/ReplaceComparisonOperator_{one}" for one in ("Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq"))
# Tests' inputs: whatever stands there, the two sides must agree on it.
INPUTS = ("optimized/recordings/cases/",)
# Speed alone: what a tile costs, by which one of several with the same words is chosen; what is computed once. And
# `@staticmethod`, without which a function of a class is the same.
ALIKE = re.compile(r"\bCost\(|^\s*@(staticmethod|(functools\.)?(lru_)?cache)\b")
# What writes caches, or is in what they keep, has a cache of its own while it is changed.
CACHES = ("reference/support/", "optimized/cuda/")
CONFIG = """[cosmic-ray]
module-path = ["reference", "optimized"]
timeout = 60.0
excluded-modules = []
test-command = "true"
[cosmic-ray.distributor]
name = "local"
"""
SUBPROCESS = """[run]
parallel = true
data_file = {folder}/.coverage
source =
    {folder}/reference
    {folder}/optimized
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-imported, module-not-measured
"""


def copy(folder: Path) -> Path:
    """The working tree without what git ignores, and without its history: a mutant must be seen by `git diff`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, target)
    for step in (["init", "-q"], ["add", "-A"], ["-c", "user.name=m", "-c", "user.email=m", "commit", "-qm", "m"]):
        subprocess.run(["git", *step], cwd=folder, check=True)
    return folder


def changes_nothing(module: str, operator: str, line: str) -> bool:
    """Whether a change is, by its kind or place, none that a test should see."""
    return operator in SAME or operator.startswith(SKIPPED) or module.startswith(INPUTS) or bool(ALIKE.search(line))


def drawn(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """`count` of all mutants that cosmic-ray knows and Python compiles, each with its patch, and how many it knows."""
    from cosmic_ray.mutating import mutate_code  # only here: another machine may judge what was drawn on this one
    from cosmic_ray.plugins import get_operator

    (folder / "mutation.toml").write_text(CONFIG, "utf-8")
    subprocess.run(["cosmic-ray", "init", "mutation.toml", "mutation.sqlite"], cwd=folder, check=True)
    query = "select module_path, operator_name, occurrence, start_pos_row from mutation_specs order by 1, 2, 3"
    with contextlib.closing(sqlite3.connect(folder / "mutation.sqlite")) as database:
        rows = database.execute(query).fetchall()
    lines = {module: (folder / module).read_text("utf-8").split("\n") for module, *_ in rows}
    rows = [one for one in rows if not changes_nothing(one[0], one[1], lines[one[0]][one[3] - 1])]
    found: list[dict[str, Any]] = []
    for module, operator, occurrence, line in random.Random(seed).sample(rows, len(rows)):
        source = (folder / module).read_text("utf-8")
        mutated = mutate_code(source, get_operator(operator)(), occurrence)
        assert mutated is not None, (module, operator, occurrence)
        try:
            compile(mutated, module, "exec")
        except SyntaxError:  # such as `/` for the `*` before arguments that have names
            continue
        (folder / module).write_text(mutated, "utf-8")
        patch = subprocess.run(["git", "diff"], cwd=folder, capture_output=True, text=True, check=True).stdout
        (folder / module).write_text(source, "utf-8")
        change = [one for one in patch.splitlines() if one[:1] in "+-" and one[:3] not in ("+++", "---")]
        place = {"module": module, "operator": operator, "occurrence": occurrence, "line": line}
        found.append({**place, "change": "\n".join(change), "patch": patch})
        if len(found) == count:
            break
    (folder / "mutation.toml").unlink()
    (folder / "mutation.sqlite").unlink()
    return {"tool": f"cosmic-ray {metadata.version('cosmic-ray')}", "known": len(rows), "mutants": found}


# --- a process for some tests ------------------------------------------------------------------------------


def forked(work: Callable[..., int], *arguments: Any) -> int:
    """The id of a process, first of a group of its own, that does some work and ends with the status it returns."""
    process = os.fork()
    if process:
        return process
    status = 70
    try:
        os.setsid()
        status = work(*arguments)
    finally:
        os._exit(status)


def _entered(folder: Path) -> Path:
    """A copy of the checkout, for this process and its children under a path that all copies have in turn.

    Caches of compiled code know files by their paths. Where mounting is not allowed, each copy fills its own.
    """
    shared = folder.parent / "checkout"
    if not ctypes.CDLL(None).unshare(0x00020000):  # CLONE_NEWNS
        commands = ("mount --make-rprivate /", f"mount --bind {folder} {shared}")
        if not any(subprocess.run(one.split(), stderr=subprocess.DEVNULL).returncode for one in commands):
            return shared
    return folder


def _pytest(folder: Path, cache: Path, out: Path, arguments: Iterable[str], plugin: object) -> int:
    """pytest's status, of tests in a copy of the checkout."""
    os.chdir(folder)
    sys.modules["__main__"] = types.ModuleType("__main__")  # or processes that a test starts import this file
    sys.path[:0] = [str(folder), f"{folder}/tests"]
    os.environ.update(PYTHONPATH=str(folder), XDG_CACHE_HOME=str(cache), OMP_NUM_THREADS="1", CI="1")
    number = os.open(out, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(number, 1)
    os.dup2(number, 2)
    return int(pytest.main([*FAST, *arguments], plugins=[plugin]))


def _ended(process: int, until: float) -> int | None:
    """The exit status of a process, waited for until a time; None if it must be stopped. Its group is stopped then."""
    status = None
    try:
        while status is None and time.monotonic() < until:
            found, word = os.waitpid(process, os.WNOHANG)
            if found:
                status = os.waitstatus_to_exitcode(word)
            else:
                time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)
        if status is None:
            os.waitpid(process, 0)
    return status


# --- which tests execute what ------------------------------------------------------------------------------


class Recorder:
    """A plugin of pytest: how long each test takes and whether it passes; coverage's contexts are tests.

    What a fixture does is every test's of its file: those of modules are made once. What numba compiles is not traced:
    a call of it is noted as the line of its function, negative.
    """

    def __init__(self, folder: Path, measured: coverage.Coverage) -> None:
        self.folder, self.measured = f"{folder}{os.sep}", measured
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.failed: set[str] = set()
        self.calls: set[tuple[str, str, int]] = set()
        self.now = ""
        recorder, njit = self, numba.njit

        class Noted(numba.core.registry.CPUDispatcher):  # type: ignore[misc,name-defined]
            def __call__(self, *arguments: Any, **named: Any) -> Any:
                code = self.py_func.__code__
                recorder.calls.add((recorder.now, code.co_filename, -code.co_firstlineno))
                return super().__call__(*arguments, **named)

        def noted(*arguments: Any, **named: Any) -> Any:
            compiled = njit(*arguments, **named)
            if isinstance(compiled, numba.core.registry.CPUDispatcher):
                compiled.__class__ = Noted
            return compiled

        numba.njit = noted

    def _context(self, name: str) -> None:
        self.now = name
        self.measured.switch_context(name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._context(item.nodeid.partition("::")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._context(item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or report.failed:
            self.failed.add(report.nodeid)
        self.seconds[report.nodeid] += report.duration


def _record(folder: Path, cache: Path, files: list[str], out: Path) -> int:
    """In a process of its own: run the tests of files, and write what they execute."""
    folder = _entered(folder)
    (out.with_suffix(".ini")).write_text(SUBPROCESS.format(folder=folder), "utf-8")
    sources = [f"{folder}/reference", f"{folder}/optimized"]
    measured = coverage.Coverage(data_file=str(out.with_suffix(".data")), config_file=False, source=sources)
    measured.start()
    os.environ["COVERAGE_PROCESS_START"] = str(out.with_suffix(".ini"))
    recorder = Recorder(folder, measured)
    status = _pytest(folder, cache, out.with_suffix(".out"), files, recorder)
    measured.stop()
    measured.save()
    passed = {name: seconds for name, seconds in recorder.seconds.items() if name not in recorder.failed}
    found = {"passed": passed, "calls": sorted(recorder.calls), "failed": sorted(recorder.failed)}
    out.write_text(json.dumps(found), "utf-8")
    return status


def record(folder: Path, cache: Path, workers: int) -> dict[str, Any]:
    """Of all fast tests that pass: their seconds, and who executes each line of each module; `others` do not pass.

    Sets of tests are numbers whose bits are places in `tests`. A negative line is a compiled function's first.
    """
    begun = time.monotonic()
    room = folder.parent / "map"
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir()
    names = sorted(str(path.relative_to(folder)) for path in folder.glob("tests/**/test_*.py"))
    names += [str(path.relative_to(folder)) for path in folder.glob("tests/**/*.ipynb")]
    parts = [names[place :: 4 * workers] for place in range(4 * workers)]
    waiting = [(part, room / f"{place}.json") for place, part in enumerate(parts) if part]
    running: dict[int, Path] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            part, out = waiting.pop(0)
            running[forked(_record, folder, cache, part, out)] = out
        process, _ = os.wait()
        out = running.pop(process)
        if not out.is_file():
            raise SystemExit(f"The tests could not run: {out.with_suffix('.out').read_text('utf-8')[-2000:]}")
        print(f"{out.stem}: {time.monotonic() - begun:.0f} s", flush=True)
    return _merged(room, folder)


def _merged(room: Path, folder: Path) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    others: set[str] = set()
    of_line: dict[tuple[str, int], set[str]] = collections.defaultdict(set)
    for out in room.glob("*.json"):
        found = json.loads(out.read_text("utf-8"))
        seconds |= found["passed"]
        others |= set(found["failed"])
        for name, path, line in found["calls"]:
            of_line[_relative(path), line].add(name)
        said = out.with_suffix(".out").read_text("utf-8").splitlines()
        print("\n".join(one for one in said if one.startswith(("FAILED", "ERROR"))), flush=True)
    for data in (*room.glob("*.data"), *folder.glob(".coverage.*")):
        kept = coverage.CoverageData(str(data))
        kept.read()
        for path in kept.measured_files():
            for line, contexts in kept.contexts_by_lineno(path).items():
                of_line[_relative(path), line] |= set(contexts)
    if not of_line:
        raise SystemExit(f"The tests ran nothing in {folder}.")
    tests = sorted(seconds)
    places: dict[str, int] = {name: 1 << place for place, name in enumerate(tests)}
    for name, bit in list(places.items()):
        file = name.partition("::")[0]
        places[file] = places.get(file, 0) | bit
    sets: dict[str, int] = {}
    modules: dict[str, dict[int, int]] = collections.defaultdict(dict)
    for (module, line), executed in sorted(of_line.items()):
        together = 0
        for one in executed:  # other processes know the test and its phase: "name (call)"
            together |= places.get(one) or places.get(one.rpartition(" (")[0], 0)
        modules[module][line] = sets.setdefault(f"{together:x}", len(sets))
    print(f"{len(tests)} tests pass, {len(others)} do not or are skipped; {sum(seconds.values()):.0f} s", flush=True)
    timed = [[name, round(seconds[name], 3)] for name in tests]
    return {"tests": timed, "others": sorted(others), "sets": list(sets), "modules": modules}


def _relative(path: str) -> str:
    """The path of a module inside its copy; an empty one of other files."""
    parts = Path(path).parts
    return "/".join(
        parts[max((n for n, part in enumerate(parts) if part in ("reference", "optimized")), default=len(parts)) :]
    )


class Map:
    """What `record` found, asked for the tests of a mutant."""

    def __init__(self, folder: Path, found: dict[str, Any]) -> None:
        self.folder = folder
        self.places = [name for name, _ in found["tests"]]
        self.known = frozenset(self.places) | frozenset(found["others"])
        self.doubtful = {name for name in self.places if name.partition("[")[0].endswith(OF_TIME)}
        self.seconds: dict[str, float] = dict(found["tests"])
        sets = [int(one, 16) for one in found["sets"]]
        self.lines = {
            module: {int(line): sets[place] for line, place in lines.items()}
            for module, lines in found["modules"].items()
        }
        self.texts = {
            str(path.relative_to(folder)): path.read_text("utf-8")
            for side in ("reference", "optimized")
            for path in folder.glob(f"{side}/**/*.py")
        }
        self.trees = {module: ast.parse(text) for module, text in self.texts.items()}
        # Functions, and statements at a module's top or in a class's body, by the names that stand in them.
        self.users = [
            (module, node, {one.id if isinstance(one, ast.Name) else one.attr for one in ast.walk(node)
                            if isinstance(one, ast.Name | ast.Attribute)})
            for module, tree in self.trees.items()
            for node in (*tree.body, *ast.walk(tree))
            if isinstance(node, ast.FunctionDef) or (node in tree.body and isinstance(node, ast.Assign | ast.AnnAssign))
        ]  # fmt: skip

    def _names(self, word: int) -> set[str]:
        return {name for place, name in enumerate(self.places) if word >> place & 1 and name not in self.doubtful}

    def _lines(self, module: str, first: int, last: int) -> int:
        lines = self.lines.get(module, {})
        found = 0
        for line in range(first, last + 1):
            found |= lines.get(line, 0)
        return found

    def _of_function(self, module: str, node: ast.FunctionDef) -> int:
        """The tests that execute a function's body, or call it compiled."""
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        found = self._lines(module, node.body[0].lineno, node.end_lineno or node.lineno)
        return found | self.lines.get(module, {}).get(-first, 0)

    def _of_names(self, origin: str, names: set[str]) -> int:
        """The tests of the functions that name one of these, or what a module or a compiled function makes of it.

        They are in the module where the names come from, or in one that names it.
        """
        stem = Path(origin).stem
        found, seen, new = 0, set(names), set(names)
        while new:
            more: set[str] = set()
            for module, node, named in self.users:
                if not new & named or not (module == origin or stem in self.texts[module]):
                    continue
                if not isinstance(node, ast.FunctionDef):
                    more |= _bound(node)
                    continue
                found |= self._of_function(module, node)
                if _is_compiled(node):
                    more.add(node.name)
            new = more - seen
            seen |= new
        return found

    def of(self, module: str, line: int) -> tuple[list[str], list[str]]:
        """The tests of the statement of a line, the best first, and the others of its module."""
        spans = [
            (*_span(node), node)
            for node in ast.walk(self.trees[module])
            if isinstance(node, (ast.stmt, ast.ExceptHandler))
        ]
        around = [one for one in sorted(spans, key=lambda one: one[:2]) if one[0] <= line <= one[1]]
        first, last, statement = around[-1] if around else (line, line, None)
        word = self._lines(module, first, last)
        functions = [node for one, node, _ in self.users if one == module and isinstance(node, ast.FunctionDef)]
        outer = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
        if isinstance(statement, ast.FunctionDef):
            word |= self._of_function(module, statement)
        elif outer and not word:  # compiled, or never executed
            word = self._of_function(module, outer[-1])
            if _is_compiled(outer[-1]):
                word |= self._of_names(module, {outer[-1].name})
        elif not outer and statement:
            word |= self._of_names(module, _bound(statement))
        whole = 0
        for one in self.lines.get(module, {}).values():
            whole |= one
        here, near = self._names(word), f"/test_{Path(module).stem}"
        room = f"tests/{Path(module).parent.relative_to(Path(module).parts[0])}/"
        tests = [name for name in self.places if name not in self.doubtful]
        rest = self._names(whole) | {name for name in tests if near in name}
        if not here:  # or other processes execute it, forks that coverage does not see
            rest |= {name for name in tests if name.startswith(room) or "rank" in name or "process" in name}
        rest -= here
        return self._ordered(here, near, room), self._ordered(rest, near, room)

    def _ordered(self, names: set[str], near: str, room: str) -> list[str]:
        """One of each function before the second of any, of the module's own file eight.

        First those of that file, then of the module's room: what it is for is tested there; the quickest of each first.
        """
        groups: dict[str, list[str]] = collections.defaultdict(list)
        for name in sorted(names, key=lambda one: (self.seconds[one], one)):
            groups[name.partition("[")[0]].append(name)
        ranked = [
            (
                place // 8 if near in name else place,
                near not in name,
                not name.startswith(room),
                self.seconds[name],
                name,
            )
            for group in groups.values()
            for place, name in enumerate(group)
        ]
        return [name for *_, name in sorted(ranked)]


def _is_compiled(node: ast.FunctionDef) -> bool:
    """Whether numba compiles a function."""
    return any("jit" in ast.unparse(one) or "intrinsic" in ast.unparse(one) for one in node.decorator_list)


def _bound(statement: ast.AST) -> set[str]:
    """The names that a statement gives to what it makes."""
    if isinstance(statement, ast.ClassDef):
        return {statement.name}
    return {one.id for one in ast.walk(statement) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _span(node: ast.AST) -> tuple[int, int]:
    """The lines of a statement without the statements inside it, and with its decorators."""
    body = getattr(node, "body", None)
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])  # type: ignore[attr-defined]
    end = body[0].lineno - 1 if body else node.end_lineno or node.lineno  # type: ignore[attr-defined]
    return first, max(node.lineno, end)  # type: ignore[attr-defined]


# --- judging -----------------------------------------------------------------------------------------------


class Only:
    """A plugin of pytest: the named tests in their order. What runs, and which test fails, goes to a file.

    A mutant may change the name of a test's case, and a test may be newer than the map. So what nobody knows of the
    same files runs, too, before the named ones.
    """

    def __init__(self, seconds: dict[str, float], known: frozenset[str], notes: Path) -> None:
        self.places = {name: place for place, name in enumerate(seconds)}
        self.seconds, self.known = seconds, known
        self.notes, self.late = (path.open("w", encoding="utf-8", buffering=1) for path in (notes, _late(notes)))

    def note(self, *words: str) -> None:
        self.notes.write(json.dumps(words) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.places or item.nodeid not in self.known]
        items.sort(key=lambda item: self.places.get(item.nodeid, -1))
        self.note("collected", str(len(items)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.note("running", item.nodeid)
        limit = PATIENCE[0] + PATIENCE[1] * self.seconds.get(item.nodeid, 1.0)
        faulthandler.dump_traceback_later(limit, exit=True, file=self.late)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.note("failed", report.nodeid)

    def pytest_sessionfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.note("ended", "")


def _late(notes: Path) -> Path:
    """Where a test that took too long stood."""
    return notes.with_suffix(".late")


def _judge(
    folder: Path,
    cache: Path,
    module: str,
    seconds: dict[str, float],
    known: frozenset[str],
    out: Path,
    options: tuple[str, ...] = ("-x",),
) -> int:
    """In a process of its own: run the named tests, until one fails."""
    near = {str(path.relative_to(folder)) for path in folder.glob(f"tests/**/test_{Path(module).stem}.py")}
    files = sorted({name.partition("::")[0] for name in seconds} | near)
    return _pytest(_entered(folder), cache, out.with_suffix(".out"), [*options, *files], Only(seconds, known, out))


def judge(
    folder: Path, cache: Path, mutant: dict[str, Any], seconds: dict[str, float], known: frozenset[str]
) -> dict[str, Any]:
    """Whether tests see a mutant, by which of them and how: a failure, an import, an end of the process, its time."""
    begun = time.monotonic()
    own = mutant["module"].startswith(CACHES) or b"numba_jit" in (folder / mutant["module"]).read_bytes()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=cache.parent) as room:
        out = Path(room) / "notes"
        if own:
            subprocess.run(["cp", "-al", str(cache), f"{room}/cache"], check=True)
        if mutant["patch"]:
            subprocess.run(["git", "apply"], cwd=folder, input=mutant["patch"], text=True, check=True)
        try:
            process = forked(
                _judge, folder, Path(room) / "cache" if own else cache, mutant["module"], seconds, known, out
            )
            limit = 10 * PATIENCE[0] + PATIENCE[1] * sum(seconds.values())
            status = _ended(process, begun + limit)
        finally:
            subprocess.run(["git", "checkout", "-q", "."], cwd=folder, check=True)
        lines = out.read_text("utf-8").splitlines() if out.exists() else []
        last = dict(json.loads(line) for line in lines)
        tail = out.with_suffix(".out").read_text("utf-8", "replace")[-2000:]
        late = status is None or (_late(out).exists() and _late(out).stat().st_size > 0)
    passed = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)  # none: their names have changed
    outcome = {"killed": status not in passed, "seconds": round(time.monotonic() - begun, 1), "tests": len(seconds)}
    if not outcome["killed"]:
        return outcome
    how = "failure" if "failed" in last else "time" if late else "end" if "running" in last else "import"
    return {**outcome, "how": how, "by": last.get("failed", last.get("running", "")), "tail": tail}


def run(
    folders: list[Path], cache: Path, found: Map, mutants: list[dict[str, Any]], log: Path, budget: list[float]
) -> None:
    """Judge mutants, as many at once as there are copies, and note what became of each; see the module's docstring.

    A copy's worker is a process, since this one must stay without threads: it forks.
    """
    before = noted(log)
    small = [one for one in mutants if one["patch"] not in before]
    small.sort(key=lambda one: "numba_jit" in (folders[0] / one["module"]).read_text("utf-8"))
    large = [one for one in mutants if not before.get(one["patch"], {}).get("final")]
    jobs = [*((one, False) for one in small), *((one, True) for one in large)]
    running: dict[int, Path] = {}
    free = list(folders)
    for mutant, again in jobs:
        while running and (not free or (again and mutant["patch"] not in noted(log))):
            free.append(running.pop(os.wait()[0]))
        if again and noted(log).get(mutant["patch"], {"final": True})["final"]:
            continue
        folder = free.pop()
        running[forked(_one, folder, cache, found, mutant, log, budget, again)] = folder
    while running:
        running.pop(os.wait()[0])
    doubtful = failing(folders, cache, found, {one["by"] for one in noted(log).values() if one.get("by")})
    if doubtful:  # here, or today: they are no judges, and those that they killed are judged again
        print(f"These fail without a mutation: {sorted(doubtful)}", flush=True)
        kept = [json.dumps(one) for one in noted(log).values() if one.get("by") not in doubtful]
        log.write_text("".join(f"{one}\n" for one in kept), "utf-8")
        found.doubtful |= doubtful
        return run(folders, cache, found, mutants, log, budget)
    lost = [one for one in mutants if not noted(log).get(one["patch"], {}).get("final")]
    if lost:
        raise SystemExit(f"{len(lost)} were not judged; their processes' errors stand above.")


def failing(folders: list[Path], cache: Path, found: Map, names: set[str]) -> set[str]:
    """Which of the tests that have killed mutants fail without any."""
    files = sorted({name.partition("::")[0] for name in names})
    shares = [set(files[place :: len(folders)]) for place in range(len(folders))]
    running: dict[int, Path] = {}
    for folder, share in zip(folders, shares, strict=True):
        chosen = {name: found.seconds.get(name, 1.0) for name in names if name.partition("::")[0] in share}
        if chosen:
            out = folder.with_suffix(".again")
            running[forked(_judge, folder, cache, "", chosen, found.known | names, out, ())] = out
    bad: set[str] = set()
    while running:
        process, word = os.wait()
        out = running.pop(process)
        notes = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
        bad |= {name for kind, name in notes if kind == "failed"}
        if os.waitstatus_to_exitcode(word) not in (0, 1):
            raise SystemExit(f"Tests could not be repeated: {out.with_suffix('.out').read_text('utf-8')[-2000:]}")
    return bad & names


def _one(
    folder: Path, cache: Path, found: Map, mutant: dict[str, Any], log: Path, budget: list[float], again: bool
) -> int:
    here, rest = found.of(mutant["module"], mutant["line"])
    small = _within(here, found.seconds, budget[0])
    chosen = _within([*here[len(small) :], *rest], found.seconds, budget[1]) if again else small
    outcome: dict[str, Any] = {"killed": False, "seconds": 0.0, "tests": 0}
    if chosen:
        outcome = judge(folder, cache, mutant, {name: found.seconds[name] for name in chosen}, found.known)
    outcome["final"] = again or outcome["killed"]
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**mutant, **outcome, "executed_by": len(here)}) + "\n")
    fate = f"killed by {outcome['how']}" if outcome["killed"] else "SURVIVED" if again else "not killed yet"
    print(
        f"{time.strftime('%H:%M:%S')} {outcome['seconds']:6.1f} s {fate} {mutant['module']}:{mutant['line']}",
        flush=True,
    )
    return 0


def _within(names: list[str], seconds: dict[str, float], budget: float) -> list[str]:
    """The first names that take so long together; one at least."""
    total = itertools.accumulate(seconds[name] for name in names)
    return [name for name, until in zip(names, total, strict=True) if until <= budget] or names[:1]


def noted(log: Path) -> dict[str, dict[str, Any]]:
    """The last outcome of each mutant, by its patch."""
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    return {one["patch"]: one for one in map(json.loads, lines)}


def _caches(room: Path) -> Path:
    """A folder for caches, with links to what this user's has: what is kept is replaced and never changed."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twin-engine"
    target = room / "cache" / base.name
    if target.exists():
        return target.parent
    target.parent.mkdir(parents=True)
    if base.is_dir() and subprocess.run(["cp", "-al", str(base), str(target)]).returncode:
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", str(base), str(target)], check=True)
    return target.parent


def main() -> None:
    """Draw, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget", type=float, nargs=2, default=[60.0, 600.0], help="seconds of tests, first and last")
    parser.add_argument("--drawn", type=Path, help="a file for what was drawn; where it exists, it is read instead")
    parser.add_argument("--map", type=Path, help="a .json.gz of who executes what; where it exists, it is read instead")
    parser.add_argument("--log", type=Path, default=Path("mutation.jsonl"), help="outcomes, one a line")
    parser.add_argument("--judged", type=Path, help="why survivors are left: sentences by change, as JSON")
    parser.add_argument(
        "--room", type=Path, help="a folder for copies of the checkout and caches, kept for another run"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of mutation.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        room = options.room or Path(temporary)
        (room / "checkout").mkdir(parents=True, exist_ok=True)
        cache = _caches(room)
        folders = [room / str(i) for i in range(options.workers)]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            copy(folder)
        if options.drawn is not None and options.drawn.exists():
            known = json.loads(options.drawn.read_text("utf-8"))
        else:
            known = drawn(folders[0], options.count, options.seed)
            if options.drawn is not None:
                options.drawn.write_text(json.dumps(known), "utf-8")
        if options.map is not None and options.map.exists():
            found = json.loads(gzip.decompress(options.map.read_bytes()))
        else:
            found = record(folders[0], cache, options.workers)
            if options.map is not None:
                options.map.write_bytes(gzip.compress(json.dumps(found).encode()))
        run(folders, cache, Map(folders[0], found), known["mutants"], options.log, options.budget)
    write(options, known)


def write(options: argparse.Namespace, known: dict[str, Any]) -> None:
    """docs/results/mutation.json, of what has been judged."""
    sys.path.insert(0, str(ROOT))
    from optimized import measure  # here and not above: what forks this process must not have imported the project

    judged = json.loads(options.judged.read_text("utf-8")) if options.judged else {}
    before = noted(options.log)
    outcomes = [before[one["patch"]] for one in known["mutants"] if one["patch"] in before]
    survivors = [one for one in outcomes if not one["killed"]]
    keys = ("module", "line", "operator", "change")
    payload = {
        "provenance": measure.provenance([]),
        "tool": known["tool"],
        "command": f"python tests/tools/mutation.py --count {options.count} --seed {options.seed}",
        "mutants": {
            "known": known["known"],
            "drawn": len(outcomes),
            "killed": len(outcomes) - len(survivors),
            "by_time": sum(one.get("how") == "time" for one in outcomes),
        },
        "survivors": [{**{k: one[k] for k in keys}, "judged": judged.get(one["change"])} for one in survivors],
    }
    print(f"{payload['mutants']}; written: {measure.write_result('mutation', payload, options.out)}")


if __name__ == "__main__":
    main()
