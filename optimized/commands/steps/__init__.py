"""The steps of `twin walkthrough`. The `run` of each computes something, writes a section of the report and returns an
`Outcome`; `progress(name, total)` gives it a function to call after each part of the work.
"""

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[str, int], Callable[[], None]]


@dataclass(frozen=True)
class Outcome:
    """A row of the walkthrough's last table.

    `equal` says whether everything that had to be equal was equal in every bit; None if nothing had to.
    """

    step: str
    result: str
    equal: bool | None = None
