"""`twin::bias_dropout_add` and `twin::dropout_backward` on the GPU: kernels/random/dropout.cu.
Semantics: `reference.ops.random.dropout`.
"""

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, pointer
from reference.ops.library import on_cuda
from reference.ops.random.dropout import bias_dropout_add_outputs, dropout_backward_outputs, keep_scale, threshold

_THREADS = 256
_ELEMENTS = 8  # that a thread computes
_MACROS: dict[tuple[bool, bool], dict[str, int]] = {  # by whether entries have m, and whether x is placed
    (deep, placed): {name: 1 for name, given in (("DEPTH", deep), ("PLACED", placed)) if given}
    for placed in (False, True)
    for deep in (False, True)
}
_kernels = {
    (dtype, *case): launch.function("dropout", "bias_dropout_add", {"WIDE": wide, **macros})
    for case, macros in _MACROS.items()
    for dtype, wide in WIDE.items()
}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]
_advance = launch.function("dropout", "advance", {"WIDE": 1})


def advance(rng_state: torch.Tensor) -> None:
    """Add one to the offset of a generator's state, on its device, in the order of launches."""
    launch.launch(_advance, (1,), (1,), [rng_state.data_ptr()], device=rng_state.device.index)


def run(
    out: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    p: float,
    rng_state: torch.Tensor | None,
    kept: torch.Tensor | None = None,
    backward: bool = False,
) -> torch.Tensor:
    """Launch the kernel on checked arguments. It writes `out`; the state is not advanced."""
    if not x.numel():
        return out
    pointers = [pointer(tensor) for tensor in (x, bias, residual, out)]
    sizes = (np.int64(x.numel()), np.int32(x.shape[1]))
    state = pointer(rng_state) if threshold(p) else 0
    vector = np.int32(all(address % 16 == 0 for address in pointers))
    args = (*pointers, *sizes, np.uint32(threshold(p)), np.float32(keep_scale(p)), state, vector, np.int32(backward))
    if kept is not None:
        args = (*args, kept.data_ptr(), np.int64(x.numel() // kept.shape[0]))
    placed = state != 0 and rng_state is not None and len(rng_state) > 2
    kernel = _kernels[x.dtype, kept is not None, placed]
    grid = (-(-x.numel() // (_THREADS * _ELEMENTS)),)
    launch.launch(kernel, grid, (_THREADS,), args, device=x.device.index)
    return out


@on_cuda
def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    p: float,
    rng_state: torch.Tensor | None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x`, `residual` `[rows, hidden]`, `bias` `[hidden]` -> `[rows, hidden]`; advances `rng_state` where p > 0."""
    given = (x, bias, residual, p, rng_state, kept)
    out = run(bias_dropout_add_outputs(*given), *given)
    if threshold(p):
        assert rng_state is not None
        advance(rng_state)
    return out


@on_cuda
def dropout_backward(
    grad: torch.Tensor, p: float, rng_state: torch.Tensor | None, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of dropout's input; `rng_state` is the state from before the forward."""
    out = dropout_backward_outputs(grad, p, rng_state, kept)
    return run(out, grad, None, None, p, rng_state, kept, backward=True)
