"""notebooks/gloo_ranks.py: an error of a rank is raised, and ranks that hang are ended: a lesson waits for nobody."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLEEPER = """
import os, time

def work(rank, count, folder):
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(300)
"""
PROGRAM = """
import os, sys, time
import gloo_ranks, sleeper

if __name__ == "__main__":
    gloo_ranks.SECONDS = float(sys.argv[2])
    try:
        gloo_ranks.start(2, sleeper.work, sys.argv[1])
    except TimeoutError as error:
        print(error)
    for pid in map(int, os.listdir(sys.argv[1])):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            print("ended")
    gloo_ranks.SECONDS = 100
    try:
        gloo_ranks.start(2, gloo_ranks.train, "tree", 1, 1)
    except gloo_ranks.torch.multiprocessing.ProcessRaisedException as error:
        print(str(error).strip().splitlines()[-1])
"""


@pytest.mark.slow
def test_ranks_that_hang_or_fail_end(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "pids").mkdir()
    path = os.pathsep.join(map(str, (ROOT, ROOT / "notebooks", tmp_path)))
    seconds = "12"  # in which both ranks have begun, on a slow machine too
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", tmp_path / "pids", seconds],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    sentence, *ended, refused = done.stdout.splitlines()
    assert sentence == f"2 ranks have not ended after {float(seconds)} s, and were stopped."
    assert ended == ["ended", "ended"]
    assert refused.startswith("ValueError: GradientOrder: groups=1; an int from 2")
