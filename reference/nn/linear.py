"""`Linear`: y = x·wᵀ + b, in fp32, in 16 bits, or in FP8 with delayed scaling.

Shapes: x `[tokens, in]`, w `[out, in]`, b `[out]`, y and g = dL/dy `[tokens, out]`. `q(t)` is the cast to FP8 by
`twin::cast_transpose`, with `t ≈ q(t)·t_inv`; E4M3 forward, E5M2 (HYBRID) or E4M3 for g.

FP8 (activation dtype T is x's or torch.autocast's; every product accumulates as `reference.tensor_core` says):

    y  = T( q(x)·q(w)ᵀ · (x_inv·w_inv) + b )        fast accumulation: one chain over `in`
    dx = T( q(g)·q(w) · (g_inv·w_inv) )             split accumulation, over `out`
    dw = T( q(g)ᵀ·q(x) · (g_inv·x_inv) )            split accumulation, over the tokens
    db = T( column sums of g )                      order: `reference.ops.dbias`

16 bits: x, w, b are rounded to T, then y = T(x·wᵀ + b), dx = T(g·w), dw = T(gᵀ·x), each product one chain.
fp32 outside FP8 is PyTorch's own product and outside the bit contract. In FP8 with T = fp32 the bias is rounded
to bf16 first. Each of these rounding points is Transformer Engine's `module/linear.py`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from reference import recompute, scaling
from reference.autocast import AutocastState, take_first_module
from reference.nn import init
from reference.nn.gemms import (
    Quantized,
    dgrad16,
    fp8_dgrad,
    fp8_forward,
    fp8_wgrad,
    linear16_forward,
    quantize,
    rows_of,
    weight_gradient,
    wgrad16,
)
from reference.nn.module import TransformerEngineBaseModule

twin = torch.ops.twin

INPUT, WEIGHT = 0, 1  # columns of scaling_fwd
GRAD_OUTPUT = 0  # column of scaling_bwd


class _FP8Linear(torch.autograd.Function):
    """The FP8 pair under autograd. FP8 state stays on the module; tensors go through saved-tensor hooks."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: "Linear",
        call: "_FP8Call",
    ) -> torch.Tensor:
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        out, x, w = layer._fp8_run(inp, weight, bias, call, needs_dx, needs_dw)
        ctx.save_for_backward(x.q_t, x.scale_inv if needs_dw else None, w.q_t if needs_dx else None, w.scale_inv)
        ctx.layer, ctx.call, ctx.main_grad_owner = layer, call, weight
        ctx.needs = (needs_dx, needs_dw, needs_db)
        ctx.inp_shape = inp.shape
        replaying = recompute.replaying()
        ctx.updates = any(ctx.needs) and not replaying and take_first_module()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_t, x_inv, w_t, w_inv = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs
        call: _FP8Call = ctx.call
        layer: Linear = ctx.layer
        meta = layer.fp8_meta["scaling_bwd"]
        arguments = (
            rows_of(grad),
            meta.scale,
            meta.amax_history,
            GRAD_OUTPUT,
            call.recipe.fp8_format.dtype(False),
        )
        dx = dw = db = None
        if needs_db:
            *cast, db = twin.cast_transpose_dbias(*arguments)
            g = Quantized(*cast)
        else:
            g = quantize(*arguments, transpose=needs_dw)
        if needs_dx:
            dx = fp8_dgrad(g, w_t, w_inv, call.activation_dtype).view(ctx.inp_shape)
        if needs_dw:
            dw = weight_gradient(
                lambda dtype: fp8_wgrad(g, x_t, x_inv, dtype), call.activation_dtype, layer._main_grad(ctx)
            )
        if ctx.updates:
            scaling.update(forward=False)
        return dx, dw, db, None, None


