"""Tapes: launches made again have the bits of the functions that made them, and what cannot be played is run."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

import reference as te
from optimized.tapes import call_groups, tape_recorder
from optimized.tapes.memory import SCRATCH, Results
from optimized.tapes.tape import Copy, Tape
from reference.support.nested import Tensors

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=3)


@pytest.fixture(autouse=True)
def no_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    call_groups._groups.clear()
    for count in ("misses", "hits"):
        monkeypatch.setattr(call_groups.counts, count, 0)
    yield
    call_groups._groups.clear()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """On a CPU the only launches are copies of whole tensors; the bytes of those that tapes made again."""
    made: list[int] = []

    def play(self: Any, device: int) -> None:
        for one in self._entries:
            if not isinstance(one, Copy):
                one.play(0)
                continue
            ctypes.memmove(*one._arguments)
            made.append(one._arguments[2])

    monkeypatch.setattr(Tape, "play", play)
    # An allocator that gives the steps of a loop the same addresses, as the GPU's does.
    places: dict[Any, Any] = {}
    room, results = call_groups.CallGroup.allocate, Results.allocate

    def same_room(group: call_groups.CallGroup, where: int, device: torch.device) -> Any:
        return places.setdefault((group, where), room(group, where, device))

    monkeypatch.setattr(call_groups.CallGroup, "allocate", same_room)
    monkeypatch.setattr(Results, "allocate", lambda group, *args: places.setdefault(group, results(group, *args)))
    return made


def played(function: Callable[[torch.Tensor], Tensors], x: torch.Tensor, constants: Any = ()) -> Any:
    key = (function, constants, *call_groups.specification((x,)))
    return call_groups.run_or_play(lambda: lambda: (function(x), (x,)), key, (x,), [])


def test_copies_are_made_again_at_the_same_addresses(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> Tensors:
        inside = x.clone()
        return inside.t().t().clone(), None

    x = torch.arange(6.0).view(2, 3)
    for step in range(20):
        x.add_(step)
        (result, nothing), saved, group = played(function, x)
        assert_same_bits(result, x)
        assert nothing is None
        assert (group is None) == (step == 0)
        if group is not None:
            assert group.found(saved)[0] is x
    (only,) = call_groups._groups.values()
    assert copied == [x.nbytes] * only.hits * 2
    assert (only.hits, only.misses) == (18, 1)
    # What is recorded all the time is left alone at last; what is known is still made again.
    monkeypatch.setattr(call_groups.counts, "misses", call_groups.counts.hits + call_groups.MOST_MISSES + 3)
    assert played(function, x)[2] is not None
    other = x.clone() + 1
    (result, _), saved, group = played(function, other)
    assert_same_bits(result, other)
    assert group is not None
    assert group.found(saved)[0] is other
    assert played(function, x[:1])[2] is None
    assert len(call_groups._groups) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1,),  # a kernel of torch's
        lambda x: (x,),  # a result that is an input
        lambda x: (torch.empty(call_groups.LARGEST + 1, dtype=torch.uint8, device=x.device)[:1].clone(),),
        lambda x: (torch.zeros_like(x),),
    ],
)
def test_what_cannot_be_played_runs_each_time(function: Callable[[torch.Tensor], Tensors]) -> None:
    x = torch.arange(6.0).view(2, 3)
    for _ in range(3):
        x.mul_(2)
        (result,), (kept,), group = played(function, x)
        assert group is None
        assert kept is x
        assert_same_bits(result, *function(x))


def test_an_op_of_torchs_is_called_again(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are copied to where later launches read them, and may be saved."""
    monkeypatch.setattr(tape_recorder, "TORCH_OPS", {torch.ops.aten.frexp.Tensor: (0, 1)})

    def function(x: torch.Tensor) -> tuple[Tensors, Tensors]:
        mantissa, exponent = torch.ops.aten.frexp.Tensor(x.clone().view(32, 128).t())
        return (mantissa.t().clone(),), (exponent,)

    x = torch.rand(64, 64)
    for step in range(6):
        x.mul_(1.5)
        (mantissa,), saved, group = call_groups.run_or_play(lambda: lambda: function(x), "frexp", (x,), [])
        exponent = (saved if group is None else group.found(saved))[0]
        expected = torch.frexp(x.view(32, 128))
        assert_same_bits(mantissa, expected[0])
        assert_same_bits(exponent, expected[1].t())
        assert (group is None) == (step == 0)
    (only,) = call_groups._groups.values()
    assert (only.hits, only.misses) == (4, 1)
    monkeypatch.setattr(tape_recorder, "MOST_MOVED", x.nbytes - 1)
    for _ in range(3):
        assert call_groups.run_or_play(lambda: lambda: function(x), "large", (x,), [])[2] is None


def test_a_copy_of_a_part_is_made_again(copied: list[int]) -> None:
    def function(x: torch.Tensor) -> tuple[Tensors, Tensors]:
        part = x[:, ::2].t().contiguous()
        return (part.clone(),), (part,)

    x = torch.rand(6, 8)
    for step in range(6):
        x.mul_(1.5)
        (result,), saved, group = call_groups.run_or_play(lambda: lambda: function(x), "part", (x,), [])
        part = (saved if group is None else group.found(saved))[0]
        for found in (result, part):
            assert_same_bits(found, x[:, ::2].t())
        assert (group is None) == (step == 0)


