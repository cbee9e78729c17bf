"""`te.Float8Quantizer`, `te.Float8CurrentScalingQuantizer` and the `te.Float8Tensor`s that they make."""

import copy
import io
import itertools
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits
from simulator import Simulator

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te
from reference.support import notice

KINDS = {te.DType.kFloat8E4M3: (ml_dtypes.float8_e4m3fn, 448.0), te.DType.kFloat8E5M2: (ml_dtypes.float8_e5m2, 57344.0)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((), (16,), (1,), (2, 3, 5), (0, 8), (48, 32), (3, 1000, 33))
E4M3, E5M2 = KINDS


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, special: bool = False) -> torch.Tensor:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 40).to(dtype)
    if special and x.numel() > 8:
        x.view(-1)[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-7, 6e4]).to(dtype)
    return x


def expected(x: torch.Tensor, scale: float, kind: te.DType) -> np.ndarray:
    """The codes by NumPy and ml_dtypes: one fp32 product, clamped, rounded once; NaN and infinities are 0x7F."""
    fp8, largest = KINDS[kind]
    with np.errstate(all="ignore"):
        scaled = x.detach().float().numpy() * np.float32(scale)
        codes = np.asarray(np.clip(scaled, -largest, largest).astype(fp8)).view(np.uint8)
    return np.where(np.isnan(scaled) | x.isinf().numpy(), np.uint8(0x7F), codes)


def largest_of(x: torch.Tensor) -> float:
    finite = x.detach().float()[~x.isnan()] if x.dim() else x.float().view(1)
    return finite.abs().max().item() if finite.numel() else 0.0


def delayed(kind: te.DType = E4M3, scale: float = 1.5, **usage: bool) -> te.Float8Quantizer:
    return te.Float8Quantizer(torch.full((1,), scale), torch.zeros(1), kind, **usage)


def check(y: Any, x: torch.Tensor, scale: float, kind: te.DType) -> None:
    """That y holds x with that scale, in all that it keeps."""
    codes = expected(x, scale, kind)
    inverse = np.float32(1) / np.float32(scale)
    assert (type(y), y.shape, y.dtype, y._fp8_dtype) == (te.Float8Tensor, x.shape, x.dtype, kind)
    assert y._data.dtype == torch.uint8
    assert_same_bits(y._data, torch.from_numpy(codes))
    assert_same_bits(y._scale_inv, torch.tensor([inverse]))
    if y._transpose is not None:
        turned = codes if codes.ndim == 0 else np.ascontiguousarray(np.moveaxis(codes, -1, 0))
        assert_same_bits(y._transpose, torch.from_numpy(turned))
    read = torch.from_numpy(np.asarray(codes.view(KINDS[kind][0]).astype(np.float32) * inverse))
    assert_same_bits(y.detach().dequantize(), read.to(x.dtype))
    assert_same_bits(y.detach().dequantize(dtype=torch.float32), read)


@pytest.mark.parametrize(("kind", "dtype", "shape"), list(itertools.product(KINDS, DTYPES, SHAPES)))
def test_delayed(kind: te.DType, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = numbers(shape, dtype, special=True)
    quantizer = delayed(kind)
    y = quantizer(x)
    check(y, x, 1.5, kind)
    assert y._transpose is not None
    assert quantizer.amax.item() == largest_of(x)
    quantizer(x / 2)
    assert quantizer.amax.item() == largest_of(x)  # the larger one


@pytest.mark.parametrize(("kind", "dtype", "shape"), list(itertools.product(KINDS, DTYPES, SHAPES)))
@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1000.0])
def test_current(kind: te.DType, dtype: torch.dtype, shape: tuple[int, ...], power: bool, epsilon: float) -> None:
    x = numbers(shape, dtype)
    quantizer = te.Float8CurrentScalingQuantizer(
        kind, "cpu", columnwise=False, force_pow_2_scales=power, amax_epsilon=epsilon
    )
    amax = max(largest_of(x), epsilon)
    scale = np.float32(KINDS[kind][1]) / np.float32(amax) if amax else np.float32(1)
    if power:
        scale = np.exp2(np.floor(np.log2(scale))).astype(np.float32)
    y = quantizer(x)
    check(y, x, float(scale), kind)
    assert y._transpose is None


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan, 1e-45])
def test_current_scales_that_are_no_quotient(value: float) -> None:
    y = te.Float8CurrentScalingQuantizer(E4M3, "cpu")(torch.full((2, 16), value))
    scale = 1.0 if value != 1e-45 else torch.finfo(torch.float32).max
    assert_same_bits(y._scale_inv, 1 / torch.tensor([scale]))


