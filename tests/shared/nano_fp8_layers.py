"""examples/nano_fp8.py as a program of `te` layers: the same model, weights, text and steps, on a CPU or a GPU.

    PYTHONPATH=.:tests python tests/shared/nano_fp8_layers.py cuda

It prints what nano_fp8.py prints. Sizes, initial weights and text are read from that file; nothing that is computed
from them is.
"""

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import optimized  # noqa: F401  (whose import registers the kernels)
import reference as te
from optimized import measure

NANO = measure.ROOT / "examples" / "nano_fp8.py"


class GPT(torch.nn.Module):
    """Bytes [SEQUENCE, ROWS] and those after them to the mean loss; parameters in the order of nano's `GPT.weights`."""

    def __init__(self, nano: Any, device: str) -> None:
        super().__init__()
        common: dict[str, Any] = {"params_dtype": torch.float32, "device": device}
        options: dict[str, Any] = {"fuse_qkv_params": True, "bias": False, "self_attn_mask_type": "causal", **common}
        options |= {"normalization": "RMSNorm", "activation": "qgelu", "hidden_dropout": 0.0, "attention_dropout": 0.0}
        sizes = (nano.HIDDEN, 4 * nano.HIDDEN, nano.HEADS)
        self.bytes = te.Embedding(nano.BYTES, nano.HIDDEN, **common)
        self.places = te.Embedding(nano.SEQUENCE, nano.HIDDEN, **common)
        self.layers = torch.nn.ModuleList(te.TransformerLayer(*sizes, **options) for _ in range(nano.LAYERS))
        self.norm = te.RMSNorm(nano.HIDDEN, **common)
        self.head = te.Linear(nano.HIDDEN, nano.BYTES, bias=False, **common)
        with torch.no_grad():
            for parameter, weight in zip(self.parameters(), nano.GPT().weights, strict=True):
                parameter.copy_(torch.from_numpy(weight.value))

    def forward(self, text: torch.Tensor, after: torch.Tensor, recipe: te.DelayedScaling) -> torch.Tensor:
        places = torch.arange(len(text), device=text.device)[:, None].expand(text.shape)
        with torch.autocast(text.device.type, torch.bfloat16):
            h = (self.bytes(text) + self.places(places)).to(torch.bfloat16)
            with te.autocast(recipe=recipe):
                for layer in self.layers:
                    h = layer(h)
            return te.cross_entropy(self.head(self.norm(h)), after)


def train(device: str) -> tuple[list[float], str]:
    """The loss of each step, and the SHA-256 of losses and weights."""
    nano: Any = SimpleNamespace(**runpy.run_path(str(NANO)))
    model, recipe, losses = GPT(nano, device), te.DelayedScaling(amax_history_len=nano.HISTORY), []
    options: dict[str, Any] = {"lr": nano.RATE, "betas": nano.BETAS, "eps": nano.EPS, "weight_decay": nano.DECAY}
    optimizer = te.optimizers.FusedAdam(model.parameters(), **options)
    for step in range(nano.STEPS):
        window = torch.from_numpy(nano.batch(step)).to(device)
        optimizer.zero_grad()
        loss = model(window[:-1], window[1:], recipe)
        loss.backward()
        losses.append(loss.detach().cpu().numpy())
        if step > 0:
            optimizer.step()
    weights = [parameter.detach().cpu().numpy() for parameter in model.parameters()]
    return [float(loss) for loss in losses], nano.digest([np.stack(losses), *weights])


if __name__ == "__main__":
    losses, found = train(sys.argv[1])
    for step, loss in enumerate(losses):
        print(f"step {step} loss {loss:.6f}")
    print(found)
