"""Integers by which tokens are drawn: the kernel's are the definition's, whatever the logits are."""

import re

import pytest
import torch
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA implementations)

twin = torch.ops.twin
SPECIAL = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-40, 3e38, -3e38, 1.0, 1.0])
TEMPERATURES = torch.tensor([0.0, 1.0, 1e-30, 1e30, -1.0, torch.nan, torch.inf, 0.7])


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 40, 1025])
def test_kernels_and_special_logits(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(tokens)
    rows = 3 * len(TEMPERATURES)
    x = torch.randn(rows, tokens, generator=generator) * 5
    special = torch.rand(rows, tokens, generator=generator) < torch.arange(rows)[:, None] % 3 / 4
    x = torch.where(special, SPECIAL[torch.randint(len(SPECIAL), x.shape, generator=generator)], x).to(dtype)
    x[-1], x[-2], x[-3] = -torch.inf, torch.nan, 2.0
    t = TEMPERATURES.repeat(3)
    expected = twin.token_weights(x, t)
    assert bool((expected.amax(1) == 2**30).all())
    assert bool((expected >= 0).all())
    assert_same_bits(twin.token_weights(x.to(device), t.to(device)).cpu(), expected)


@pytest.mark.parametrize(
    ("logits", "temperature", "sentence"),
    [
        (torch.zeros(2, 0), torch.zeros(2), "logits has shape [2, 0]; 1 to 8388608 columns are accepted."),
        (torch.zeros(2, 3), torch.zeros(3), "temperature must be"),
        (torch.zeros(2, 3).double(), torch.zeros(2), "logits must be torch.float32, torch.bfloat16 or torch.float16"),
    ],
)
def test_what_is_refused(logits: torch.Tensor, temperature: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match="^twin::token_weights: " + re.escape(sentence)):
        twin.token_weights(logits, temperature)
