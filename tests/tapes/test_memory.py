"""Where the tensors of a played call lie, and what a tape knows of the ops of PyTorch that it holds."""

import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

from optimized.tapes import tape_recorder
from optimized.tapes.memory import ARENA, FIRST, SCRATCH, Place, TensorRef, arrange, place_of, tensors_of


def test_a_place_is_a_tensor_in_the_storage_of_another() -> None:
    whole = torch.arange(48, dtype=torch.float32).view(6, 8)
    sources = [None, torch.empty(3), whole[1:]]
    for x, offset in ((whole[1:], 0), (whole[2:4, 1::3], 36), (whole[1:].t(), 0), (whole[0], -32), (whole[3:3], 64)):
        place = place_of(x, sources)
        assert place == (2, offset, x.shape, x.stride(), x.dtype)
        found = place.of(sources)
        assert (found is sources[2]) == (x.shape == (5, 8))
        assert_same_bits(found, x)
        assert found.data_ptr() == x.data_ptr()
        assert found.stride() == x.stride()
    words = Place(2, 4, torch.Size([3]), (2,), torch.int16).of(sources)
    assert_same_bits(words, whole.view(torch.int16).flatten()[18:24:2])
    elsewhere = torch.ones(2, 3).t()
    assert place_of(elsewhere, sources) == (-1, 0, elsewhere.shape, elsewhere.stride(), elsewhere.dtype)


def test_a_tensor_by_its_address() -> None:
    x = torch.arange(48).view(6, 8)[1:5:2, 1::3]
    lying, same, number = TensorRef.of([x, [x, None], 3])
    assert lying == (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device)
    assert (same, number) == ([lying, None], 3)
    made, (again, nothing), three = tensors_of([lying, same, number])
    assert (nothing, three) == (None, 3)
    for found in (made, again):
        assert_same_bits(found, x)
        assert found.data_ptr() == x.data_ptr()
        assert found.untyped_storage().nbytes() == (16 + 2 * 3 + 1) * 8  # no more than from its first to its last


def test_what_cudnns_attention_draws_is_read_later() -> None:
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    for p, later in ((0.0, (0, 1)), (0.1, (0, 1, 6, 7)), (1.0, (0, 1, 6, 7))):
        args = [None] * 5 + [p]
        assert tape_recorder._read_later(forward, args) == later
        assert tape_recorder.TorchOp(forward, args, {}, {}).capturable == (p == 0)
        assert tape_recorder._read_later(backward, args) == (0, 1, 2)
        assert tape_recorder.TorchOp(backward, args, {}, {}).capturable
    without = [None] * 5  # as PyTorch hands them on, where dropout_p and all that follow have their defaults
    assert tape_recorder._read_later(forward, without) == (0, 1)
    assert tape_recorder.TorchOp(forward, without, {}, {}).capturable
    assert tape_recorder.TorchOutOp(torch.ops.aten.cat.out, [], TensorRef.of(torch.empty(3))).capturable


def test_what_is_called_a_view_of_views_is_composite() -> None:
    """Of any other op the dispatcher says whether it is a view: an entry would have no effect."""
    for op in tape_recorder._VIEWS_OF_VIEWS:
        assert op.is_view
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 6]), min_size=1, max_size=4),
    steps=st.lists(st.integers(0, 7), min_size=4, max_size=4),
    data=st.data(),
)
def test_in_inference_mode_what_splits_a_tensor_is_a_view(
    sizes: list[int], steps: list[int], data: st.DataObject
) -> None:
    """Whatever its strides, so that a tape may take it: the ops that `Heads.split` is made of, and their like."""
    dim = data.draw(st.integers(-len(sizes), len(sizes) - 1))
    with torch.inference_mode(), tape_recorder.Watch() as seen:
        x = torch.empty(8 * 6 * 4, dtype=torch.uint8).as_strided(sizes, steps[: len(sizes)])
        views = [x.unflatten(dim, (sizes[dim], 1)), *x.split(2, dim), *x.split([sizes[dim], 0], dim)]
        views += [x.select(dim, i) for i in range(sizes[dim])]
        assert all(torch._C._is_alias_of(x, view) for view in views)  # type: ignore[attr-defined]
    assert seen.usable


class _Allocated:
    """What `arrange` reads of an allocation."""

    def __init__(self, size: int, until: int) -> None:
        self.size, self.until, self.like = size, until, (torch.Size([size]), (1,), torch.uint8)


@settings(deadline=None)
@given(
    drawn=st.lists(
        st.tuples(st.integers(0, 5000), st.integers(1, 6), st.sampled_from(["result", "saved", "temporary"]))
    ),
)
def test_what_lives_at_a_time_lies_apart(drawn: list[tuple[int, int, str]]) -> None:
    lasting = [(i, kind) for i, (_, _, kind) in enumerate(drawn) if kind != "temporary"]
    allocated = [
        _Allocated(size, i + lives if kind == "temporary" else sys.maxsize)
        for i, (size, lives, kind) in enumerate(drawn)
    ]
    results = {i: number for number, i in enumerate(i for i, kind in lasting if kind == "result")}
    saved: set[int | None] = {i for i, kind in lasting if kind == "saved"}
    places, (arena, scratch) = arrange(allocated, results, saved)  # type: ignore[arg-type]
    room = {ARENA: arena, SCRATCH: scratch, **{FIRST + number: allocated[i].size for i, number in results.items()}}
    for i, (one, place) in enumerate(zip(allocated, places, strict=True)):
        assert place.offset % 512 == 0
        assert place.offset + one.size <= room[place.number]
        if i in results:
            assert place[:2] == (FIRST + results[i], 0)
        if i in saved:
            assert place.number == ARENA
        for other, its in list(zip(allocated, places, strict=True))[:i]:
            if other.until > i and its.number == place.number:  # both live when `one` begins
                apart = place.offset + one.size <= its.offset or its.offset + other.size <= place.offset
                assert apart


def test_a_temporary_lies_in_memory_that_is_used_later() -> None:
    """A result of 4 KB comes last: three of the temporaries before it fit in there, two of them at one place."""
    sizes = ((2048, 2), (2048, 2), (2048, 3), (4096, sys.maxsize))
    allocated = [_Allocated(*one) for one in sizes]
    places, (arena, scratch) = arrange(allocated, {3: 0}, set())  # type: ignore[arg-type]
    assert (arena, scratch) == (0, 0)
    assert [place[:2] for place in places] == [(FIRST, 0), (FIRST, 2048), (FIRST, 0), (FIRST, 0)]
