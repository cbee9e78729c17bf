"""The likeliest token is the first largest logit, and its loss the trainer's, whatever the logits are."""

import re

import pytest
import torch
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA implementations)

twin = torch.ops.twin
SPECIAL = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-40, 3e38, -3e38, 1.0, 1.0])


def logits(rows: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of normal numbers, of some with others among them; a row of ties, one of NaN and one of -inf."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(rows, tokens, generator=generator) * 5
    special = torch.rand(rows, tokens, generator=generator) < torch.arange(rows)[:, None] % 3 / 4
    x = torch.where(special, SPECIAL[torch.randint(len(SPECIAL), x.shape, generator=generator)], x)
    x[-1], x[-2], x[-3] = -torch.inf, torch.nan, 2.0
    x[-4, :-1], x[-5, 0], x[-5, 1:] = -torch.inf, torch.nan, -3.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 40, 3000])
def test_token_and_loss_are_those_of_the_other_ops(tokens: int, dtype: torch.dtype) -> None:
    x = logits(11, tokens, dtype)
    token, loss = twin.likeliest(x)
    assert token.tolist() == twin.token_weights(x, torch.zeros(len(x))).argmax(1).tolist()
    assert_same_bits(loss, twin.cross_entropy(x, token, -100, 0.0)[0])


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 40, 1025, 8192 * 2 + 2056])
def test_kernels_and_special_logits(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    x = logits(8, tokens, dtype)
    for given in (x, x[:, : tokens - 1].contiguous() if tokens > 1 else x):
        expected = twin.likeliest(given)
        for found, wanted in zip(twin.likeliest(given.to(device)), expected, strict=True):
            assert_same_bits(found.cpu(), wanted)


@pytest.mark.simulated
@pytest.mark.gpu
def test_a_row_of_more_tiles_than_a_block_takes_at_a_time(device: torch.device) -> None:
    x = torch.randn(2, 16 * 8192 + 9000, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[1, 16 * 8192 + 8999] = 9.0
    x[1, 16 * 8192 + 17] = 9.0
    expected = twin.likeliest(x)
    assert expected[0][1] == 16 * 8192 + 17
    for found, wanted in zip(twin.likeliest(x.to(device)), expected, strict=True):
        assert_same_bits(found.cpu(), wanted)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (torch.zeros(2, 0), "logits has shape [2, 0]; 1 to 8388608 columns are accepted."),
        (torch.zeros(2, 3).double(), "logits must be torch.float32, torch.bfloat16 or torch.float16"),
    ],
)
def test_what_is_refused(given: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match="^twin::likeliest: " + re.escape(sentence)):
        twin.likeliest(given)
