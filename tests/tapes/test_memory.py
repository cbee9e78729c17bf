"""Where the tensors of a played call lie, and what a tape knows of the ops of PyTorch that it holds."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

from optimized.tapes import tape_recorder
from optimized.tapes.memory import Place, TensorRef, place_of, tensors_of


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
