"""Parts of a Float8Tensor, its views in inference mode, its subclasses, and `data = values`."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

import reference as te
from reference.float8.float8_tensor import Float8Tensor

BF16 = torch.bfloat16


class Special(Float8Tensor):
    """A program's own kind."""


def tensor(*shape: int, kind: type[Float8Tensor] = Float8Tensor, scale: float = 3.5) -> Any:
    torch.manual_seed(0)
    quantizer = te.Float8Quantizer(torch.full([1], scale), torch.zeros(1), te.DType.kFloat8E4M3)
    made = quantizer(torch.randn(shape, dtype=BF16))
    return kind(shape, BF16, data=made._data, fp8_scale_inv=made._scale_inv, quantizer=quantizer)


def weight() -> Any:
    with te.quantized_model_init():
        return te.Linear(32, 48, params_dtype=BF16).weight


CUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "chunk": lambda x: x.chunk(3, 0),
    "chunk columns": lambda x: x.chunk(2, 1),
    "split": lambda x: x.split(20),
    "split sizes": lambda x: x.split([10, 38]),
    "slice": lambda x: x[3:40:2],
    "column slice": lambda x: x[:, 5:9],
    "row": lambda x: x[7],
    "number": lambda x: x[7, 3],
    "narrow": lambda x: x.narrow(1, 2, 5),
    "unbind": lambda x: x.unbind(),
    "tensor_split": lambda x: x.tensor_split(5),
    "as_strided": lambda x: x.as_strided((8, 16), (64, 2), 32),
    "part of a part": lambda x: x[8:40].chunk(2)[1][:, 4:20],
    "view of a part": lambda x: x.chunk(3)[1].view(8, -1),
    "reshape of a part": lambda x: x.chunk(3)[1].reshape(-1),
    "view_as of a part": lambda x: x[16:].view_as(x[16:]),
}
WHOLE: dict[str, Callable[[torch.Tensor], Any]] = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "view": lambda x: x.view(-1),
    "view_as": lambda x: x.view_as(x),
    "reshape": lambda x: x.reshape(16, -1),
    "flatten": lambda x: x.flatten(),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
}
OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "t": lambda x: x.t(),
    "expand": lambda x: x.expand(2, 48, 32),
    "permute": lambda x: x.permute(1, 0),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "to": lambda x: x.to(torch.float16),
    "matmul": lambda x: x @ torch.ones(32, 2, dtype=BF16),
}


def several(found: Any) -> list[Any]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("make", [weight, lambda: tensor(48, 32)], ids=["weight", "tensor"])
@pytest.mark.parametrize("name", [*CUTS, *WHOLE, *OTHERS])
def test_views_have_the_numbers_and_stay_in_fp8(name: str, make: Callable[[], Any], inference: bool) -> None:
    x, cut = make(), (CUTS | WHOLE | OTHERS)[name]
    numbers = x.dequantize().detach()
    with torch.inference_mode(inference), torch.no_grad():
        for found, expected in zip(several(cut(x)), several(cut(numbers)), strict=True):
            assert found.shape == expected.shape
            assert isinstance(found, Float8Tensor) or name in OTHERS, type(found)
            plain = found.dequantize() if isinstance(found, te.QuantizedTensor) else found
            assert_same_bits(plain.contiguous(), expected.contiguous())
            if isinstance(found, Float8Tensor):
                codes = found._data.view(torch.float8_e4m3fn)
                assert_same_bits((codes.float() * found._scale_inv).to(BF16).view(expected.shape), expected)


@pytest.mark.parametrize("name", CUTS)
def test_a_write_to_a_part_leaves_one_scale_for_all(name: str) -> None:
    """A new scale: the whole is cast anew, as for other views."""
    x = tensor(48, 32)
    expected = x.dequantize()
    x._quantizer.scale.fill_(64.0)
    part, same = several(CUTS[name](x))[-1], several(CUTS[name](expected))[-1]
    part.copy_(torch.full_like(same, 1.5))
    same.fill_(1.5)
    assert x._scale_inv == 1 / 64
    whole = tensor(48, 32, scale=64.0)
    whole.quantize_(expected)
    assert_same_bits(x.dequantize(), whole.dequantize())
    assert_same_bits(part.dequantize(), same.contiguous())


