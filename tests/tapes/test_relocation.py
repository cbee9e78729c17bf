"""Tapes that move with their tensors: each byte of the arguments is that of a recording at the other addresses."""

import copy
import ctypes
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from shared.dry_gpu import DryGpu

import optimized
import reference as te
from optimized.cuda import launch
from optimized.tapes import TapeRunner, call_groups
from optimized.tapes.relocation import NotRelocatable, RelocatableTape, _integers
from optimized.tapes.tape import Copy, Tape
from reference.nn.core import autograd
from reference.nn.transformer import halves
from reference.state import gradient_places

BF16 = torch.bfloat16
TransformerLayer = optimized.TransformerLayer


def transformer(hidden: int = 64, **options: Any) -> Callable[[], torch.nn.Module]:
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": BF16, **options}
    return lambda: TransformerLayer(hidden, 4 * hidden, hidden // 16, **given)


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: optimized.Linear(64, 48, params_dtype=BF16),
    "LayerNormLinear": lambda: optimized.LayerNormLinear(64, 48, params_dtype=BF16, normalization="RMSNorm"),
    "LayerNormMLP": lambda: optimized.LayerNormMLP(64, 128, params_dtype=BF16, activation="swiglu"),
    "layer": transformer(),
    "joined weights": transformer(fuse_qkv_params=True),
    "dropout": transformer(hidden_dropout=0.1, attention_dropout=0.1),
    "grouped queries": transformer(num_gqa_groups=2, fuse_qkv_params=True),
    "post-norm": transformer(apply_residual_connection_post_layernorm=True, output_layernorm=True),
    "normed queries": transformer(qk_norm_type="L2Normalization"),
    "sinks": transformer(softmax_type="learnable"),
    "decoder": transformer(layer_type="decoder"),
    "cudnn": transformer(attention_backend="cudnn"),
    "fused products": transformer(256),
    "fused products and dropout": transformer(256, hidden_dropout=0.1, fuse_qkv_params=True),
}
GIVEN: dict[str, Any] = {
    "plain": lambda x: {},
    "angles": lambda x: {"rotary_pos_emb": torch.ones(x.shape[0], 1, 1, 16, device="cuda")},
    "window": lambda x: {"window_size": (8, 0)},
    "mask": lambda x: {
        "self_attn_mask_type": "padding",
        "attention_mask": torch.zeros(2, 1, 1, x.shape[0], dtype=torch.bool, device="cuda"),
    },
}
MODES: dict[str, Any] = {
    "bf16": None,
    "delayed": te.DelayedScaling(amax_history_len=4),
    "attention in fp8": te.DelayedScaling(amax_history_len=4, fp8_dpa=True),
}


def arguments(tape: Tape, like: Tape, kernel_of: Callable[[int], Any]) -> list[Any]:
    """What a tape's launches hand to the driver, in bytes, and its other entries; `like` was recorded."""
    found: list[Any] = []
    for entry, recorded in zip(tape.entries, like.entries, strict=True):
        if not isinstance(entry, launch.Launch):
            found.append(entry._arguments if isinstance(entry, Copy) else entry)
            continue
        pointers = (ctypes.c_uint64 * len(recorded.args)).from_address(entry._pointers)
        sizes = [x.storage.nbytes if isinstance(x, launch.ByValue) else 8 for x in recorded.args]
        values = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        handle, *grid = entry._head
        found.append((kernel_of(handle), grid, entry._early, values))
    return found


