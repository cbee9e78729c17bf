"""How much the tests see: mutants of `reference` and `optimized`'s Python, drawn by cosmic-ray, and which survive.

    pip install -e ".[dev,mutation]"
    PYTHONPATH=. python tests/tools/mutation.py --count 300 --seed 1          # an hour on two cores

A mutant is one change of one place (a number, an operator, a condition). cosmic-ray lists all of them; `--count` are
drawn. Each is judged by `pytest -m "not slow"` in a copy of the checkout, which stops at the first test that fails: the
tests that execute the changed statement, as coverage found them, the quickest first, and then all. A mutant survives
if every test passes; one that hangs is killed.

Each outcome is added to `--log` at once, and what is there is not judged again. At the end all go to
docs/results/mutation.json, every survivor with its change and, from `--judged`, a JSON file of sentences by change, why
it is left.
"""

import argparse
import ast
import bisect
import contextlib
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import coverage
import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 900.0  # seconds for a mutant
FAST = ("-q", "-m", "not slow", "-p", "no:cacheprovider")
# Annotations are full of `X | None`, each of which dies at its import under all eleven of these.
SKIPPED = ("core/ReplaceBinaryOperator_BitOr_",)
CONFIG = """[cosmic-ray]
module-path = ["reference", "optimized"]
timeout = 60.0
excluded-modules = []
test-command = "true"
[cosmic-ray.distributor]
name = "local"
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


# --- what to judge, and by which tests ---------------------------------------------------------------------


def drawn(folder: Path, count: int, seed: int) -> tuple[list[dict[str, Any]], int]:
    """`count` of all mutants that cosmic-ray knows, each with its patch, and how many it knows."""
    from cosmic_ray.mutating import mutate_code  # only here: another machine may judge what was drawn on this one
    from cosmic_ray.plugins import get_operator

    (folder / "mutation.toml").write_text(CONFIG, "utf-8")
    subprocess.run(["cosmic-ray", "init", "mutation.toml", "mutation.sqlite"], cwd=folder, check=True)
    query = "select module_path, operator_name, occurrence, start_pos_row from mutation_specs order by 1, 2, 3"
    with contextlib.closing(sqlite3.connect(folder / "mutation.sqlite")) as database:
        rows = [row for row in database.execute(query) if not row[1].startswith(SKIPPED)]
    found = []
    for module, operator, occurrence, line in random.Random(seed).sample(rows, count):
        source = (folder / module).read_text("utf-8")
        mutated = mutate_code(source, get_operator(operator)(), occurrence)
        assert mutated is not None, (module, operator, occurrence)
        (folder / module).write_text(mutated, "utf-8")
        patch = subprocess.run(["git", "diff"], cwd=folder, capture_output=True, text=True, check=True).stdout
        (folder / module).write_text(source, "utf-8")
        change = [one for one in patch.splitlines() if one[:1] in "+-" and one[:3] not in ("+++", "---")]
        place = {"module": module, "operator": operator, "occurrence": occurrence, "line": line}
        found.append({**place, "change": "\n".join(change), "patch": patch})
    return found, len(rows)


class Coverage:
    """Which tests execute a statement, and how long each takes: from one run of all tests in a copy."""

    def __init__(self, folder: Path, workers: int) -> None:
        options = ("-n", str(workers), "--cov=reference", "--cov=optimized", "--cov-context=test", "--cov-report=")
        command = [sys.executable, "-m", "pytest", *FAST, *options, "--junitxml=report.xml"]
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        if subprocess.run(command, cwd=folder, env=environment).returncode:
            raise SystemExit("The tests fail without a mutation.")
        self.folder = folder
        self.seconds: dict[str, float] = {}
        for case in ElementTree.parse(folder / "report.xml").getroot().iter("testcase"):
            parts = case.attrib["classname"].split(".")
            count = next(place for place, part in enumerate(parts, 1) if part.startswith("test_"))
            name = "::".join(["/".join(parts[:count]) + ".py", *parts[count:], case.attrib["name"]])
            self.seconds[name] = float(case.attrib["time"])
        self.data = coverage.CoverageData(str(folder / ".coverage"))
        self.data.read()
        if not any(Path(name).is_relative_to(folder) for name in self.data.measured_files()):
            raise SystemExit(f"The tests ran {next(iter(self.data.measured_files()))}, not the copy in {folder}.")
        self._contexts: dict[str, dict[int, list[str]]] = {}
        self._statements: dict[str, list[tuple[int, int]]] = {}

    def tests(self, module: str, line: int) -> list[str]:
        """The tests that execute the statement of a line, the quickest first; none where only an import does."""
        path = str(self.folder / module)
        if path not in self._contexts:
            self._contexts[path] = self.data.contexts_by_lineno(path)
            tree = ast.parse(Path(path).read_text("utf-8"))
            spans = {_span(node) for node in ast.walk(tree) if isinstance(node, (ast.stmt, ast.ExceptHandler))}
            self._statements[path] = sorted(spans)
        spans = self._statements[path]
        around = [span for span in spans[: bisect.bisect(spans, (line, sys.maxsize))] if span[1] >= line]
        first, last = around[-1] if around else (line, line)
        found = {one for row in range(first, last + 1) for one in self._contexts[path].get(row, ())}
        names = {one.rpartition("|")[0] for one in found if one} & self.seconds.keys()
        near = f"/test_{Path(module).stem}"
        return sorted(names, key=lambda name: (near not in name, self.seconds[name], name))


def _span(node: ast.stmt | ast.ExceptHandler) -> tuple[int, int]:
    """The lines of a statement without the statements inside it."""
    body = getattr(node, "body", None)
    end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    return node.lineno, max(node.lineno, end)


# --- judging -----------------------------------------------------------------------------------------------


class Only:
    """A plugin of pytest: the named tests in their order, or all, those of files like the module's first."""

    def __init__(self, names: list[str], module: str) -> None:
        self.places = {name: place for place, name in enumerate(names)}
        self.near = f"/test_{Path(module).stem}"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.places:
            items[:] = [item for item in items if item.nodeid in self.places]
            items.sort(key=lambda item: self.places[item.nodeid])
        else:
            items.sort(key=lambda item: self.near not in item.nodeid)


