"""What a `Generator` is asked for and what it finds: requests, batches of them, steps on their way, tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch

from reference.generation.sampling import Sampling
from reference.nn.attentions.fixed_step import FixedStep
from reference.support import pinned


class Token(NamedTuple):
    """What a step has found: the next token of request `name`, its log-probability, and why it is the last, if it is.

    `ended` is None, "stop" (it is one of the request's stop tokens) or "length".
    """

    name: int
    token: int
    logprob: float
    ended: str | None


class Completion(NamedTuple):
    """The new tokens of a request, their log-probabilities, and why they end."""

    tokens: list[int]
    logprobs: list[float]
    ended: str


@dataclass
class Request:
    """A request, and `text`, its tokens so far: a prompt of `first` tokens and what was found."""

    name: int
    text: list[int]
    limit: int
    sampling: Sampling
    stop: frozenset[int]
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = len(self.text)

    @property
    def left(self) -> int:
        """How many tokens it may still get."""
        return self.first + self.limit - len(self.text)


class Batch:
    """Requests in the order of a step. Lists of what they have are made once, since steps follow on each other."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.names = [one.name for one in requests]
        self.texts = [one.text for one in requests]
        self.settings = [one.sampling for one in requests]
        self.stops = [(i, one.stop) for i, one in enumerate(requests) if one.stop]


class Flight(NamedTuple):
    """A step that was launched and not yet read: it draws counts[i] tokens of a batch's request i, one after the other.

    What it draws lies in `tokens`, int64 on the device; of a graph's step that is part of `held`.
    """

    batch: Batch
    counts: list[int]
    drafts: dict[int, list[int]]
    tokens: torch.Tensor
    held: FixedStep | None
    found: pinned.Fetched

    @staticmethod
    def of_graph(batch: Batch, held: FixedStep) -> "Flight":
        """A step of one token each, with a copy to the host behind it."""
        return Flight(batch, [1] * len(batch.names), {}, held.tokens, held, pinned.Fetched(held.found))

    def wait(self) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities, when they are there."""
        found = self.found.wait()
        tokens, losses = found if self.held is None else self.held.parted(found[0])
        count = sum(self.counts)
        return tokens[:count].tolist(), (-losses[:count]).tolist()


def common(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """With how many equal tokens two texts begin, at most `most`."""
    pairs = enumerate(islice(zip(a, b, strict=False), most))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b), most))
