"""Cases of `twin parity`: optimizers and gradient clipping. None is recorded yet."""

from collections.abc import Iterator
from functools import partial

import torch

from optimized.recordings.case import WIDE, Case, Outputs, named, numbers, short
from reference.ops import adam_states as states
from reference.ops.adam import correction

twin = torch.ops.twin
_SIZES = ((3, 7), (33, 100))
_MOMENTS = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def _lists(**lists: list[torch.Tensor]) -> Outputs:
    return {f"{name}.{i}": x for name, found in lists.items() for i, x in enumerate(found)}


def _drawn(dtype: torch.dtype, seed: int, device: torch.device) -> list[torch.Tensor]:
    return [numbers(shape, dtype, seed + i).to(device) for i, shape in enumerate(_SIZES)]


def _states(dtype: torch.dtype, moment: torch.dtype, remainders: bool, device: torch.device) -> Outputs:
    """Three steps of two tensors, whose masters are remainders, or the parameters themselves."""
    grads, params, rounded = _drawn(dtype, 181, device), _drawn(dtype, 183, device), list[torch.Tensor]()
    if remainders:
        rounded, params = (list(part) for part in zip(*(states.parted(x.float()) for x in params), strict=True))
    moments = [[torch.zeros(shape, dtype=moment, device=device) for shape in _SIZES] for _ in range(2)]
    scales = [[torch.ones(1, device=device) for _ in _SIZES if moment in states.RANGES] for _ in range(2)]
    for step in (1, 2, 3):
        rest = (1e-2, 0.9, 0.999, 1e-8, 0.1, correction(0.9, step), correction(0.999, step), True)
        twin.adam_states(grads, params, *moments, rounded, [], *scales, *rest)
    both = {"exp_avg": moments[0], "exp_avg_sq": moments[1], "scale": scales[0], "scale_sq": scales[1]}
    return _lists(param=params, rounded=rounded, **both)


def _captured(dtype: torch.dtype, scale: float, device: torch.device) -> Outputs:
    """A step, one that is skipped, and another step."""
    grads, params = _drawn(dtype, 191, device), _drawn(dtype, 193, device)
    first, second = ([torch.zeros(shape, device=device) for shape in _SIZES] for _ in range(2))
    step, rate = torch.zeros(1, dtype=torch.int32, device=device), torch.full((), 0.01, device=device)
    given = torch.full((1,), scale, device=device)
    for skipped in (0.0, 1.0, 0.0):
        found = torch.full((1,), skipped, device=device)
        control = twin.adam_control(step, rate, given, found, 0.9, 0.999, True)
        twin.adam_capturable(grads, params, first, second, [], control, 0.9, 0.999, 1e-8, 0.1, True, True)
    lists = _lists(grad=grads, param=params, exp_avg=first, exp_avg_sq=second)
    return {**lists, "control": control, "step": step}


def _sgd(dtype: torch.dtype, nesterov: bool, device: torch.device) -> Outputs:
    grads, params, buffers = (_drawn(dtype, 195 + 2 * i, device) for i in range(3))
    for step in range(3):
        twin.sgd(grads, params, buffers, 1e-2, 0.9, 0.0 if nesterov else 0.3, 0.1, nesterov, step == 0, nesterov)
    return _lists(param=params, buffer=buffers)


def _adafactor(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Outputs:
    count = torch.Size(shape).numel()
    grad, param = (numbers((1, count), dtype, 203 + i).view(shape).to(device) for i in range(2))
    matrix = len(shape) > 1
    row = torch.zeros((*shape[:-1], 1) if matrix else shape, device=device)
    col = torch.zeros((*shape[:-2], 1, shape[-1]), device=device) if matrix else None
    for weight in (1.0, 0.6, 0.4):
        twin.adafactor(grad, param, row, col, 0.01, weight, 0.999, 1e-7, 1e-14, 1e-3, 1.0, False)
    if col is None:
        return named("param variance", (param, row))
    return named("param row_var col_var", (param, row, col))


def _clip(dtype: torch.dtype, device: torch.device) -> Outputs:
    grads = [numbers(shape, dtype, 207 + i).to(device) for i, shape in enumerate(((3, 7), (330, 100), (32769, 1)))]
    norms = [twin.grad_norm(grads, kind) for kind in ("l2", "max")]
    twin.clip_grads(grads, norms[0], 0.37)
    return {**_lists(grad=grads), **named("l2 max", norms)}


def cases() -> Iterator[Case]:
    """Adam with other state and on the device, SGD, Adafactor, and clipping."""
    for dtype in WIDE:
        for moment in _MOMENTS:
            kind = f"{short(dtype)}, moments in {str(moment).removeprefix('torch.')}"
            yield Case("adam_states", kind, partial(_states, dtype, moment, False), live=True)
        yield Case("adam_capturable", f"{short(dtype)}, scale 3", partial(_captured, dtype, 3.0), live=True)
        for nesterov in (False, True):
            yield Case("sgd", short(dtype) + ", Nesterov" * nesterov, partial(_sgd, dtype, nesterov), live=True)
        for shape in ((65, 300), (2, 70, 5), (700,)):
            size = "x".join(map(str, shape))
            yield Case("adafactor", f"{short(dtype)} {size}", partial(_adafactor, dtype, shape), live=True)
        yield Case("clip_grads", short(dtype), partial(_clip, dtype), live=True)
    yield Case("adam_states", "bf16, remainders", partial(_states, torch.bfloat16, torch.bfloat16, True), live=True)
