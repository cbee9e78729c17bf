"""What a comparison of two runs has found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Where runs part; `str()` is the verdict in sentences.

    Attributes:
        equal: whether everything that both have is the same.
        lines: the verdict.
        step: the first step that differs; None in recordings, which are of one step.
        op: the number of the first op that differs, -1 for the start of the step; None in trails.
        tensor: the first tensor that differs, in words.
        index: of its first number that differs; None where the files do not say.
        who: the runs, or ranks, that differ from the others.
    """

    equal: bool
    lines: tuple[str, ...]
    step: int | None = None
    op: int | None = None
    tensor: str | None = None
    index: tuple[int, ...] | None = None
    who: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.lines)


def listed(parts: list[str] | tuple[str, ...]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
