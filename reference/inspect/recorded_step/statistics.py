"""What a replay says about each tensor: how it fills its format, how exact it is, and where NaN and infinity began.

Of each result of a twin op that is a matrix of numbers:

    amax          the largest magnitude, NaN and infinity aside; of codes, that of the numbers before the cast
    scale         what numbers were multiplied by before the cast: 1 / scale_inv
    saturated     share of numbers that the cast clipped: a format with one more number above would round them there
    underflowed   share of numbers that are not 0 and became the code of 0
    SQNR          10 log10( sum of x² / sum of (result - x)² ) in dB, where x is the op in float64
                  (`reference.inspect.recorded_step.float64`) and result what it returned, for codes times scale_inv;
                  over the elements in which both are finite
    NaN, infinity how many
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from reference.inspect.recorded_step.file import Op, Recording
from reference.inspect.recorded_step.float64 import evaluated
from reference.inspect.recorded_step.ops import decoded, dtype_name
from reference.inspect.recorded_step.replay import read_name, result_names, written_name
from reference.numbers import formats
from reference.ops.casts.cast_blocks import of_each

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_WIDE = (torch.float32, torch.bfloat16, torch.float16)
# No matrices of numbers, or shown already.
_ASIDE = ("codes_t", "scale", "scales", "scale_inv", "scale_inv_t", "mean", "rstd", "m", "inv")


@dataclass(frozen=True)
class Row:
    """One result; see the head of the file. A share, scale or SQNR is None where it has no meaning."""

    op: int
    at: str
    phase: str
    name: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    amax: float
    scale: float | None
    saturated: float | None
    underflowed: float | None
    sqnr: float | None
    nan: int
    infinite: int


class Statistics:
    """An observer for `replay`.

    Attributes:
        rows: in the order of the ops.
        first: the op in which NaN, and in which infinity, first appeared, and in which of its tensors, in words.
    """

    def __init__(self, recording: Recording) -> None:
        self._names = recording.names
        self.rows: list[Row] = []
        self.first: dict[str, tuple[int, Op, str]] = {}

    def __call__(self, number: int, op: Op, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        for i, x in enumerate(read):
            self._look(number, op, x, "read it in", read_name, i)
        for i, x in enumerate(written):
            self._look(number, op, x, "made it in", written_name, i)
        names = result_names(op)
        args = decoded(op.args, read)
        wide = evaluated(op.name.removeprefix("twin::"), args)
        for i, name in enumerate(names):
            if i < len(written) and name not in _ASIDE and written[i].numel() and written[i].dtype in (*_FP8, *_WIDE):
                scale_inv = None
                if written[i].dtype in _FP8:
                    scale_inv = next((written[j] for j in range(i + 1, len(names)) if names[j] == "scale_inv"), None)
                    if scale_inv is not None and "cast_blocks" in op.name:
                        square = op.name.startswith("twin::cast_blocks") and args[2]
                        rows, cols = written[i].shape
                        scale_inv = of_each(scale_inv, rows, cols, square)
                    elif scale_inv is not None and op.name.startswith("twin::cast_rowwise"):
                        scale_inv = scale_inv[:, None]
                cast = self._name(op, 0) if scale_inv is not None and name == "codes" and i == 0 else name
                self.rows.append(_row(number, op, cast, written[i], scale_inv, wide[i] if i < len(wide) else None))
        if op.name == "twin::multi_cast_transpose":
            self._weights(number, op, read, written)

    def _weights(self, number: int, op: Op, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Rows of the op that casts several weights: it writes histories, codes, transposes and scale_invs."""
        xs = decoded(op.args, read)[0]
        codes, scale_invs = written[-3 * len(xs) : -2 * len(xs)], written[-len(xs) :]
        for i, (x, q, scale_inv) in enumerate(zip(xs, codes, scale_invs, strict=True)):
            if q.numel():
                self.rows.append(_row(number, op, self._name(op, i), q, scale_inv, x.double()))

    def _name(self, op: Op, read: int) -> str:
        """What codes are called: "codes", and of what, if that has a name in the model."""
        region = op.reads[read].region
        of = self._names.get((region.storage, region.offset))
        return "codes" if of is None else f"codes of {of.removeprefix(op.at + '.')}"

    def _look(self, number: int, op: Op, x: torch.Tensor, how: str, name: Callable[[Op, int], str], i: int) -> None:
        if not x.is_floating_point() or len(self.first) == 2:
            return
        x = formats.decode(x) if x.dtype in _FP8 else x
        for special, there in (("NaN", x.isnan()), ("infinity", x.isinf())):
            if special not in self.first and bool(there.any()):
                self.first[special] = (number, op, f"{how} {name(op, i)}")


def _row(
    number: int, op: Op, tensor: str, x: torch.Tensor, scale_inv: torch.Tensor | None, wide: torch.Tensor | None
) -> Row:
    scale = saturated = underflowed = None
    values = (formats.decode(x) if x.dtype in _FP8 else x).double()
    seen = values
    if scale_inv is not None and x.dtype in _FP8:
        scale = 1.0 / scale_inv.item() if scale_inv.numel() == 1 else None
        seen = values * scale_inv.double()
        if wide is not None:
            fmt = formats.format_of(x.dtype)
            clipped = (wide / scale_inv.double()).abs() >= fmt.largest + fmt.spacing(fmt.largest) / 2
            saturated, underflowed = _share(clipped), _share((values == 0) & (wide != 0))
    magnitude = seen if wide is None or scale_inv is None else wide
    finite = magnitude[magnitude.isfinite()].abs()
    return Row(
        number, op.at, op.phase, op.name.removeprefix("twin::"), tensor, dtype_name(x.dtype), tuple(x.shape),
        finite.max().item() if finite.numel() else 0.0, scale, saturated, underflowed,
        None if wide is None else sqnr(seen, wide), int(values.isnan().sum()), int(values.isinf().sum()),
    )  # fmt: skip


def _share(of: torch.Tensor) -> float:
    """Of all elements; 0 of none."""
    return int(of.sum()) / max(1, of.numel())


def sqnr(found: torch.Tensor, exact: torch.Tensor) -> float | None:
    """The signal to quantization noise ratio in dB; infinity where nothing differs, None without a signal."""
    both = found.isfinite() & exact.isfinite()
    signal = exact[both].square().sum().item()
    noise = (found[both] - exact[both]).square().sum().item()
    if signal == 0:
        return None
    return 10 * math.log10(signal / noise) if noise else math.inf
