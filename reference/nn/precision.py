"""How a layer computes: in 16 bits or in FP8. Layers are written once, over the calls of this file.

Shapes: x `[tokens, in]`, w `[out, in]`, g = dL/dy `[tokens, out]`; y = x·wᵀ + b, dx = g·w, dw = gᵀ·x. A GEMM reads both
operands along K, so a backward wants the transposed copies: FP8 has them as tensors of their own, 16 bits as views.
Rounding points stand in the layers, the ops' arithmetic in `reference.ops`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reference.nn.float8_tensor import Float8Tensor, dequantized, operand
from reference.notice import say_once
from reference.ops.cast_transpose import cast_outputs
from reference.ops.cat_cast_transpose import side_by_side
from reference.ops.library import twin
from reference.recipe import DelayedScaling

if TYPE_CHECKING:
    from reference.nn.module import TransformerEngineBaseModule


Tensors = list[torch.Tensor]


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`[..., features]` as contiguous `[tokens, features]`."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`; x itself where it has it, which a compiler does not take for another tensor."""
    return x if x.dtype == dtype else x.to(dtype)


class Operand(NamedTuple):
    """A matrix as GEMMs read it.

    `rows` is `[rows, cols]`, `columns` its transpose (in FP8 padded to a multiple of 16 with zeros) or None where no
    backward will read it, `scale_inv` fp32 `[1]` for FP8 codes and None for 16-bit numbers.
    """

    rows: torch.Tensor
    columns: torch.Tensor | None
    scale_inv: torch.Tensor | None


