"""Record, on an H200, six training steps of an FP8 `Linear` made of PyTorch and cuBLASLt alone.

    PYTHONPATH=. python tests/golden/record_linear.py FOLDER

Nothing of Twin Engine computes here: the casts are torch's float8 conversions after a clamp, the products are
`torch._scaled_mm` (cuBLASLt; fast accumulation forward, split accumulation backward), the scale update is
Transformer Engine's rule in torch ops. tests/te/test_golden_linear.py then asks
`reference.Linear` for the same bits.
The cases and their inputs are `optimized.recordings.linear`'s.
"""

import datetime
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from optimized.recordings.linear import CASES, LEARNING_RATE, STEPS, Case, inputs, parameters
from reference.support import files


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The saturating cast (no NaN occurs here)."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


def product(
    a: torch.Tensor, b: torch.Tensor, a_inv: torch.Tensor, b_inv: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype, fast: bool,
) -> torch.Tensor:  # fmt: skip
    """a · bᵀ by cuBLASLt."""
    return torch._scaled_mm(
        a.contiguous(),
        b.contiguous().t(),
        scale_a=a_inv,
        scale_b=b_inv,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


class State:
    """Scale and amax history of one direction."""

    def __init__(self, columns: int, case: Case) -> None:
        self.scale = torch.ones(columns, device="cuda")
        self.history = torch.zeros(case.history, columns, device="cuda")
        self.algorithm = case.algorithm

    def take(self, column: int, x: torch.Tensor) -> torch.Tensor:
        """Note x's amax and return its scale."""
        self.history[0, column] = torch.maximum(self.history[0, column], x.float().abs().max())
        return self.scale[column].clone()

    def update(self, limit: float) -> None:
        last = self.history[0].clone()
        rolled = torch.cat([self.history[1:], last[None]])
        amax = rolled.amax(0) if self.algorithm == "max" else last
        scale = torch.where(amax > 0, torch.tensor(limit, device="cuda") / amax, self.scale)
        rolled[0] = 0
        self.scale = torch.where(last != 0, scale, self.scale)
        self.history = torch.where(last != 0, rolled, self.history)


def record(name: str, case: Case) -> dict[str, np.ndarray]:
    """Six steps; every result as raw words."""
    dtype = getattr(torch, case.dtype)
    e4m3, backward_format = torch.float8_e4m3fn, torch.float8_e5m2 if case.hybrid else torch.float8_e4m3fn
    forward, backward = State(3, case), State(2, case)
    weight, bias = (t.cuda() for t in parameters(name, case))
    results: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        x, g = (t.cuda() for t in inputs(name, case, step))
        sx, sw = forward.take(0, x), forward.take(1, weight)
        xq, wq, x_inv, w_inv = cast(x, sx, e4m3), cast(weight, sw, e4m3), 1 / sx, 1 / sw
        out = product(xq, wq, x_inv, w_inv, bias if case.bias else None, dtype, True)
        forward.update(448.0)
        sg = backward.take(0, g)
        gq, g_inv = cast(g, sg, backward_format), 1 / sg
        dx = product(gq, wq.t(), g_inv, w_inv, None, dtype, False)
        dw = product(gq.t(), xq.t(), g_inv, x_inv, None, dtype, False)
        backward.update(57344.0 if case.hybrid else 448.0)
        weight = (weight.float() - (dw.float() * LEARNING_RATE)).to(dtype)
        for key, value in (
            ("out", out), ("dx", dx), ("dw", dw), ("db", g.double().sum(0).to(dtype)), ("fwd_scale", forward.scale),
            ("fwd_history", forward.history), ("bwd_scale", backward.scale), ("bwd_history", backward.history),
        ):  # fmt: skip
            value = value.cpu().contiguous().clone()
            integer = torch.int16 if value.element_size() == 2 else torch.int32
            results[f"{name}.{step}.{key}"] = value.view(integer).numpy()
    return results


def main() -> None:
    out = Path(sys.argv[1])
    results: dict[str, np.ndarray] = {}
    for name, case in CASES.items():
        results |= record(name, case)
    with files.replacing(out / "linear_h200.npz") as file:
        np.savez_compressed(file, **results)
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    provenance = {
        "what": "six training steps of an FP8 Linear by torch._scaled_mm (cuBLASLt); recorded by record_linear.py",
        "gpu, driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cases": {name: case._asdict() for name, case in CASES.items()},
    }
    files.write(out / "linear_h200.json", json.dumps(provenance, indent=2) + "\n")
    print({key.split(".")[0]: 1 for key in results}, sum(v.size for v in results.values()), "words")


if __name__ == "__main__":
    main()
