"""docs/launchers.md: its program, under Accelerate as it is, prints the same hash from one process and from two."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HASH = re.compile(r"^[0-9a-f]{64}$", re.MULTILINE)


@pytest.mark.integration
def test_accelerate_has_one_hash_on_one_process_and_on_two(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    program, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/launchers.md").read_text(), re.DOTALL)
    path = tmp_path / "program.py"
    path.write_text(program)
    two = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    found = []
    for launcher in ([], two):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(
            [sys.executable, *launcher, str(path)], env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        found += HASH.findall(done.stdout)
    assert len(found) == 2
    assert found[0] == found[1]
