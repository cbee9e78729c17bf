"""`twin train --compare-every N`: whether ranks have the same words after each step, and which one has not.

After a step each rank takes the digests of `te.trail` (`reference.inspect.trails.sums`, 192 bits a tensor) of what all
ranks must have alike: gradients after their sum, weights, moments, FP8 state, random states. After N steps the ranks
exchange them. Nobody waits for a device in between.

The first step that differs is known, and in it the first kind of tensor:

    gradient             their sum over ranks, or clipping     twin::grad_norm, twin::clip_grads
    model, optimizer     the optimizer, or memory              twin::adam
    fp8                  delayed scaling, or memory            twin::scale_update
    random               the draw of seeds, or memory

A wrong word that a rank sends to all in the sum of gradients is the same on every rank: only a second computation sees
it (`--resume` in one process). Under `--fsdp` ranks have different rows of weights; what is compared is what all have.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch

from optimized.training.trainer import Trainer
from reference.inspect.trails.sums import changed_word, sums
from reference.support.dtensor import is_dtensor

# The first part of a name → what computes such a tensor.
MADE_BY = {
    "gradient": "the sum of gradients over ranks, or clipping (twin::grad_norm, twin::clip_grads)",
    "model": "the optimizer's step (twin::adam), or memory",
    "optimizer": "the optimizer's step (twin::adam), or memory",
    "fp8": "the update of scales (twin::scale_update), or memory",
    "random": "the generator of masks, or memory",
}


class Parted(NamedTuple):
    """Where ranks part.

    Attributes:
        step: the first step after which they differ.
        rank: the one that differs from most; of two, it is the higher one, and nobody knows which of both is right.
        name: of the first tensor.
        others: how many more tensors differ.
        word: (the position in that tensor, the change as an integer) if it is a single word.
    """

    step: int
    rank: int
    name: str
    others: int
    word: tuple[int, int] | None

    def __str__(self) -> str:
        what = "" if self.word is None else f": its word {self.word[0]}, by {self.word[1]:+d} as an integer"
        more = f", and {self.others} other tensors" * (self.others > 0)
        made = MADE_BY[self.name.split("/")[0]]
        return f"rank {self.rank} has other words after step {self.step}: {self.name}{what}{more}. It is made by {made}"


class RankDigests:
    """The digests of this rank's steps since the ranks last compared them."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._steps: list[tuple[int, torch.Tensor]] = []
        self._names: list[str] = []
        self._words: list[int] = []

    def add(self) -> None:
        """Take those of the step that was made."""
        found = {
            f"gradient/{name}": p.grad for name, p in self.trainer.model.named_parameters() if p.grad is not None
        } | self.trainer.tensors()
        alike = {name: x for name, x in found.items() if not is_dtensor(x)}
        self._names = list(alike)
        self._words = [-(-x.nbytes // 4) for x in alike.values()]
        where = self.trainer.model.device
        self._steps.append((self.trainer.step, sums([x.to(where) for x in alike.values()])))

    def compared(self, gather: Any) -> Parted | None:
        """What all ranks find of their steps; `gather(value)` gives every rank's."""
        mine = {step: found.cpu() for step, found in self._steps}
        self._steps = []
        of_ranks = gather(mine)
        for step in mine:
            found = torch.stack([one[step] for one in of_ranks])  # [ranks, tensors, 3]
            if (found == found[0]).all():
                continue
            whole = [one.numpy().tobytes() for one in found]
            right = whole.index(Counter(whole).most_common(1)[0][0])
            rank = next(r for r, one in enumerate(whole) if one != whole[right])
            differs = (found[rank] != found[right]).any(1).nonzero()[:, 0].tolist()
            first = differs[0]
            word = changed_word(self._words[first], found[right, first].tolist(), found[rank, first].tolist())
            return Parted(step, rank, self._names[first], len(differs) - 1, word)
        return None