class Compared:
    """Records every call at new addresses although its tape could be moved, and compares the two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.equal = self.fixed = 0
        self.kernel_of: Callable[[int], Any] = lambda handle: handle
        self.moved: Tape | None = None
        usual, record = call_groups.CallGroup.moved, call_groups.CallGroup.record

        def moved(group: call_groups.CallGroup, addresses: Any, tensors: Any) -> None:
            self.moved = usual(group, addresses, tensors)
            self.fixed += group.relocatable is None and len(group.tapes) > 0

        def recorded(
            group: call_groups.CallGroup, run: Any, results: Any, sources: Any, tensors: Any, addresses: Any
        ) -> Any:
            found = record(group, run, results, sources, tensors, addresses)
            if self.moved is not None:
                tape = group.tapes[addresses]
                assert arguments(self.moved, tape, self.kernel_of) == arguments(tape, tape, self.kernel_of)
                self.equal += 1
            return found

        monkeypatch.setattr(call_groups.CallGroup, "moved", moved)
        monkeypatch.setattr(call_groups.CallGroup, "record", recorded)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compared:
    monkeypatch.setattr(call_groups, "_groups", {})
    monkeypatch.setattr(call_groups, "counts", call_groups.Counts())
    return Compared(monkeypatch)


def train(layer: Any, recipe: Any, given: Any = GIVEN["plain"], steps: int = 4, first: Any = None) -> list[Any]:
    """Results and gradients. Each step has tensors in memory of its own, as far as the layer does not keep them."""
    kept: list[Any] = []
    seen: list[Any] = []
    hidden = next(p.shape[-1] for p in layer.parameters() if p.dim() == 2)
    more = {"encoder_output": torch.ones(48, 2, hidden, dtype=BF16, device="cuda")}
    more = more if getattr(layer, "layer_type", None) == "decoder" else {}
    for step in range(steps):
        x = torch.randn(256 if hidden > 64 else 48, 2, hidden, dtype=BF16, device="cuda").requires_grad_()
        its = more | given(x) | ({} if first is None else {"is_first_microbatch": step == 0})
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x, **its)
        grad = torch.ones_like(y)
        y.backward(grad)
        kept += [x, its, grad]
        seen += [y, x.grad, *(p.grad for p in layer.parameters())]
        layer.zero_grad(set_to_none=True)
    return seen


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("small", [0, halves.SMALL], ids=["two pairs", "one pair"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_moved_tape_is_the_one_that_would_be_recorded(
    name: str, small: int, mode: str, compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "SMALL", small)
    recipe = MODES["delayed" if name in ("sinks", "cudnn") and mode != "bf16" else mode]
    with DryGpu() as gpu:
        gpu.tapes()
        compared.kernel_of = lambda handle: gpu.launches[handle].kernel
        train(LAYERS[name](), recipe, steps=6)  # some begin at addresses that the allocator had before
    assert compared.equal >= 3
    assert compared.fixed == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("weights", ["plain", "in fp8", "cast in the first microbatch"])
def test_what_else_a_moved_tape_reads(given: str, weights: str, compared: Compared) -> None:
    """Angles and masks lie elsewhere in each step, weights and their casts do not."""
    with DryGpu() as gpu:
        gpu.tapes()
        compared.kernel_of = lambda handle: gpu.launches[handle].kernel
        with te.quantized_model_init(enabled=weights == "in fp8"):
            layer = LAYERS["layer"]()
        train(layer, MODES["delayed"], GIVEN[given], 6, True if "microbatch" in weights else None)
    assert compared.equal >= 3
    assert compared.fixed == 0


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
@pytest.mark.parametrize("small", [0, halves.SMALL], ids=["two pairs", "one pair"])
def test_a_tape_moves_with_the_places_of_gradients(
    small: int, recipe: str, compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each step elsewhere in one bucket, and at other distances from each other."""
    monkeypatch.setattr(halves, "SMALL", small)
    with DryGpu() as gpu:
        gpu.tapes()
        compared.kernel_of = lambda handle: gpu.launches[handle].kernel
        layer = LAYERS["joined weights"]()
        weights = [p for p in layer.parameters() if p.dim() > 1]
        kept = []
        for step in range(6):
            flat = torch.empty(sum(p.numel() for p in weights) + 4096, dtype=BF16, device="cuda")
            places, first = {}, 256 * step
            for p in weights[step % 2 :] + weights[: step % 2]:
                places[p] = flat[first : first + p.numel()].view(p.shape)
                first += p.numel()
            x = torch.randn(48, 2, 64, dtype=BF16, device="cuda").requires_grad_()
            with te.autocast(enabled=recipe != "bf16", recipe=MODES[recipe]), gradient_places.offering(places):
                y = layer(x)
                y.backward(y)
            assert not gradient_places.offered
            there = [gpu.address(p.grad) == gpu.address(place) for p, place in places.items()]
            assert there == [step != 1] * 4  # the first backward runs, the second is measured, the others are played
            kept += [flat, x, y]
            layer.zero_grad(set_to_none=True)
    assert compared.equal >= 3
    assert compared.fixed == 0


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_a_call_that_is_not_played_writes_to_its_places(
    recipe: str, compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_groups, "LARGEST", 0)
    with DryGpu() as gpu:
        gpu.tapes()
        layer = LAYERS["joined weights"]()
        for _ in range(3):
            places = {p: torch.empty_like(p).detach() for p in layer.parameters() if p.dim() > 1}
            x = torch.randn(48, 2, 64, dtype=BF16, device="cuda").requires_grad_()
            with te.autocast(enabled=recipe != "bf16", recipe=MODES[recipe]), gradient_places.offering(places):
                y = layer(x)
                y.backward(y)
            there = [gpu.address(p.grad) == gpu.address(place) for p, place in places.items()]
            assert there == [True] * 4
            layer.zero_grad(set_to_none=True)
    assert compared.equal == 0


