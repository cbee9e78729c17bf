"""Recipes for users; a recipe decides which quantizer each tensor of a layer has, and what is updated when.

Names, defaults and meaning are Transformer Engine's (`transformer_engine.common.recipe`); `Float8RowwiseScaling` is
torchao's.
"""

from reference.recipes.base import Format, MMParams, QParams, Recipe
from reference.recipes.block_scaling import Float8BlockScaling
from reference.recipes.by_layer import AUTOCAST, by_layer
from reference.recipes.current_scaling import Float8CurrentScaling
from reference.recipes.delayed_scaling import DelayedScaling
from reference.recipes.mxfp8_block_scaling import MXFP8BlockScaling
from reference.recipes.nvfp4_block_scaling import NVFP4BlockScaling
from reference.recipes.rowwise_scaling import Float8RowwiseScaling
from reference.support import not_offered

__all__ = [
    "AUTOCAST",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
    "by_layer",
]

not_offered.explain(__name__)
