"""`RankDigests`: the sentence about the first word that a rank has alone, without processes.

tests/training/test_ranks_that_fail.py has `twin train --compare-every` on ranks.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optimized.training.rank_digests import Parted, RankDigests

STEPS = 3


def digests(changes: dict[int, dict[str, dict[int, int]]]) -> RankDigests:
    """Of a rank with changed words: what is added, by step, tensor and place."""
    model: Any = SimpleNamespace(device=torch.device("cpu"))
    gradient = torch.nn.Parameter(torch.zeros(4))
    model.named_parameters = lambda: [("w", gradient)]
    tensors = {name: torch.arange(40, dtype=torch.int32) + 7 for name in ("model/w", "optimizer/w", "fp8/scale")}
    trainer: Any = SimpleNamespace(model=model, tensors=lambda: tensors, step=0)
    found = RankDigests(trainer)
    for step in range(1, STEPS + 1):
        trainer.step, gradient.grad = step, torch.arange(4.0)
        for name, changed in changes.get(step, {}).items():
            for place, more in changed.items():
                (gradient.grad.view(torch.int32) if name == "gradient/w" else tensors[name])[place] += more
        found.add()
    return found


def parted(*of_ranks: RankDigests) -> Parted | None:
    """What ranks find that exchange what they have."""
    sent: list[Any] = []
    for one in of_ranks[1:]:
        assert one.compared(lambda mine: sent.append(mine) or [mine]) is None
    return of_ranks[0].compared(lambda mine: [mine, *sent])


@pytest.mark.parametrize(
    ("changed", "said", "made"),
    [
        ({"model/w": {5: -3}}, "model/w: its word 5, by -3 as an integer. It is", "twin::adam"),
        ({"fp8/scale": {39: 4}}, "fp8/scale: its word 39, by +4 as an integer. It is", "twin::scale_update"),
        (
            {"gradient/w": {2: 1}, "model/w": {8: 1}, "optimizer/w": {8: 1}},
            "gradient/w: its word 2, by +1 as an integer, and 2 other tensors. It is",
            "twin::grad_norm",
        ),
    ],
    ids=["model", "fp8", "gradient"],
)
def test_the_rank_the_step_the_tensor_and_the_word_are_named(
    changed: dict[str, dict[int, int]], said: str, made: str
) -> None:
    found = str(parted(digests({}), digests({2: changed}), digests({})))
    assert found.startswith(f"rank 1 has other words after step 2: {said}")
    assert made in found


def test_of_several_words_none_is_named() -> None:
    found = str(parted(digests({}), digests({}), digests({3: {"model/w": {5: 1, 6: -2}}})))
    assert found.startswith("rank 2 has other words after step 3: model/w. It is made by ")


def test_ranks_with_the_same_words_do_not_part() -> None:
    assert parted(digests({}), digests({})) is None