def product(
    a: Any,
    b: Any,
    inverses: tuple[torch.Tensor | None, torch.Tensor | None],
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    """a·bᵀ + bias: `twin::gemm_fp8` where there are scales, else `twin::gemm`; in fp32 PyTorch's own product."""
    if a.dtype == torch.float32:
        return torch.nn.functional.linear(a, b, bias)
    if inverses[0] is None:
        return twin.gemm(a, b, bias, out_dtype)
    return twin.gemm_fp8(a, b, *inverses, bias, out_dtype, accumulate)


def fprop(x: Operand, w: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """y `[tokens, out]`, fast accumulation."""
    return product(x.rows, w.rows, (x.scale_inv, w.scale_inv), bias, out_dtype, "fast")


class Weight(NamedTuple):
    """Arguments of `Call.weight`."""

    name: str
    w: torch.Tensor | Operand
    column: int
    transpose: bool


class Kept(NamedTuple):
    """What a backward keeps of an operand: its transpose and its scale's inverse."""

    columns: torch.Tensor | None
    scale_inv: torch.Tensor | None


def keep(operand: Operand) -> Kept:
    """The part of an operand that goes to `save_for_backward`; nothing where it has no transpose."""
    return Kept(None, None) if operand.columns is None else Kept(operand.columns, operand.scale_inv)


def dgrad(g: Operand, w: Kept, out_dtype: torch.dtype) -> torch.Tensor:
    """dx `[tokens, in]`, split accumulation."""
    return product(g.rows, w.columns, (g.scale_inv, w.scale_inv), None, out_dtype, "split")


def wgrad(g: Operand, x: Kept, out_dtype: torch.dtype, main_grad: torch.Tensor | None) -> torch.Tensor | None:
    """dw `[out, in]`, split accumulation; or None after main_grad = round(fp32(main_grad) + fp32 dw)."""
    a: Any = g.columns
    b: Any = x.columns
    if main_grad is None:
        return product(a, b, (g.scale_inv, x.scale_inv), None, out_dtype, "split")
    if a.dtype == torch.float32:
        main_grad.copy_(main_grad.float() + torch.nn.functional.linear(a, b))
    elif g.scale_inv is None:
        twin.gemm_accumulate(a, b, main_grad)
    else:
        twin.gemm_fp8_accumulate(a, b, g.scale_inv, x.scale_inv, main_grad)
    return None


class Call:
    """One forward (and its backward) in 16 bits (or in fp32, with products that are PyTorch's own).

    Columns are those of the FP8 state, `3·gemm + (input 0, weight 1)` forward and `2·gemm` for a gradient; 16 bits has
    no use for them. Every method takes `[rows, cols]`.
    """

    fp8 = False

    def __init__(self, layer: "TransformerEngineBaseModule", dtype: torch.dtype) -> None:
        self.layer: Any = layer  # each layer's pair reads its own attributes
        self.dtype = dtype  # of activations: results are rounded to it
        # Inside an autograd.Function grad mode is always off; this is the mode outside.
        self.grad_enabled = torch.is_grad_enabled()

    def constants(self) -> Any:
        """All that the launches of its pair depend on besides tensors, hashable.

        None where such a thing is not among them: a gradient that is added elsewhere, a cached weight.
        """
        layer = self.layer
        if layer is None or layer.fuse_wgrad_accumulation or layer.return_layernorm_output:
            return None
        return self.dtype, layer.eps, layer.zero_centered_gamma, layer.kind, layer.activation

    def collect(self, every: Tensors, forward: Tensors, backward: Tensors) -> None:
        """With `constants`: append the tensors that it takes from the layer, what forward changes, what backward."""

    def following(self, needs: tuple[bool, ...], x: torch.Tensor) -> Any:
        """The pair that certainly runs next, as (forward, backward, call, needs, tensors), x being like its input.

        None where that is not known. `needs` is its own pair's.
        """
        return None

    def needs(self, tensors: Sequence[torch.Tensor | None]) -> tuple[bool, ...]:
        """Which gradients a backward will be asked for: none under torch.no_grad()."""
        return tuple([x is not None and x.requires_grad and self.grad_enabled for x in tensors])

    def taken(self, x: Any, trains: bool) -> Any:
        """A tensor as a pair's functions take it: a weight that is kept in FP8 as plain numbers."""
        if not isinstance(x, Float8Tensor):
            return x
        say_once("dequantized", "a weight that is kept in FP8 is used outside of FP8 autocast: it is dequantized")
        codes, _, scale_inv = operand(x, transpose=False)
        return dequantized(codes, scale_inv, x.dtype)

    def _operand(self, x: torch.Tensor, transpose: bool) -> Operand:
        return Operand(x, x.t() if transpose else None, None)

    def input(self, x: torch.Tensor, column: int, transpose: bool) -> Operand:
        """An activation as an operand."""
        return self._operand(as_dtype(x, self.dtype), transpose)

    def weight(self, name: str, w: torch.Tensor | Operand, column: int, transpose: bool) -> Operand:
        """A weight as an operand (it may be one); `name` is its entry in the cache of FP8 weights."""
        return w if isinstance(w, Operand) else self._operand(as_dtype(w, self.dtype), transpose)

    def weights(self, *weights: Weight) -> list[Operand]:
        """Several weights of one module as operands."""
        return [self.weight(*one) for one in weights]

    def residual(
        self,
        x: Operand,
        w: Operand,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        p: float,
        rng_state: torch.Tensor | None,
    ) -> torch.Tensor:
        """residual + dropout(x·wᵀ + bias) `[tokens, out]`, as `twin::bias_dropout_add` rounds it."""
        return twin.bias_dropout_add(fprop(x, w, None, self.dtype), bias, residual, p, rng_state)

    def bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """A bias as the GEMM takes it."""
        return None if bias is None else as_dtype(bias, self.dtype)

    def norm(
        self, x: torch.Tensor, norm: "NormArguments", column: int, transpose: bool
    ) -> tuple[Operand, torch.Tensor, torch.Tensor]:
        """The normalised x as an operand, and the rows' mean and rstd."""
        y, mean, rstd = twin.norm(x, *norm, self.dtype)
        return self._operand(y, transpose), mean, rstd

    def activated(
        self, x: Operand, w: Operand, bias: torch.Tensor | None, kind: str, column: int, transpose: bool
    ) -> tuple[torch.Tensor, Operand]:
        """The pre-activation h = x·wᵀ + bias `[tokens, out]`, and its activation as an operand."""
        h = fprop(x, w, bias, self.dtype)
        return h, self._operand(twin.activation(h, kind), transpose)

    def grad(self, g: torch.Tensor, column: int, transpose: bool, dbias: bool) -> tuple[Operand, torch.Tensor | None]:
        """A gradient as an operand, and its column sums where the bias wants them."""
        g = as_dtype(g, self.dtype)
        return self._operand(g, transpose), twin.dbias(g) if dbias else None

    def joined_grad(
        self, parts: list[torch.Tensor], groups: int, column: int, transpose: bool, dbias: bool
    ) -> tuple[Operand, torch.Tensor | None]:
        """`grad` of matrices side by side in each of `groups` groups of columns."""
        return self.grad(side_by_side(parts, groups), column, transpose, dbias)

    def activated_grad(
        self, g: Operand, w: Kept, h: torch.Tensor, kind: str, column: int, transpose: bool, dbias: bool
    ) -> tuple[Operand, torch.Tensor | None]:
        """The gradient of the pre-activation h as an operand, and its column sums; g·w is that of the activation."""
        dact = dgrad(g, w, self.dtype)
        return self.grad(twin.activation_backward(dact, h, kind), column, transpose, dbias)


class NormArguments(NamedTuple):
    """Arguments of `twin::norm` after x."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    zero_centered: bool
    kind: str


class CalibratingCall(Call):
    """16 bits, noting the amax of what FP8 would cast."""

    def constants(self) -> Any:
        return None

    def _note(self, x: torch.Tensor, column: int) -> None:
        twin.amax(x.detach().contiguous(), self.layer.fp8_meta["scaling_fwd"].amax_history, column)

    def input(self, x: torch.Tensor, column: int, transpose: bool) -> Operand:
        operand = super().input(x, column, transpose)
        self._note(operand.rows, column)
        return operand

    def weight(self, name: str, w: torch.Tensor | Operand, column: int, transpose: bool) -> Operand:
        self._note(w.rows if isinstance(w, Operand) else w, column)
        return super().weight(name, w, column, transpose)

    def norm(
        self, x: torch.Tensor, norm: NormArguments, column: int, transpose: bool
    ) -> tuple[Operand, torch.Tensor, torch.Tensor]:
        operand, mean, rstd = super().norm(x, norm, column, transpose)
        self._note(operand.rows, column)
        return operand, mean, rstd

    def activated(
        self, x: Operand, w: Operand, bias: torch.Tensor | None, kind: str, column: int, transpose: bool
    ) -> tuple[torch.Tensor, Operand]:
        h, operand = super().activated(x, w, bias, kind, column, transpose)
        self._note(operand.rows, column)
        return h, operand


class FP8Call(Call):
    """One forward (and its backward) in FP8 with delayed scaling.

    `scale` is `scaling_fwd.scale`, or in a checkpoint's recomputation that of the first run; `amax_history` is None
    where no amax may be taken a second time.
    """

    fp8 = True

    def __init__(
        self,
        layer: "TransformerEngineBaseModule",
        dtype: torch.dtype,
        recipe: DelayedScaling,
        is_first_microbatch: bool | None,
        scale: torch.Tensor,
        amax_history: torch.Tensor | None,
    ) -> None:
        super().__init__(layer, dtype)
        self.forward_dtype = recipe.fp8_format.dtype(True)
        self.backward_dtype = recipe.fp8_format.dtype(False)
        self.is_first_microbatch = is_first_microbatch
        self.scale = scale
        self.amax_history = amax_history

    def constants(self) -> Any:
        found = super().constants()
        cached = self._cached()
        if found is None or (self.is_first_microbatch is not None and len(cached) < self.layer.num_gemms):
            return None  # a weight is cast for later microbatches
        return *found, self.forward_dtype, self.backward_dtype, self.amax_history is None, len(cached)

    def collect(self, every: Tensors, forward: Tensors, backward: Tensors) -> None:
        meta = self.layer.fp8_meta["scaling_bwd"]
        every += (self.scale, meta.scale, meta.amax_history)
        backward.append(meta.amax_history)
        if self.amax_history is not None:
            every.append(self.amax_history)
            forward.append(self.amax_history)
        every += [t for operand in self._cached() for t in operand if t is not None]

    def _cached(self) -> list[Operand]:
        """The weights that an earlier microbatch has cast, if this one reads them."""
        if self.is_first_microbatch is not False:
            return []
        found = (self._reused(name, transpose=True) for name in list(self.layer._fp8_workspaces))
        return [one for one in found if one is not None]

    def taken(self, x: Any, trains: bool) -> Any:
        """A weight that is kept in FP8 as an operand."""
        return Operand(*operand(x, transpose=trains)) if isinstance(x, Float8Tensor) else x

    def input(self, x: torch.Tensor, column: int, transpose: bool) -> Operand:
        return _cast(x, self.scale, self.amax_history, column, self.forward_dtype, transpose)

    def weight(self, name: str, w: torch.Tensor | Operand, column: int, transpose: bool) -> Operand:
        """The weight cast now, or before, or the copy that an earlier microbatch made."""
        if self.is_first_microbatch is False:
            cached = self._reused(name, transpose)
            if cached is not None:
                return cached
        operand = w if isinstance(w, Operand) else self.input(w.contiguous(), column, transpose)
        if self.is_first_microbatch is not None:
            self.layer._fp8_workspaces[name] = operand
        return operand

    def weights(self, *weights: Weight) -> list[Operand]:
        """In one launch where `prepare` can."""
        cast = prepare([(self, one) for one in weights])
        return super().weights(*(one._replace(w=w) for one, w in zip(weights, cast, strict=True)))

    def _reused(self, name: str, transpose: bool) -> Operand | None:
        """What an earlier microbatch has cast of a weight, if it is what this one reads."""
        found = self.layer._fp8_workspaces.get(name)
        if found is None or found.rows.dtype != self.forward_dtype or (found.columns is None and transpose):
            return None
        if found.rows.is_inference() and not torch.is_inference_mode_enabled():  # autograd takes no such tensor
            found = self.layer._fp8_workspaces[name] = Operand(*(t if t is None else t.clone() for t in found))  # type: ignore[arg-type]
        return found

    def bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """In the activation dtype, bf16 where that is fp32 (cuBLAS takes no fp32 bias, and we follow it)."""
        return None if bias is None else as_dtype(bias, torch.bfloat16 if self.dtype == torch.float32 else self.dtype)

    def norm(
        self, x: torch.Tensor, norm: NormArguments, column: int, transpose: bool
    ) -> tuple[Operand, torch.Tensor, torch.Tensor]:
        *cast, mean, rstd = twin.norm_cast_transpose(
            x, *norm, self.scale, self.amax_history, column, self.forward_dtype
        )
        return _operand(cast, transpose), mean, rstd

    def activated(
        self, x: Operand, w: Operand, bias: torch.Tensor | None, kind: str, column: int, transpose: bool
    ) -> tuple[torch.Tensor, Operand]:
        state = (self.scale, self.amax_history, column, self.forward_dtype)
        h, *cast = twin.gemm_fp8_activation(x.rows, w.rows, x.scale_inv, w.scale_inv, bias, self.dtype, kind, *state)
        return h, _operand(cast, transpose)

    def residual(
        self,
        x: Operand,
        w: Operand,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        p: float,
        rng_state: torch.Tensor | None,
    ) -> torch.Tensor:
        inverses = (x.scale_inv, w.scale_inv)
        return twin.gemm_fp8_bias_dropout_add(x.rows, w.rows, *inverses, bias, residual, self.dtype, p, rng_state)

    def grad(self, g: torch.Tensor, column: int, transpose: bool, dbias: bool) -> tuple[Operand, torch.Tensor | None]:
        meta = self.layer.fp8_meta["scaling_bwd"]
        state = (meta.scale, meta.amax_history, column, self.backward_dtype)
        if dbias:
            *cast, db = twin.cast_transpose_dbias(g, *state)
            return Operand(*cast), db
        return _cast(g, *state, transpose), None

    def joined_grad(
        self, parts: list[torch.Tensor], groups: int, column: int, transpose: bool, dbias: bool
    ) -> tuple[Operand, torch.Tensor | None]:
        if not dbias:
            return super().joined_grad(parts, groups, column, transpose, dbias)
        meta = self.layer.fp8_meta["scaling_bwd"]
        state = (meta.scale, meta.amax_history, column, self.backward_dtype)
        *cast, db = twin.cat_cast_transpose_dbias([part.contiguous() for part in parts], groups, *state)
        return Operand(*cast), db

    def activated_grad(
        self, g: Operand, w: Kept, h: torch.Tensor, kind: str, column: int, transpose: bool, dbias: bool
    ) -> tuple[Operand, torch.Tensor | None]:
        meta = self.layer.fp8_meta["scaling_bwd"]
        state = (meta.scale, meta.amax_history, column, self.backward_dtype)
        *cast, db = twin.gemm_fp8_activation_backward(g.rows, w.columns, g.scale_inv, w.scale_inv, h, kind, *state)
        return _operand(cast, transpose), db if dbias else None


def prepare(weights: Sequence[tuple[Call, Weight]]) -> list[torch.Tensor | Operand]:
    """The weights of FP8 modules cast in one launch, for `Call.weight` to take.

    They come back as they are where some are in 16 bits, wanted without their transposes, cached by an earlier
    microbatch, or operands already.
    """
    calls = [call for call, _ in weights if isinstance(call, FP8Call) and call.is_first_microbatch is not False]
    xs = [one.w.contiguous() for _, one in weights if one.transpose and not isinstance(one.w, Operand)]
    if not len(calls) == len(xs) == len(weights) or len({x.dtype for x in xs}) > 1:
        return [one.w for _, one in weights]
    operands = [Operand(*cast_outputs(x, x.shape[1], calls[0].forward_dtype)) for x in xs]
    histories = [call.amax_history for call in calls if call.amax_history is not None]
    columns = [one.column for _, one in weights]
    room = [list(part) for part in zip(*operands, strict=True)]
    twin.multi_cast_transpose(xs, [call.scale for call in calls], histories, columns, *room)
    return list(operands)


def _operand(cast: Sequence[torch.Tensor], transpose: bool) -> Operand:
    """What a cast with transpose gave; the transpose is let go where no backward will read it."""
    q, q_t, scale_inv = cast
    return Operand(q, q_t if transpose else None, scale_inv)


def _cast(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
    transpose: bool,
) -> Operand:
    if transpose:
        return Operand(*twin.cast_transpose(x, scale, amax_history, column, dtype))
    q, scale_inv = twin.cast(x, scale, amax_history, column, dtype)
    return Operand(q, None, scale_inv)
