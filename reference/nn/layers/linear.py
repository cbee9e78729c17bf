"""`Linear`: y = x·wᵀ + b, in fp32, in 16 bits, or in FP8.

Shapes: x `[tokens, in]`, w `[out, in]`, b `[out]`, y and g = dL/dy `[tokens, out]`. q(t) is the cast to FP8, with
t ≈ q(t)·t_inv: E4M3 forward, E5M2 (HYBRID) or E4M3 for g. T is the activation dtype, x's or torch.autocast's.

    y  = T( q(x)·q(w)ᵀ · (x_inv·w_inv) + b )        fast accumulation: one chain over `in`
    dx = T( q(g)·q(w) · (g_inv·w_inv) )             split accumulation, over `out`
    dw = T( q(g)ᵀ·q(x) · (g_inv·x_inv) )            split accumulation, over the tokens
    db = T( column sums of g )                      order: `reference.ops.casts.dbias`

16 bits: x, w, b are rounded to T, then y = T(x·wᵀ + b), dx = T(g·w), dw = T(gᵀ·x), each GEMM one chain. fp32 outside
FP8 is PyTorch's own GEMM and outside the bit contract. In FP8 with T = fp32 the bias is rounded to bf16 first. Each of
these rounding points is Transformer Engine's (`module/linear.py`).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from reference.arguments import check_arguments
from reference.nn.core import init
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.checks import activation_dtype, check_input
from reference.nn.core.context import ModuleContext
from reference.nn.core.module import TransformerEngineBaseModule
from reference.nn.core.parameters import InitMethod, Split, forked, named, parameter_dtype, split_sizes
from reference.recipes.quantized import Operand, Quantized, Stacked, Weight, dgrad, fprop, rows_of, stacked
from reference.recipes.roles import Roles, columns_of_parts, linear_map
from reference.support.nested import Tensors


class Wants(NamedTuple):
    """Which gradients are wanted."""

    x: bool
    weight: bool
    bias: bool


class Plan(NamedTuple):
    """T, which gradients are wanted (`Wants`), the key of the GEMM's quantizers."""

    dtype: torch.dtype
    needs: tuple[bool, ...]
    gemms: Hashable

    @property
    def wants(self) -> Wants:
        """`needs` by names."""
        return Wants(*self.needs)


class Saved(NamedTuple):
    """What backward reads: the transposes of x and w, where a gradient needs them."""

    x: Operand | None
    w: Operand | Stacked | None


def forward(
    plan: Plan, context: ModuleContext, x: torch.Tensor, weight: torch.Tensor | Weight, bias: torch.Tensor | None
) -> tuple[torch.Tensor, Saved]:
    """y `[tokens, out]` of x `[tokens, in]`."""
    wants, gemm = plan.wants, context.gemm
    qx = gemm.input.quantize(x, transpose=wants.weight)
    qw = context.weight(gemm, weight, transpose=wants.x)
    return fprop(qx, qw, bias, plan.dtype, gemm.how), Saved(qx.column, qw.column)


def backward(plan: Plan, context: ModuleContext, saved: Saved, grad: torch.Tensor) -> Tensors:
    """dx, dw, db of g `[tokens, out]`."""
    wants = plan.wants
    g, db = context.gemm.grad.grad(grad.contiguous(), transpose=wants.weight, dbias=wants.bias)
    return (*quantized_backward(plan, context, saved, g), db)


def quantized_backward(plan: Plan, context: ModuleContext, saved: Saved, g: Quantized) -> Tensors:
    """dx, dw of a quantized dL/dy."""
    wants, gemm = plan.wants, context.gemm
    of_weight = context.weight_grad_once(gemm, g, saved.x, plan.dtype, wants.weight)
    dx = dgrad(g, saved.w, plan.dtype, gemm.how, of_weight) if wants.x else None
    return dx, of_weight()


