"""`twin::adam_control` and `twin::adam_capturable`: a step of Adam whose numbers lie on the device.

A CUDA graph of it can be replayed: the learning rate, the count of steps, a scaler's scale and whether it found an
infinity are read when the kernels run. `adam_control` makes of them the five numbers that the step needs:

    skip  = found_inf != 0
    step  = step + 1, unless the step is skipped
    c     = fp32(1 − beta^step)              `reference.ops.optimizers.adam.correction`, in float64; 1 without bias
    correction inv   = fp32(1 / float64(grad_scale))    1 without a scale; `torch.amp.GradScaler`'s own formula
    control = [lr, c1, c2, inv, skip]        fp32

and `adam_capturable` is `twin::adam` with them. With `unscale` it first multiplies, in fp32, and goes on with the
product, which it also writes to the gradient:

    g = fp32(grad) · inv                     one rounding; grad = g rounded to the gradient's dtype

A step that is skipped changes nothing but the control. Moments are fp32 or bf16 (kept as `twin::adam_states` says).

Source: Transformer Engine's `common/multi_tensor/adam.cu`, whose corrections are CUDA's `pow` in fp32.
"""

from collections.abc import Sequence

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.checks import check_each, check_lengths
from reference.ops.library import define
from reference.ops.optimizers import adam as plain

CONTROL, OP = "twin::adam_control", "twin::adam_capturable"
NUMBERS = 5  # of a control


def control_outputs(
    step: torch.Tensor,
    lr: torch.Tensor,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    beta1: float,
    beta2: float,
    bias_correction: bool,
) -> torch.Tensor:
    """Check the arguments; the control, fp32 `[5]`."""
    given = {"step": step, "lr": lr, "grad_scale": grad_scale, "found_inf": found_inf}
    for name, x in given.items():
        dtype = torch.int32 if name == "step" else torch.float32
        if x is not None and (x.dtype != dtype or x.numel() != 1 or x.device != step.device):
            raise ValueError(
                f"{CONTROL}: {name} is {x.dtype} {list(x.shape)} on {x.device}; one number of {dtype} on "
                f"{step.device} is accepted."
            )
    return torch.empty(NUMBERS, dtype=torch.float32, device=step.device)


@define(control_outputs, mutates=("step",))
def adam_control(
    step: torch.Tensor,
    lr: torch.Tensor,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    beta1: float,
    beta2: float,
    bias_correction: bool,
) -> torch.Tensor:
    """Count the step and make its control, fp32 `[5]`.

    Args:
        step: int32, one number: steps made so far; changed in place.
        lr, grad_scale, found_inf: fp32, one number each; the last two may be missing.
        beta1, beta2: float64.
        bias_correction: whether c1 and c2 differ from 1.
    """
    control = control_outputs(step, lr, grad_scale, found_inf, beta1, beta2, bias_correction)
    skip = found_inf is not None and found_inf.item() != 0
    step += int(not skip)
    divisors = [plain.correction(beta, int(step.item())) if bias_correction else 1.0 for beta in (beta1, beta2)]
    with np.errstate(all="ignore"):
        inverse = 1.0 if grad_scale is None else np.float64(1) / np.float64(grad_scale.item())
        numbers = np.asarray([lr.item(), *divisors, inverse, skip]).astype(np.float32)
    return control.copy_(torch.from_numpy(numbers))


def outputs(
    grads: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    rounded: Sequence[torch.Tensor],
    control: torch.Tensor,
    *rest: float,
) -> None:
    """Refuse what `twin::adam_capturable` does not accept; any scalars are accepted."""
    lists = {"params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    lists |= {"rounded": rounded} if len(rounded) else {}
    check_lengths(OP, "grads", len(grads), lists)
    if not len(grads):
        return
    wide, device = grads[0].dtype, grads[0].device
    if wide not in formats.WIDE_DTYPES:
        raise TypeError(f"{OP}: grads[0] is {wide}; float32, bfloat16 and float16 are accepted.")
    if params[0].dtype not in (torch.float32, wide) or (len(rounded) and params[0].dtype != torch.float32):
        masters = "masters in float32" if len(rounded) else f"{wide} and float32"
        raise TypeError(f"{OP}: params[0] is {params[0].dtype}; {masters} are accepted.")
    moment = exp_avgs[0].dtype
    if moment not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{OP}: exp_avgs[0] is {moment}; float32 and bfloat16 are accepted.")
    if control.dtype != torch.float32 or control.shape != (NUMBERS,) or control.device != device:
        raise ValueError(
            f"{OP}: control is {control.dtype} {list(control.shape)} on {control.device}; float32 [{NUMBERS}] on "
            f"{device} is accepted."
        )
    dtypes = {"params": params[0].dtype, "exp_avgs": moment, "exp_avg_sqs": moment, "rounded": wide}
    for name, tensors in ({"grads": grads} | lists).items():
        check_each(OP, name, tensors, dtypes.get(name, wide), [grad.shape for grad in grads], device)


@define(outputs, mutates=("grads", "params", "exp_avgs", "exp_avg_sqs", "rounded"))
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
    """Change `params`, `exp_avgs`, `exp_avg_sqs`, `rounded`, and with `unscale` also `grads`, in place.

    Args:
        grads, params, rounded: those of `twin::adam`.
        exp_avgs, exp_avg_sqs: fp32, or both bf16.
        control: fp32 `[5]`, from `twin::adam_control`.
        beta1, beta2, eps, weight_decay, decoupled: those of `twin::adam`.
        unscale: multiply the gradients by the control's inverse scale.
    """
    outputs(grads, params, exp_avgs, exp_avg_sqs, rounded, control)
    lr, c1, c2, inverse, skip = control.tolist()
    if skip:
        return
    scalars = (lr, beta1, beta2, eps, weight_decay, c1, c2)
    for i, grad in enumerate(grads):
        g, p, m, v = (formats.widen(x.detach()).numpy() for x in (grad, params[i], exp_avgs[i], exp_avg_sqs[i]))
        if unscale:
            with np.errstate(all="ignore"):
                g = np.asarray(g * np.float32(inverse))
            grad.copy_(torch.from_numpy(g))
        new, *moments = (torch.from_numpy(x) for x in plain.update(g, p, m, v, scalars, decoupled))
        for x, value in zip((exp_avgs[i], exp_avg_sqs[i], params[i]), (*moments, new), strict=True):
            x.copy_(value)
        if rounded:
            rounded[i].copy_(new)
