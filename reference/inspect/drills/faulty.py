"""Bits that flip beside a recorded step: `Faulty` is a recorder in whose step a `Fault` happens."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reference.inspect.recorded_step import recorder
from reference.inspect.recorded_step.file import Region
from reference.inspect.recorded_step.ops import changed_by
from reference.numbers.tensor_core import fast
from reference.numbers.tensor_core.faults import StepFault, bits_of, gemm_word, steps_of
from reference.numbers.tensor_core.model import Operands


@dataclass
class Fault:
    """A bit to flip when its op comes.

    Attributes:
        op, moment: when. "before": since the tensor was written; "while": after the op's inputs were digested; "after":
            in a result, before it is digested; "inside": in a stage of the tensor core's model while it runs.
        choice, bit: which of the op's tensors, and which of its bits, as parts of 1.
        read: the number of the tensor among those that the op reads, in place of `choice`.
        region: the tensor, in place of `choice`.
        stage: of "inside" (`reference.numbers.tensor_core.faults`).
        flipped: the tensor and the place of the number.
        known: whether the recording knows what the tensor had before.
    """

    op: int
    moment: str
    choice: float = 0.0
    bit: float = 0.4
    read: int | None = None
    region: Region | None = None
    stage: str = ""
    flipped: tuple[torch.Tensor, tuple[int, ...]] | None = None
    known: bool = False

    def flip(self, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """Flip a bit in one of these."""
        # A word of an expanded tensor is several numbers.
        tensors = [x for x in tensors if x.numel() and not _is_expanded(x)]
        if not tensors:
            return None
        x = tensors[int(self.choice * len(tensors))]
        at, bit = divmod(int(self.bit * x.nbytes * 8), 8 * x.element_size())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(at, dtype=torch.int64, device="cpu"), x.shape))
        word = x[where].reshape(1).contiguous().view(torch.uint8)
        word[bit // 8] ^= 1 << bit % 8
        x[where] = word.view(x.dtype)[0]
        self.flipped = (x, where)
        return x


def _is_expanded(x: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


class Faulty(recorder.Recorder):
    """A recorder beside which bits flip."""

    fault: Fault

    def _due(self, moment: str) -> bool:
        return len(self.made.ops) == self.fault.op and self.fault.moment == moment and self.fault.flipped is None

    def _read(self, op: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> str:
        # What reads nothing is not recorded, and has no number: a profiler's mark in front of the op.
        if self._due("before") and (self.fault.read is None or op.kind != "fed"):
            # Of an input of the step nobody knows what it was, and of memory that nobody has written neither.
            seen = {access.region.storage for access in self.made.accesses() if access.digest is not None}
            some = [x for x in given if recorder.has_numbers(x) and self._storage(x).number in seen]
            if self.fault.read is not None:
                some = [given[self.fault.read]]
            elif self.fault.region is not None:
                some = [x for x in some if self._region(x).place() == self.fault.region.place()][:1]
            self.fault.known = self.fault.flip(some) is not None
        at = super()._read(op, args, kwargs, given)
        if op.kind != "fed" and self._due("while"):
            some = [x for x in given if self._storage(x).written]
            self.fault.flip(some if self.fault.read is None else [given[self.fault.read]])
        if self._due("inside"):
            self._words, fast.gemm_words = fast.gemm_words, self._wrong_words  # type: ignore[assignment]
        return at

    def _wrong_words(self, operands: Operands, split_k: int | None = None, c: Any = None) -> Any:
        """The words of a GEMM, one of them with a fault."""
        words = self._words(operands, split_k, c)
        fault = self.fault
        if words.ndim != 2 or not words.size or not operands.a.shape[1] or fault.flipped is not None:
            return words
        place, rest = divmod(fault.choice * words.size, 1)
        row, column = divmod(int(place), words.shape[1])
        step, rest = divmod(rest * steps_of(operands), 1)
        term, bit = int(rest * operands.instruction.k), int(fault.bit * bits_of(operands, fault.stage))
        of_word = operands._replace(a=operands.a[row : row + 1], b=operands.b[column : column + 1])
        start = None if c is None else np.ascontiguousarray(c[row : row + 1, column : column + 1])
        words[row, column] = gemm_word(of_word, split_k, start, StepFault(int(step), fault.stage, term, bit))[0, 0]
        fault.flipped = (torch.empty(0, dtype=torch.float32, device="cpu"), (row, column))
        return words

    def _wrote(
        self, op: Any, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        self._repair()
        if self._due("after"):
            self.fault.flip([x for x in (*results, *changed_by(func, args, kwargs, given)) if recorder.has_numbers(x)])
            self.fault.known = self.fault.flipped is not None
        super()._wrote(op, func, args, kwargs, given, results)

    def _repair(self) -> None:
        if fast.gemm_words == self._wrong_words:
            fast.gemm_words = self._words

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        self._repair()
        super().__exit__(error_type, error, trace)
