"""The steps of `twin walkthrough`: each computes something, writes its part of the report and returns an `Outcome`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """A row of the walkthrough's last table.

    `equal` says whether everything that had to be equal was equal in every bit; None if nothing had to.
    """

    step: str
    result: str
    equal: bool | None = None
