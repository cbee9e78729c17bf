"""Cases of `scale_update`."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import Call, Calls, Inputs
from optimized.recordings.case import Case, Outputs, numbers

twin = torch.ops.twin


def _scale_update(algorithm: str, margin: int, device: torch.device) -> Outputs:
    """Nine updates of three modules at once, with amaxes of 0, infinity and NaN among them."""
    scales = [torch.ones(n, device=device) for n in (3, 3, 2)]
    histories = [torch.zeros(rows, n, device=device) for rows, n in ((5, 3), (1, 3), (16, 2))]
    amaxes = numbers((9, 8), torch.float32, 51).abs()
    amaxes[3] = 0.0
    amaxes[4, :3] = torch.tensor([float("inf"), float("nan"), 1e-45])
    for step in range(9):
        for history, part in zip(histories, amaxes[step].split([3, 3, 2]), strict=True):
            history[0] = part.to(device)
        twin.scale_update(scales, histories, 448.0, margin, algorithm)
    return {
        **{f"scale{i}": scale for i, scale in enumerate(scales)},
        **{f"history{i}": history for i, history in enumerate(histories)},
    }


def cases() -> Iterator[Case]:
    for algorithm, margin in product(("max", "most_recent"), (0, 2)):
        yield Case("scale_update", f"{algorithm}, margin {margin}", partial(_scale_update, algorithm, margin))


def _call(c: Inputs, widths: Sequence[int], algorithm: str, margin: int, rows: int = 3) -> Call:
    scales = [c.positive(n) for n in widths]
    histories = [c.positive(rows + n, n) for n in widths]
    return Call(twin.scale_update, (scales, histories, 448.0, margin, algorithm))


def calls(c: Inputs) -> Calls:
    for algorithm, margin, rows in product(("max", "most_recent"), (0, 2), (1, 3, 1030)):
        yield _call(c, (3, 2, 6), algorithm, margin, rows)
    yield _call(c, (0,), "max", 0)
    yield _call(c, [2] * 65, "max", 0)  # one more than the kernel's smallest capacity


def large(c: Inputs) -> Calls:
    for count in (64, 1024, 1025):  # the capacities of the kernel's arguments
        yield _call(c, [2] * count, "max", 0)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for algorithm in ("max", "most_recent"):
        yield _call(c, (cols,), algorithm, 0)
