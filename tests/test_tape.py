"""Tapes: launches made again have the bits of the functions that made them, and what cannot be replayed is run."""

import copy
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import assert_same_bits

import optimized
import reference as te
from optimized import launch, tape, watch
from reference.nn import autograd, blocks

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=3)


@pytest.fixture(autouse=True)
def no_kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tape._kinds.clear()
    for count in ("misses", "hits"):
        monkeypatch.setattr(tape._All, count, 0)
    yield
    tape._kinds.clear()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """On a CPU the only launches are copies of whole tensors; the bytes of those that tapes made again."""
    made: list[int] = []

    def again(self: Any, device: int) -> None:
        for one in self._entries:
            if not isinstance(one, launch.Copy):
                one.again(0)
                continue
            ctypes.memmove(*one._arguments)
            made.append(one._arguments[2])

    monkeypatch.setattr(launch.Launches, "again", again)
    # An allocator that gives the steps of a loop the same addresses, as the GPU's does.
    places: dict[Any, Any] = {}
    room, results = tape.Kind.room, tape.Kind.room_for_results

    def same_room(kind: tape.Kind, where: int, device: torch.device) -> Any:
        return places.setdefault((kind, where), room(kind, where, device))

    monkeypatch.setattr(tape.Kind, "room", same_room)
    monkeypatch.setattr(
        tape.Kind, "room_for_results", lambda kind, device: places.setdefault(kind, results(kind, device))
    )
    return made


def played(function: Callable[[torch.Tensor], tape.Saved], x: torch.Tensor, constants: Any = ()) -> Any:
    key = (function, constants, *tape._specifications((x,)))
    return tape.play(lambda: lambda: (function(x), (x,)), key, (x,), [])


def test_copies_are_made_again_at_the_same_addresses(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> tape.Saved:
        inside = x.clone()
        return inside.t().t().clone(), None

    x = torch.arange(6.0).view(2, 3)
    for step in range(20):
        x.add_(step)
        (result, nothing), saved, kind = played(function, x)
        assert_same_bits(result, x)
        assert nothing is None
        assert (kind is None) == (step == 0)
        if kind is not None:
            assert kind.found(saved)[0] is x
    (only,) = tape._kinds.values()
    assert copied == [x.nbytes] * only.hits * 2
    assert (only.hits, only.misses) == (18, 1)
    # What is recorded all the time is left alone at last; what is known is still made again.
    monkeypatch.setattr(tape._All, "misses", tape._All.hits + tape.MOST_MISSES + 2)
    assert played(function, x)[2] is not None
    assert played(function, x.clone())[2] is None
    assert played(function, x[:1])[2] is None
    assert len(tape._kinds) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1,),  # a kernel of torch's
        lambda x: (x,),  # a result that is an input
        lambda x: (torch.empty(tape.LARGEST + 1, dtype=torch.uint8, device=x.device)[:1].clone(),),
        lambda x: (x.t().clone(),),  # a copy that is not of a whole tensor
        lambda x: (torch.zeros_like(x),),
    ],
)
def test_what_cannot_be_replayed_runs_each_time(function: Callable[[torch.Tensor], tape.Saved]) -> None:
    x = torch.arange(6.0).view(2, 3)
    for _ in range(3):
        x.mul_(2)
        (result,), (kept,), kind = played(function, x)
        assert kind is None
        assert kept is x
        assert_same_bits(result, *function(x))


