"""How much the tests see: mutants of `reference` and `optimized`'s Python, drawn by cosmic-ray, and which survive.

    pip install -e ".[dev,mutation]"
    PYTHONPATH=. python tests/mutation.py --count 300 --seed 1          # some hours on two cores

A mutant is one change of one place (a number, an operator, a condition). cosmic-ray lists all of them; `--count` are
drawn. Each runs `pytest -x -m "not slow"` in a copy of the checkout: first the test files that execute its line, the
quickest first, as coverage of each file by itself found them; then, where none of them failed, all others. A mutant
survives if every test passes. One that hangs counts as killed after `TIMEOUT`.

The outcome goes to docs/results/mutation.json, every survivor with its change and, from `--judged`, a JSON file of
sentences by change, why it is left.
"""

import argparse
import concurrent.futures
import json
import os
import queue
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from optimized import measure

ROOT = Path(__file__).parent.parent
TIMEOUT = 1200.0  # seconds
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
    """What git tracks, as it is now, without its history: a mutant must be seen by `git diff`."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, target)
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=m", "-c", "user.email=m", "commit", "-qm", "m"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def pytest(folder: Path, files: list[str], runner: tuple[str, ...] = ()) -> int:
    """Run test files; pytest's exit status, 2 after `TIMEOUT`."""
    command = [sys.executable, "-m", *runner, "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "PYTHONPATH": str(folder), "CI": "1"}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 2


def covered(folder: Path) -> dict[str, Any]:
    """By test file: its seconds, and the lines of each source file that it executes."""
    found = {}
    for file in sorted((folder / "tests").glob("test_*.py")):
        start = time.monotonic()
        name = f"tests/{file.name}"
        status = pytest(folder, [name], runner=("coverage", "run", "--source=reference,optimized", "-m"))
        if status not in (0, 5):
            raise SystemExit(f"{name} fails without a mutation: pytest's exit status is {status}.")
        subprocess.run([sys.executable, "-m", "coverage", "json", "-q", "-o", "c.json"], cwd=folder, check=status == 0)
        lines = json.loads((folder / "c.json").read_text("utf-8"))["files"] if status == 0 else {}
        found[name] = {
            "seconds": round(time.monotonic() - start, 1),
            "lines": {path: entry["executed_lines"] for path, entry in lines.items()},
        }
        print(f"{name}: {found[name]['seconds']} s", flush=True)
    return found


def order(coverage: dict[str, Any], path: str, line: int) -> tuple[list[str], list[str]]:
    """The test files that execute a line, quickest first, and the others; compiled functions' lines are not counted."""
    near = f"test_{Path(path).stem}"

    def rank(name: str) -> tuple[bool, float]:
        return not Path(name).stem.startswith(near), coverage[name]["seconds"]

    first = [name for name, one in coverage.items() if line in one["lines"].get(path, ())]
    rest = [name for name in coverage if name not in first]
    return sorted(first, key=rank), sorted(rest, key=rank)


def judge(folder: Path, coverage: dict[str, Any], mutant: dict[str, Any]) -> dict[str, Any]:
    """Apply a mutant in a copy and run the tests: with its change, and whether it was killed."""
    command = ["cosmic-ray", "apply", mutant["module"], mutant["operator"], str(mutant["occurrence"])]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    changed = subprocess.run(["git", "diff", "-U0"], cwd=folder, capture_output=True, text=True, check=True).stdout
    change = [line for line in changed.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    start = time.monotonic()
    try:
        killed = any(
            files and pytest(folder, files) != 0 for files in order(coverage, mutant["module"], mutant["line"])
        )
    finally:
        subprocess.run(["git", "checkout", "-q", "."], cwd=folder, check=True)
    return {**mutant, "change": change, "killed": killed, "seconds": round(time.monotonic() - start)}


def drawn(folder: Path, count: int, seed: int) -> tuple[list[dict[str, Any]], int]:
    """`count` of all mutants that cosmic-ray knows, and how many those are."""
    (folder / "mutation.toml").write_text(CONFIG, "utf-8")
    subprocess.run(["cosmic-ray", "init", "mutation.toml", "mutation.sqlite"], cwd=folder, check=True)
    query = "select module_path, operator_name, occurrence, start_pos_row from mutation_specs order by 1, 2, 3"
    with sqlite3.connect(folder / "mutation.sqlite") as database:
        rows = [row for row in database.execute(query) if not row[1].startswith(SKIPPED)]
    keys = ("module", "operator", "occurrence", "line")
    return [dict(zip(keys, row, strict=True)) for row in random.Random(seed).sample(rows, count)], len(rows)


def run(folders: list[Path], coverage: dict[str, Any], mutants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judge mutants, as many at once as there are copies, and say of each what became of it."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for folder in folders:
        free.put(folder)

    def one(mutant: dict[str, Any]) -> dict[str, Any]:
        folder = free.get()
        try:
            return judge(folder, coverage, mutant)
        finally:
            free.put(folder)

    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(len(folders)) as pool:
        for i, outcome in enumerate(pool.map(one, mutants), 1):
            outcomes.append(outcome)
            where = f"{outcome['module']}:{outcome['line']}"
            print(f"{i}/{len(mutants)} {'killed' if outcome['killed'] else 'SURVIVED'} {where}", flush=True)
            if not outcome["killed"]:
                print("\n".join(outcome["change"]), flush=True)
    return outcomes


def main() -> None:
    """Draw, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--judged", type=Path, help="why survivors are left: sentences by change, as JSON")
    parser.add_argument("--out", type=Path, default=measure.RESULTS, help="folder of mutation.json")
    options = parser.parse_args()
    judged = json.loads(options.judged.read_text("utf-8")) if options.judged else {}
    with tempfile.TemporaryDirectory() as room:
        folders = [copy(Path(room) / str(i)) for i in range(options.workers)]
        mutants, total = drawn(folders[0], options.count, options.seed)
        outcomes = run(folders, covered(folders[0]), mutants)
    survivors = [one for one in outcomes if not one["killed"]]
    payload = {
        "provenance": measure.provenance([]),
        "tool": f"cosmic-ray {metadata.version('cosmic-ray')}",
        "command": f"python tests/mutation.py --count {options.count} --seed {options.seed}",
        "mutants": {"known": total, "drawn": len(outcomes), "killed": len(outcomes) - len(survivors)},
        "survivors": [{**one, "judged": judged.get("\n".join(one["change"]))} for one in survivors],
    }
    print(measure.write_result("mutation", payload, options.out))


if __name__ == "__main__":
    main()