class _Linear16(torch.autograd.Function):
    """The 16-bit pair under autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: "Linear",
        dtype: torch.dtype,
    ) -> torch.Tensor:
        x, w = rows_of(inp).to(dtype), weight.to(dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None)
        ctx.layer, ctx.main_grad_owner, ctx.inp_shape, ctx.dtype = layer, weight, inp.shape, dtype
        return linear16_forward(x, w, bias, dtype).view(*inp.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        g = rows_of(grad).to(ctx.dtype)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = dgrad16(g, w).view(ctx.inp_shape)
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(lambda dtype: wgrad16(g, x, dtype), ctx.dtype, ctx.layer._main_grad(ctx))
        if ctx.needs_input_grad[2]:
            db = twin.dbias(g)
        return dx, dw, db, None, None


class _FP8Call(NamedTuple):
    """What one FP8 forward fixes for its backward."""

    recipe: Any
    activation_dtype: torch.dtype
    is_first_microbatch: bool | None


# --- the module ------------------------------------------------------------------------------------------


class Linear(TransformerEngineBaseModule):
    """y = x·wᵀ + b with Transformer Engine's arguments and parameter names.

    Args:
        in_features, out_features: sizes; in FP8 both must be multiples of 16. Any token count works.
        bias: learn a bias.
        init_method: called with the weight; None draws Transformer Engine's normal(0, 0.023), by our own Philox
            seeded from torch's CPU generator, so the numbers do not depend on the machine or the device.
        get_rng_state_tracker, rng_tracker_name: the weight is drawn inside `tracker().fork(name)`.
        parameters_split: names (equal parts) or name → size, to hold weight and bias as several parameters.
        params_dtype: None is torch's default dtype.
        device: None is the package's own: "cpu" for `reference`, "cuda" for `optimized`.
        return_bias: return `(y without bias, bias)`.
        fuse_wgrad_accumulation: add dw to `weight.main_grad` (fp32 or bf16) instead of returning it.
        parallel_mode, sequence_parallel, tp_group, tp_size, ub_*, delay_wgrad_compute, symmetric_ar_type,
            save_original_input: accepted at the values that mean "off"; anything else is not offered.

    Source: Transformer Engine's `pytorch/module/linear.py`.
    """

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
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
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
        super().__init__()
        _refuse_parallelism(locals())
        if min(in_features, out_features) < 1:
            raise ValueError(
                f"Linear: in_features={in_features}, out_features={out_features}; sizes >= 1 are accepted."
            )
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.name = name
        self._init_method = init_method
        self._fork_rng = functools.partial(_fork, get_rng_state_tracker, rng_tracker_name)
        self._create_parameters(parameters_split, params_dtype, device)
        if self._parameter_device().type != "meta":
            self.reset_parameters()

    def _create_parameters(
        self,
        split: Sequence[str] | Mapping[str, int] | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"Linear: params_dtype={dtype}; float32, bfloat16 and float16 are accepted.")
        device = self.resolve_device(device)
        sizes = _split_sizes(split, self.out_features)
        self.weight_names = [f"{part}weight" for part in sizes]
        self.bias_names = [f"{part}bias" for part in sizes]
        for part, size in sizes.items():
            weight = torch.empty(size, self.in_features, dtype=dtype, device=device)
            self.register_parameter(f"{part}weight", torch.nn.Parameter(weight))
        for part, size in sizes.items():
            vector = torch.empty(size if self.use_bias else 0, dtype=dtype, device=device)
            if self.use_bias:
                self.register_parameter(f"{part}bias", torch.nn.Parameter(vector))
            else:
                setattr(self, f"{part}bias", vector)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights anew and zero the biases; parameters on the meta device move to the default one first."""
        if self._parameter_device().type == "meta":
            self.to_empty(device=self.resolve_device(None))
        for name in self.weight_names:
            with self._fork_rng():
                (self._init_method or init.normal_)(getattr(self, name))
        for name in self.bias_names:
            getattr(self, name).zero_()

    def _joined(self, names: list[str]) -> torch.Tensor:
        tensors = [getattr(self, name) for name in names]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Apply the layer.

        Args:
            inp: `[..., in_features]`, fp32, bf16 or fp16.
            is_first_microbatch: None casts the weight each time. True casts it and keeps the FP8 copy; False
                uses that copy and leaves the weight's amax history alone.
            fp8_output, fp8_grad: FP8 results; only False is offered.

        Returns:
            `[..., out_features]` in the input's dtype (or torch.autocast's); with `return_bias`, and the bias.
        """
        if fp8_output or fp8_grad:
            raise NotImplementedError(
                f"Linear: fp8_output={fp8_output}, fp8_grad={fp8_grad}; only False is accepted: "
                f"results in FP8 are not offered."
            )
        self.check_input(inp, self.in_features)
        state = self.init_fp8_metadata()
        weight = self._joined(self.weight_names)
        bias = self._joined(self.bias_names) if self.use_bias else None
        out = self._run(inp, weight, bias if self.apply_bias else None, state, is_first_microbatch)
        if self.return_bias:
            dtype = self.activation_dtype(inp)
            return out, self._joined(self.bias_names).to(dtype)
        return out

    def _run(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: AutocastState,
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        dtype = self.activation_dtype(inp)
        if state.enabled:
            self._check_fp8_sizes()
            call = _FP8Call(state.recipe, dtype, is_first_microbatch)
            if torch.is_grad_enabled():
                return _FP8Linear.apply(inp, weight, bias, self, call)
            return self._fp8_run(inp, weight, bias, call, False, False)[0]
        if state.calibrating and not recompute.replaying():
            self._calibrate(inp, weight)
        if dtype == torch.float32:
            return torch.nn.functional.linear(inp, weight.float(), None if bias is None else bias.float())
        if torch.is_grad_enabled():
            return _Linear16.apply(inp, weight, bias, self, dtype)
        out = linear16_forward(rows_of(inp).to(dtype), weight.to(dtype), bias, dtype)
        return out.view(*inp.shape[:-1], self.out_features)

    def _check_fp8_sizes(self) -> None:
        for name in ("in_features", "out_features"):
            if getattr(self, name) % 16:
                raise ValueError(
                    f"Linear: {name}={getattr(self, name)} under FP8 autocast; a multiple of 16 is accepted "
                    f"(rows of FP8 operands start at multiples of 16 bytes)."
                )

    def _calibrate(self, inp: torch.Tensor, weight: torch.Tensor) -> None:
        history = self.fp8_meta["scaling_fwd"].amax_history
        with torch.no_grad():
            twin.amax(rows_of(inp.detach()), history, INPUT)
            twin.amax(weight.detach().contiguous(), history, WEIGHT)

    def _fp8_run(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: _FP8Call,
        needs_dx: bool,
        needs_dw: bool,
    ) -> tuple[torch.Tensor, Quantized, Quantized]:
        """Cast and multiply: y in the input's shape, and the two operands for backward."""
        meta = self.fp8_meta["scaling_fwd"]
        scale = recompute.scale_for(self, meta.scale)
        history = None if recompute.replaying() else meta.amax_history
        dtype = call.recipe.fp8_format.dtype(True)
        x = quantize(rows_of(inp), scale, history, INPUT, dtype, transpose=needs_dw)
        w = self._fp8_weight(weight, scale, history, dtype, needs_dx, call.is_first_microbatch)
        if bias is not None:
            bias = bias.to(torch.bfloat16 if call.activation_dtype == torch.float32 else call.activation_dtype)
        out = fp8_forward(x, w, bias, call.activation_dtype)
        return out.view(*inp.shape[:-1], self.out_features), x, w

    def _fp8_weight(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        history: torch.Tensor | None,
        dtype: torch.dtype,
        transpose: bool,
        is_first_microbatch: bool | None,
    ) -> Quantized:
        """The weight in FP8: cast now, or the copy an earlier microbatch made."""
        if is_first_microbatch is False:
            cached = self._fp8_workspaces.get("weight")
            if cached is not None and cached.q.dtype == dtype and (cached.q_t is not None or not transpose):
                return cached
        w = quantize(weight.contiguous(), scale, history, WEIGHT, dtype, transpose)
        if is_first_microbatch is not None:
            self._fp8_workspaces["weight"] = w
        return w

    def _main_grad(self, ctx: Any) -> torch.Tensor | None:
        """Where dw is to be added, if `fuse_wgrad_accumulation` asks for it."""
        if not self.fuse_wgrad_accumulation:
            return None
        main_grad = getattr(ctx.main_grad_owner, "main_grad", None)
        if main_grad is None:
            raise RuntimeError(
                "Linear: fuse_wgrad_accumulation=True and the weight has no main_grad; "
                "a float32 or bfloat16 tensor of the weight's shape is accepted."
            )
        return main_grad

    def extra_repr(self) -> str:
        """Sizes, bias and the recipe last run under."""
        recipe = self.fp8_meta.get("recipe")
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
        return text if recipe is None else f"{text}, recipe={recipe}"


