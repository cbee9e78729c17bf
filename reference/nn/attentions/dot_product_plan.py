"""What the arguments of `DotProductAttention.forward` mean: how to attend, and which tensors that takes."""

from typing import Any, NamedTuple

import torch

from reference.memory.recompute import Run, current_run
from reference.nn.attentions.attention_extras import Extras
from reference.nn.attentions.attention_lengths import lengths_alibi, lengths_mask, lengths_of_masks
from reference.nn.attentions.exact_attention import Equation, full_mask
from reference.nn.attentions.inference_step import Cached, StepTensors
from reference.nn.attentions.no_grad_inputs import NO_INPUTS, NoGradInputs
from reference.nn.attentions.packing import maps_of
from reference.nn.core.checks import Shape
from reference.nn.core.context import ModuleContext


class Call(NamedTuple):
    """A forward of attention's core.

    Attributes:
        equation: how to attend.
        reads: its mask, slopes and lengths, and where packed sequences lie.
        added: a bias, or sinks; None without.
        longest: the longest sequences of queries and of keys where packed ones are read as they lie, else None.
    """

    equation: Equation
    reads: NoGradInputs
    added: torch.Tensor | None = None
    longest: tuple[int, int] | None = None


def call_of(
    module: Any,
    equation: Equation,
    mask: Any,
    extras: Extras,
    shape: Shape,
    x: torch.Tensor,
    by_mask: bool,
    tokens: tuple[int, int] | None = None,
) -> Call:
    """The call of a `DotProductAttention` without a cache; `equation` has the mask type and the window.

    `shape`: [b, h, sq, skv]. `x` has the activations' device. `by_mask`: the core takes no lengths, so they become a
    mask; of ALiBi's slopes then a bias, where each sequence has a diagonal of its own. `tokens`: of queries and of keys
    in "thd".
    """
    mask_type, (bias, lengths, _) = equation.mask_type, extras
    added, slopes, counts = bias.values, None, None
    if bias.given:
        equation = equation._replace(bias=bias.bias_type)
        slopes = module.slopes(bias, x.device)
    elif module.softmax_type != "vanilla":
        equation, added = equation._replace(softmax=module.softmax_type), module.sinks(x.device)
    if lengths.given and lengths.read_by(mask_type):
        counts = lengths.counts()
    else:
        counts = lengths_of_masks(mask_type, equation.window, mask, shape[0], bias.bias_type)
    of_entries: Any = (None, None)
    if counts is None:
        mask = full_mask(mask_type, mask)
    elif not by_mask:
        of_entries, mask = counts, None
    else:
        if slopes is not None and (alibi := lengths_alibi(slopes, mask_type, counts, shape)) is not None:
            added, slopes = alibi, None
        mask_type, window, mask = lengths_mask(mask_type, equation.window, counts, shape)
        equation = equation._replace(mask_type=mask_type, window=window)
    reads = NoGradInputs(mask, slopes, *of_entries)
    if tokens is None:
        return Call(equation, reads, added)
    if by_mask:
        return Call(equation, reads.with_maps(*maps_of(lengths, tokens)), added)
    starts = dict(zip(("q_starts", "kv_starts"), lengths.starts(), strict=True))
    return Call(equation, reads._replace(**starts), added, (lengths.max_q, lengths.max_kv))


def cached_call_of(
    module: Any, equation: Equation, cached: Cached, step: StepTensors, x: torch.Tensor, layout: str
) -> Call:
    """The call of a `DotProductAttention` with a cache."""
    reads, longest = NO_INPUTS.with_step(step), (cached.longest, cached.keys) if layout == "thd" else None
    if module.softmax_type == "vanilla":
        return Call(equation, reads, None, longest)
    return Call(equation._replace(softmax=module.softmax_type), reads, module.sinks(x.device), longest)


def context_of(module: Any, dtype: torch.dtype, device: torch.device, run: Run | None = None) -> ModuleContext | None:
    """The context of a forward that uses FP8 state, or calibrates it; None of any other. `run`: as in `prepared`."""
    run = current_run() if run is None else run
    if not module.attends_in_fp8(run):
        return None
    if module._device != device:
        module._set_device(device)
    found: ModuleContext = module.context(dtype, None, run)
    return found
