"""`twin::norm` and its relatives: each call that is refused, and its sentence."""

import re

import pytest
import torch

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
twin = torch.ops.twin
GOOD = {
    "norm": [torch.zeros(4, 32), torch.ones(32), torch.ones(32), 1e-5, False, "layernorm", BF16],
    "norm_scale": [
        *[torch.zeros(4, 32), torch.ones(32), torch.ones(32), 1e-5, False, "layernorm", BF16],
        *[E4M3, False, 0.0],
    ],
    "norm_cast_transpose": [
        *[torch.zeros(4, 32), torch.ones(32), torch.ones(32), 1e-5, False, "layernorm"],
        *[torch.ones(3), torch.zeros(5, 3), 1, E4M3],
    ],
    "norm_backward": [
        *[torch.zeros(4, 32), torch.zeros(4, 32), torch.ones(32), torch.zeros(4), torch.ones(4)],
        *[False, "layernorm", torch.zeros(4, 32)],
    ],
}
REFUSALS = [
    ("norm", 0, torch.zeros(32), "x must be 2-D, [rows, cols]; got shape (32,)."),
    ("norm", 0, torch.zeros(4, 32).double(), "x must be torch.float32, torch.bfloat16 or torch.float16; got"),
    ("norm", 0, torch.zeros(32, 4).t(), "x must be contiguous (row-major); got strides (1, 4)"),
    ("norm", 0, torch.zeros(4, 0), "x must have 1 to 2097152 columns; got shape (4, 0)."),
    ("norm", 1, torch.ones(31), "weight must be contiguous torch.float32 [32] on cpu; got torch.float32 [31]"),
    ("norm", 1, torch.ones(32).double(), "weight must be torch.float32, torch.bfloat16 or torch.float16; got"),
    (
        "norm",
        1,
        torch.ones(64)[::2],
        "weight must be contiguous torch.float32 [32] on cpu; got torch.float32 [32] on cpu, strides (2,).",
    ),
    ("norm", 2, torch.ones(1, 32), "bias must be contiguous torch.float32 [32] on cpu; got torch.float32 [1, 32]"),
    ("norm", 2, torch.ones(32).half(), "bias must be contiguous torch.float32 [32] on cpu; got torch.float16"),
    ("norm", 3, 0.0, "eps must be a positive finite number in fp32; got 0.0."),
    ("norm", 3, 1e-60, "eps must be a positive finite number in fp32; got 1e-60."),
    ("norm", 3, float("nan"), "eps must be a positive finite number in fp32; got nan."),
    ("norm", 5, "batchnorm", "kind must be 'layernorm' or 'rmsnorm'; got 'batchnorm'."),
    ("norm", 5, "rmsnorm", "bias must be None for kind 'rmsnorm'; got a tensor."),
    ("norm", 6, E4M3, "out_dtype must be torch.float32, torch.bfloat16 or torch.float16; got torch.float8_e4m3fn."),
    ("norm_scale", 5, "rmsnorm", "bias must be None for kind 'rmsnorm'; got a tensor."),
    ("norm_scale", 6, E4M3, "out_dtype must be torch.float32, torch.bfloat16 or torch.float16; got torch.float8_e4m3"),
    ("norm_scale", 7, BF16, "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.bfloat16."),
    ("norm_scale", 9, -1.0, "epsilon=-1.0; a finite number of fp32, from 0 on, is accepted."),
    ("norm_cast_transpose", 5, "rmsnorm", "bias must be None for kind 'rmsnorm'; got a tensor."),
    ("norm_cast_transpose", 8, 3, "column must be from 0 to 2, the columns of scale; got 3."),
    ("norm_cast_transpose", 9, BF16, "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.bfloat16."),
    (
        "norm_backward",
        0,
        torch.zeros(4, 32).half(),
        "grad must be contiguous torch.float32 [4, 32] on cpu; got torch.float16",
    ),
    ("norm_backward", 7, torch.zeros(3, 32), "residual_grad must be contiguous torch.float32 [4, 32] on cpu; got"),
    ("norm_backward", 3, torch.zeros(0), "mean must be contiguous torch.float32 [4] on cpu; got torch.float32 [0]"),
    ("norm_backward", 4, torch.ones(4).half(), "rstd must be contiguous torch.float32 [4] on cpu; got torch.float16"),
    ("norm_backward", 6, "rmsnorm", "mean must be contiguous torch.float32 [0] on cpu; got torch.float32 [4]"),
]


@pytest.mark.parametrize(("op", "position", "wrong", "sentence"), REFUSALS)
def test_refusals(op, position, wrong, sentence):
    arguments = [*GOOD[op][:position], wrong, *GOOD[op][position + 1 :]]
    with pytest.raises(ValueError, match=re.escape(f"twin::{op}: {sentence}")):
        getattr(twin, op)(*arguments)


def test_refused_shapes_and_gradients():
    with pytest.raises(ValueError, match="the columns of x must be a multiple of 16"):
        twin.norm_cast_transpose(torch.zeros(4, 40), torch.ones(40), None, *GOOD["norm_cast_transpose"][3:])
    for op, arguments in GOOD.items():
        getattr(twin, op)(*arguments)
        arguments = [torch.zeros(4, 32, requires_grad=True), *arguments[1:]]
        with pytest.raises(RuntimeError, match=f"twin::{op} has no derivative of its own"):
            getattr(twin, op)(*arguments)
