"""Calls of an op, and their inputs: what every look at an op draws from.

    def calls(c: Inputs) -> Iterator[Call]:            in cases/<op>.py
        yield Call(twin.dbias, (c.x(65, 300),))

The same calls run on a CPU, on a GPU or in the simulator beside the CPU (tests/ops/test_ops.py; on a GPU `twin parity`,
too: `compared`), under compute-sanitizer (tests/tools/sanitizer.py), and on a GPU that only takes notes
(tests/cuda/test_launches.py). So a new op has one list of them.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from optimized.recordings.case import FP8, HALVES, Outputs
from reference.inspect.recorded_step.ops import tensors_of
from reference.numbers import formats
from reference.support import unwritten

(BF16, FP16), FP32 = HALVES, torch.float32
E4M3, E5M2 = FP8
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 448.0, 464.0, -480.0, 57344.0, 2.0**-9, 1e-40)


class Call(NamedTuple):
    """`op(*args)`.

    Attributes:
        op: one of `torch.ops.twin`.
        args: tensors among them may be changed.
        chosen: in its place on a GPU: a function of `optimized.ops` with a choice that the op makes itself, as a tile.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    chosen: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """Of the op."""
        return str(getattr(self.op, "__name__", self.op))

    def run(self) -> Any:
        """What comes back."""
        on_gpu = self.chosen is not None and any(x.is_cuda for x in tensors_of(self.args))
        return (self.chosen if on_gpu and self.chosen is not None else self.op)(*self.args)

    def changed(self) -> list[int]:
        """Which of its arguments the op may change."""
        arguments = getattr(torch.ops.twin, self.name).default._schema.arguments
        return [i for i, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write]

    def moved(self, device: torch.device) -> "Call":
        """The same call there, of copies laid out alike: strides, where tensors begin, and who shares memory."""
        storages: dict[int, torch.Tensor] = {}

        def there(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage._cdata not in storages:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                storages[storage._cdata] = whole.to(device, copy=True)
            return storages[storage._cdata].view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

        return self._replace(args=tree_map_only(torch.Tensor, there, self.args))


def ahead(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` where nobody writes its tensors, so that a product's weights may be loaded early."""

    def run(*args: Any) -> Any:
        with unwritten.held(tensors_of(args)):
            return function(*args)

    return run


class Inputs:
    """Makes tensors on a device. Two with one seed, on any devices, make the same numbers in the same order.

    Args:
        device: where.
        seed: of all numbers.
        filled: False leaves memory as it is allocated, for launches alone.
    """

    def __init__(self, device: torch.device | str, seed: int = 0, filled: bool = True) -> None:
        self.device, self.filled = torch.device(device), filled
        self.draw = np.random.default_rng(seed)

    def _placed(self, values: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> torch.Tensor:
        """`values` in memory of their own, `start` elements after a multiple of 16 bytes."""
        x = torch.from_numpy(values).to(dtype)
        if start:
            x = torch.cat([x.new_zeros(start), x])
        return x.to(self.device)[start:].view(shape)

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
        if not start:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.empty(torch.Size(shape).numel() + start, dtype=dtype, device=self.device)[start:].view(shape)

    def x(self, *shape: int, dtype: torch.dtype = BF16, start: int = 0, special: bool = False) -> torch.Tensor:
        """Normal numbers of magnitudes from 2⁻⁸ to 2⁷; with `special` zeros, NaN, infinities and limits among them."""
        if not self.filled:
            return self._memory(shape, dtype, start)
        count = torch.Size(shape).numel()
        x = self.draw.standard_normal(count, np.float32) * np.exp2(np.arange(count) // 7 % 16 - 8, dtype=np.float32)
        if special and count:
            where = self.draw.integers(0, count, size=1 + count // 16)
            x[where] = self.draw.choice(SPECIAL, size=len(where))
        return self._placed(x, dtype, shape, start)

    def normal(self, *shape: int, dtype: torch.dtype = BF16, start: int = 0) -> torch.Tensor:
        """Normal numbers of one magnitude."""
        if not self.filled:
            return self._memory(shape, dtype, start)
        return self._placed(self.draw.standard_normal(torch.Size(shape).numel(), np.float32), dtype, shape, start)

    def positive(self, *shape: int, dtype: torch.dtype = FP32, start: int = 0) -> torch.Tensor:
        """Numbers from 0.1 to 10."""
        if not self.filled:
            return self._memory(shape, dtype, start)
        return self._placed(10 ** self.draw.uniform(-1, 1, torch.Size(shape).numel()), dtype, shape, start)

    def zeros(self, *shape: int, dtype: torch.dtype = FP32, start: int = 0) -> torch.Tensor:
        """+0."""
        if not self.filled:
            return self._memory(shape, dtype, start)
        return self._placed(np.zeros(torch.Size(shape).numel()), dtype, shape, start)

    def codes(self, *shape: int, dtype: torch.dtype = E4M3, start: int = 0) -> torch.Tensor:
        """FP8 numbers from a bell curve that fills most of the format; no NaN."""
        if not self.filled:
            return self._memory(shape, dtype, start)
        values = self.draw.standard_normal(torch.Size(shape).numel(), np.float32)
        codes = formats.cast(torch.from_numpy(values), formats.format_of(dtype), 24.0).view(torch.uint8)
        return self._placed(codes.numpy(), torch.uint8, shape, start).view(dtype)

    def integers(self, *shape: int, below: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """From 0 to below - 1; 0 where that is none."""
        if not self.filled:
            return self._memory(shape, dtype, 0)
        return self._placed(self.draw.integers(0, max(1, below), torch.Size(shape).numel()), dtype, shape, 0)

    def mask(self, *shape: int) -> torch.Tensor:
        """Bools, two fifths of them True."""
        return self.integers(*shape, below=5, dtype=torch.uint8) < 2

    def one(self) -> torch.Tensor:
        """fp32 `[1]`, such as a scale_inv."""
        return self.positive(1)

    def state(self, columns: int = 3, step: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """A scale and an amax history whose entries are `step` apart."""
        scale, history = self.positive(columns * step), self.positive(4, columns * step)
        return scale[::step], history[:, ::step]

    def random_state(self) -> torch.Tensor:
        """Seed and offset of dropout."""
        return self.integers(2, below=1 << 20)


Calls = Iterator[Call]


def compared(calls: Callable[[Inputs], Calls], device: torch.device) -> Outputs:
    """What each call of a list gives on a device, and the arguments that it has changed."""
    found: Outputs = {}
    for i, here in enumerate(calls(Inputs("cpu"))):
        call = here.moved(device)
        results = [call.run(), *(call.args[place] for place in call.changed())]
        found |= {f"{i}.{n}": x for n, x in enumerate(tensors_of(results))}
    return found
