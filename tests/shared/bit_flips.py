"""Bits that flip beside a recorded step: `Faulty` is a recorder in whose step a `Fault` happens."""

from dataclasses import dataclass
from typing import Any

import torch

from reference.inspect.recorded_step import recorder
from reference.inspect.recorded_step.ops import changed_by


@dataclass
class Fault:
    """A bit to flip when its op comes.

    Attributes:
        op, moment: when.
        choice, bit: which of the op's tensors, and which of its bits, as parts of 1.
        read: the number of the tensor among those that the op reads, in place of `choice`.
        flipped: the tensor and the place of the number.
        known: whether the recording knows what the tensor had before.
    """

    op: int
    moment: str
    choice: float = 0.0
    bit: float = 0.4
    read: int | None = None
    flipped: tuple[torch.Tensor, tuple[int, ...]] | None = None
    known: bool = False

    def flip(self, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """Flip a bit in one of these."""
        tensors = [x for x in tensors if x.numel()]
        if not tensors:
            return None
        x = tensors[int(self.choice * len(tensors))]
        at, bit = divmod(int(self.bit * x.nbytes * 8), 8 * x.element_size())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), x.shape))
        word = x[where].reshape(1).contiguous().view(torch.uint8)
        word[bit // 8] ^= 1 << bit % 8
        x[where] = word.view(x.dtype)[0]
        self.flipped = (x, where)
        return x


class Faulty(recorder.Recorder):
    """A recorder beside which bits flip."""

    fault: Fault

    def _due(self, moment: str) -> bool:
        return len(self.made.ops) == self.fault.op and self.fault.moment == moment and self.fault.flipped is None

    def _read(self, op: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> str:
        if self._due("before"):
            # Of an input of the step nobody knows what it was, and of memory that nobody has written neither.
            seen = {access.region.storage for access in self.made.accesses() if access.digest is not None}
            some = [x for x in given if self._storage(x).number in seen]
            x = self.fault.flip(some if self.fault.read is None else [given[self.fault.read]])
            self.fault.known = x is not None
        at = super()._read(op, args, kwargs, given)
        if op.kind != "fed" and self._due("while"):
            some = [x for x in given if self._storage(x).written]
            self.fault.flip(some if self.fault.read is None else [given[self.fault.read]])
        return at

    def _wrote(
        self, op: Any, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        if op.kind != "fed" and self._due("after"):
            self.fault.flip([*results, *changed_by(func, args, kwargs, given)])
            self.fault.known = self.fault.flipped is not None
        super()._wrote(op, func, args, kwargs, given, results)