def test_an_op_of_torchs_is_called_again(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are copied to where later launches read them, and may be saved."""
    monkeypatch.setattr(watch, "FOREIGN", {torch.ops.aten.frexp.Tensor: (0, 1)})

    def function(x: torch.Tensor) -> tuple[tape.Saved, tape.Saved]:
        mantissa, exponent = torch.ops.aten.frexp.Tensor(x.clone().view(32, 128).t())
        return (mantissa.t().clone(),), (exponent,)

    x = torch.rand(64, 64)
    for step in range(6):
        x.mul_(1.5)
        (mantissa,), saved, kind = tape.play(lambda: lambda: function(x), "frexp", (x,), [])
        exponent = (saved if kind is None else kind.found(saved))[0]
        expected = torch.frexp(x.view(32, 128))
        assert_same_bits(mantissa, expected[0])
        assert_same_bits(exponent, expected[1].t())
        assert (kind is None) == (step == 0)
    (only,) = tape._kinds.values()
    assert (only.hits, only.misses) == (4, 1)
    monkeypatch.setattr(watch, "MOST_MOVED", x.nbytes - 1)
    for _ in range(3):
        assert tape.play(lambda: lambda: function(x), "large", (x,), [])[2] is None


def test_an_op_of_torchs_writes_where_it_wrote(copied: list[int]) -> None:
    def function(x: torch.Tensor) -> tuple[tape.Saved, tape.Saved]:
        wide = torch.cat([x.t(), x.clone()], dim=1)
        return (wide.clone(),), (wide,)

    x = torch.rand(32, 32)
    for step in range(6):
        x.mul_(1.5)
        (result,), saved, kind = tape.play(lambda: lambda: function(x), "cat", (x,), [])
        wide = (saved if kind is None else kind.found(saved))[0]
        for found in (result, wide):
            assert_same_bits(found, torch.cat([x.t(), x], dim=1))
        assert (kind is None) == (step == 0)
    (only,) = tape._kinds.values()
    assert (only.hits, only.misses) == (4, 1)


def test_what_is_saved_may_be_empty(copied: list[int]) -> None:
    def function(x: torch.Tensor) -> tuple[tape.Saved, tape.Saved]:
        inside, empty = x.clone(), torch.empty(0)  # as RMSNorm's mean
        return (inside.clone(),), (inside, empty)

    x = torch.arange(6.0)
    for _ in range(3):
        _, saved, kind = tape.play(lambda: lambda: function(x), "empty", (x,), [])
    assert kind is not None
    inside, empty = kind.found(saved)
    assert_same_bits(inside, x)
    assert empty is not None
    assert empty.shape == (0,)


def test_what_is_not_saved_lies_elsewhere_and_shares_room(copied: list[int]) -> None:
    def function(x: torch.Tensor) -> tuple[tape.Saved, tape.Saved]:
        wide = x.new_empty(2, 1024)
        del wide
        temporary = x.clone()  # where `wide` was, and the next of them behind it
        kept = temporary.clone()
        for _ in range(8):
            temporary = temporary.clone()
        return (temporary.clone(),), (kept,)

    x = torch.arange(1024.0)
    for step in range(4):
        x.add_(step)
        (result,), saved, kind = tape.play(lambda: lambda: function(x), "temporaries", (x,), [])
        assert_same_bits(result, x)
    assert kind is not None
    (arena,) = saved
    assert arena is not None
    assert arena.untyped_storage().nbytes() == 4096
    assert_same_bits(kind.found(saved)[0], x)
    assert kind.sizes[tape.SCRATCH] == 2 * 4096
    assert set(copied) == {4096}


def test_what_is_kept_is_bounded(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST_TAPES", 2)
    monkeypatch.setattr(tape, "MOST_KINDS", 2)
    xs = [torch.full((4,), float(i)) for i in range(5)]
    counts = []
    for x in (xs[0], *xs):
        (result,), _, _ = played(cloned, x)
        assert_same_bits(result, x)
        (only,) = tape._kinds.values()
        counts.append(len(only.tapes))
    assert counts == [0, 1, 2, 1, 2, 1]
    counts = [played(cloned, xs[0], constants) and len(tape._kinds) for constants in (1, 2, 3, 4)]
    assert counts == [2, 1, 2, 1]


def test_what_cudnns_attention_draws_is_read_later() -> None:
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    for p, later in ((0.0, (0, 1)), (0.1, (0, 1, 6, 7)), (1.0, (0, 1, 6, 7))):
        args = [None] * 5 + [p]
        assert watch._read_later(forward, args) == later
        assert watch.Foreign(forward, args, {}, {}).capturable == (p == 0)
        assert watch._read_later(backward, args) == (0, 1, 2)
        assert watch.Foreign(backward, args, {}, {}).capturable
    assert watch.Into(torch.ops.aten.cat.out, [], watch.Lying.of(torch.empty(3))).capturable


def test_a_place_is_a_tensor_in_the_storage_of_another() -> None:
    whole = torch.arange(48, dtype=torch.float32).view(6, 8)
    sources = [None, torch.empty(3), whole[1:]]
    for x, offset in ((whole[1:], 0), (whole[2:4, 1::3], 36), (whole[1:].t(), 0), (whole[0], -32), (whole[3:3], 64)):
        place = watch.place_of(x, sources)
        assert place == (2, offset, x.shape, x.stride(), x.dtype)
        found = place.of(sources)
        assert (found is sources[2]) == (x.shape == (5, 8))
        assert_same_bits(found, x)
        assert found.data_ptr() == x.data_ptr()
        assert found.stride() == x.stride()
    words = watch.Place(2, 4, torch.Size([3]), (2,), torch.int16).of(sources)
    assert_same_bits(words, whole.view(torch.int16).flatten()[18:24:2])
    elsewhere = torch.ones(2, 3).t()
    assert watch.place_of(elsewhere, sources) == (-1, 0, elsewhere.shape, elsewhere.stride(), elsewhere.dtype)


def test_a_tensor_by_its_address() -> None:
    x = torch.arange(48).view(6, 8)[1:5:2, 1::3]
    lying, same, number = watch.Lying.of([x, [x, None], 3])
    assert lying == (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device)
    assert (same, number) == ([lying, None], 3)
    made, (again, nothing), three = watch._tensors([lying, same, number])
    assert (nothing, three) == (None, 3)
    for found in (made, again):
        assert_same_bits(found, x)
        assert found.data_ptr() == x.data_ptr()
        assert found.untyped_storage().nbytes() == (16 + 2 * 3 + 1) * 8  # no more than from its first to its last


def test_how_much_is_too_much(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind has an arena of 512 bytes and a scratch of 1024."""

    def function(x: torch.Tensor) -> tuple[tape.Saved, tape.Saved]:
        kept, first = x.clone(), x.clone()
        second = first.clone()
        return (second.clone(),), (kept,)

    x = torch.arange(3.0)
    for limit, usable in ((1535, False), (1536, True)):
        monkeypatch.setattr(tape, "LARGEST", limit)
        tape.play(lambda: lambda: function(x), limit, (x,), [])
        assert tape._kinds[limit].sizes == [512, 1024]
        assert tape._kinds[limit].usable == usable
    # As many misses more than hits as are accepted.
    monkeypatch.setattr(tape, "MOST_MISSES", 3)
    monkeypatch.setattr(tape._All, "misses", 3)
    assert tape.play(lambda: lambda: function(x), 1536, (x,), [])[2] is not None
    assert tape._All.misses == 4
    assert tape.play(lambda: lambda: function(x), "another", (x,), [])[2] is None
    assert "another" not in tape._kinds
    tape._All.hits = 1
    tape.play(lambda: lambda: function(x), "another", (x,), [])
    assert "another" in tape._kinds


def test_results_share_one_allocation(copied: list[int]) -> None:
    """All but the first, each from a multiple of 512 bytes on, if they are of one dtype."""

    def function(x: torch.Tensor, second: torch.dtype) -> tuple[tape.Saved, tape.Saved]:
        others = (x.new_empty(3, 5), None, x.new_empty(128), torch.empty(7, dtype=second))
        return (x.clone(), *others), (x,)

    x = torch.arange(6.0).view(2, 3)
    for dtype, pooled in ((torch.float32, [15, 113, 128, 7, 121]), (torch.float64, [])):
        key = ("shared", dtype)
        for _ in range(3):
            results, _, kind = tape.play(lambda dtype=dtype: lambda: function(x, dtype), key, (x,), [])
        assert kind is not None
        assert kind.pooled == pooled
        assert [None if one is None else (*one.shape, one.dtype) for one in results] == [
            *((2, 3, torch.float32), (3, 5, torch.float32), None, (128, torch.float32), (7, dtype))
        ]
        first = results[1].data_ptr()
        offsets = [one.data_ptr() - first for one in results[1:] if one is not None]
        assert (offsets == [0, 512, 1024]) == bool(pooled)
        assert results[0].untyped_storage().nbytes() == 24


def cloned(x: torch.Tensor) -> tape.Saved:
    return (x.clone(),)


def test_a_saved_tensor_that_lies_elsewhere_is_not_replayed(copied: list[int]) -> None:
    elsewhere = torch.ones(3)

    def function(x: torch.Tensor) -> tuple[tape.Saved, tape.Saved]:
        return (x.clone(),), (elsewhere, None)

    x = torch.arange(4.0)
    for step in range(4):
        (result,), saved, kind = tape.play(lambda: lambda: function(x), "elsewhere", (x,), [])
        assert_same_bits(result, x)
        assert kind is None
        assert saved[0] is elsewhere
        assert tape._kinds["elsewhere"].usable == (step == 0)


def test_inputs_that_share_memory_at_times_are_not_replayed(copied: list[int]) -> None:
    def call(x: torch.Tensor, y: torch.Tensor) -> Any:
        return tape.play(lambda: lambda: ((y.clone(),), (x, y)), "shared", (x, y), [])

    both = torch.arange(8.0)
    x, y = torch.arange(4.0), torch.arange(4.0, 8.0)
    assert call(x, y)[2] is None
    _, saved, kind = call(x, y)
    assert kind.found(saved) == (x, y)
    (result,), saved, kind = call(both[:4], both[4:])  # y would be sought in x's storage from now on
    assert kind is None
    assert_same_bits(result, both[4:])
    assert_same_bits(saved[1], both[4:])
    assert not tape._kinds["shared"].usable


def test_other_shapes_and_constants_are_other_kinds(copied: list[int]) -> None:
    function = lambda x: (x.clone(),)  # noqa: E731
    for x, constants in ((torch.ones(2), 1), (torch.ones(2), 2), (torch.ones(3), 1), (torch.ones(2).double(), 1)):
        assert played(function, x, constants)[2] is None
    assert len(tape._kinds) == 4


def test_what_is_replayed() -> None:
    """Not where a weight is cast for later microbatches, nor where its gradient is added elsewhere."""
    layer = te.LayerNormMLP(32, 64, params_dtype=BF16)
    x = torch.ones(4, 32, dtype=BF16)

    def context(first: bool | None = None) -> Any:
        return layer.context(BF16, first)

    plain = context()
    assert plain.replayable
    with te.autocast(recipe=RECIPE):
        assert context().replayable
        assert context().kind != plain.kind
        assert not context(True).replayable
        assert not context(False).replayable
        layer(x, is_first_microbatch=True)
        assert context(False).replayable
        assert context(False).kind != context().kind
        cached = layer._fp8_workspaces["fc1_weight"].codes
        assert any(t is cached for t in context(False).state(backward=False)[0])
        assert all(t is not cached for t in context(False).state(backward=True)[0])
    with te.autocast(enabled=False, calibrating=True):
        assert context().kind != plain.kind
        (history,) = context().state(backward=False)[1]
        assert history is layer.fp8_meta["scaling_fwd"].amax_history
    layer.fuse_wgrad_accumulation = True
    assert not context().replayable


def train(
    layer: torch.nn.Module, player: autograd.Plain, fp8: bool, monkeypatch: pytest.MonkeyPatch, micro: bool = False
) -> list[Any]:
    """Steps, some with two forwards before a backward, without gradients, or on another input; at the end ten alike.

    Or each of three microbatches, whose weights are cast in the first of all.
    """
    monkeypatch.setattr(autograd, "player", player)
    numbers = torch.Generator("cuda").manual_seed(3)
    torch.manual_seed(4)  # of cuDNN's dropout
    x = torch.empty(25, 2, 64, dtype=BF16, device="cuda").requires_grad_()
    seen: list[Any] = []
    for step in range(20):
        layer.zero_grad(set_to_none=True)
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=numbers, device="cuda") * 2.0 ** (step % 4))
        with te.autocast(enabled=fp8, recipe=RECIPE):
            firsts = (step == 0, False, False) if micro else (None, None) if step in (3, 7) else (None,)
            outs = [layer(x, is_first_microbatch=first) for first in firsts]
            if step in (4, 8):
                with torch.no_grad():
                    seen.append(layer(x))
                    seen.append(layer(x[:16]))
        torch.autograd.backward(outs, [torch.full_like(out, 2.0**-step) for out in outs])
        seen += [*outs, x.grad, *(p.grad for p in layer.parameters())]
        for module in layer.modules():
            for meta in (getattr(module, "fp8_meta", {}).get(key) for key in ("scaling_fwd", "scaling_bwd")):
                seen += [] if meta is None else [meta.scale, meta.amax_history]
        seen = [one.cpu().clone() for one in seen]  # what stays on the GPU keeps its address from the next step
        del outs
        x.grad = None
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(p - p.grad * 0.125)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("small", [0, blocks.SMALL], ids=["two nodes", "one node"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("mode", ["bf16", "fp8", "fp8 weights", "microbatches", "cudnn"])
def test_a_layer_has_the_same_bits_with_tapes(
    mode: str, dropout: float, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8, weights, micro = mode != "bf16", mode == "fp8 weights", mode == "microbatches"
    monkeypatch.setattr(blocks, "SMALL", small)
    torch.manual_seed(1)
    with te.quantized_model_init(enabled=weights, recipe=RECIPE):
        layer = optimized.TransformerLayer(
            *(64, 128, 4),
            hidden_dropout=dropout,
            attention_dropout=dropout,
            fuse_qkv_params=True,
            params_dtype=BF16,
            attention_backend="cudnn" if mode == "cudnn" else "exact",
        )
    other = copy.deepcopy(layer)
    expected = train(layer, autograd.Plain(), fp8, monkeypatch, micro)
    assert not tape._kinds
    actual = train(other, tape.Player(), fp8, monkeypatch, micro)
    for position, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert_same_bits(a, b, f"tensor {position} of {len(expected)}")
    assert sum(kind.hits for kind in tape._kinds.values()) >= 8
    assert all(kind.usable for kind in tape._kinds.values())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["exact", "cudnn"])
def test_tapes_within_a_capture_of_the_users(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launches become part of it, and memory that a tape's own graph uses does not."""
    torch.manual_seed(1)
    layer = optimized.TransformerLayer(
        *(64, 128, 4), hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, attention_backend=backend
    )
    other = copy.deepcopy(layer)
    x = torch.randn(25, 2, 64, dtype=BF16, device="cuda").requires_grad_()

    def step(layer: torch.nn.Module) -> list[torch.Tensor]:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with te.autocast(recipe=RECIPE):
            out = layer(x)
        out.backward(torch.ones_like(out))
        return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]

    for _ in range(5):
        step(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            results = step(layer)
    graph.replay()
    actual = [one.cpu() for one in results]
    monkeypatch.setattr(autograd, "player", autograd.Plain())
    for _ in range(8):
        expected = step(other)
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b.cpu())
    assert sum(kind.hits for kind in tape._kinds.values()) >= 2


@pytest.mark.gpu
def test_a_parameter_changed_between_forward_and_backward_is_noticed() -> None:
    layer = optimized.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16)
    for _ in range(4):
        x = torch.ones(8, 2, 64, dtype=BF16, device="cuda").requires_grad_()
        y = layer(x)
        with torch.no_grad():
            layer.layernorm_mlp.layer_norm_weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
