"""Row-wise scaling: each row of an operand, along K, has a scale of its own, that of its amax.

    y  = T( q(x) · q(w)ᵀ + b )       a scale for each token, and for each row of w
    dx = T( q(g) · q(wᵀ)ᵀ )          a scale for each token, and for each column of w
    dw = T( q(gᵀ) · q(xᵀ)ᵀ )         a scale for each column of g, and of x
    codes, scales                    `reference.ops.casts.cast_rowwise`; E4M3 in all, scales that are powers of two
    GEMMs                            `reference.ops.gemms.gemm_fp8_rowwise`: y fast, dx and dw split

So what each GEMM reads is cast along its own K: q(wᵀ) is not q(w)ᵀ. With `weight_gradient="high_precision"` less is
cast:

    dx = T( q(g) · q(w) )            one scale for all of w, `twin::current_scale`
    dw = T( gᵀ · x )                 the numbers themselves, in T

There is no state between steps. The results of norms and activations are rounded to the activation dtype T before they
are cast. A token's scale is of that token alone, so its words do not depend on the batch.

Both are torchao's: `Float8LinearConfig.from_recipe_name("rowwise")` and `"rowwise_with_gw_hp"`, in
torchao/float8/config.py, 36027d8. In bf16 without a bias its words are ours (docs/results/rowwise_torchao.json);
elsewhere they may be others, as the two files of ops say.
"""

from dataclasses import dataclass
from typing import Any

import torch

from reference.ops.casts import cast_rowwise  # noqa: F401  (declares the ops)
from reference.ops.gemms import gemm_fp8_rowwise  # noqa: F401  (declares the ops)
from reference.ops.library import twin
from reference.recipes.base import Format, Recipe, check_recipe
from reference.recipes.quantized import DEQUANTIZE, PRODUCTS, Operand, Products, Quantized
from reference.recipes.quantizer import ForwardOnly, Quantizer
from reference.recipes.roles import Role, Roles

ROWWISE = "row-wise scaled"
"""Layout: FP8 codes with a scale for each row, or one for all of them."""
EPSILON = 1e-12
"""The least amax, torchao's."""


@dataclass(unsafe_hash=True)
class Float8RowwiseScaling(Recipe):
    """Scale each row by its own amax.

    Args:
        weight_gradient: "fp8", torchao's "rowwise", or "high_precision", its "rowwise_with_gw_hp": a weight's gradient
            is multiplied in the activation dtype, and the weight has one scale where dx reads it.
        fp8_format: `Format.E4M3` or `Format.HYBRID`.
        fp8_dpa, fp8_mha: FP8 attention; only False is offered.
        backward_override: FP8 in forward alone, whatever weight_gradient is; backward multiplies in the activation
            dtype, with "high_precision" what the forward has cast, with "dequantized" what its codes stand for.
    """

    weight_gradient: str = "fp8"
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        of = self.weight_gradient
        if not isinstance(of, str) or of not in ("fp8", "high_precision"):
            raise ValueError(
                f"Float8RowwiseScaling: weight_gradient={of!r}; 'fp8' and 'high_precision' (torchao's rowwise and "
                f"rowwise_with_gw_hp) are accepted."
            )
        check_recipe(self)

    @property
    def high_precision_weight_gradient(self) -> bool:
        """Whether a weight's gradient alone is multiplied in the activation dtype."""
        return self.weight_gradient == "high_precision" and self.backward_override is None

    @property
    def reads_dtype(self) -> bool:
        return super().reads_dtype or self.high_precision_weight_gradient

    def quantizer(self, role: Role, state: Any) -> "ByRows":
        cls = OneScaleBackward if self.high_precision_weight_gradient and role.tensor == "weight" else ByRows
        return cls(self.codes(role.is_forward)[0])

    def quantizers(self, roles: Roles, forward: Any, backward: Any, dtype: torch.dtype) -> dict[str, Quantizer]:
        found = super().quantizers(roles, forward, backward, dtype)
        if self.high_precision_weight_gradient:
            found |= {role.name: ForwardOnly(found[role.name], dtype) for role in roles.all if role.tensor != "weight"}
        return found


class ByRows(Quantizer):
    """Casts with a scale for each row, and the transpose with one for each of its own; `dtype` is the codes'."""

    fp8 = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.how = dtype, (dtype, True, EPSILON)
        self.key = (type(self).__name__, dtype)

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        if not transpose:
            q, scale_inv = twin.cast_rowwise(x, *self.how)
            return Quantized(Operand(q, scale_inv, ROWWISE), None)
        q, q_t, scale_inv, scale_inv_t = twin.cast_rowwise_transpose(x, *self.how)
        return Quantized(Operand(q, scale_inv, ROWWISE), Operand(q_t, scale_inv_t, ROWWISE))


class OneScaleBackward(ByRows):
    """The same, but the transpose has one scale, that of the whole matrix."""

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        found = super().quantize(x, False)
        if not transpose:
            return found
        _, q_t, scale_inv = twin.cast_transpose(x, twin.current_scale(x, *self.how), None, 0, self.dtype)
        return found._replace(column=Operand(q_t, scale_inv, ROWWISE))


def _multiply(
    a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype, accumulate: str
) -> torch.Tensor:
    return twin.gemm_fp8_rowwise(a.codes, b.codes, a.scales, b.scales, bias, out_dtype, accumulate)


def _add(a: Operand, b: Operand, out: torch.Tensor) -> None:
    twin.gemm_fp8_rowwise_accumulate(a.codes, b.codes, a.scales, b.scales, out)


DEQUANTIZE[ROWWISE] = lambda a, dtype: twin.dequantize(a.codes, a.scales, False, dtype)
PRODUCTS[ROWWISE, ROWWISE] = Products(_multiply, _add, torch.float32)