def _fork(get_tracker: Callable[[], Any] | None, name: str | None) -> Any:
    """The context a weight is drawn in."""
    if get_tracker is None:
        return torch.no_grad()
    return get_tracker().fork() if name is None else get_tracker().fork(name)


def _split_sizes(split: Sequence[str] | Mapping[str, int] | None, out_features: int) -> dict[str, int]:
    """Parameter-name prefix → rows, as Transformer Engine names them (`"query"` → `query_weight`)."""
    if split is None:
        return {"": out_features}
    if isinstance(split, Mapping):
        sizes = {f"{name.rstrip('_')}_": size for name, size in split.items()}
    else:
        sizes = {f"{name.rstrip('_')}_": out_features // len(split) for name in split}
    if not sizes or sum(sizes.values()) != out_features:
        raise ValueError(
            f"Linear: parameters_split={split!r} with out_features={out_features}; "
            f"distinct names whose sizes add up to out_features are accepted."
        )
    return sizes


_PARALLEL_OFF = {
    "sequence_parallel": False,
    "tp_group": None,
    "tp_size": 1,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "delay_wgrad_compute": False,
    "symmetric_ar_type": None,
    "save_original_input": False,
}


def _refuse_parallelism(arguments: Mapping[str, Any]) -> None:
    for name, off in _PARALLEL_OFF.items():
        if arguments[name] != off:
            raise NotImplementedError(f"Linear: {name}={arguments[name]!r} is not offered; {off!r} is accepted.")
    if arguments["parallel_mode"] not in (None, "row", "column"):
        raise ValueError(
            f"Linear: parallel_mode={arguments['parallel_mode']!r}; None, 'row' and 'column' are accepted."
        )