def test_gradients_pass_as_they_are() -> None:
    x, g = numbers((2, 3, 5)).requires_grad_(), numbers((2, 3, 5)) / 7
    for quantizer in (delayed(), te.Float8CurrentScalingQuantizer(E5M2, "cpu")):
        x.grad = None
        quantizer(x).dequantize().backward(g)
        assert_same_bits(x.grad, g)
        x.grad = None
        y = quantizer(x)
        (y * 2).backward(g)
        assert_same_bits(x.grad, g * 2)
    with torch.no_grad():
        assert not delayed()(x).requires_grad


def test_the_constructor() -> None:
    data = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    inverse = torch.tensor([0.375])
    y = te.Float8Tensor(
        shape=(2, 3, 4), dtype=torch.bfloat16, data=data, fp8_scale_inv=inverse, fp8_dtype=E4M3, requires_grad=True
    )
    assert isinstance(y, te.QuantizedTensor)
    assert (y.shape, y.dtype, y.requires_grad, y._transpose) == (data.shape, torch.bfloat16, True, None)
    read = torch.from_numpy(data.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)) * 0.375
    assert_same_bits(y.detach().dequantize(), read.bfloat16())
    y.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert_same_bits(y._transpose, data.movedim(-1, 0).contiguous())
    assert y.get_usages() == {"rowwise": True, "columnwise": True}
    y.remove_caches()
    assert y._transpose is None
    with torch.no_grad():
        y.copy_(torch.full((2, 3, 4), 6.0))  # with the scale 1 / 0.375
    check(y.detach(), torch.full((2, 3, 4), 6.0).bfloat16(), float(1 / inverse), E4M3)
    assert te.Float8Tensor(8, torch.float32, data=torch.zeros(8, dtype=torch.uint8), fp8_scale_inv=inverse).shape == (
        8,
    )


def test_ops_read_the_numbers() -> None:
    y = delayed()(numbers((6, 16)))
    read, other = y.dequantize(), numbers((6, 16)) + 3
    for op in (
        lambda x: x + other,
        lambda x: other - x,
        lambda x: x * 2 / 3,
        torch.sin,
        lambda x: x @ other.t(),
        lambda x: torch.cat([x, other]),
        lambda x: x[1:3, ::2].sum(),
        lambda x: x.t().contiguous(),
        lambda x: x.to(torch.float16),
    ):
        found = op(y)
        assert type(found) is torch.Tensor
        assert_same_bits(found, op(read))


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_changes_are_writes(kind: te.DType, columnwise: bool) -> None:
    x = numbers((6, 16), torch.bfloat16)
    for change in (
        lambda z: z.add_(1),
        lambda z: z.mul_(x),
        lambda z: z.copy_(x / 3),
        lambda z: z[2].zero_(),
        lambda z: z.view(-1)[5:40].mul_(2),
        lambda z: z.view(3, 32).add_(1),
        lambda z: z.reshape(2, 3, 16)[1].neg_(),
        lambda z: setattr(z, "data", x + 2),
    ):
        y = delayed(kind, columnwise=columnwise)(x)
        values = y.dequantize()
        change(values)
        change(y)
        check(y, values, 1.5, kind)
        assert (y._transpose is not None) == columnwise
        assert y._quantizer.amax >= largest_of(values)


def test_a_reshaped_tensor_is_the_same_memory() -> None:
    y = delayed()(numbers((6, 16)))
    z = y.view(2, 48)
    assert (type(z), z._transpose) == (te.Float8Tensor, None)
    assert_same_bits(z._data, y._data.view(2, 48))
    z.copy_(numbers((2, 48)) / 5)
    check(y, numbers((2, 48)).view(6, 16) / 5, 1.5, E4M3)
    part = y[1:3]
    assert isinstance(part, te.QuantizedTensor)
    assert_same_bits(part.dequantize(), y.dequantize()[1:3])
    assert type(y.contiguous()) is te.Float8Tensor


