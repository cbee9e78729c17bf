"""docs/launchers.md: its program, under Accelerate as it is, prints the same hash from one process and from two."""

import json
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


TRAINER = """
import importlib, json, os, pathlib, sys, torch, transformers
device, folder = sys.argv[1:]
te = importlib.import_module("optimized" if device == "cuda" else "reference")
transformers.set_seed(0)
sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=128)
model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**sizes), dtype=torch.bfloat16)
te.convert(model, recipe=te.DelayedScaling(amax_history_len=4))
ids = (torch.arange(128).reshape(2, 64) * 5 % 128).repeat(16, 1)
arguments = transformers.TrainingArguments(
    folder, per_device_train_batch_size=1, max_steps=8, learning_rate=1e-2, lr_scheduler_type="constant", report_to=[],
    save_strategy="no", use_cpu=device == "cpu", disable_tqdm=True, logging_steps=1, log_level="error", bf16=True,
    fsdp="full_shard", fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
data = [{"input_ids": one, "labels": one} for one in ids]
trainer = transformers.Trainer(model, arguments, train_dataset=data)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
fp8 = [one.fp8 for one in model.modules() if isinstance(one, te.Linear)]
kinds = sorted({type(p).__name__ for p in model.parameters()})
found = [losses, all(fp8), len(fp8), type(trainer.model_wrapped).__name__, kinds]
pathlib.Path(folder, os.environ["RANK"]).write_text(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("device", "wrapped", "kinds"),
    [
        ("cpu", "DistributedDataParallel", ["Parameter"]),
        pytest.param("cuda", "FSDPLlamaForCausalLM", ["DTensor"], marks=[pytest.mark.gpu, pytest.mark.gpus(2)]),
    ],
)
@pytest.mark.integration
def test_the_trainer_with_fsdp_trains_in_fp8(device: str, wrapped: str, kinds: list[str], tmp_path: Path) -> None:
    """On CPUs it takes DDP, on GPUs FSDP2; either way all ranks have the same losses, which fall."""
    pytest.importorskip("accelerate")
    program = tmp_path / "program.py"
    program.write_text(TRAINER)
    two = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    env |= {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
    out = tmp_path / "out"  # a file a rank: what both print may be in one line
    out.mkdir()
    command = [sys.executable, *two, str(program), device, str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((out / str(rank)).read_text()) for rank in range(2))
    assert first == second
    losses, *rest = first
    assert losses[-1] < losses[0]
    assert rest == [True, 15, wrapped, kinds]
