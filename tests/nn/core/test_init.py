"""Parameter initialisers: the distribution, the rounding, the seed."""

import pytest
import torch

from reference.nn.core import init
from reference.numbers import philox


def test_normal_is_the_philox_normal_with_transformer_engines_defaults(same_bits):
    torch.manual_seed(3)
    weight = init.normal_(torch.nn.Parameter(torch.empty(96, 64)))
    torch.manual_seed(3)
    same_bits(weight.detach(), philox.normal((96, 64), 0.0, 0.023))
    assert abs(weight.std().item() - 0.023) < 0.001
    assert abs(weight.mean().item()) < 0.002


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_the_fp32_ones_rounded_once(dtype, same_bits):
    torch.manual_seed(4)
    single = init.normal_(torch.empty(50, 48))
    torch.manual_seed(4)
    same_bits(init.normal_(torch.empty(50, 48, dtype=dtype)), single.to(dtype))


def test_views_are_filled_in_row_major_order_and_nothing_beside_them():
    torch.manual_seed(5)
    plain = init.normal_(torch.empty(8, 4), 1.0, 0.5)
    torch.manual_seed(5)
    storage = torch.zeros(4, 16)
    view = init.normal_(storage[:, :8].t(), 1.0, 0.5)
    assert torch.equal(view, plain)
    assert not storage[:, 8:].any()


def test_gradients_do_not_flow_through_initialisation():
    weight = torch.nn.Parameter(torch.empty(4, 4))
    assert init.normal_(weight) is weight
    assert weight.is_leaf
    assert weight.grad_fn is None


def test_refusals():
    with pytest.raises(ValueError, match=r"tensor is torch.float8_e4m3fn; float32, bfloat16"):
        init.normal_(torch.empty(16, dtype=torch.float8_e4m3fn))
