"""`clamped_swiglu`: its limits, special values and parameters. test_activation.py tests it among the other kinds."""

import pytest
import torch
from shared.activation_values import INF, NAN, numbers
from shared.bits import assert_same_bits

from reference.numbers import elementary
from reference.ops.activations import activation

twin = torch.ops.twin


def test_clamped_swiglu_at_its_limits_and_at_special_values() -> None:
    x1 = torch.tensor([[7.0, 8.0, INF, -INF, NAN, 2.0, 2.0, 2.0, 2.0, 2.0]])
    x2 = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 7.0, -7.0, 9.0, -INF, NAN]])
    x = torch.cat([x1, x2], 1)
    seven, two = (float(elementary.qgelu(torch.tensor([n]))[0]) for n in (7.0, 2.0))
    y = twin.activation(x, "clamped_swiglu")
    expected = torch.tensor([[seven * 2] * 3 + [NAN, NAN, two * 8, two * -6, two * 8, two * -6, NAN]])
    assert_same_bits(y, expected)
    dx = twin.activation_backward(torch.ones_like(x1), x, "clamped_swiglu")
    assert_same_bits(dx[:, 1:3], torch.zeros(1, 2), "no gradient above the limit")
    assert_same_bits(dx[:, 10:], torch.tensor([[seven] * 3 + [NAN, NAN, two, two, 0.0, 0.0, two]]), "of the gate")
    assert dx[0, 0] == 2 * elementary.dqgelu(x1[0, :1]), "the limit itself is inside"


def test_the_parameters_of_clamped_swiglu() -> None:
    x, grad = numbers(20, 32, torch.bfloat16, 0, 8.0), numbers(20, 16, torch.bfloat16, 1)
    same = activation.Clamp().kind
    assert same == "clamped_swiglu(7.0, 1.702, 1.0)"
    assert_same_bits(twin.activation(x, "clamped_swiglu"), twin.activation(x, same))
    assert_same_bits(twin.activation_backward(grad, x, "clamped_swiglu"), twin.activation_backward(grad, x, same), "dx")
    found = [twin.activation(x, activation.Clamp(*one).kind) for one in ((7.0,), (6.0,), (7.0, 1.0), (7.0, 1.702, 0.0))]
    assert all((a != b).any() for i, a in enumerate(found) for b in found[:i])
    unwritten = ("()", "(7.0)", "(7, 1.702, 1.0)", "(7.0, 1.702, 1.0", "(7.0,1.702,1.0)")
    unfit = ("(0.0, 1.0, 1.0)", "(nan, 1.0, 1.0)", "(1.0, 1.0, 1e31)", "(1.0, -1.0, 1.0)")
    for kind in ("swiglu(7.0, 1.0, 1.0)", *(f"clamped_swiglu{rest}" for rest in (*unwritten, *unfit))):
        with pytest.raises(ValueError, match="kind must be one of"):
            twin.activation(x, kind)