def test_writing_through_a_quantizer() -> None:
    x, quantizer = numbers((4, 8)), delayed(scale=2.0)
    out = delayed()(torch.zeros(4, 8))
    assert quantizer.quantize(x, out=out) is out
    check(out, x, 2.0, E4M3)
    before = out._data.clone()
    for same in (
        quantizer.update_quantized(x / 2, out, noop_flag=torch.ones(1)),
        out.quantize_(x / 2, noop_flag=torch.ones(1)),
    ):
        assert same is out
        assert_same_bits(out._data, before)
    for flag, factor in ((0, 0.5), (2, 0.25), (-1, 0.5)):  # 1 alone keeps what is there
        quantizer.update_quantized(x * factor, out, noop_flag=torch.full((1,), flag))
        check(out, x * factor, 2.0, E4M3)
    out.quantize_(x)
    check(out, x, 1.5, E4M3)  # its own
    out.update_quantizer(quantizer)
    out.quantize_(x)
    check(out, x, 2.0, E4M3)
    for y, wanted in zip(quantizer.multi_quantize([x, x * 2]), (x, x * 2), strict=True):
        check(y, wanted, 2.0, E4M3)


def test_a_copy_of_another_one_casts_nothing() -> None:
    y, other = delayed()(numbers((4, 8))), delayed(scale=3.0)(numbers((4, 8)) * 2)
    y.copy_(other)
    check(y, numbers((4, 8)) * 2, 3.0, E4M3)
    y.quantize_(other)
    check(y, other.dequantize(), 1.5, E4M3)
    third = delayed(E5M2, 3.0)(numbers((4, 8)))  # another format: its numbers are cast
    y.copy_(third)
    check(y, third.dequantize(), 1.5, E4M3)


def test_codes_in_a_buffer_of_the_programs() -> None:
    y, buffer = delayed()(numbers((4, 8))), torch.zeros(40, dtype=torch.uint8)
    y._data = buffer[4:36].view(4, 8)
    assert_same_bits(y._transpose, torch.zeros(8, 4, dtype=torch.uint8))
    y.copy_(numbers((4, 8)))
    check(y, numbers((4, 8)), 1.5, E4M3)
    assert_same_bits(buffer[4:36], y._data.view(-1))
    assert not buffer[:4].any()
    assert not buffer[36:].any()
    with pytest.raises(ValueError, match=r"_data is torch.uint8 \[2\]; .*\[4, 8\] is accepted"):
        y._data = buffer[:2]


def test_quantizers() -> None:
    quantizer = delayed()
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    other = quantizer.copy()
    other.set_usage(columnwise=False)
    assert (quantizer.columnwise_usage, other.columnwise_usage) == (True, False)
    assert other.scale is quantizer.scale
    quantizer.calibrate(numbers((5, 7), special=True))
    assert quantizer.amax.item() == torch.inf
    quantizer.calibrate(numbers((5, 7)))  # of this tensor alone
    assert quantizer.amax.item() == largest_of(numbers((5, 7)))
    empty = quantizer.make_empty((3, 5), dtype=torch.float16, requires_grad=True)
    assert (empty.shape, empty.dtype, empty.requires_grad) == ((3, 5), torch.float16, True)
    assert empty._transpose.shape == (5, 3)
    codes = torch.arange(16, dtype=torch.uint8)
    made = quantizer.create_tensor_from_data(codes, fake_dtype=torch.bfloat16)
    assert_same_bits(made._data, codes)
    assert_same_bits(made._scale_inv, 1 / quantizer.scale)
    assert te.Float8CurrentScalingQuantizer(E4M3, "cpu").make_empty((2,)).device.type == "cpu"


