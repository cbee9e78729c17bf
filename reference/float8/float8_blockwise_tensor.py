"""`Float8BlockwiseQTensor`: a weight that is kept in FP8 only, with a scale for each square of 128 × 128.

    write x' q, scale_inv = `twin::cast_blocks`(x', square)      the scales of what is written, in its dtype
    qᵀ       has the same squares, so the codes and the scales turned are the cast of x'ᵀ

`scale_inv` and that of the transposed codes lie as GEMMs read them (`reference.ops.casts.cast_blocks`), which is how
Transformer Engine's lie, too. `reference.float8.kept_tensor` says what else it does.

Source: Transformer Engine's `pytorch/tensor/float8_blockwise_tensor.py`.
"""

from typing import Any, NoReturn

import torch

from reference.float8.kept_tensor import KeptTensor
from reference.recipes.block_scaling import SQUARES, InBlocks

__all__ = ["Float8BlockwiseQTensor"]


class Float8BlockwiseQTensor(KeptTensor):
    """A weight of `quantized_model_init` under `Float8BlockScaling`; the module's docstring says what it holds."""

    @staticmethod
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "te.Float8BlockwiseQTensor(...) is not offered; a weight made in te.quantized_model_init(recipe="
            "te.recipe.Float8BlockScaling()) is one."
        )

    # Transformer Engine's names.
    _rowwise_data = property(lambda self: self.codes.view(torch.uint8), KeptTensor._set_data)
    _rowwise_scale_inv = property(lambda self: self._kept.scale_inv)
    _columnwise_data = property(lambda self: None if self.codes_t is None else self.codes_t.view(torch.uint8))
    _columnwise_scale_inv = property(lambda self: self._kept.scale_inv_t)
    _is_2D_scaled = True

    @property
    def _quantizer(self) -> NoReturn:
        raise AttributeError(
            "Float8BlockwiseQTensor: te.Float8BlockQuantizer is not offered; quantize_() and copy_() write the weight."
        )


KeptTensor.classes[SQUARES] = Float8BlockwiseQTensor
torch.serialization.add_safe_globals([InBlocks])  # for torch.load(weights_only=True)
