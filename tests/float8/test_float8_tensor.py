"""A weight that is kept in FP8: what it reads as, what a write does, and that it behaves as a tensor."""

import copy
import io
import pickle

import pytest
import torch
from shared import processes
from shared.bits import assert_same_bits

import reference as te
from reference.float8.float8_tensor import Float8Tensor
from reference.numbers import formats
from reference.state.scaling import FP8TensorMeta

COLUMN = 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(dtype: torch.dtype = torch.bfloat16, seed: int = 0, shape: tuple[int, ...] = (48, 32)) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 16).to(dtype)


def weight_of(values: torch.Tensor, scale: float = 1.0, transposed: bool = False) -> Float8Tensor:
    meta = FP8TensorMeta.fresh(3, 2, torch.device("cpu"))
    meta.scale[COLUMN] = scale
    weight = Float8Tensor.of(values, meta, COLUMN)
    if transposed:
        weight.operand(transpose=True)
    return weight


def state_of(weight: Float8Tensor) -> FP8TensorMeta:
    return weight._kept.state()


def check_written(weight: Float8Tensor, values: torch.Tensor, scale: float, what: str = "a write") -> None:
    """That the weight holds `values` as they are cast with `scale`, in every tensor that it keeps."""
    codes = formats.cast(values, formats.E4M3, scale)
    assert_same_bits(weight.codes, codes, f"{what}: codes")
    assert_same_bits(weight._scale_inv, 1.0 / torch.tensor([scale]), f"{what}: scale_inv")
    if weight.codes_t is not None:
        assert_same_bits(weight.codes_t.view(torch.uint8), codes.view(torch.uint8).t(), f"{what}: transposed codes")
    read = (formats.decode(codes) * weight._scale_inv).to(weight.dtype)
    assert_same_bits(weight.dequantize(), read, f"{what}: numbers")
    assert_same_bits(weight + 0, read + 0, f"{what}: in an op")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_write_and_a_read(dtype: torch.dtype, transposed: bool) -> None:
    first, second = numbers(dtype), numbers(dtype, seed=1) * 4
    first[3, 4], first[5, 6] = float("nan"), float("inf")
    weight = weight_of(first, 3.3, transposed)
    assert (weight.dtype, weight.shape, type(weight.detach())) == (dtype, first.shape, Float8Tensor)
    check_written(weight, first, 3.3)
    history = state_of(weight).amax_history
    assert history[0].tolist() == [0.0, float("inf"), 0.0]
    history[0] = 0
    state_of(weight).scale[COLUMN] = 700.7
    check_written(weight, first, 3.3, "a new scale alone")
    weight.copy_(second)
    check_written(weight, second, 700.7)
    assert history[0, COLUMN] == second.abs().max().float()
    weight.copy_(second / 2)
    assert history[0, COLUMN] == second.abs().max().float(), "row 0 keeps the larger"


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_copied_is_cast_from_its_own_dtype(dtype: torch.dtype) -> None:
    weight = weight_of(numbers(dtype), 90.0, transposed=True)
    master = numbers(torch.float32, seed=2) * (1 + 2.0**-11)
    weight.copy_(master)
    check_written(weight, master, 90.0)
    weight.copy_(master.double())
    check_written(weight, master.to(dtype), 90.0, "float64 through the weight's dtype")
    weight.copy_(master.t().contiguous().t()[:1])
    check_written(weight, master[:1].expand(48, 32), 90.0, "broadcast")