def test_a_layers_weight_is_one() -> None:
    with te.quantized_model_init():
        layer = te.Linear(32, 16)
    weight = layer.weight
    assert isinstance(weight, te.Float8Tensor)
    assert isinstance(weight, te.QuantizedTensor)
    state = layer.fp8_meta["scaling_fwd"]
    assert weight._quantizer.scale.data_ptr() == state.scale[1:].data_ptr()
    assert weight._quantizer.amax.data_ptr() == state.amax_history[0, 1:].data_ptr()
    weight.dequantize().sum().backward()
    assert_same_bits(weight.grad, torch.ones(16, 32))
    with pytest.raises(NotImplementedError, match="a layer's weight has the scales of its layer"):
        weight.update_quantizer(delayed())


def test_a_layer_reads_a_quantized_input_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    notice._said.discard("quantized input")
    torch.manual_seed(1)
    layer = te.Linear(32, 16)
    x = numbers((4, 32)).requires_grad_()
    y = delayed(scale=30.0)(x)
    plain = y.detach().dequantize().requires_grad_()
    other = copy.deepcopy(layer)
    for enabled in (False, True):
        x.grad = plain.grad = None
        with te.autocast(enabled=enabled):
            found, wanted = layer(y), other(plain)
        assert_same_bits(found, wanted)
        found.sum().backward(retain_graph=True)
        wanted.sum().backward()
        assert_same_bits(x.grad, plain.grad)
        with te.autocast(enabled=enabled):
            assert_same_bits(layer(y.view(2, 2, 32)[:1]), other(plain.view(2, 2, 32)[:1]))
    (record,) = caplog.records
    assert "it is read, and cast by the layer's own recipe" in record.getMessage()


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_files(kind: te.DType) -> None:
    for y in (
        delayed(kind)(numbers((4, 8), torch.bfloat16)),
        te.Float8CurrentScalingQuantizer(kind, "cpu")(numbers((2, 3, 5))),
    ):
        buffer = io.BytesIO()
        torch.save({"x": y}, buffer)
        buffer.seek(0)
        for other in (
            copy.deepcopy(y),
            y.clone(),
            y.to("cpu", copy=True),
            pickle.loads(pickle.dumps(y)),
            torch.load(buffer, weights_only=True)["x"],
        ):
            assert (type(other), other.dtype, other._fp8_dtype) == (te.Float8Tensor, y.dtype, kind)
            assert_same_bits(other._data, y._data)
            assert_same_bits(other._scale_inv, y._scale_inv)
            before, value = y._data.clone(), torch.full(y.shape, 5.0)
            other.copy_(value)
            assert_same_bits(other._data, y._quantizer.copy()(value)._data, "written by a quantizer of its own")
            assert_same_bits(y._data, before)


def quantizers(kind: te.DType, device: str) -> list[Any]:
    one = te.Float8Quantizer(torch.full((1,), 1.5, device=device), torch.zeros(1, device=device), kind)
    current = te.Float8CurrentScalingQuantizer
    options: tuple[dict[str, Any], ...] = ({}, {"force_pow_2_scales": True}, {"amax_epsilon": 1000.0})
    return [one, *(current(kind, device, **each) for each in options)]


def steps(quantizer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """What a quantizer makes of x, what it reads as, and what a write leaves."""
    y = quantizer(x)
    found = [y._data.clone(), y._transpose.clone(), y._scale_inv.clone(), y.dequantize()]
    y.mul_(3)
    return [*found, y._data, y._transpose, y._scale_inv, getattr(quantizer, "amax", x)]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype", "shape"), list(itertools.product(KINDS, DTYPES, SHAPES)))
def test_both_sides_have_the_same_bits(kind: te.DType, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = numbers(shape, dtype, special=True)
    for there, here in zip(quantizers(kind, "cuda"), quantizers(kind, "cpu"), strict=True):
        for a, b in zip(steps(there, x.cuda()), steps(here, x), strict=True):
            assert_same_bits(a.cpu(), b)


@pytest.mark.simulated
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "dtype"), [(E4M3, torch.float32), (E5M2, torch.bfloat16), (E4M3, torch.float16)])
def test_the_kernels_have_the_same_bits(kind: te.DType, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = numbers(shape, dtype, special=True)
    for simulated, here in zip(quantizers(kind, "cpu"), quantizers(kind, "cpu"), strict=True):
        with Simulator() as gpu:
            found = steps(simulated, x)
        assert gpu.launches
        for a, b in zip(found, steps(here, x), strict=True):
            assert_same_bits(a, b)