def test_an_op_of_torchs_writes_where_it_wrote(copied: list[int]) -> None:
    def function(x: torch.Tensor) -> tuple[Tensors, Tensors]:
        wide = torch.cat([x.t(), x.clone()], dim=1)
        return (wide.clone(),), (wide,)

    x = torch.rand(32, 32)
    for step in range(6):
        x.mul_(1.5)
        (result,), saved, group = call_groups.run_or_play(lambda: lambda: function(x), "cat", (x,), [])
        wide = (saved if group is None else group.found(saved))[0]
        for found in (result, wide):
            assert_same_bits(found, torch.cat([x.t(), x], dim=1))
        assert (group is None) == (step == 0)
    (only,) = call_groups._groups.values()
    assert (only.hits, only.misses) == (4, 1)


def test_what_is_saved_may_be_empty(copied: list[int]) -> None:
    def function(x: torch.Tensor) -> tuple[Tensors, Tensors]:
        inside, empty = x.clone(), torch.empty(0)  # as RMSNorm's mean
        return (inside.clone(),), (inside, empty)

    x = torch.arange(6.0)
    for _ in range(3):
        _, saved, group = call_groups.run_or_play(lambda: lambda: function(x), "empty", (x,), [])
    assert group is not None
    inside, empty = group.found(saved)
    assert_same_bits(inside, x)
    assert empty is not None
    assert empty.shape == (0,)


def test_what_is_not_saved_lies_elsewhere_and_shares_room(copied: list[int]) -> None:
    def function(x: torch.Tensor) -> tuple[Tensors, Tensors]:
        wide = x.new_empty(2, 1024)
        del wide
        temporary = x.clone()  # where `wide` was, and the next of them after it
        kept = temporary.clone()
        for _ in range(8):
            temporary = temporary.clone()
        return (temporary.clone(),), (kept,)

    x = torch.arange(1024.0)
    for step in range(4):
        x.add_(step)
        (result,), saved, group = call_groups.run_or_play(lambda: lambda: function(x), "temporaries", (x,), [])
        assert_same_bits(result, x)
    assert group is not None
    (arena,) = saved
    assert arena is not None
    assert arena.untyped_storage().nbytes() == 4096
    assert_same_bits(group.found(saved)[0], x)
    assert group.sizes[SCRATCH] == 2 * 4096
    assert set(copied) == {4096}


def test_what_is_kept_is_bounded(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_groups, "MOST_TAPES", 2)
    monkeypatch.setattr(call_groups, "MOST_GROUPS", 2)
    xs = [torch.full((4,), float(i)) for i in range(5)]
    counts = []
    for x in (xs[0], *xs):
        (result,), _, _ = played(cloned, x)
        assert_same_bits(result, x)
        (only,) = call_groups._groups.values()
        counts.append(len(only.tapes))
    assert counts == [0, 1, 2, 1, 2, 1]
    counts = [played(cloned, xs[0], constants) and len(call_groups._groups) for constants in (1, 2, 3, 4)]
    assert counts == [2, 1, 2, 1]


