"""examples/nano_fp8.py as a program of `te` layers: the same model, weights, text and steps, on a CPU or a GPU.

    PYTHONPATH=.:tests python tests/shared/nano_fp8_layers.py cuda
    PYTHONPATH=.:tests python tests/shared/nano_fp8_layers.py cuda --record

It prints what nano_fp8.py prints, and records it in tests/golden/nano_fp8.json. Sizes, initial weights and text are
those of that file; all that is computed from them, layers compute.
"""

import hashlib
import json
import runpy
import sys
from collections.abc import Iterator
from datetime import date
from types import SimpleNamespace
from typing import Any

import torch

import optimized  # noqa: F401  (whose import registers the kernels)
import reference as te
from optimized import measure
from reference.support import files

NANO = measure.ROOT / "examples" / "nano_fp8.py"
GOLDEN = measure.ROOT / "tests" / "golden" / "nano_fp8.json"
"""Losses and hash, and the device and date of the run that gave them."""


def nano() -> Any:
    """The names of nano_fp8.py."""
    return SimpleNamespace(**runpy.run_path(str(NANO)))


class GPT(torch.nn.Module):
    """Bytes [SEQUENCE, ROWS] and those after them to the mean loss; parameters in the order of `new_weights`."""

    def __init__(self, program: Any, device: str) -> None:
        super().__init__()
        hidden, common = program.HIDDEN, {"params_dtype": torch.float32, "device": device}
        options: dict[str, Any] = {"fuse_qkv_params": True, "bias": False, "self_attn_mask_type": "causal", **common}
        options |= {"normalization": "RMSNorm", "activation": "qgelu", "hidden_dropout": 0.0, "attention_dropout": 0.0}
        self.bytes = te.Embedding(program.BYTES, hidden, **common)
        self.places = te.Embedding(program.SEQUENCE, hidden, **common)
        self.layer = te.TransformerLayer(hidden, 4 * hidden, program.HEADS, **options)
        self.norm = te.RMSNorm(hidden, **common)
        self.head = te.Linear(hidden, program.BYTES, bias=False, **common)
        with torch.no_grad():
            for parameter, weight in zip(self.parameters(), program.new_weights(), strict=True):
                parameter.copy_(torch.from_numpy(weight.value))

    def forward(self, text: torch.Tensor, after: torch.Tensor, recipe: te.DelayedScaling) -> torch.Tensor:
        places = torch.arange(len(text), device=text.device)[:, None].expand(text.shape)
        with torch.autocast(text.device.type, torch.bfloat16):
            h = (self.bytes(text) + self.places(places)).to(torch.bfloat16)
            with te.autocast(recipe=recipe):
                h = self.layer(h)
            return te.cross_entropy(self.head(self.norm(h)), after)


def train(device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The loss of each step; then the trained parameters. All by name, on the CPU."""
    program = nano()
    model, recipe = GPT(program, device), te.DelayedScaling(amax_history_len=program.HISTORY)
    options: dict[str, Any] = {"lr": program.RATE, "betas": program.BETAS, "eps": program.EPS}
    optimizer = te.optimizers.FusedAdam(model.parameters(), weight_decay=program.DECAY, **options)
    for step in range(program.STEPS):
        text, after = (torch.from_numpy(part).to(device) for part in program.batch(step))
        optimizer.zero_grad()
        loss = model(text, after, recipe)
        loss.backward()
        if step > 0:
            optimizer.step()
        yield f"step {step} loss", loss.detach().cpu()
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().cpu()


def digest(found: dict[str, torch.Tensor]) -> str:
    """The SHA-256 that nano_fp8.py prints, of what `train` has found."""
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in found.values())).hexdigest()


def record(device: str, found: dict[str, torch.Tensor]) -> None:
    """Replace what is recorded by what the layers have found on a device."""
    losses = [float(x) for x in found.values() if x.dim() == 0]
    name = torch.cuda.get_device_name() if device == "cuda" else device
    about = {"device": name, "date": str(date.today()), "torch": torch.__version__}
    files.write(GOLDEN, json.dumps(about | {"sha256": digest(found), "losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    found = dict(train(sys.argv[1]))
    for name, x in found.items():
        if x.dim() == 0:
            print(f"{name} {float(x):.6f}")
    print(digest(found))
    if sys.argv[2:] == ["--record"]:
        record(sys.argv[1], found)
