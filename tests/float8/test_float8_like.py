"""`te.Float8Tensor.make_like` and its relatives; and what Float8Tensors and quantizers refuse."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.bits import assert_same_bits

import reference as te

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2


def delayed(kind: te.DType = E4M3) -> te.Float8Quantizer:
    return te.Float8Quantizer(torch.full((1,), 1.5), torch.zeros(1), kind)


def made(kind: te.DType = E4M3) -> Any:
    return delayed(kind)(torch.arange(32).reshape(4, 8).sub(16).bfloat16())


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_one_made_like_another_shares_its_memory(kind: te.DType) -> None:
    y = made(kind)
    same, reshaped = te.Float8Tensor.make_like(y), te.Float8Tensor.make_like(y, shape=(2, 16), requires_grad=True)
    wide = y.to_dtype(torch.float32)
    assert (same.dtype, same.shape, same.requires_grad) == (torch.bfloat16, (4, 8), False)
    assert (reshaped.shape, reshaped.requires_grad) == ((2, 16), True)
    assert wide.dtype == torch.float32
    assert_same_bits(wide.dequantize(), y._data.view(y.codes.dtype).float() * y._scale_inv)
    other = torch.linspace(-3, 3, 32).reshape(4, 8)
    same.copy_(other)
    expected = delayed(kind)(other)
    for one in (y, same, wide):
        assert_same_bits(one._data, expected._data)
        assert_same_bits(one._transpose, expected._transpose, "transposed codes too")
    assert_same_bits(reshaped._data, expected._data.view(2, 16))


def test_codes_of_its_own() -> None:
    y, codes = made(), torch.arange(16, dtype=torch.uint8).view(2, 8)
    other = te.Float8Tensor.make_like(y, data=codes, data_transpose=codes.t().contiguous(), dtype=torch.float16)
    assert (other.shape, other.dtype) == ((2, 8), torch.float16)
    assert_same_bits(other._data, codes)
    assert_same_bits(other._scale_inv, y._scale_inv)
    before = y._data.clone()
    other.copy_(torch.ones(2, 8))
    assert_same_bits(other._data, delayed()(torch.ones(2, 8))._data, "by the quantizer of y")
    assert_same_bits(y._data, before)


def test_metadata_is_the_constructors_arguments() -> None:
    y = made()
    parts = y.get_metadata()
    assert parts.keys() == {"data", "fp8_scale_inv", "fp8_dtype", "data_transpose", "quantizer"}
    again = te.Float8Tensor(y.shape, y.dtype, **parts)
    assert_same_bits(again.dequantize(), y.dequantize())
    assert again._data.data_ptr() == y._data.data_ptr()


def test_a_layers_weight() -> None:
    with te.quantized_model_init():
        layer = te.Linear(32, 16)
    other = te.Float8Tensor.make_like(layer.weight)
    assert other.is_weight
    assert_same_bits(other._data, layer.weight._data)
    detached = te.Float8Tensor(layer.weight.shape, layer.weight.dtype, **layer.weight.get_metadata())
    assert_same_bits(detached.dequantize(), layer.weight.dequantize())


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"shape": (5, 8)}, ValueError, r"^make_like: shape=\[5, 8\]; one of 32 numbers, as tensor, is accepted\.$"),
        ({"dtype": torch.int8}, TypeError, "dtype=torch.int8"),
        ({"requires_grad": 1}, TypeError, "requires_grad=1"),
        ({"data": torch.zeros(4, 8)}, ValueError, r"data is torch.float32 \[4, 8\]; torch.uint8"),
        (
            {"data_transpose": torch.zeros(8, 4)},
            ValueError,
            "data_transpose without data; both, data alone, or neither",
        ),
    ],
)
def test_what_make_like_refuses(given: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        te.Float8Tensor.make_like(made(), **given)
    with pytest.raises(TypeError, match=r"^make_like: tensor=tensor\(.*; a te\.Float8Tensor is accepted\.$"):
        te.Float8Tensor.make_like(torch.ones(1), **given)


def test_what_is_refused() -> None:
    one, data = torch.ones(1), torch.zeros(2, 4, dtype=torch.uint8)
    quantizer = delayed()
    y = quantizer(torch.ones(2, 4))
    current = te.Float8CurrentScalingQuantizer
    for call, error, sentence in (
        (lambda: te.Float8Quantizer(torch.ones(2), one, E4M3), ValueError, r"scale is torch.float32 \[2\]; a torch"),
        (lambda: te.Float8Quantizer(one, None, E4M3), ValueError, "amax is None; a torch.float32 tensor"),
        (lambda: te.Float8Quantizer(one, one, te.DType.kByte), ValueError, "fp8_dtype=.*kFloat8E4M3 and"),
        (lambda: te.Float8Quantizer(one, one, "E4M3"), TypeError, "fp8_dtype='E4M3'; te.DType"),
        (
            lambda: te.Float8Quantizer(one, one, E4M3, rowwise=False),
            NotImplementedError,
            "rowwise=False is not offered",
        ),
        (lambda: quantizer.set_usage(columnwise=1), TypeError, "columnwise=1; True and False"),
        (lambda: current(E4M3, "cpu", amax_epsilon=-1.0), ValueError, "amax_epsilon=-1.0; a finite number"),
        (lambda: current(E4M3, "cpu", force_pow_2_scales=2), TypeError, "force_pow_2_scales=2"),
        (
            lambda: current(E4M3, "cpu", with_amax_reduction=True),
            ValueError,
            r"with_amax_reduction=True before torch\.distributed\.init_process_group; False is accepted\.$",
        ),
        (
            lambda: current(E4M3, "cpu", amax_reduction_group=dist.ProcessGroup(0, 2)),
            ValueError,
            "amax_reduction_group=.* with with_amax_reduction=False, where nothing reads it; None is accepted, or with",
        ),
        (
            lambda: current(E4M3, "cpu", with_amax_reduction=True, amax_reduction_group="tp"),
            TypeError,
            r"amax_reduction_group='tp'; None and a process group of which this process is a rank are accepted\.$",
        ),
        (lambda: current(E4M3, "cpu", amax=one), NotImplementedError, "amax=<a torch.float32 tensor> is not offered"),
        (lambda: quantizer(torch.ones(2, dtype=torch.int32)), TypeError, "the tensor to quantize is torch.int32"),
        (lambda: quantizer.quantize(one, dtype=torch.float16), TypeError, "dtype=torch.float16; the tensor's"),
        (lambda: quantizer.quantize(one, out=torch.ones(1)), TypeError, "the tensor to write to is a Tensor"),
        (lambda: quantizer.quantize(one, out=y), ValueError, r"shape \[1\] is written to \[2, 4\]"),
        (lambda: delayed(E5M2).quantize(torch.ones(2, 4), out=y), ValueError, "format is kFloat8E5M2"),
        (lambda: quantizer.create_tensor_from_data(data, internal=True), NotImplementedError, "internal=True is not"),
        (lambda: quantizer.make_empty((2,), pin_memory=True), NotImplementedError, "pin_memory=True is not offered"),
        (
            lambda: te.Float8Tensor((3, 4), torch.float32, data=data, fp8_scale_inv=one),
            ValueError,
            r"data is .*\[2, 4",
        ),
        (lambda: te.Float8Tensor((2, 4), torch.int8, data=data, fp8_scale_inv=one), TypeError, "dtype=torch.int8"),
        (
            lambda: te.Float8Tensor((2, 4), torch.float32, data=data, fp8_scale_inv=one.double()),
            ValueError,
            "fp8_scale_inv is torch.float64",
        ),
        (
            lambda: te.Float8Tensor((2, 4), torch.float32, data=data, fp8_scale_inv=one, data_transpose=data),
            ValueError,
            r"data_transpose is torch.uint8 \[2, 4\]; torch.uint8 or torch.float8_e4m3fn \[4, 2\]",
        ),
        (
            lambda: te.Float8Tensor(
                (2, 4), torch.float32, data=data, fp8_scale_inv=one, fp8_dtype=E5M2, quantizer=quantizer
            ),
            ValueError,
            "a te.Quantizer of kFloat8E5M2 is accepted",
        ),
        (lambda: y.update_usage(rowwise_usage=False), NotImplementedError, "rowwise_usage=False is not offered"),
    ):
        with pytest.raises(error, match=sentence):
            call()
    assert_same_bits(y.dequantize(), torch.ones(2, 4), "nothing was written")