def test_a_copy_of_another_one_casts_nothing() -> None:
    weight, other = weight_of(numbers(), 90.0, transposed=True), weight_of(numbers(seed=1), 7.0)
    history = state_of(weight).amax_history.clone()
    weight.copy_(other)
    check_written(weight, numbers(seed=1), 7.0)
    assert torch.equal(state_of(weight).amax_history, history)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.mul_(0.5),
        lambda w: w.sub_(torch.ones_like(w)),
        lambda w: torch.nn.init.constant_(w, 0.25),
        lambda w: torch.add(w, 1.0, out=w),
        lambda w: w[3].zero_(),
        lambda w: w.__setitem__((slice(2, 5), 7), 0.5),
        lambda w: w.view(-1)[40:80].mul_(2.0),
        lambda w: w.t().chunk(2)[1].copy_(torch.full((16, 48), 0.125)),
        lambda w: w.detach().add_(0.5),
        lambda w: w.data.clamp_(-0.01, 0.01),
        lambda w: setattr(w, "data", torch.full((48, 32), 0.75)),
        lambda w: torch._foreach_mul_([w], 3.0),
        lambda w: w.index_fill_(0, torch.tensor([1, 2]), 0.5),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_other_changes_read_change_and_write(change, transposed: bool) -> None:  # type: ignore[no-untyped-def]
    """Views included; the version tells autograd."""
    weight = weight_of(numbers(), 90.0, transposed)
    expected = weight.dequantize()
    versions = [x._version for x in (weight.codes, weight._scale_inv)]
    change(expected)
    change(weight)
    check_written(weight, expected, 90.0)
    assert all(x._version > v for x, v in zip((weight.codes, weight._scale_inv), versions, strict=True))


def test_an_alias_writes_to_transposed_codes_made_later() -> None:
    weight = weight_of(numbers(), 90.0)
    alias = weight.detach()
    weight.operand(transpose=True)
    alias.copy_(numbers(seed=1))
    check_written(weight, numbers(seed=1), 90.0)


def test_reading_gives_plain_tensors_and_gradients() -> None:
    weight = torch.nn.Parameter(weight_of(numbers(), 90.0))
    assert isinstance(weight, torch.nn.Parameter)
    assert isinstance(weight, Float8Tensor)
    x = numbers(seed=1, shape=(4, 32))
    plain = weight.detach().dequantize().requires_grad_()
    for w in (weight, plain):
        (torch.nn.functional.linear(x, w) * w[:, :1].t()).sum().backward()
    assert type(weight.grad) is torch.Tensor
    assert_same_bits(weight.grad, plain.grad)
    for result in (weight.float(), weight * 1, torch.cat([weight, weight]), torch.zeros_like(weight), weight.sum(0)):
        assert type(result) is torch.Tensor
    assert torch.equal(weight.float(), plain.float())
    assert "Float8Tensor" in repr(weight)
    assert "a part of another" in repr(weight[:2])
    assert "a view" in repr(weight.t())


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_change_a_weight_once_a_step(name: str) -> None:
    """A step is the plain one from the numbers that the weight reads as, and a write of its result."""
    weight = torch.nn.Parameter(weight_of(numbers(), 90.0, transposed=True))
    plain = torch.nn.Parameter(weight.detach().dequantize())
    optimizers = [OPTIMIZERS[name]([w]) for w in (weight, plain)]
    for step in range(4):
        for w, optimizer in zip((weight, plain), optimizers, strict=True):
            w.grad = numbers(seed=step + 2)
            optimizer.step()
        check_written(weight, plain.detach(), 90.0, f"step {step}")
        with torch.no_grad():
            plain.copy_(weight)


def test_every_in_place_op_of_a_step_is_a_write() -> None:
    weight = torch.nn.Parameter(weight_of(numbers(), 90.0))
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1)
    weight.grad = numbers(seed=1)
    other = weight.detach().clone()
    other.mul_(1 - 0.01 * 0.1)
    other = torch.nn.Parameter(other)
    other.grad = weight.grad
    optimizer.step()
    torch.optim.AdamW([other], lr=0.01, weight_decay=0.0).step()
    assert_same_bits(weight.codes, other.codes)


