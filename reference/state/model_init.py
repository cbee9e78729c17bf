"""`quantized_model_init`: layers made inside keep their weights in FP8 only.

A weight is drawn in `params_dtype` and cast by the recipe, as that casts a layer's weight, and the numbers that were
drawn are dropped. Biases and norms stay as they are.

    recipe                  a weight's scale                                        the tensor
    DelayedScaling          that of the layer's state, 1 at first                   `te.Float8Tensor`
    Float8CurrentScaling    of the amax of what is written                          `te.Float8Tensor`
    Float8BlockScaling      of the amax of each 128 × 128 of what is written        `te.Float8BlockwiseQTensor`

What is written later, such as an optimizer's fp32 masters, is cast from its own dtype, without a rounding to the
weight's dtype in between (`reference.float8.kept_tensor`).

The first scale of delayed scaling, 1, leaves few bits to weights far below 1. In training it is replaced after the
first step. In inference, where nothing is written any more, it stays, and a checkpoint of 16-bit weights is cast with
the scales that it brings: use one of a model that has run in FP8, or another recipe.
"""

from typing import NamedTuple

from reference.arguments import check_arguments
from reference.recipe import DelayedScaling, Recipe
from reference.state.threads import ThreadContextManager, here

__all__ = ["fp8_model_init", "quantized_model_init"]


class QuantizedInit(NamedTuple):
    """The settings that a layer reads when it is made inside `quantized_model_init`."""

    recipe: Recipe
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
        recipe: casts the weights; None is `DelayedScaling()`. A `Float8BlockScaling` must have square blocks for
            weights (w_block_scaling_dim=2). An `autocast` of another recipe may read weights with one scale if it is
            `DelayedScaling` or `Float8CurrentScaling`.
        preserve_high_precision_init_val: keep each weight's initial values on the CPU, for an optimizer's master
            weights: `weight.get_high_precision_init_val()` returns, `weight.clear_high_precision_init_val()` frees
            them.

    Source: Transformer Engine's `quantized_model_init`.
    """

    what, where = "quantized_model_init", "inits"

    def __init__(
        self, enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        check_arguments("quantized_model_init", locals())
        if not enabled:
            recipe = None
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"quantized_model_init: recipe={recipe!r}; a recipe of te.recipe or None is accepted.")
        if recipe is not None and not recipe.keeps_weights:
            raise NotImplementedError(
                f"quantized_model_init: recipe={recipe!r} is not offered; DelayedScaling, Float8CurrentScaling and "
                f"Float8BlockScaling with w_block_scaling_dim=2 are accepted."
            )
        settings = QuantizedInit((recipe or DelayedScaling()).fixed, preserve_high_precision_init_val)
        self.settings = settings if enabled else None
        super().__init__()


fp8_model_init = quantized_model_init
"""`quantized_model_init` under its older name."""