def test_moved_tapes_are_bounded_over_all_groups(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are moved again where they are needed."""
    monkeypatch.setattr(call_groups, "MOST_MOVED", 3)
    monkeypatch.setattr(call_groups.counts, "moved", 0)
    xs = [torch.full((4,), float(i)) for i in range(5)]
    kept = []
    for constants in (1, 2):
        for x in (xs[0], *xs):
            (result,), _, _ = played(cloned, x, constants)
            assert_same_bits(result, x)
            kept.append(sum(len(group.tapes) for group in call_groups._groups.values()))
    # Of each group one call is measured, one recorded, and four are moved.
    assert kept == [0, 1, 2, 3, 4, 1, 1, 2, 3, 4, 1, 2]
    assert [(group.misses, group.hits) for group in call_groups._groups.values()] == [(1, 4)] * 2


def test_how_much_is_too_much(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A group has an arena of 512 bytes and a scratch of 1024."""

    def function(x: torch.Tensor) -> tuple[Tensors, Tensors]:
        kept, first = x.clone(), x.clone()
        second = first.clone()
        return (second.clone(),), (kept,)

    x = torch.arange(3.0)
    for limit, usable in ((1535, False), (1536, True)):
        monkeypatch.setattr(call_groups, "LARGEST", limit)
        call_groups.run_or_play(lambda: lambda: function(x), limit, (x,), [])
        assert call_groups._groups[limit].sizes == (512, 1024)
        assert call_groups._groups[limit].usable == usable
    # As many misses more than hits as are accepted.
    monkeypatch.setattr(call_groups, "MOST_MISSES", 3)
    monkeypatch.setattr(call_groups.counts, "misses", 3)
    assert call_groups.run_or_play(lambda: lambda: function(x), 1536, (x,), [])[2] is not None
    assert call_groups.counts.misses == 4
    assert call_groups.run_or_play(lambda: lambda: function(x), "another", (x,), [])[2] is None
    assert "another" not in call_groups._groups
    call_groups.counts.hits = 1
    call_groups.run_or_play(lambda: lambda: function(x), "another", (x,), [])
    assert "another" in call_groups._groups


def test_results_share_one_allocation(copied: list[int]) -> None:
    """All but the first, each from a multiple of 512 bytes on, if they are of one dtype."""

    def function(x: torch.Tensor, second: torch.dtype) -> tuple[Tensors, Tensors]:
        others = (x.new_empty(3, 5), None, x.new_empty(128), torch.empty(7, dtype=second))
        return (x.clone(), *others), (x,)

    x = torch.arange(6.0).view(2, 3)
    for dtype, pooled in ((torch.float32, [15, 113, 128, 7, 121]), (torch.float64, [])):
        key = ("shared", dtype)
        for _ in range(3):
            results, _, group = call_groups.run_or_play(lambda dtype=dtype: lambda: function(x, dtype), key, (x,), [])
        assert group is not None
        assert group.results.sizes == pooled
        assert [None if one is None else (*one.shape, one.dtype) for one in results] == [
            *((2, 3, torch.float32), (3, 5, torch.float32), None, (128, torch.float32), (7, dtype))
        ]
        first = results[1].data_ptr()
        offsets = [one.data_ptr() - first for one in results[1:] if one is not None]
        assert (offsets == [0, 512, 1024]) == bool(pooled)
        assert results[0].untyped_storage().nbytes() == 24


def cloned(x: torch.Tensor) -> Tensors:
    return (x.clone(),)


def test_a_saved_tensor_that_lies_elsewhere_is_not_played(copied: list[int]) -> None:
    elsewhere = torch.ones(3)

    def function(x: torch.Tensor) -> tuple[Tensors, Tensors]:
        return (x.clone(),), (elsewhere, None)

    x = torch.arange(4.0)
    for step in range(4):
        (result,), saved, group = call_groups.run_or_play(lambda: lambda: function(x), "elsewhere", (x,), [])
        assert_same_bits(result, x)
        assert group is None
        assert saved[0] is elsewhere
        assert call_groups._groups["elsewhere"].usable == (step == 0)


@pytest.mark.parametrize("first", [False, True])
def test_inputs_that_share_memory_at_times(first: bool, copied: list[int]) -> None:
    """Where the recorded call's did, y is sought in x's storage: calls whose inputs share none are not played."""

    def call(x: torch.Tensor, y: torch.Tensor) -> Any:
        return call_groups.run_or_play(lambda: lambda: ((y.clone(),), (x, y)), "shared", (x, y), [])

    both, more = torch.arange(8.0), torch.arange(9.0)
    apart, shared = (torch.arange(4.0), torch.arange(4.0, 8.0)), (both[:4], both[4:])
    one, other = (shared, apart) if first else (apart, shared)
    assert call(*one)[2] is None
    for pair in (one, (more[:4], more[4:8]) if first else (one[0].clone(), one[1].clone())):
        (result,), saved, group = call(*pair)
        for found, expected in zip((*group.found(saved), result), (*pair, pair[1]), strict=True):
            assert_same_bits(found, expected)
    assert call_groups._groups["shared"].hits == 1
    (result,), saved, group = call(*other)
    assert (group is None) == first
    for found, expected in zip(saved if first else group.found(saved), other, strict=True):
        assert_same_bits(found, expected)
    assert_same_bits(result, other[1])
    assert call_groups._groups["shared"].usable != first


def test_other_shapes_and_constants_are_other_groups(copied: list[int]) -> None:
    function = lambda x: (x.clone(),)  # noqa: E731
    for x, constants in ((torch.ones(2), 1), (torch.ones(2), 2), (torch.ones(3), 1), (torch.ones(2).double(), 1)):
        assert played(function, x, constants)[2] is None
    assert len(call_groups._groups) == 4


def test_what_is_played() -> None:
    """Not where a weight is cast for later microbatches, nor where its gradient is added elsewhere."""
    layer = te.LayerNormMLP(32, 64, params_dtype=BF16)
    x = torch.ones(4, 32, dtype=BF16)

    def context(first: bool | None = None) -> Any:
        return layer.context(BF16, first)

    plain = context()
    assert plain.playable
    with te.autocast(recipe=RECIPE):
        assert context().playable
        assert context().key != plain.key
        assert not context(True).playable
        assert not context(False).playable
        layer(x, is_first_microbatch=True)
        assert context(False).playable
        assert context(False).key != context().key
        cached = next(cast.row.codes for (name, *_), cast in layer._store.casts.items() if name == "fc1_weight")
        assert any(t is cached for t in context(False).state(backward=False)[0])
        assert all(t is not cached for t in context(False).state(backward=True)[0])
    with te.autocast(enabled=False, calibrating=True):
        assert context().key != plain.key
        (history,) = context().state(backward=False)[1]
        assert history is layer.fp8_meta["scaling_fwd"].amax_history
    layer.fuse_wgrad_accumulation = True
    assert not context().playable
