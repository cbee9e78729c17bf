"""Equality of bits, and what a run of the tests depends on."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

import torch
from shared.driver_stub import cuda  # noqa: F401  (a fixture)

from optimized import measure


def sources() -> dict[str, str]:
    """A hash of every source file that a test depends on, by path."""
    found = (path for folder in ("reference", "optimized", "tests") for path in (measure.ROOT / folder).rglob("*.*"))
    return {
        str(path.relative_to(measure.ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(found)
        if path.suffix in (".py", ".cu", ".cuh", ".npz")
    }


def changed_sources(then: Mapping[str, str]) -> list[str]:
    """The files that are not what they were when `sources` gave `then`."""
    now = sources()
    return sorted(path for path in now.keys() | then.keys() if now.get(path) != then.get(path))


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing_words(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors differ in any bit; in 16 and 32 bits NaN equals NaN. Shapes and dtypes must agree."""
    assert a.dtype == b.dtype, f"dtypes {a.dtype} and {b.dtype}"
    assert a.shape == b.shape, f"shapes {list(a.shape)} and {list(b.shape)}"
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    differ = a.view(WORDS[a.element_size()]) != b.view(WORDS[b.element_size()])
    if a.element_size() > 1 and a.is_floating_point():
        differ &= ~(a.isnan() & b.isnan())
    return differ


def assert_same_bits(a: torch.Tensor, b: torch.Tensor, what: str = "tensors") -> None:
    """Fail with the number of differing words, the first coordinate and both values."""
    differ = differing_words(a, b)
    if bool(differ.any()):
        where = tuple(int(i) for i in differ.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} words differ, first at {where}: "
            f"{a[where].float().item()!r} and {b[where].float().item()!r}"
        )


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch computes on so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
