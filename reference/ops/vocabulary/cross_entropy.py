"""`twin::cross_entropy`, its backward and its mean: softmax cross-entropy of rows of logits.

Of a row x of V logits with target t, in fp32, each operation rounded once:

    m    = max x                                0 if no logit is above -inf; NaN is ignored
    S    = Σ exp(x - m)                         `reference.numbers.elementary.exp`
    loss = log S - (x[t] - m)                   `reference.numbers.elementary.log`; +0 where t is `ignore_index`

With smoothing ε the target has the weight keep = 1 - ε, and every class share = ε / V:

    loss = log S - (keep · (x[t] - m) + ε · ((Σ x) / V - m))

Backward, with the row's gradient g, divided by `divisor` where there is one:

    p  = exp(x - m) · (1 / S)
    dx = round(g · (p - share))                 round(g · (p - (keep + share))) at t; +0 where t is `ignore_index`

One rounding to the logits' dtype. What a backward needs besides logits and targets are m and 1 / S of each row.

The order of both sums, by which a row is read once. Element 8 (256 i + l) + j belongs to lane l < 256, j < 8. A lane
takes its groups of 8 neighbours in tiles of 4, i = 4 n .. 4 n + 3. It has a maximum, -inf at first, and sums from +0:

1. a tile's maximum joins the lane's, and becomes m' (0 while it is -inf);
2. the sum of exponentials is multiplied by exp(maximum before - m');
3. for each group of the tile in order, the sum of its 8 exp(x - m') is added, by a halving tree: for h in (4, 2, 1)
   [j] + [j + h], j < h; and that of its 8 x to the sum of x. Missing elements of the last group are +0.

At last a lane's sum of exponentials is multiplied by exp(its maximum - m). The lanes are added by a halving tree over
the 32 of a warp, for h in (16, 8, 4, 2, 1), and one over the 8 warps, for h in (4, 2, 1).

`cross_entropy_mean`: loss i belongs to lane i mod 1024, which adds in order from +0; then halving trees over the 32
lanes of a warp and over the 32 warps. The sum is divided by the divisor, one rounding each.

A target that is neither a class nor `ignore_index` is an error here. On a GPU, where looking would cost a wait, it
makes its row's loss and gradient NaN.
"""

import numpy as np
import torch

from reference.numbers import elementary, formats
from reference.numbers.elementary import ONE, ZERO, exp_scalar, log_scalar
from reference.ops.checks import check_input, check_like
from reference.ops.library import define
from reference.support.numba_jit import jit

OP = "twin::cross_entropy"
MOST_CLASSES = 1 << 30
KINDS = ("mean", "sum", "mean_or_zero")
_LOWEST = np.float32(-np.inf)
_AT_ONCE = 1 << 22  # logits that are widened at a time


def check_rows(op: str, logits: torch.Tensor, target: torch.Tensor, label_smoothing: float) -> None:
    """Refuse logits that are not `[rows, V]`, targets that are not int64 `[rows]`, and a bad smoothing."""
    check_input(op, "logits", logits)
    if not 0 < logits.shape[1] <= MOST_CLASSES:
        raise ValueError(f"{op}: logits has shape {list(logits.shape)}; 1 to {MOST_CLASSES} classes are accepted.")
    check_like(op, "target", target, torch.int64, logits.shape[:1], logits.device)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must be from 0 to 1; got {label_smoothing}.")


def check_targets(op: str, target: torch.Tensor, classes: int, ignore_index: int) -> None:
    """Refuse a target that is no class. It looks at the numbers, so only the CPU calls it."""
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0, 0])
        raise IndexError(
            f"{op}: target[{at}] is {int(target[at])}; 0 to {classes - 1} and ignore_index={ignore_index} are accepted."
        )


