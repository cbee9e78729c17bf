"""`twin::adam_control` and `twin::adam_capturable` on the GPU: kernels/optimizers/adam_control.cu and adam_states.cu.

Semantics: `reference.ops.optimizers.adam_capturable`.
"""

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, pointer
from optimized.ops.multi_tensor import ELEMENTS_PER_BLOCK, THREADS, tables
from optimized.ops.optimizers.adam_states import _ROW, CAPACITIES, KINDS, MASTER, OWN, kernel, rows, scalars, tiles
from reference.ops.library import on_cuda
from reference.ops.optimizers.adam_capturable import control_outputs, outputs

_control = launch.function("adam_control", "adam_control")
CONFIGURATIONS = [_control.configuration]


def _word(x: float) -> np.int64:
    """The 64 bits of a float64, as a kernel's integer."""
    return np.float64(x).view(np.int64)


@on_cuda
def adam_control(
    step: torch.Tensor,
    lr: torch.Tensor,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    beta1: float,
    beta2: float,
    bias_correction: bool,
) -> torch.Tensor:
    """Count the step and make its control, fp32 `[5]`."""
    control = control_outputs(step, lr, grad_scale, found_inf, beta1, beta2, bias_correction)
    pointers = [step.data_ptr(), lr.data_ptr(), pointer(grad_scale), pointer(found_inf)]
    args = [*pointers, _word(beta1), _word(beta2), np.int32(bias_correction), control.data_ptr()]
    launch.launch(_control, (1,), (1,), args, device=step.device.index)
    return control


@on_cuda
def adam_capturable(
    grads: list[torch.Tensor],
    params: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    rounded: list[torch.Tensor],
    control: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    unscale: bool,
) -> None:
    """Change `params`, `exp_avgs`, `exp_avg_sqs`, `rounded`, and with `unscale` also `grads`, in place."""
    outputs(grads, params, exp_avgs, exp_avg_sqs, rounded, control)
    found = list(rows((grads, params, exp_avgs, exp_avg_sqs, rounded, [], [], [])))
    numbers = scalars(0.0, beta1, beta2, eps, weight_decay, 1.0, 1.0, decoupled)
    if not found:
        return
    moment = KINDS[exp_avgs[0].dtype]
    kinds = (OWN if params[0].dtype == grads[0].dtype else MASTER, moment, moment)
    for capacity, blocks, args in tables(_ROW, found, CAPACITIES, tiles(*kinds) * ELEMENTS_PER_BLOCK):
        chosen = kernel("adam_states", WIDE[grads[0].dtype], *kinds, capacity)
        more = [numbers, 0, control.data_ptr(), np.int32(unscale)]
        launch.launch(chosen, (blocks,), (THREADS,), [*args, *more], device=grads[0].device.index)
