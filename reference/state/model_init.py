"""`quantized_model_init`: layers made inside keep their weights in FP8 only.

A weight is drawn in `params_dtype` and cast to FP8 with scale 1, its amax is recorded, and the 16-bit numbers are
dropped. `reference.float8.float8_tensor` says what follows. Biases and norms stay as they are.

The first scale of delayed scaling, 1, leaves few bits to weights far below 1. In training it is replaced after the
first step. In inference, where nothing is written any more, it stays, and a checkpoint of 16-bit weights is cast with
the scales that it brings: use one of a model that has run in FP8.
"""

from typing import NamedTuple

from reference.arguments import check_arguments
from reference.recipe import DelayedScaling
from reference.state.threads import ThreadContextManager, here

__all__ = ["fp8_model_init", "quantized_model_init"]


class QuantizedInit(NamedTuple):
    """The settings that a layer reads when it is made inside `quantized_model_init`."""

    recipe: DelayedScaling
    preserve: bool


def current() -> QuantizedInit | None:
    """The settings of this thread's innermost open context; None outside of one."""
    opened = here().inits
    return opened[-1].settings if opened else None


class quantized_model_init(ThreadContextManager):
    """Make layers whose weights are kept in FP8 only.

    A context belongs to the thread that opened it. Contexts of a thread must end in reverse order; the one that ends
    too early raises RuntimeError.

    Args:
        enabled: off inside an enabled context makes ordinary layers; the other arguments are not read then, as in
            Transformer Engine, whose programs always give them.
        recipe: a `DelayedScaling`, whose amax_history_len is that of the new state; None is `DelayedScaling()`.
        preserve_high_precision_init_val: keep each weight's initial values on the CPU, for an optimizer's master
            weights: `weight.get_high_precision_init_val()` returns, `weight.clear_high_precision_init_val()` frees
            them.

    Source: Transformer Engine's `quantized_model_init`.
    """

    what, where = "quantized_model_init", "inits"

    def __init__(
        self, enabled: bool = True, recipe: DelayedScaling | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        check_arguments("quantized_model_init", locals())
        if not enabled:
            recipe = None
        if recipe is not None and not isinstance(recipe, DelayedScaling):
            raise TypeError(f"quantized_model_init: recipe={recipe!r}; a recipe.DelayedScaling or None is accepted.")
        settings = QuantizedInit((recipe or DelayedScaling()).fixed, preserve_high_precision_init_val)
        self.settings = settings if enabled else None
        super().__init__()


fp8_model_init = quantized_model_init
"""`quantized_model_init` under its older name."""