def outputs(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_rows(OP, logits, target, label_smoothing)
    rows = logits.shape[0]
    loss, maximum, inverse = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    return loss, maximum, inverse


def backward_outputs(
    grad: torch.Tensor,
    divisor: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    maximum: torch.Tensor,
    inverse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    op = "twin::cross_entropy_backward"
    check_rows(op, logits, target, label_smoothing)
    for name, x in (("maximum", maximum), ("inverse", inverse)):
        check_like(op, name, x, torch.float32, target.shape, logits.device)
    check_like(op, "grad", grad, torch.float32, target.shape if grad.dim() else (), logits.device)
    if divisor is not None:
        check_like(op, "divisor", divisor, torch.float32, (), logits.device)
    return torch.empty_like(logits)


def mean_outputs(
    loss: torch.Tensor, target: torch.Tensor, ignore_index: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "twin::cross_entropy_mean"
    check_like(op, "target", target, torch.int64, target.shape[:1], loss.device)
    check_like(op, "loss", loss, torch.float32, target.shape, loss.device)
    if kind not in KINDS:
        raise ValueError(f"{op}: kind must be one of {KINDS}; got {kind!r}.")
    return loss.new_empty(()), loss.new_empty(())


@jit
def halve(v: np.ndarray, count: int) -> np.float32:
    """The sum of the first `count` numbers by a halving tree; overwrites them."""
    h = count // 2
    while h > 0:
        for j in range(h):
            v[j] = v[j] + v[j + h]
        h //= 2
    return v[0]


@jit
def add_lanes(lanes: np.ndarray) -> np.float32:
    """The sum over lanes, a multiple of 32, warp by warp; overwrites them."""
    warps = lanes.size // 32
    for warp in range(warps):
        lanes[warp] = halve(lanes[32 * warp : 32 * warp + 32], 32)
    return halve(lanes, warps)


@jit
def _origin(top: np.float32) -> np.float32:
    return ZERO if top == _LOWEST else top


@jit
def row_sums(
    x: np.ndarray, tops: np.ndarray, sums: np.ndarray, plain: np.ndarray, powers: np.ndarray
) -> tuple[np.float32, np.float32, np.float32]:
    """m, S and Σ x of a row; `tops`, `sums` and `plain` `[256]` are overwritten."""
    cols = x.size
    e, v = np.empty(8, np.float32), np.empty(8, np.float32)
    for lane in range(256):
        top, total, straight = _LOWEST, ZERO, ZERO
        for tile in range(8 * lane, cols, 8192):
            before = top
            for first in range(tile, min(tile + 8192, cols), 2048):
                for c in range(first, min(first + 8, cols)):
                    if x[c] > top:  # false for NaN
                        top = x[c]
            origin = _origin(top)
            total = total * exp_scalar(before - origin, powers)
            for first in range(tile, min(tile + 8192, cols), 2048):
                for j in range(8):
                    there = first + j < cols
                    v[j] = x[first + j] if there else ZERO
                    e[j] = exp_scalar(v[j] - origin, powers) if there else ZERO
                total = total + halve(e, 8)
                straight = straight + halve(v, 8)
        tops[lane], sums[lane], plain[lane] = top, total, straight
    top = _LOWEST
    for lane in range(256):
        if tops[lane] > top:
            top = tops[lane]
    origin = _origin(top) + ZERO  # never -0
    for lane in range(256):
        sums[lane] = sums[lane] * exp_scalar(tops[lane] - origin, powers)
    return origin, add_lanes(sums), add_lanes(plain)


@jit
def loss_rows(
    x: np.ndarray,
    target: np.ndarray,
    ignored: int,
    smoothing: np.float32,
    found: np.ndarray,
    powers: np.ndarray,
) -> None:
    """Loss, m and 1 / S of rows x `[rows, V]` into `found` `[3, rows]`; zeros where a row is ignored."""
    tops, sums, plain = np.empty(256, np.float32), np.empty(256, np.float32), np.empty(256, np.float32)
    classes, keep = np.float32(x.shape[1]), ONE - smoothing
    for row in range(x.shape[0]):
        if target[row] == ignored:
            found[:, row] = ZERO
            continue
        m, total, straight = row_sums(x[row], tops, sums, plain, powers)
        at_target = x[row, target[row]] - m
        if smoothing > ZERO:
            at_target = keep * at_target + smoothing * (straight / classes - m)
        found[0, row] = log_scalar(total, powers) - at_target
        found[1, row] = m
        found[2, row] = ONE / total


@jit
def gradient_rows(
    x: np.ndarray,
    target: np.ndarray,
    ignored: int,
    smoothing: np.float32,
    grad: np.ndarray,
    stats: np.ndarray,
    first: int,
    classes: int,
    dx: np.ndarray,
    powers: np.ndarray,
) -> None:
    """The gradient of rows x before its rounding; `grad` `[rows]`, `stats` m and 1 / S `[2, rows]`.

    x `[rows, columns]` has the columns from `first` on of logits that have `classes`.
    """
    share, keep = smoothing / np.float32(classes), ONE - smoothing
    for row in range(x.shape[0]):
        if target[row] == ignored:
            dx[row] = ZERO
            continue
        m, inverse, g = stats[0, row], stats[1, row], grad[row]
        for c in range(x.shape[1]):
            weight = keep + share if first + c == target[row] else share
            dx[row, c] = g * (exp_scalar(x[row, c] - m, powers) * inverse - weight)


@jit
def mean_lanes(loss: np.ndarray) -> np.float32:
    """The sum of the losses in its order."""
    lanes = np.zeros(1024, np.float32)
    for i in range(loss.size):
        lanes[i % 1024] = lanes[i % 1024] + loss[i]
    return add_lanes(lanes)


def _parts(x: torch.Tensor) -> list[slice]:
    """Rows that are widened together."""
    step = max(1, _AT_ONCE // x.shape[1])
    return [slice(first, first + step) for first in range(0, x.shape[0], step)]


def _wide(x: torch.Tensor) -> np.ndarray:
    return formats.widen(x.detach()).contiguous().numpy()


@define(outputs)
def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, m and 1 / S of each row, fp32 `[rows]`.

    Args:
        logits: `[rows, V]`, contiguous; fp32, bf16 or fp16.
        target: int64 `[rows]`, a class or `ignore_index`.
        ignore_index: the target of rows that have no loss; any int.
        label_smoothing: ε, rounded to fp32.

    Raises:
        IndexError: a target is neither a class nor `ignore_index`.
    """
    loss, maximum, inverse = outputs(logits, target, ignore_index, label_smoothing)
    check_targets(OP, target, logits.shape[1], ignore_index)
    found = np.empty((3, logits.shape[0]), np.float32)
    rest = (ignore_index, np.float32(label_smoothing))
    for part in _parts(logits):
        piece = np.empty((3, len(target[part])), np.float32)
        loss_rows(_wide(logits[part]), target[part].numpy(), *rest, piece, elementary.powers_of_two())
        found[:, part] = piece
    for out, values in zip((loss, maximum, inverse), found, strict=True):
        out.copy_(torch.from_numpy(values))
    return loss, maximum, inverse


@define(backward_outputs)
def cross_entropy_backward(
    grad: torch.Tensor,
    divisor: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    maximum: torch.Tensor,
    inverse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """The gradient of `logits`, of their dtype and shape.

    Args:
        grad: of the losses, fp32 `[rows]`; or of their sum or mean, `[]`.
        divisor: of a mean, fp32 `[]`; or None.
        maximum, inverse: m and 1 / S, fp32 `[rows]`.
        logits, target, ignore_index, label_smoothing: the forward's.
    """
    dx = backward_outputs(grad, divisor, logits, target, maximum, inverse, ignore_index, label_smoothing)
    check_targets("twin::cross_entropy_backward", target, logits.shape[1], ignore_index)
    stats = torch.stack([maximum, inverse])
    gradient_of_columns(dx, grad, divisor, logits, target, stats, ignore_index, label_smoothing, 0, logits.shape[1])
    return dx


def gradient_of_columns(
    dx: torch.Tensor,
    grad: torch.Tensor,
    divisor: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    first: int,
    classes: int,
) -> None:
    """Write to `dx` the gradient of `logits` `[rows, columns]`, the columns from `first` on of `classes`.

    Arguments that are checked, as `cross_entropy_backward` has them; `stats` m and 1 / S `[2, rows]`.
    """
    with np.errstate(all="ignore"):
        g = grad.numpy() if divisor is None else grad.numpy() / divisor.numpy()
    rows = np.ascontiguousarray(np.broadcast_to(g, target.shape))
    rest = (ignore_index, np.float32(label_smoothing))
    for part in _parts(logits):
        x = _wide(logits[part])
        out = np.empty_like(x)
        here = (rows[part], np.ascontiguousarray(stats[:, part].numpy()), first, classes)
        gradient_rows(x, target[part].numpy(), *rest, *here, out, elementary.powers_of_two())
        dx[part].copy_(torch.from_numpy(out))


@define(mean_outputs)
def cross_entropy_mean(
    loss: torch.Tensor, target: torch.Tensor, ignore_index: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `loss` over a divisor, and that divisor, fp32 `[]`.

    Args:
        loss: fp32 `[rows]`, +0 in rows that are ignored.
        target: int64 `[rows]`.
        ignore_index: the target of rows that are not counted.
        kind: "sum": the divisor is 1. "mean": how many rows are counted; without any the mean is NaN. "mean_or_zero":
            the same, but 1 at least.
    """
    mean, divisor = mean_outputs(loss, target, ignore_index, kind)
    count = 1 if kind == "sum" else int((target != ignore_index).sum())
    count = max(count, 1) if kind == "mean_or_zero" else count
    with np.errstate(all="ignore"):
        value = np.divide(mean_lanes(loss.numpy()), np.float32(count), dtype=np.float32)
    mean.fill_(float(value))
    divisor.fill_(float(np.float32(count)))
    return mean, divisor
