"""What a change costs in this tree, counted from its files and its history, and written to docs/results/house.json:

    PYTHONPATH=. python tests/tools/count_house.py [--time]      # --time: the fast suite, too, on a quiet machine

Each number is counted twice: in the tree before contracts had names (`BEFORE`), and in the one that is checked out.

An op's commit is one that adds its definition in `reference/ops` and its kernel, both by the op's name. Files of code
that it touches are counted; those by the op's name are the op's own. A recipe's files are those that its commits touch.
Calls are those of functions in `reference` that a TransformerLayer under delayed scaling makes on a CPU before its
first op's own file, in a fourth step; `asked` are those among them that read what a thread holds: its autocast, its
recomputation. A circle is a set of modules of which each imports every other, directly or not.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from optimized import measure

BEFORE = "aea215e"
CODE = (".py", ".cu", ".cuh", ".h")
SIDES = {"source": ("reference", "optimized"), "tests": ("tests",)}
RECIPES = {  # the commits with which a recipe landed, and the names of what is its own
    "Float8BlockScaling": ("2525dfc^..be253d1", ("block",)),
    "Float8RowwiseScaling": ("7210c8a^1..7210c8a^2", ("rowwise",)),
}
CALLS = """
import json, sys
import torch
import reference as te

layer = te.TransformerLayer(64, 128, 4, params_dtype=torch.bfloat16, device="cpu")
x = torch.randn(16, 2, 64, dtype=torch.bfloat16, requires_grad=True)
recipe, calls = te.recipe.DelayedScaling(), []

def profile(frame, event, arg):
    if event == "call":
        calls.append(frame.f_code.co_filename.replace("\\\\", "/") + ":" + frame.f_code.co_name)

for step in range(4):
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        sys.setprofile(profile if step == 3 else None)
        y = layer(x)
        sys.setprofile(None)
    y.sum().backward()
declares = ("library.py", "checks.py")
first = next(n for n, call in enumerate(calls)
             if "/reference/ops/" in call and not call.split(":")[-2].endswith(declares))
ours = [call for call in calls[:first] if "/reference/" in call]
print(json.dumps({"calls": len(ours), "asked": sum(call.endswith("threads.py:here") for call in ours)}))
"""
CIRCLES = """
import json
import grimp

graph = grimp.build_graph("reference", "optimized", cache_dir=None)
found = set()
for name in graph.modules:
    both = graph.find_upstream_modules(name) & graph.find_downstream_modules(name)
    if both:
        found.add(tuple(sorted({name, *both})))
print(json.dumps(sorted(found)))
"""


def git(*words: str, root: Path = measure.ROOT) -> list[str]:
    """The lines that git writes."""
    run = subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True)
    return run.stdout.splitlines()


def of_code(paths: Iterable[str]) -> list[str]:
    """The source and the tests among files; none that was measured or recorded."""
    return [path for path in paths if path.endswith(CODE) and path.startswith((*SIDES["source"], *SIDES["tests"]))]


def own(path: str, names: Sequence[str]) -> bool:
    """Whether a file carries one of the names."""
    return any(name in Path(path).stem for name in names)


def ops_commits(commits: str, root: Path = measure.ROOT) -> list[dict[str, Any]]:
    """Of each commit that adds ops with their kernels: the ops, files that it touches, and those not the ops' own."""
    added = git(
        *("log", "--no-merges", "-M", "--diff-filter=A", "--format=commit %h", "--name-only", commits),
        *("--", "reference/ops", "optimized/kernels"),
        root=root,
    )
    commit, new = "", dict[str, list[Path]]()
    for line in filter(None, added):
        if line.startswith("commit "):
            commit = line.split()[1]
        else:
            new.setdefault(commit, []).append(Path(line))
    counts = []
    for commit, paths in new.items():
        kernels = {path.stem for path in paths if path.suffix == ".cu"}
        ops = sorted({path.stem for path in paths if path.suffix == ".py"} & kernels)
        if not ops:
            continue
        files = of_code(git("show", "-M", "--format=", "--name-only", commit, root=root))
        others = [path for path in files if not own(path, ops)]
        counts.append({"commit": commit, "ops": ops, "files": len(files), "others": len(others)})
    return counts


def medians(commits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of commits that add one op each: how many, and the medians of their files."""
    single = [one for one in commits if len(one["ops"]) == 1]
    return {"commits": len(single)} | {
        name: statistics.median(one[name] for one in single) if single else None for name in ("files", "others")
    }


def recipe_files(commits: str, names: Sequence[str]) -> dict[str, int]:
    """How many files of code the commits of a recipe touch, and how many of source and of tests are not its own."""
    files = of_code({path for path in git("log", "--no-merges", "--format=", "--name-only", commits) if path})
    others = [path for path in files if not own(path, names)]
    tests = [path for path in others if path.startswith(SIDES["tests"])]
    return {"files": len(files), "other_source": len(others) - len(tests), "other_tests": len(tests)}


def lines(tree: Path) -> dict[str, dict[str, int]]:
    """Lines of code by side and room."""
    counts: dict[str, dict[str, int]] = {side: {} for side in SIDES}
    for side, tops in SIDES.items():
        for path in (path for top in tops for path in sorted((tree / top).rglob("*")) if path.suffix in CODE):
            parts = path.relative_to(tree).parts
            room = "/".join(parts[:2] if len(parts) > 2 else parts[:1])
            counts[side][room] = counts[side].get(room, 0) + path.read_bytes().count(b"\n")
    return counts


def within(tree: Path, program: str) -> Any:
    """What a program prints as JSON that imports from `tree` alone."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    return json.loads(subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True).stdout)


def counted(tree: Path) -> dict[str, Any]:
    """The numbers of a tree that do not need its history."""
    found = lines(tree)
    return {
        "lines": found,
        "before_first_op": within(tree, CALLS),
        "circles": within(tree, CIRCLES),
    }


def main() -> int:
    """Count, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--time", action="store_true", help="time the fast suite as CI runs it; leave the machine alone"
    )
    parser.add_argument("--out", type=Path, default=measure.RESULTS, help="folder of house.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", BEFORE], cwd=measure.ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        before = counted(Path(folder))
    commits = {"before": ops_commits(BEFORE), "now": ops_commits(f"{BEFORE}..HEAD")}
    payload = {
        "provenance": measure.provenance(()),
        "command": "python tests/tools/count_house.py",
        "before_commit": BEFORE,
        "before": before | {"op": medians(commits["before"])},
        "now": counted(measure.ROOT) | {"op": medians(commits["now"])},
        "recipes": {name: recipe_files(*what) for name, what in RECIPES.items()},
        "op_commits": commits,
    }
    if options.time:
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "not slow"]
        status = subprocess.run(command, cwd=measure.ROOT, env={**os.environ, "CI": "1"}).returncode
        payload["suite"] = {"seconds": round(time.monotonic() - start), "status": status, "cores": os.cpu_count()}
    print(measure.write_result("house", payload, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
