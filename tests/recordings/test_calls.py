"""The inputs of the ops' calls (optimized/recordings/calls.py) are what their functions say, filled and not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

from optimized.recordings.calls import E4M3, E5M2, Inputs
from reference.inspect.recorded_step.ops import tensors_of

Make = Callable[[Inputs], Any]
WIDE = (torch.float32, torch.bfloat16, torch.float16)
MADE: dict[str, Make] = {
    **{f"x, {dtype}": lambda c, dtype=dtype: c.x(33, 40, dtype=dtype, special=True) for dtype in WIDE},
    **{f"codes, {dtype}": lambda c, dtype=dtype: c.codes(5, 16, dtype=dtype, start=3) for dtype in (E4M3, E5M2)},
    "normal": lambda c: c.normal(3, 5, 7, start=2),
    "positive": lambda c: c.positive(300, start=1),
    "zeros": lambda c: c.zeros(2, 9),
    "integers": lambda c: c.integers(400, below=9),
    "none to draw from": lambda c: c.integers(4, below=0),
    "mask": lambda c: c.mask(40, 50),
    "one": lambda c: c.one(),
    "state": lambda c: c.state(5, 3),
    "state of three": lambda c: c.state(),
    "random_state": lambda c: c.random_state(),
    "nothing": lambda c: c.x(0, 16, special=True),
}


@pytest.mark.parametrize("name", MADE)
def test_inputs_are_alike_for_one_seed_and_laid_out_alike_without_numbers(name: str) -> None:
    here, again, other, empty = (
        list(tensors_of([MADE[name](one)]))
        for one in (Inputs("cpu", 7), Inputs("cpu", 7), Inputs("cpu", 8), Inputs("cpu", 7, filled=False))
    )
    for a, b, c in zip(here, again, empty, strict=True):
        assert_same_bits(a, b)
        assert (a.shape, a.dtype, a.stride(), a.storage_offset()) == (c.shape, c.dtype, c.stride(), c.storage_offset())
    if name not in ("zeros", "nothing", "none to draw from"):
        bits = [torch.cat([x.contiguous().view(torch.uint8).flatten() for x in one]) for one in (here, other)]
        assert not torch.equal(*bits)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_memory_begins_where_it_is_asked_to(start: int) -> None:
    for make in (Inputs.x, Inputs.normal, Inputs.positive, Inputs.zeros, Inputs.codes):
        for filled in (True, False):
            x: torch.Tensor = make(Inputs("cpu", filled=filled), 4, 8, start=start)  # type: ignore[operator]
            assert (x.storage_offset(), x.is_contiguous(), x.shape) == (start, True, (4, 8))


def test_special_numbers_are_all_there() -> None:
    """Both zeros and infinities, NaN, what FP8 saturates or rounds to nothing, and a subnormal one, among others."""
    x, plain = (Inputs("cpu").x(4096, dtype=torch.float32, special=one) for one in (True, False))
    zero = x == 0
    assert bool((zero & x.signbit()).any())
    assert bool((zero & ~x.signbit()).any())
    assert bool(x.isnan().any())
    assert {-float("inf"), float("inf"), 448.0, 464.0, -480.0, 57344.0, 2.0**-9} <= set(x.tolist())
    assert bool(((x != 0) & (x.abs() < torch.finfo(torch.float32).tiny)).any())
    assert 0.9 < float((x == plain).float().mean()) < 1
    assert bool(plain.isfinite().all())
    assert not bool((plain == 0).any())


def test_ranges() -> None:
    c = Inputs("cpu")
    magnitudes = c.x(16 * 700, dtype=torch.float32).view(-1, 16, 7).permute(1, 0, 2).reshape(16, -1).abs().mean(1)
    assert torch.log2(magnitudes / magnitudes[0]).round().tolist() == list(range(16))  # powers of two, seven in turn
    positive, integers, mask = c.positive(4000), c.integers(4000, below=9), c.mask(4000)
    assert 0.1 <= float(positive.min()) < 0.11
    assert 9 < float(positive.max()) <= 10
    assert sorted(set(integers.tolist())) == list(range(9))
    assert mask.dtype == torch.bool
    assert 0.36 < float(mask.float().mean()) < 0.44
    for dtype in (E4M3, E5M2):
        codes = c.codes(64, 64, dtype=dtype)
        assert bool(codes.float().isfinite().all())
        assert len(set(codes.view(torch.uint8).flatten().tolist())) > 80
    assert not bool(c.zeros(30).any())
    scale, history = c.state(5, 3)
    assert (scale.stride(), history.shape, history.stride(1)) == ((3,), (4, 5), 3)
