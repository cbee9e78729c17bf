"""docs/launchers.md: its program trains under ZeRO 1, 2 and 3 on two ranks, where DeepSpeed is installed.

pip install --no-build-isolation deepspeed==0.19.8
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOUND = re.compile(r"weights ([0-9a-f]{64}) scales ([0-9a-f]{64})")
RECIPES = ("te.DelayedScaling()", "te.recipe.Float8CurrentScaling()", "te.recipe.Float8BlockScaling()")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="could not import deepspeed"),
]


def program(stage: int, recipe: str = RECIPES[0], microbatches: int = 1) -> str:
    """The page's, with another stage, recipe, and number of microbatches of a step."""
    text = (ROOT / "docs/launchers.md").read_text()
    (shown,) = (one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "deepspeed" in one)
    changes = {
        "STAGE = 3": f"STAGE = {stage}",
        RECIPES[0]: recipe,
        '"zero_optimization"': f'"gradient_accumulation_steps": {microbatches}, "zero_optimization"',
    }
    for before, after in changes.items():
        assert before in shown
        shown = shown.replace(before, after)
    return shown


def hashes(programs: list[str], folder: Path) -> list[tuple[str, str]]:
    """Of weights and of FP8 state, which both ranks have; the programs run one after the other in the same processes.

    DeepSpeed compiles its collectives in the folder, where no lock of a process that was killed is.
    """
    end = "torch.distributed.destroy_process_group()\n"
    assert all(one.endswith(end) for one in programs)
    texts = [one.removesuffix(end) for one in programs]
    path = folder / "programs.py"
    path.write_text(f"import torch\nfor text in {texts!r}:\n    exec(text, {{}})\n{end}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["--redirects", "3", "--log-dir", str(folder / "log"), str(path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    env |= {"TORCH_EXTENSIONS_DIR": str(folder), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    logs = {rank: "".join(one.read_text() for one in folder.glob(f"log/**/{rank}/std*.log")) for rank in range(2)}
    assert done.returncode == 0, f"{done.stderr}\n{logs[0][-3000:]}"
    first, second = (FOUND.findall(logs[rank]) for rank in range(2))
    assert len(first) == len(programs)
    assert first == second
    return first


def test_every_stage_has_the_same_hashes(tmp_path: Path) -> None:
    """In each recipe, and once more; with microbatches the first stage has an order of its own."""
    cases = [(stage, recipe) for recipe in RECIPES for stage in (1, 2, 3, 3)]
    with_microbatches = [program(stage, microbatches=2) for stage in (1, 2, 3)]
    found = hashes([*(program(*case) for case in cases), *with_microbatches], tmp_path)
    for number, recipe in enumerate(RECIPES):
        assert len(set(found[4 * number : 4 * number + 4])) == 1, recipe
    first, second, third = found[-3:]
    assert len({*found[:-3], first, second}) == len(RECIPES) + 2
    assert second == third