def _pytest(folder: str, cache: str, names: list[str], module: str) -> None:
    """In a process of its own: run tests and leave with pytest's status."""
    os.setsid()
    os.chdir(folder)
    sys.path[:0] = [folder, f"{folder}/tests"]
    os.environ.update(PYTHONPATH=folder, XDG_CACHE_HOME=cache, OMP_NUM_THREADS="1")
    with open(os.devnull, "w") as silence:
        os.dup2(silence.fileno(), 1)
        os.dup2(silence.fileno(), 2)
    where = sorted({name.partition("::")[0] for name in names}) or ["tests"]
    os._exit(pytest.main([*FAST, "-x", "-p", "no:xdist", *where], plugins=[Only(names, module)]))


def _link(source: str, target: str) -> None:
    """What is kept is replaced and never changed, so a link will do, on one file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def judge(folder: Path, cache: Path, mutant: dict[str, Any], names: list[str]) -> bool:
    """Whether the tests see a mutant that is applied in a copy. Compiled code is kept apart, for this mutant only."""
    subprocess.run(["git", "apply", "--allow-empty"], cwd=folder, input=mutant["patch"], text=True, check=True)
    context: Any = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        if cache.is_dir():
            shutil.copytree(cache, Path(own) / cache.name, copy_function=_link)
        process = context.Process(target=_pytest, args=(str(folder), own, names, mutant["module"]))
        try:
            process.start()
            process.join(TIMEOUT)
            if process.exitcode == pytest.ExitCode.NO_TESTS_COLLECTED:
                raise RuntimeError(f"{mutant['module']}: none of {names} was found.")
            return process.exitcode != 0
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            subprocess.run(["git", "checkout", "-q", "."], cwd=folder, check=True)


def run(folders: list[Path], cache: Path, todo: list[tuple[dict[str, Any], list[str]]], log: Path) -> None:
    """Judge mutants, as many at once as there are copies, and note what became of each."""
    some = next((names for _, names in todo if names), [])
    if judge(folders[0], cache, {"patch": "", "module": ""}, some):
        raise SystemExit("A copy of the checkout without a mutation is killed.")
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for folder in folders:
        free.put(folder)

    def one(mutant: dict[str, Any], names: list[str]) -> dict[str, Any]:
        folder = free.get()
        try:
            killed = judge(folder, cache, mutant, names) or (bool(names) and judge(folder, cache, mutant, []))
            return {**mutant, "killed": killed}
        finally:
            free.put(folder)

    with ThreadPoolExecutor(len(folders)) as pool, log.open("a", encoding="utf-8") as noted:
        for done, future in enumerate(as_completed([pool.submit(one, *each) for each in todo]), 1):
            outcome = future.result()
            noted.write(json.dumps(outcome) + "\n")
            noted.flush()
            fate = "killed" if outcome["killed"] else "SURVIVED"
            print(f"{done}/{len(todo)} {fate} {outcome['module']}:{outcome['line']}", flush=True)
            if not outcome["killed"]:
                print(outcome["change"], flush=True)


def main() -> None:
    """Draw, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--drawn", type=Path, help="a file for what was drawn; where it exists, it is read instead")
    parser.add_argument("--log", type=Path, default=Path("mutation.jsonl"), help="outcomes, one a line")
    parser.add_argument("--judged", type=Path, help="why survivors are left: sentences by change, as JSON")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of mutation.json")
    options = parser.parse_args()
    # Here and not above: processes that judge import this file, and the project from their copies.
    from optimized import measure
    from reference.support import files

    judged = json.loads(options.judged.read_text("utf-8")) if options.judged else {}
    multiprocessing.set_forkserver_preload(["torch", "numba"])
    with tempfile.TemporaryDirectory() as room:
        folders = [copy(Path(room) / str(i)) for i in range(options.workers)]
        if options.drawn is None or not options.drawn.exists():
            mutants, known = drawn(folders[0], options.count, options.seed)
            tool = f"cosmic-ray {metadata.version('cosmic-ray')}"
            if options.drawn is not None:
                files.write(options.drawn, json.dumps({"tool": tool, "known": known, "mutants": mutants}))
        else:
            mutants, known, tool = (
                json.loads(options.drawn.read_text("utf-8"))[k] for k in ("mutants", "known", "tool")
            )
        before = (
            [json.loads(line) for line in options.log.read_text("utf-8").splitlines()] if options.log.exists() else []
        )
        done = {one["patch"] for one in before}
        todo = [one for one in mutants if one["patch"] not in done]
        if todo:
            seen = Coverage(folders[0], options.workers)
            judging = [(one, seen.tests(one["module"], one["line"])) for one in todo]
            judging.sort(key=lambda one: bool(one[1]))  # those that may need all tests take longest: first
            run(folders, files.cache_folder("numba").parent, judging, options.log)
    patches = {one["patch"] for one in mutants}
    outcomes = [json.loads(line) for line in options.log.read_text("utf-8").splitlines()]
    outcomes = [one for one in outcomes if one["patch"] in patches]
    survivors = [one for one in outcomes if not one["killed"]]
    keys = ("module", "line", "operator", "change")
    payload = {
        "provenance": measure.provenance([]),
        "tool": tool,
        "command": f"python tests/tools/mutation.py --count {options.count} --seed {options.seed}",
        "mutants": {"known": known, "drawn": len(outcomes), "killed": len(outcomes) - len(survivors)},
        "survivors": [{**{k: one[k] for k in keys}, "judged": judged.get(one["change"])} for one in survivors],
    }
    print(f"{payload['mutants']}; written: {measure.write_result('mutation', payload, options.out)}")


if __name__ == "__main__":
    main()