class LinearBase(TransformerEngineBaseModule):
    """A layer with one linear map, whose weight and bias may be split into several parameters."""

    fp8_sizes = ("in_features", "out_features")
    weight_names: Sequence[str] = ("weight",)
    part_rows: tuple[int, ...] = ()

    def _set_up(
        self,
        in_features: int,
        out_features: int,
        split: Split,
        params_dtype: torch.dtype | None,
        device: torch.device | str | None,
        init_method: InitMethod | None,
        get_rng_state_tracker: Callable[[], Any] | None,
        rng_tracker_name: str | None = None,
    ) -> None:
        """Create the parameters; `use_bias` and `fuse_wgrad_accumulation` must be set before."""
        layer = type(self).__name__
        if self.fuse_wgrad_accumulation and split is not None:
            raise NotImplementedError(
                f"{layer}: fuse_wgrad_accumulation=True with parameters_split={split!r} is not offered; "
                f"parameters_split=None is accepted."
            )
        self.in_features, self.out_features = int(in_features), int(out_features)
        parts = split_sizes(layer, split, self.out_features)
        if self.tp_size > 1 and self.parallel_mode is not None:
            parts = self._share(parts)
        if self.quantized_init is not None and split is not None:
            self._keep_parts(parts)
        dtype, device = parameter_dtype(layer, params_dtype), self.resolve_device(device)
        self._init_method = init_method or init.normal_
        self._rng = (get_rng_state_tracker, rng_tracker_name)
        self._create_parameters(parts, dtype, device)
        if self._parameter_device().type == "meta":
            self.keep_in_fp8()
        else:
            self.reset_parameters()

    def _share(self, parts: dict[str, int]) -> dict[str, int]:
        """Let the ranks of a group share the map; this rank's rows of each part."""
        layer, mode = type(self).__name__, f" and parallel_mode={self.parallel_mode!r}"
        if self.quantized_init is not None:
            raise NotImplementedError(
                f"{layer}: tp_size={self.tp_size} in quantized_model_init is not offered; a layer that is made outside "
                f"of it is accepted."
            )
        if self.parallel_mode == "row":
            self.in_features = self.divided("in_features", self.in_features, mode)
            return parts
        self.out_features = self.divided("out_features", self.out_features, mode)
        what = "a size of parameters_split" if len(parts) > 1 else "out_features"
        return {name: self.divided(what, size, mode) for name, size in parts.items()}

    def divide(self, mode: str | None) -> None:
        self.parallel_mode = mode
        self.part_rows = tuple(self._share(dict(zip(self.weight_names, self.part_rows, strict=True))).values())
        self._take_roles()
        self.forget_precision()

    def partitions(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        if self.parallel_mode == "row":
            return dict.fromkeys(self.weight_names, (1, (self.in_features,)))
        found: dict[str, tuple[int, tuple[int, ...]]] = {}
        for name, rows in zip(self.weight_names, self.part_rows, strict=True):
            found[name] = found[f"{name.removesuffix('weight')}bias"] = (0, (rows,))
        return found

    def _keep_parts(self, parts: dict[str, int]) -> None:
        """Let each part of a weight that is kept in FP8 have a scale of its own, that of a GEMM of its own."""
        assert self.quantized_init is not None
        recipe = self.quantized_init.recipe
        fits, why = recipe.rows_of_parts, "rows of FP8 operands start at multiples of 16 bytes"
        if fits > 16:
            why = f"a block of {type(recipe).__name__} has {fits}"
        for name, rows in parts.items():
            if rows % fits:
                raise ValueError(
                    f"{type(self).__name__}: parameters_split gives {name.rstrip('_')!r} {rows} rows in "
                    f"quantized_model_init; a multiple of {fits} is accepted ({why})."
                )
        self.weight_names = [f"{part}weight" for part in parts]
        self._take_roles()

    def _create_parameters(self, parts: dict[str, int], dtype: torch.dtype, device: torch.device) -> None:
        self.weight_names = [f"{part}weight" for part in parts]
        self.bias_names = [f"{part}bias" for part in parts]
        self.part_rows = tuple(parts.values())
        if self.tp_size > 1:
            self._take_roles()
        for name, size in zip(self.weight_names, parts.values(), strict=True):
            weight = torch.empty(size, self.in_features, dtype=dtype, device=device)
            self.register_parameter(name, torch.nn.Parameter(weight))
        for name, size in zip(self.bias_names, parts.values(), strict=True):
            if self.use_bias:
                self.register_parameter(name, torch.nn.Parameter(torch.empty(size, dtype=dtype, device=device)))
            else:
                setattr(self, name, torch.empty(0, dtype=dtype, device=device))
        self.mark_parameters()

    @torch.no_grad()
    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the weights anew and zero the biases; from the meta device, move to the default device first.

        Args:
            defer_init: True does nothing, as in Transformer Engine.
        """
        if defer_init:
            return
        if self._parameter_device().type == "meta":
            self.to_empty(device=self.resolve_device(None))
        for name in self.weight_names:
            with forked(*self._rng):
                self.initialize(name, self._init_method)
        for name in self.bias_names:
            getattr(self, name).zero_()

    def parts_of(self, name: str) -> list[torch.nn.Parameter]:
        """The parameters that the weight consists of, by rows."""
        return named(self, self.weight_names)

    def own_roles(self) -> Roles:
        kept_in_parts = self.quantized_init is not None and tuple(self.weight_names) != ("weight",)
        shared, row = None, self.parallel_mode == "row"
        if self.tp_size > 1 and self.parallel_mode is not None:
            shared = self.shared(row, (self.in_features,) if row else self.part_rows)
        return Roles(
            (linear_map("", "weight", shared=shared, tokens=self.tokens),),
            parts=columns_of_parts(self.weight_names) if kept_in_parts else {},
        )

    def columns_of_parts(self) -> dict[str, int]:
        return columns_of_parts(self.weight_names)

    def delayed_weights(self) -> list[str]:
        return ["weight"]

    def joined_weight(self) -> Any:
        """The weight `[out, in]`, its parts concatenated; several that are kept in FP8 as a tuple."""
        only = self._parameters.get(self.weight_names[0]) if len(self.weight_names) == 1 else None
        if only is not None:  # without the calls below, in each step
            return only
        parts = named(self, self.weight_names)
        if len(parts) > 1 and self.quantized_init is not None:
            return tuple(parts)
        return _joined(parts)

    def joined_bias(self) -> torch.Tensor | None:
        """The bias `[out]`, or None."""
        if not self.use_bias:
            return None
        only = self._parameters.get(self.bias_names[0]) if len(self.bias_names) == 1 else None
        return _joined(named(self, self.bias_names)) if only is None else only

    def extra_repr(self) -> str:
        recipe = self.fp8_meta.get("recipe")
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
        return text if recipe is None else f"{text}, recipe={recipe}"


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else stacked(tensors)


class Linear(LinearBase):
    """y = x·wᵀ + b with Transformer Engine's arguments and parameter names.

    Args:
        in_features, out_features: sizes; in FP8 both must be multiples of 16. Any token count works.
        bias: learn a bias.
        init_method: called with the weight; None draws Transformer Engine's normal(0, 0.023)
        (`reference.nn.core.init`). get_rng_state_tracker, rng_tracker_name: the weight is drawn inside
            `tracker().fork(name)`. Without a tracker the name has no effect; Megatron always gives it.
        parameters_split: names (equal parts) or name → size, for weight and bias as several parameters.
        params_dtype: None is torch's default dtype.
        device: None is the package's own: "cpu" for `reference`, "cuda" for `optimized`.
        return_bias: return `(y without bias, bias)`.
        fuse_wgrad_accumulation: add dw to `weight.main_grad` (fp32, bf16 or fp16) instead of returning it. With
            `is_first_microbatch=True`, or where `weight.overwrite_main_grad` is True, main_grad is zeroed first. Where
            `weight.grad_added_to_main_grad` exists (Megatron's convention), it becomes True and `weight.grad` gets
            zeros, so that hooks on it run; `weight.zero_out_wgrad` changes nothing about these.
        parallel_mode, sequence_parallel, tp_group, tp_size: tensor parallelism (`reference.parallel.tensor`), with the
            words of one process. "column": a rank has its rows of the weight and of the bias, and y's columns; "row":
            its columns of the weight and x's columns. in_features and out_features are the whole layer's, and the
            attributes of that name this rank's. The size of tp_group counts; without one, tp_size, and
            `set_tensor_parallel_group` gives the group later. sequence_parallel: x `[s, ..., in]` (column) or y (row)
            are this rank's part of the sequence, an equal one on each rank. Weights are drawn whole and cut: from one
            seed on all ranks they are those of one process. Gradients of a bias are whole on every rank, so that
            nobody need add them.
        delay_wgrad_compute: backward leaves dw out, and `backward_dw()` computes it
        (`reference.nn.core.delayed_wgrad`). save_original_input: what Transformer Engine's backward reads, x or its
            codes; here always the codes in FP8. The numbers are the same, so it has no effect.
        ub_*, symmetric_ar_type: only "off" is offered.

    Source: Transformer Engine's `pytorch/module/linear.py`.
    """

    parallel_modes = ("column", "row")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Split = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        check_arguments("Linear", locals())
        super().__init__()
        self.use_bias = bias
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.name, self.ub_name, self.parallel_mode = name, ub_name, parallel_mode
        self.take_tensor_group(tp_group, tp_size, sequence_parallel)
        self.save_original_input = save_original_input
        rng = (get_rng_state_tracker, rng_tracker_name)
        self._set_up(in_features, out_features, parameters_split, params_dtype, device, init_method, *rng)
        self.delays(delay_wgrad_compute)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer.

        Args:
            inp: `[..., in_features]`, fp32, bf16 or fp16; there may be no tokens.
            is_first_microbatch: None casts the weight each time. True casts it and keeps the FP8 copy; False uses that
                copy and leaves the weight's amax history alone.
            fp8_output, fp8_grad: only False is offered.

        Returns:
            `[..., out_features]` in the input's dtype (or torch.autocast's); with `return_bias` also the bias.
        """
        if not (fp8_output is fp8_grad is False and (is_first_microbatch is None or type(is_first_microbatch) is bool)):
            given = {"is_first_microbatch": is_first_microbatch, "fp8_output": fp8_output, "fp8_grad": fp8_grad}
            check_arguments("Linear.forward", given)
        check_input(self, inp, self.in_features)
        row, column = (self.tp_size > 1 and self.parallel_mode == mode for mode in ("row", "column"))
        if self.sequence_parallel:
            self.check_rows(inp, row)
        dtype = activation_dtype(inp)
        context = self.context(dtype, is_first_microbatch)
        self.check_ranks(inp, row)
        bias = self.joined_bias()
        tensors = (rows_of(inp), self.joined_weight(), None if self.return_bias else bias)
        plan = Plan(dtype, wanted(*tensors), context.key)
        out = differentiable(forward, backward, plan, context, *tensors)
        out = out.view(*self.lead(inp, gathers=column, scatters=row), self.out_features)
        if self.return_bias:
            return out, None if bias is None else bias.to(dtype)
        return out