def test_tapes_settle_in_three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the fourth step on nothing is recorded, although every step's tensors lie elsewhere."""
    ran: list[int] = []
    with DryGpu() as gpu:
        gpu.tapes()
        layer = LAYERS["layer"]()

        class Step:
            """What a step of `train` gives the layer, and how many launches Python made before it."""

            def __call__(self, x: torch.Tensor) -> dict[str, Any]:
                ran.append(len(gpu.launches))
                return {}

        train(layer, MODES["delayed"], Step(), steps=7)
        ran.append(len(gpu.launches))
        groups = [group for group in call_groups._groups.values() if group.relocatable]
    made = [after - before for before, after in pairwise(ran)]
    assert all(made[:3])
    assert made[3:] == [0] * 4
    assert [(group.misses, group.hits) for group in groups] == [(1, 5), (1, 4)]  # forward, backward
    assert [len(group.tapes) for group in groups] == [6, 5]


def storage(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor that starts at a multiple of 64 bytes."""
    whole = torch.zeros(int(np.prod(shape)) * dtype.itemsize + 64, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 64 :][: int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)


def copies(*pairs: tuple[int, int]) -> Tape:
    tape = Tape()
    for to, source in pairs:
        tape.append(Copy(to, source, 8))
    return tape


def test_where_addresses_are_sought() -> None:
    """In the tensors; what lies elsewhere stays, unless it is in a tensor's storage."""
    big = storage(256)
    x, y = big[:64].view(8, 8).t()[1:3], storage(32)
    outside = torch.zeros(8)
    inside = (x.data_ptr() + 56 + 1, y.data_ptr() + 31, outside.data_ptr())
    tape = copies((inside[0], inside[1]), (inside[2], 77))
    found = RelocatableTape(tape, [x, y])
    other, more = storage(256), storage(32)
    x2 = other[:64].view(8, 8).t()[1:3]
    moved = found.at([x2.data_ptr(), more.data_ptr()], [x2, more])
    assert moved is not None
    assert [one._arguments for one in moved.entries] == [
        (x2.data_ptr() + 57, more.data_ptr() + 31, 8),
        (outside.data_ptr(), 77, 8),
    ]
    for beyond in (x.data_ptr() + 58, big.data_ptr() + 255):
        with pytest.raises(NotRelocatable):
            RelocatableTape(copies((beyond, 0)), [x, y]).at([x.data_ptr(), y.data_ptr()], [x, y])


def test_calls_that_are_not_alike_but_for_addresses() -> None:
    """Other remainders of 16, tensors that are one or are no longer one, or no longer at one distance in a storage."""
    big = storage(4096)
    x, y, z = storage(64), big[:64], big[128:192]
    found = RelocatableTape(copies((x.data_ptr(), y.data_ptr())), [x, y, z, x])

    def serves(*tensors: torch.Tensor) -> bool:
        return found.at([one.data_ptr() for one in tensors], list(tensors)) is not None

    room, other = storage(128), storage(4096)
    assert serves(room[16:80], other[512:576], other[640:704], room[16:80])
    assert not serves(room[1:65], big[:64], big[128:192], room[1:65])
    assert not serves(room[8:72], big[:64], big[128:192], room[8:72])
    assert not serves(room[16:80], other[512:576], other[640:704], room[32:96])
    assert not serves(other[512:576], other[512:576], other[640:704], other[512:576])
    assert not serves(room[16:80], other[512:576], other[656:720], room[16:80])
    assert not serves(room[16:80], other[512:576], big[640:704], room[16:80])


def recorded(*arguments: Any) -> Tape:
    tape = Tape()
    tape.append(launch.Launch(launch.function("relative", "f"), (1, *(1,) * 6, 0), arguments, early=False))
    return tape


def test_where_in_arguments_addresses_are() -> None:
    """Python's ints and fields of 64 bits. The bits of other numbers may look like one."""
    x = storage(64)
    high = x.data_ptr()
    row = np.dtype([("at", "u8"), ("words", "u4", 2), ("pair", [("n", "i8", 2), ("f", "f8")]), ("bytes", "u1", 8)])
    table = np.zeros(2, row)
    table["at"], table["pair"]["n"] = high + 1, high + 2
    for name in ("words", "bytes"):
        table[name] = np.array([[high], [high]], np.uint64).view(row[name].base)
    table["pair"]["f"] = np.array([high], np.uint64).view(np.float64)[0]
    given = (np.int32(7), high, np.uint64(high), launch.by_value(table), np.float32(1.5), -1, 3)
    tape, other = recorded(*given), storage(128)[64:]
    moved = RelocatableTape(tape, [x]).at([other.data_ptr()], [other])
    assert moved is not None
    expected = table.copy()
    expected["at"], expected["pair"]["n"] = other.data_ptr() + 1, other.data_ptr() + 2
    wanted = (given[0], other.data_ptr(), given[2], launch.by_value(expected), *given[4:])
    assert arguments(moved, tape, int) == arguments(recorded(*wanted), tape, int)
    assert _integers(row) == (0, 16, 24)


def test_a_struct_whose_addresses_nobody_names_is_fixed() -> None:
    x = storage(64)
    packed = np.dtype([("n", "i4"), ("at", "u8")])  # at 4 bytes
    for struct in (np.zeros(128, np.uint8), np.zeros((), packed), np.zeros((4, 4), np.int64)[:, 0]):
        with pytest.raises(NotRelocatable):
            RelocatableTape(recorded(launch.by_value(struct)), [x]).at([x.data_ptr()], [x])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("small", [0, halves.SMALL], ids=["two pairs", "one pair"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_moved_tape_is_the_one_that_would_be_recorded_on_a_gpu(
    name: str, small: int, mode: str, compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's tensor maps among them: one with a replaced address is the one that is encoded."""
    monkeypatch.setattr(halves, "SMALL", small)
    recipe = MODES["delayed" if name in ("sinks", "cudnn") and mode != "bf16" else mode]
    train(LAYERS[name](), recipe)
    assert compared.equal >= 2  # forward and backward
    assert compared.fixed == 0


SIMULATED = ("Linear", "layer")
ALL = [pytest.param(name, marks=[pytest.mark.simulated] if name in SIMULATED else []) for name in LAYERS]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_a_layer_whose_tensors_always_lie_elsewhere_has_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch, same_bits: Any
) -> None:
    """Every step is made at new addresses, from moved tapes."""
    monkeypatch.setattr(call_groups, "_groups", {})
    monkeypatch.setattr(call_groups, "counts", call_groups.Counts())
    monkeypatch.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)  # the simulator is a mode
    torch.manual_seed(1)
    plain = LAYERS[name]()
    taped = copy.deepcopy(plain)
    results: list[list[torch.Tensor]] = []
    for layer, runner in ((plain, autograd.Runner()), (taped, TapeRunner())):
        monkeypatch.setattr(autograd, "runner", runner)
        torch.manual_seed(2)
        results.append(train(layer, MODES["delayed"], steps=8))
    assert sum(group.hits for group in call_groups._groups.values() if group.relocatable) >= 6
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            same_bits(a, b)
