"""The steps of `twin walkthrough`: each computes something, writes its part of the report and returns an `Outcome`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One line of the walkthrough's closing table.

    `equal` says whether everything that had to be equal in every bit was; None where nothing had to.
    """

    step: str
    result: str
    equal: bool | None = None
