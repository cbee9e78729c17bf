"""The definition of attention is fast enough to be used: its time beside that of PyTorch's attention in float32."""

import time
from collections.abc import Callable

import pytest
import torch

import reference  # noqa: F401  (registers the definitions)

pytestmark = pytest.mark.slow
twin = torch.ops.twin
HEADS, SEQUENCE, CHANNELS = 16, 2048, 128
AT_MOST = 20.0


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward_take_at_most_twenty_times_as_long_as_pytorchs(causal: bool) -> None:
    q, k, v, grad = (torch.randn(1, HEADS, SEQUENCE, CHANNELS).bfloat16() for _ in range(4))
    rest = (CHANNELS**-0.5, "causal" if causal else "none", -1, -1, None, 0.0, None)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    wide = grad.float()

    def ours() -> None:
        out, m, inv = twin.attention(q, k, v, *rest)
        twin.attention_backward(grad, q, k, v, out, m, inv, *rest)

    def theirs() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        torch.autograd.grad(out, leaves, wide)

    ours()  # compiles
    theirs()
    times = [(seconds(ours), seconds(theirs)) for _ in range(3)]
    ratio = min(one for one, _ in times) / min(other for _, other in times)
    print(f"causal={causal}: {ratio:.1f} times PyTorch's time, {times}")
    assert ratio <= AT_MOST
