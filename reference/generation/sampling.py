"""The next token of a sequence: drawn from its logits by its own random numbers, the same on every device.

Of a sequence that has n tokens, logits x `[V]` and a `Sampling` (temperature T, top_k, top_p, seed):

    w      = twin::token_weights(x, T)         integers, about 2^30 · exp((x - max x) / T); T = 0: the first largest x
    order    larger w first; of equal ones the token with the lower number first
    top_k    only the first top_k tokens in this order stay; 0 is all
    top_p    of these, token i of the order stays where the sum before it is < top_p · (sum of all of them); 1 is all
    u      = word / 2^32                       word 0 of Philox4x32 with the key `seed` and the counter (n, 0)
    token  = the first, by number, at which the sum of w up to it (tokens that stay) is > u · (sum of all that stay)

Sums are integers below 2^53, so their order means nothing. top_p · sum and u · sum are float64 products, rounded once;
an integer is compared with one by comparing it with the product's ceiling or floor. Where all rows have T = 0, one pass
over their logits finds tokens and losses (`twin::likeliest`).
So a token depends on x, the settings and n alone: not on the batch, on when the sequence was admitted, or on what was
drawn before it. Two sequences with one seed and one text continue alike: give every sequence a seed of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reference.numbers import philox
from reference.ops.library import twin
from reference.support import pinned

_NO_TARGET = -100
MOST = 2**62  # tokens: the largest top_k


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; by default the likeliest one is taken.

    Args:
        temperature: divides logits; 0 takes the first largest one.
        top_k: so many of the likeliest tokens can be drawn; 0 is all.
        top_p: those can be drawn which are the likeliest ones of this share of the probability; 1 is all.
        seed: of the sequence's random numbers, 0 to 2^64 - 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        def check(name: str, types: Any, low: float, high: float, text: str) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, types) or not low <= value <= high:
                raise ValueError(f"Sampling: {name}={value!r}; {text} is accepted.")

        check("temperature", (int, float), 0, 1e30, "a number from 0 to 1e30")
        check("top_k", int, 0, MOST, "an int from 0 (all tokens) on")
        check("top_p", (int, float), 0, 1, "a number from 0 to 1 (all tokens)")
        check("seed", int, 0, 2**64 - 1, "an int from 0 to 2^64 - 1")

    @property
    def sorts(self) -> bool:
        """Whether some tokens cannot be drawn, so that the order of all is needed."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> Any:
    """u, float64 `[rows]`, in NumPy: of each row's seed and its sequence's length."""
    key, at, low = np.array(seeds, np.uint64), np.array(positions, np.uint64), np.uint64(0xFFFFFFFF)
    high = np.uint64(32)
    words = philox.philox4x32((at & low, at >> high, 0, 0), (key & low, key >> high))
    return words[0] * 2.0**-32


def kept(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Weights int32 `[rows, V]`, 0 where a token cannot be drawn; top_k int64 `[rows]`, 1 or more, top_p float64."""
    values, tokens = weights.sort(dim=1, descending=True, stable=True)
    first = torch.arange(weights.shape[1], device=weights.device) < top_k[:, None]
    values = values * first
    upto = values.cumsum(1, dtype=torch.int64)
    stays = upto - values < (top_p * upto[:, -1]).ceil().long()[:, None]  # integers below a number: below its ceiling
    stays[:, 0].fill_(True)
    return torch.zeros_like(weights).scatter_(1, tokens, values * stays)


def drawn(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Tokens int64 `[rows]` of weights int32 `[rows, V]` and u float64 `[rows]`."""
    upto = weights.cumsum(1, dtype=torch.int64)
    height = (upto[:, -1] * u).floor().long()  # an integer is above a number if it is above its floor
    return torch.searchsorted(upto, height[:, None], right=True)[:, 0]


class Drawing:
    """The settings of rows on their device, in tensors that stay where they are: a CUDA graph may read them.

    Args:
        rows: of logits.
        limited: how many of them have `Sampling.sorts`; others need no order of their tokens.
    """

    def __init__(self, rows: int, limited: int, device: torch.device) -> None:
        self.rows, self.limited = rows, limited
        self._host = torch.zeros(5, rows, dtype=torch.int64, device="cpu")
        with torch.inference_mode(False):
            self._device = torch.zeros(5, rows, dtype=torch.int64, device=device)
        self._settings: list[Sampling] = []

    def fill(self, settings: Sequence[Sampling], positions: Sequence[int]) -> None:
        """Let rows be drawn by these settings, on sequences of `positions` tokens; one copy from the host."""
        host, settings = self._host.numpy(), list(settings)
        if settings != self._settings:  # most steps have those of the step before
            host[0].view(np.float64)[:] = [one.temperature for one in settings]
            if self.limited:
                rows = limited_rows(settings)
                rows += rows[:1] * (self.limited - len(rows))  # again the first of them: it is written twice, alike
                host[2, : self.limited] = rows
                host[3, : self.limited] = [settings[row].top_k or MOST for row in rows]
                host[4].view(np.float64)[: self.limited] = [settings[row].top_p for row in rows]
            self._settings = settings
        host[1].view(np.float64)[:] = uniform([one.seed for one in settings], positions)
        pinned.fill(self._device, self._host)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Tokens int64 `[rows]`, drawn from logits `[rows, V]`; contiguous."""
        temperature, u, rows, top_k, top_p = self._device
        weights = twin.token_weights(logits, temperature.view(torch.float64).float())
        if self.limited:
            rows, top_k = rows[: self.limited], top_k[: self.limited]
            limits = (top_k, top_p.view(torch.float64)[: self.limited])
            weights.index_copy_(0, rows, kept(weights.index_select(0, rows), *limits))
        return drawn(weights, u.view(torch.float64))


def limited_rows(settings: Sequence[Sampling]) -> list[int]:
    """Rows in which some tokens cannot be drawn."""
    return [row for row, one in enumerate(settings) if one.sorts]


def drawing_of(settings: Sequence[Sampling], positions: Sequence[int], device: torch.device) -> Drawing | None:
    """How rows are drawn; None where all take their likeliest token."""
    if not any(one.temperature for one in settings):
        return None
    drawing = Drawing(len(settings), len(limited_rows(settings)), device)
    drawing.fill(settings, positions)
    return drawing


def next_tokens(logits: torch.Tensor, drawing: Drawing | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's token, int64 `[rows]`, and its loss, fp32 `[rows]`, from logits `[rows, V]`; contiguous."""
    if drawing is None:
        return twin.likeliest(logits)  # type: ignore[no-any-return]
    tokens = drawing(logits)
    return tokens, twin.cross_entropy(logits, tokens, _NO_TARGET, 0.0)[0]


def sample(logits: torch.Tensor, settings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
    """Tokens int64 `[rows]` that follow on sequences of `positions` tokens, from logits `[rows, V]`; contiguous.

    Raises:
        ValueError: there are not as many settings, or positions, as rows.
    """
    if not len(settings) == len(positions) == len(logits):
        raise ValueError(
            f"sample: {len(settings)} settings and {len(positions)} positions of {len(logits)} rows; as many are "
            "accepted."
        )
    return next_tokens(logits, drawing_of(settings, positions, logits.device))[0]
