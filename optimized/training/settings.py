"""What a training run is: sizes, schedule and precision, as numbers that a checkpoint can hold.

The arithmetic here uses +, −, · and / of IEEE doubles alone, so that each machine has the same learning rates: a
library's cosine may differ in its last bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from reference.optimizers.parameters import FLT_MAX
from reference.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

BYTES = 256
LARGEST = 2**31 - 1
COUNTS = (
    *("sequence", "hidden", "heads", "layers", "rows", "vocabulary"),
    *("steps", "warmup", "accumulate", "groups", "amax_history_len"),
)
RECIPES: dict[str, Callable[["Settings"], Recipe | None]] = {
    "bf16": lambda settings: None,
    "delayed": lambda settings: DelayedScaling(amax_history_len=settings.amax_history_len),
    "current": lambda settings: Float8CurrentScaling(),
    "block": lambda settings: Float8BlockScaling(),
    "rowwise": lambda settings: Float8RowwiseScaling(),
    "rowwise_with_gw_hp": lambda settings: Float8RowwiseScaling(weight_gradient="high_precision"),
    "mxfp8": lambda settings: MXFP8BlockScaling(),
    "nvfp4": lambda settings: NVFP4BlockScaling(),
}


@dataclass(frozen=True)
class Settings:
    """A GPT and its training. The defaults are the walkthrough's.

    Attributes:
        layers, hidden, heads: of the transformer; its MLPs have 4 · hidden.
        sequence: bytes that the model sees at most; rows: sequences of a microbatch; accumulate: microbatches a step.
        groups: of a step's microbatches, whose sums are added in a tree (`te.parallel.GradientOrder`); a divisor of
            accumulate. So many ranks at most share a step, to the same bits.
        vocabulary: rows of the table. A text has 256 different bytes; GPT-2's sizes have room for 50,304.
        steps, learning_rate, warmup: the schedule, see `rate`.
        betas, weight_decay: AdamW's; vectors do not decay.
        clip: the largest norm of the gradient; 0: it is not clipped.
        std: of the first weights; proj's and fc2's are smaller by √(2 · layers), as in GPT-2.
        dropout: of attention's weights, and of what attention and MLP add.
        precision: of the layers' linear maps, one of `RECIPES`; all else has 16 bits. A CPU alone has mxfp8 and nvfp4.
        amax_history_len: steps that delayed scaling remembers.
        recompute: keep only the layers' inputs for backward.
        seed: of weights, masks and places in the text.
    """

    sequence: int = 64
    hidden: int = 128
    heads: int = 2
    layers: int = 2
    rows: int = 8
    vocabulary: int = BYTES
    steps: int = 80
    learning_rate: float = 0.002
    warmup: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.0
    std: float = 0.02
    dropout: float = 0.0
    precision: str = "bf16"
    amax_history_len: int = 16
    accumulate: int = 1
    groups: int = 1
    recompute: bool = False
    seed: int = 2026

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in COUNTS:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LARGEST:
                raise ValueError(
                    f"{name}={_shown(value)}; a whole number, at least 1 and at most {LARGEST}, is accepted."
                )
        for name in ("learning_rate", "weight_decay", "clip", "std"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= FLT_MAX:
                raise ValueError(f"{name}={_shown(value)}; a finite number of at least 0 is accepted, as fp32 has it.")
        wrong = [
            f"precision={self.precision!r}; {', '.join(RECIPES)} are accepted" * (self.precision not in RECIPES),
            f"hidden={self.hidden} with heads={self.heads}; a multiple is accepted" * bool(self.hidden % self.heads),
            f"groups={self.groups} with accumulate={self.accumulate}; a divisor is accepted"
            * bool(self.accumulate % self.groups),
            f"dropout={self.dropout}; a number from 0 to below 1 is accepted" * (not 0 <= self.dropout < 1),
            f"vocabulary={self.vocabulary}; at least {BYTES} is accepted" * (self.vocabulary < BYTES),
            f"seed={_shown(self.seed)}; 0 to 2^63 - 1 is accepted" * (not 0 <= self.seed < 2**63),
        ]
        for one in filter(None, wrong):
            raise ValueError(f"{one}.")

    def recipe(self) -> Recipe | None:
        """The recipe of the layers' linear maps, or None."""
        return RECIPES[self.precision](self)

    def rate(self, step: int) -> float:
        """The learning rate of a step: it rises over `warmup` steps, and falls as a cosine to 0 over all others."""
        if step < self.warmup:
            return self.learning_rate * ((step + 1) / self.warmup)
        return self.learning_rate * falling((step - self.warmup) / max(1, self.steps - self.warmup))

    @property
    def tokens(self) -> int:
        """Bytes that a step guesses."""
        return self.accumulate * self.rows * self.sequence

    @property
    def numbers(self) -> int:
        """Parameters in matrices that multiply: four maps of each layer, and the head."""
        return 12 * self.layers * self.hidden**2 + self.vocabulary * self.hidden

    @property
    def flops(self) -> int:
        """Floating-point operations of a step: 6 for each of `numbers` and token, and causal attention's products.

        What is recomputed does not count.
        """
        return self.tokens * (6 * self.numbers + 6 * self.layers * self.hidden * self.sequence)

    @property
    def least_bytes(self) -> int:
        """Bytes that a step needs at least: weights and two moments in fp32, and each layer's input in 16 bits."""
        weights = self.numbers + self.sequence * self.hidden
        return 12 * weights + 2 * self.layers * self.rows * self.sequence * self.hidden

    def differences(self, other: "Settings") -> list[str]:
        """The names of what differs."""
        return [one.name for one in fields(self) if getattr(self, one.name) != getattr(other, one.name)]


def _shown(value: object) -> str:
    """A value in a sentence, shortened."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def falling(t: float) -> float:
    """(1 + cos πt) / 2 for 0 <= t <= 1, as cos²(πt/2): its series by Horner's rule, within 2^-51."""
    x = math.pi / 2 * t
    total = 0.0
    for k in range(11, -1, -1):
        total = (-1.0 if k % 2 else 1.0) / math.factorial(2 * k) + x * x * total
    return total * total


_GPT: dict[str, Any] = {"vocabulary": 50304, "sequence": 1024, "rows": 8, "steps": 1000, "warmup": 100}
_COMMON: dict[str, Any] = {"weight_decay": 0.1, "clip": 1.0}
SIZES = {
    "nano": Settings(sequence=128, rows=4, steps=200, warmup=20, **_COMMON),
    "micro": Settings(
        hidden=256, heads=4, layers=4, sequence=256, steps=1000, warmup=100, learning_rate=0.001, **_COMMON
    ),
    "124m": Settings(hidden=768, heads=12, layers=12, learning_rate=6e-4, **_GPT, **_COMMON),
    "350m": Settings(hidden=1024, heads=16, layers=24, learning_rate=3e-4, **_GPT, **_COMMON),
    "1.3b": Settings(hidden=2048, heads=16, layers=24, learning_rate=2e-4, **_GPT, **_COMMON),
}
