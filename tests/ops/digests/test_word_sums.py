"""`twin::word_sums`: the kernel's digests are the definition's, of any dtype, size and address, beside anything."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import optimized  # noqa: F401  (registers the CUDA implementations)
from optimized.ops.digests.word_sums import BYTES
from reference.ops.digests import word_sums as definition
from reference.ops.digests.word_sums import BLOCK, COLUMN, ROW, h, outputs

twin = torch.ops.twin
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool, torch.int64, torch.complex64)


def random_bytes(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def sizes(generator: torch.Generator) -> Iterator[int]:
    """Bytes: around words, rows, blocks, and what a block of threads takes; and drawn ones."""
    for edge in (0, 4, 16, 256, 4 * BLOCK, BYTES):
        for more in (-1, 0, 1, 3):
            yield max(0, edge + more)
    for most in (40, 4 * BLOCK, 3 * BYTES):
        yield int(torch.randint(most, (), generator=generator))


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_any_size_at_any_address(seed: int, device: torch.device) -> None:
    """Bytes that are no part of a tensor, before and after it, are all ones: none of them enters."""
    generator = torch.Generator().manual_seed(seed)
    tensors, there = [], []
    for count in sizes(generator):
        start = int(torch.randint(17, (), generator=generator)) if seed else 0
        around = torch.full((start + count + 21,), 255, dtype=torch.uint8)
        around[start : start + count] = random_bytes(count, generator)
        tensors.append(around[start : start + count])
        there.append(around.to(device)[start : start + count])
    order = torch.randperm(len(tensors), generator=generator).tolist()
    poison = torch.full((len(tensors), 3), -1, dtype=torch.int64, device=device)
    del poison  # what the results' memory may hold
    assert_same_bits(twin.word_sums([there[i] for i in order]).cpu(), twin.word_sums([tensors[i] for i in order]))


@pytest.mark.simulated
@pytest.mark.gpu
def test_any_dtype_and_layout(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(7)
    tensors = [(random_bytes(8 * 30 * 7, generator) % 2).view(dtype) for dtype in DTYPES]
    tensors += [x[:210].view(30, 7).t() for x in tensors] + [x[::3] for x in tensors] + [x[:0] for x in tensors]
    tensors += [torch.randn(4, 6, 5, 3, generator=generator).to(memory_format=torch.channels_last)]
    tensors += [torch.tensor(3.5), torch.ones(1).expand(70), torch.ones(1, 1).expand(1, 1)]
    expected = torch.cat([twin.word_sums([x.contiguous().clone()]) for x in tensors])
    assert_same_bits(twin.word_sums([x.to(device) for x in tensors]).cpu(), expected)
    there = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in tensors[:21]]
    for a, b in zip(there, tensors, strict=False):
        a.copy_(b)
    assert_same_bits(twin.word_sums(there).cpu(), expected[:21])


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 64, 65, 1025])
def test_any_number_of_tensors(count: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(count)
    tensors = [random_bytes(int(n), generator) for n in torch.randint(0, 30, (count,), generator=generator)]
    assert_same_bits(twin.word_sums([x.to(device) for x in tensors]).cpu(), twin.word_sums(tensors))


class Copies(TorchDispatchMode):
    """Which results of `cat` are in memory at once."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self.made.append(StorageWeakRef(found.untyped_storage()))
            self.most = max(self.most, sum(not one.expired() for one in self.made))
        return found


def test_one_batch_of_copies_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "_BATCH", 4 * BLOCK)
    generator = torch.Generator().manual_seed(3)
    tensors = [random_bytes(4 * BLOCK - 4 * (n % 3), generator) for n in range(20)]
    with Copies() as copies:
        definition.word_sums(tensors)
    assert len(copies.made) >= 4
    assert copies.most == 1


@pytest.mark.gpu
def test_more_bytes_than_an_int_counts() -> None:
    """The last word of 4 GiB counts as its definition says, and a block in the middle."""
    x = torch.zeros((1 << 30) + 3, dtype=torch.int32, device="cuda")
    for at in (len(x) - 1, (1 << 29) + 77):
        x.zero_()[at] = -5
        block = torch.zeros(BLOCK, dtype=torch.int32)
        block[at % BLOCK] = -5
        # A block's own sums are those of block 0, but for the constants of their places.
        found, first = twin.word_sums([x])[0].tolist(), twin.word_sums([block])[0].tolist()
        assert found[0] == first[0] == -5
        for k, (here, there) in enumerate(zip(constants(at // BLOCK), constants(0), strict=True), 1):
            assert found[k] * there % 2**64 == first[k] * here % 2**64


def constants(block: int) -> tuple[int, int]:
    row, column = h(np.array([ROW + block, COLUMN + block], dtype=np.uint64)).tolist()
    return row, column


@pytest.mark.parametrize(
    ("tensors", "error", "sentence"),
    [
        ([torch.eye(3).to_sparse()], TypeError, "tensors[0] is torch.sparse_coo; dense tensors are accepted."),
        (
            [torch.ones(2), torch.ones(2, dtype=torch.complex64).conj()],
            TypeError,
            "tensors[1] is a view of conjugates or negatives; resolve_conj()",
        ),
        ([torch.ones(2, dtype=torch.complex64).conj().imag], TypeError, "tensors[0] is a view of conjugates or neg"),
        (
            [torch.ones(2), torch.ones(2, device="meta")],
            ValueError,
            "tensors[1] is on meta, tensors[0] on cpu; one is accepted.",
        ),
    ],
)
def test_what_is_refused(tensors: list[torch.Tensor], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=re.escape(f"twin::word_sums: {sentence}")):
        outputs(tensors)


def test_no_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"twin::word_sums: tensors is empty; one tensor or more is accepted"):
        outputs([])