def test_copies_have_state_of_their_own() -> None:
    weight = torch.nn.Parameter(weight_of(numbers(), 90.0, transposed=True))
    weight.grad = numbers(seed=3)
    buffer = io.BytesIO()
    torch.save(weight, buffer)
    buffer.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(weight),
        "clone": weight.detach().clone(),
        "to": weight.detach().to("cpu", copy=True),
        "pickle": pickle.loads(pickle.dumps(weight)),
        "save": torch.load(buffer, weights_only=False),
    }
    for how, other in copies.items():
        assert type(other) is Float8Tensor, how
        assert isinstance(other, torch.nn.Parameter) == (how in ("deepcopy", "pickle", "save")), how
        assert other.requires_grad == isinstance(other, torch.nn.Parameter), how
        with torch.no_grad():
            state_of(other).scale[COLUMN] = 4.0
            other.copy_(numbers(seed=1))
        check_written(other.detach(), numbers(seed=1), 4.0, how)
        check_written(weight.detach(), numbers(), 90.0, f"after {how}")
        assert state_of(weight).scale[COLUMN] == 90.0, how
        assert state_of(weight).amax_history[0, COLUMN] == numbers().abs().max().float(), how
    assert_same_bits(copies["deepcopy"].grad, weight.grad)


def test_a_weight_keeps_its_shape() -> None:
    weight = weight_of(numbers())
    with pytest.raises(RuntimeError, match="expanded size"):
        weight.copy_(torch.ones(48, 16))
    with pytest.raises(RuntimeError):
        weight.unsqueeze_(0)


def test_shared_memory_holds_what_it_keeps() -> None:
    weight = weight_of(numbers(), 90.0, transposed=True)
    assert not weight.is_shared()
    weight.share_memory_()
    assert weight.is_shared()
    assert weight.codes.is_shared()
    assert weight._scale_inv.is_shared()
    check_written(weight, numbers(), 90.0)
    weight.copy_(numbers(seed=1))
    check_written(weight, numbers(seed=1), 90.0)


def test_a_layer_in_shared_memory_is_seen_by_another_process() -> None:
    with te.quantized_model_init():
        layer = te.Linear(32, 48, params_dtype=torch.bfloat16)
    layer.share_memory()
    assert all(t.is_shared() for t in (layer.weight, layer.bias, layer.fp8_meta["scaling_fwd"].scale))
    process = processes.started(halve, layer.weight.codes)
    process.join()
    assert process.exitcode == 0
    assert not layer.weight.codes.view(torch.uint8).any()


def halve(codes: torch.Tensor) -> None:
    codes.view(torch.uint8).zero_()


def test_no_memory_is_handed_out_that_is_not_there() -> None:
    """Its own storage is empty: what would read it raises, or reads the numbers."""
    weight = weight_of(numbers(), 90.0)
    assert torch.equal(torch.from_dlpack(weight.dequantize()), weight.dequantize())
    with pytest.raises(
        BufferError, match=r"Float8Tensor: it has no memory of its own; `dequantize\(\)` gives a tensor"
    ):
        torch.from_dlpack(weight)
    for held in (weight, weight.detach(), torch.nn.Parameter(weight), weight[0], copy.deepcopy(weight)):
        with pytest.raises(RuntimeError, match="Cannot access data pointer of Tensor"):  # torch's, not address 0
            torch.utils.dlpack.to_dlpack(held)
        assert held.data_ptr() == 0
    with pytest.raises(RuntimeError):
        weight.numpy()


def test_an_optimizer_that_compiles_its_step_is_refused() -> None:
    """As torchao's low-bit optimizers do: inside of torch.compile a weight has no scale to be written with."""
    weight = weight_of(numbers())
    inner = {name: getattr(weight, name) for name in weight.__tensor_flatten__()[0]}
    traced = Float8Tensor.__tensor_unflatten__(inner, weight.__tensor_flatten__()[1], None, None)
    with pytest.raises(RuntimeError, match=r"where it has no scale; an optimizer .* not torchao's AdamW8bit\.$"):
        traced.copy_(numbers(seed=1))