def test_a_part_s_copies_have_memory_of_their_own() -> None:
    x = tensor(48, 32)
    part = x.chunk(3)[1]
    copies = [part.clone(), copy.deepcopy(part), pickle.loads(pickle.dumps(part))]
    before = part.dequantize()
    x.zero_()
    for one in copies:
        assert type(one) is Float8Tensor
        assert_same_bits(one.dequantize(), before)
    assert not part.dequantize().any()


def test_gradients_pass_through_a_part() -> None:
    x = tensor(48, 32).requires_grad_()
    (x.chunk(2)[1].dequantize() * 3).sum().backward()
    assert_same_bits(x.grad, torch.cat([torch.zeros(24, 32), torch.full((24, 32), 3.0)]).to(BF16))


@pytest.mark.parametrize("name", [*WHOLE, "sharing a dtype", "parameter", "cpu"])
def test_a_subclass_stays_one(name: str) -> None:
    more: dict[str, Callable[[Any], Any]] = {
        "sharing a dtype": lambda x: x.to_dtype(torch.float16),
        "parameter": torch.nn.Parameter,
        "cpu": lambda x: x.cpu(),
    }
    assert type((WHOLE | more)[name](tensor(48, 32, kind=Special))) is Special


@pytest.mark.parametrize("shape", [(16, 16), (48, 32), (64,), (2, 3, 16)])
@pytest.mark.parametrize("of", [Float8Tensor, Special, torch.Tensor])
def test_data_takes_values_of_any_shape(shape: tuple[int, ...], of: Any) -> None:
    x = tensor(48, 32, kind=Special)
    x.update_usage(columnwise_usage=True)
    values = torch.randn(shape, dtype=BF16) if of is torch.Tensor else tensor(*shape, kind=of, scale=8.0)
    x.data = values
    assert (type(x), x.shape, x.dtype) == (Special, torch.Size(shape), BF16)
    expected = tensor(*shape)
    expected.quantize_(values) if of is torch.Tensor else expected.copy_(values)
    assert_same_bits(x.dequantize(), expected.dequantize())
    assert_same_bits(x._data, expected._data)
    assert x._transpose.shape == (shape[-1], *shape[:-1])
    x.mul_(2)
    assert x.shape == torch.Size(shape)


def test_a_weight_takes_data_of_another_shape_and_keeps_its_layer_s_scale() -> None:
    with te.quantized_model_init():
        layer = te.Linear(32, 48, params_dtype=BF16)
    layer.fp8_meta["scaling_fwd"].scale.fill_(4.0)
    layer.weight.data = torch.ones(16, 32)
    assert layer.weight.is_weight
    assert layer.weight._scale_inv == 0.25
    assert layer.weight.dequantize().unique().tolist() == [1.0]


def test_a_view_takes_data_of_its_shape_only() -> None:
    x = tensor(48, 32)
    with pytest.raises(ValueError, match=r"data has shape \[2, 2\]; that of the view, \[16, 32\], is accepted"):
        x.chunk(3)[0].data = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"shape=\[512\] of a part of a Float8Tensor; \[16, 32\] is accepted"):
        Float8Tensor.make_like(x.chunk(3)[0], shape=(512,))
    x.chunk(3)[0].data = torch.ones(16, 32)
    assert x.dequantize()[:16].unique().tolist() == [1.0]


def test_a_layer_s_state_dict_in_inference_mode() -> None:
    with te.quantized_model_init():
        layer = te.TransformerLayer(32, 64, 2, params_dtype=BF16)
    with torch.inference_mode():
        inside = layer.state_dict()
    for name, value in layer.state_dict().items():
        assert_same_bits(inside[name], value, name)
