"""Run the GPU suite on a Hopper machine and write its summary, docs/results/gpu_suite.json:

    PYTHONPATH=. python tests/tools/gpu_suite.py [--out FOLDER] [pytest's arguments]

A skip is an error. The summary holds, for every test file, how many tests passed and failed and how long they took; and
a hash of every source file, so that a run without a GPU can say what has changed since.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from shared.bits import sources

from optimized import measure
from optimized.commands import check_folder
from optimized.cuda import compiler

COMMAND = ("-m", "gpu and not slow", "--require-gpu")


def summary(report: Path) -> dict[str, Any]:
    """Tests by file from pytest's JUnit report."""
    files: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        # A module that is skipped as a whole has no class: its name is the case's.
        names = (case.attrib["classname"] or case.attrib["name"]).split(".")
        name = next(one for one in names if one.startswith("test_"))  # between its room and a class
        file = files.setdefault(name, {"passed": 0, "failed": 0, "seconds": 0.0})
        bad = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        file["failed" if bad else "passed"] += 1
        file["seconds"] = round(file["seconds"] + float(case.attrib["time"]), 1)
    return dict(sorted(files.items()))


def main() -> int:
    """Run, write, and pass on pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=measure.RESULTS, help="folder of gpu_suite.json")
    options, rest = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    check_folder("--out", options.out)  # now, and not after minutes on a GPU
    before = sources()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *COMMAND, f"--junitxml={report}", *rest, "tests"]
        status = subprocess.run(command, cwd=measure.ROOT).returncode
        files = summary(report)
    payload = {
        "provenance": measure.provenance(compiler.names()),
        "command": " ".join(["pytest", *COMMAND]),
        "passed": sum(file["passed"] for file in files.values()),
        "failed": sum(file["failed"] for file in files.values()),
        "files": files,
        "sources": before,
    }
    print(measure.write_result("gpu_suite", payload, options.out))
    return status


if __name__ == "__main__":
    sys.exit(main())
