"""Attention on a GPU, run again and again: the same bits on a busy GPU, errors beside cuDNN's, memory by sequence."""

from typing import Any

import pytest
import torch
from shared.attention_cases import Case, inputs, run, to_cuda

import optimized  # noqa: F401  (registers the CUDA ops)
from optimized.bench.layers.layer_models import cudnn

pytestmark = pytest.mark.gpu
twin = torch.ops.twin
RUNS = 100
LONG = {"b": 2, "hkv": 2, "sq": 1100, "skv": 1100, "mask_type": "causal"}
AGAIN = [
    Case(**LONG, group=1, d=128),
    Case(**LONG, group=4, d=128, dropout=0.1),  # whose last heads are taken in parts
    Case(**LONG, group=4, d=64, lengths="both"),
    Case(**{**LONG, "mask_type": "none"}, group=2, d=96, bias="1hss"),
    Case(**LONG, group=2, d=256),
]


def words(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("case", AGAIN, ids=lambda case: f"d={case.d}")
def test_a_hundred_runs_beside_other_work_have_the_same_bits(case: Case) -> None:
    given = {name: to_cuda(x) for name, x in inputs(case).items()}
    start = given["rng_state"]

    def once() -> dict[str, torch.Tensor]:
        return run(case, {**given, "rng_state": None if start is None else start.clone()})

    first = once()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for i in range(RUNS):
        with torch.cuda.stream(other):  # sizes vary, so that the two meet at other places each time
            torch.mm(a[: 256 * (1 + i % 16)], a)
        for name, value in once().items():
            different += (words(value) != words(first[name])).sum()
    torch.cuda.synchronize()
    assert different.item() == 0


def test_a_hundred_runs_in_fp8_have_the_same_bits() -> None:
    q, k, v = (torch.randn(2, 4, 900, 128, device="cuda").to(torch.float8_e4m3fn) for _ in range(3))
    v, one = v.transpose(2, 3).contiguous(), torch.ones(1, device="cuda")
    rest = (128**-0.5, "causal", -1, -1, None, 0.0, None, torch.bfloat16)
    first = twin.attention_fp8(q, k, v, one, one, one, *rest)
    for _ in range(RUNS):
        for found, expected in zip(twin.attention_fp8(q, k, v, one, one, one, *rest), first, strict=True):
            assert torch.equal(words(found), words(expected))


def in_float64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, causal: bool) -> list[Any]:
    """The result, and the gradients of q, k and v."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_beside_cudnns(dtype: torch.dtype, causal: bool, d: int) -> None:
    """Root mean squares of the errors against float64 are no larger; 0.5 % is the chance of these numbers."""
    generator = torch.Generator("cuda").manual_seed(d)
    q, k, v, grad = (torch.randn(2, 4, 1024, d, device="cuda", generator=generator).to(dtype) for _ in range(4))
    truth = in_float64(q, k, v, grad, causal)
    rest = (d**-0.5, "causal" if causal else "none", -1, -1, None, 0.0, None)
    out, m, inv = twin.attention(q, k, v, *rest)
    ours = [out, *twin.attention_backward(grad, q, k, v, out, m, inv, *rest)]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    result = cudnn(*leaves, causal=causal, p=0.0)
    theirs = [result.detach(), *torch.autograd.grad(result, leaves, grad)]
    for name, exact, one, other in zip(("out", "dq", "dk", "dv"), truth, ours, theirs, strict=True):
        errors = [(x.double() - exact).square().mean().sqrt().item() for x in (one, other)]
        print(f"{dtype} d={d} causal={causal} {name}: ours / cuDNN's {errors[0] / errors[1]:.4f}")
        assert errors[0] <= 1.005 * errors[1], name


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_memory_is_linear_in_the_sequence(dropout: float) -> None:
    """The most that forward and backward take: twice as much for twice the tokens. Dropout's bits have a room of their
    own, as large as `KEEP` at most."""

    def peak(sequence: int) -> int:
        q, k, v, grad = (torch.randn(1, 16, sequence, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        state = torch.tensor([5, 0], device="cuda") if dropout else None
        rest = (128**-0.5, "causal", -1, -1, None, dropout)
        torch.cuda.reset_peak_memory_stats()
        out, m, inv = twin.attention(q, k, v, *rest, state)
        twin.attention_backward(grad, q, k, v, out, m, inv, *rest, state)
        return torch.cuda.max_memory_allocated()

    short, long = peak(16384), peak(32768)
    assert long <= 2.05 * short
