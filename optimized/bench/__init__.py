"""What `twin bench` measures.

A benchmark has NAME, WHAT (in a few words), `run(progress)`, which measures and returns a result, and `tables(result)`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from optimized import measure

Progress = Callable[[float], object]
Payload = dict[str, Any]
Case = TypeVar("Case")


def silent(done: float) -> None:
    """Progress that nobody watches."""


def each(cases: Sequence[Case], progress: Progress) -> Iterator[Case]:
    """The cases in turn; after each, `progress` is told the fraction done."""
    for done, case in enumerate(cases, 1):
        yield case
        progress(done / len(cases))


def last_tenth(losses: Sequence[float]) -> float:
    """The mean of the last tenth, the sum exact: Python 3.12's `sum` differs from 3.11's in the last digit."""
    last = losses[-max(1, len(losses) // 10) :]
    return math.fsum(last) / len(last)


def bits(nats: Any) -> Any:
    """Losses, a number or an array, in bits, as pages and pictures show them; results hold them in nats."""
    return nats / math.log(2)


def result(what: str, kernels: Sequence[str], **found: Any) -> Payload:
    """What `run` returns: what was measured, what was `found`, and where it comes from; it depends on `kernels`."""
    return {"what": what, **found, "provenance": measure.provenance(kernels)}
