"""The two halves of a transformer layer, each with its norm and its residual as one pair of functions.

    h = x + dropout(attention(norm(x))·wᵀ + b)        y = h + dropout(act(norm(h)·w1ᵀ + b1)·w2ᵀ + b2)

They are the pairs of their parts one after the other, with the same roundings and therefore the same bits, and do at
once what the parts do apart:

    both weights are cast in one launch                           FP8, unless they are cached
    bias, dropout and residual are the product's epilogue         FP8
    the residual's gradient is added by the norm's backward       two roundings, as of two modules
    db of proj and of fc2 by the cast of their gradient           where `dbias` would read it once more
    the gradients of q, k, v are cast from where they are         FP8 with a bias; else side by side first

`TransformerLayer` runs its parts instead where somebody looks at them (`untouched`), where a half is none of these, and
where attention is PyTorch's own (fp32). It has checked its arguments before it calls anything here.
A small layer runs both halves as one pair (`is_small`): what one half saves then lives until the other is through, and
the host, for which such a layer waits, has half the calls to make.
"""

from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook

from reference import recompute
from reference.compiled import before
from reference.nn import attention, layernorm_linear, layernorm_mlp, linear
from reference.nn.attention import AttentionCall, CudnnCall, DotProductAttention, Mask
from reference.nn.autograd import differentiable
from reference.nn.dropout import Generator
from reference.nn.layernorm_linear import LayerNormLinear
from reference.nn.layernorm_mlp import LayerNormMLP
from reference.nn.linear import GRAD_OUTPUT, INPUT, WEIGHT, Linear
from reference.nn.multihead_attention import MultiheadAttention, SplitCall, split_forward
from reference.nn.precision import Call, Tensors, Weight, keep, prepare, rows_of
from reference.ops.library import twin

Saved = tuple[torch.Tensor | None, ...]
Dropout = tuple[float, Generator]

SMALL = 1 << 27  # elements of parameters and of activations together, some 30 to an element of x
_ATTENTION_TENSORS = 7  # arguments of its pair, x included
_MLP_SAVED = 14


def _collect_state(state: torch.Tensor | None, *lists: Tensors) -> None:
    """A random state that forward draws from."""
    if state is not None:
        for one in lists:
            one.append(state)


class BlockCall(Call):
    """A half's forward: the call of its first module, its dropout, and its input's shape.

    The pairs take and give tensors of that shape, so that autograd sees no views between the halves.
    """

    def __init__(self, first: Call, dropout: Dropout, shape: torch.Size) -> None:
        super().__init__(first.layer, first.dtype)
        self.fp8, self.first, self.shape = first.fp8, first, shape
        self.p, generator = dropout
        self.state = generator.take() if self.p > 0 else None  # here: no compiler follows it out of a pair

    def parts(self) -> tuple[Call, ...]:
        """The calls of its modules."""
        return (self.first,)

    def constants(self) -> Any:
        found = [self.p, *(part.constants() for part in self.parts())]
        return None if None in found else tuple(found)

    def collect(self, every: Tensors, forward: Tensors, backward: Tensors) -> None:
        for part in self.parts():
            part.collect(every, forward, backward)
        _collect_state(self.state, every, forward)

    def taken(self, x: Any, trains: bool) -> Any:
        return self.first.taken(x, trains)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden]` in the input's shape; no view, which a function's result must not be."""
        return torch.ops.aten._unsafe_view(rows, self.shape)

    def before_dropout(self, grad: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """The gradient on the other side of the dropout that drew from `state`."""
        return twin.dropout_backward(grad, self.p, state) if self.p > 0 else grad


def mlp_forward(
    call: BlockCall,
    needs: tuple[bool, ...],
    h: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, Saved]:
    """y `[..., hidden]` of h `[..., hidden]`."""
    mlp, dropped, rows = call.first, before(call.state), rows_of(h)
    tensors = (rows, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight)
    a, w2, _, saved = layernorm_mlp.hidden_forward(mlp, needs, *tensors)
    return call.whole(mlp.residual(a, w2, mlp.bias(fc2_bias), rows, call.p, call.state)), (*saved, dropped)


def mlp_backward(call: BlockCall, needs: tuple[bool, ...], saved: Saved, grad: torch.Tensor) -> Saved:
    """The gradients of forward's tensors."""
    grad = rows_of(grad)
    *kept, dropped = saved
    inner = call.before_dropout(grad, dropped)
    residual_grad = grad if needs[0] else None
    dh, *grads = layernorm_mlp.backward(call.first, needs, tuple(kept), inner, residual_grad=residual_grad)
    return None if dh is None else call.whole(dh), *grads


class AttentionBlockCall(BlockCall):
    """The calls of the QKV projection (`first`), of attention and of the output projection."""

    next: Any = None  # the layer's MLP, its dropout, is_first_microbatch: what runs behind it, where that is known

    def __init__(
        self,
        first: Call,
        dropout: Dropout,
        core: AttentionCall | CudnnCall,
        proj: Call,
        split: SplitCall,
        shape: torch.Size,
        sequence_first: bool,
    ) -> None:
        super().__init__(first, dropout, shape)
        self.core, self.proj, self.split, self.lead = core, proj, split, shape[:-1]
        self.heads_first = (1, 2, 0, 3) if sequence_first else (0, 2, 1, 3)
        self.tokens_first = (2, 0, 1, 3) if sequence_first else (0, 2, 1, 3)

    def parts(self) -> tuple[Call, ...]:
        return self.first, self.proj

    def constants(self) -> Any:
        found, core = super().constants(), self.core
        if found is None or (isinstance(core, AttentionCall) and core.arguments[2] is not None):
            return None  # a mask is a tensor that is not among the arguments
        layout = (self.split.parts, self.split.channels, self.split.rows, self.lead, self.heads_first)
        how = (core.scale, core.kind, core.p) if isinstance(core, CudnnCall) else core.arguments
        return (*found, type(core), how, *layout)

    def collect(self, every: Tensors, forward: Tensors, backward: Tensors) -> None:
        super().collect(every, forward, backward)
        _collect_state(getattr(self.core, "state", None), every, forward)

    def following(self, needs: tuple[bool, ...], x: torch.Tensor) -> Any:
        if self.next is None or recompute.active():  # a checkpoint would note the scales of a second call
            return None
        call, parameters = _mlp_arguments(self.next[0], x, *self.next[1:])
        call.grad_enabled = self.grad_enabled
        tensors = tuple(call.taken(t, any(needs)) for t in parameters)
        return mlp_forward, mlp_backward, call, (any(needs), *call.needs(parameters)), (x, *tensors)

    def heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v `[b, heads, s, channels]` of the projection; a backward makes the views anew."""
        pieces, _ = split_forward(self.split, (), mixed.view(*self.lead, mixed.shape[-1]))
        return tuple(piece.permute(self.heads_first) for piece in pieces)

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads·channels]` of `[b, heads, s, channels]`."""
        return x.permute(self.tokens_first).reshape(-1, x.shape[1] * x.shape[3])


def attention_forward(
    call: AttentionBlockCall,
    needs: tuple[bool, ...],
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, Saved]:
    """h `[..., hidden]` of x `[..., hidden]`."""
    qkv, proj, x = call.first, call.proj, rows_of(x)
    qkv_w, proj_w = prepare(
        [
            (qkv, Weight("weight", qkv_weight, WEIGHT, any(needs[:3]))),
            (proj, Weight("weight", proj_weight, WEIGHT, any(needs[:5]))),
        ]
    )
    mixed: Any
    mixed, saved_qkv = layernorm_linear.forward(qkv, needs[:5], x, norm_weight, norm_bias, qkv_w, qkv_bias)
    attend: Any = attention.forward if isinstance(call.core, AttentionCall) else attention.cudnn_forward
    out, (_, _, _, *saved_core) = attend(call.core, (any(needs[:5]),), *call.heads(mixed))
    dropped = before(call.state)
    operand = proj.input(call.tokens(out), INPUT, transpose=needs[5])
    w = proj.weight("weight", proj_w, WEIGHT, transpose=any(needs[:5]))
    h = proj.residual(operand, w, proj.bias(proj_bias), x, call.p, call.state)
    return call.whole(h), (*saved_qkv, *keep(operand), *keep(w), dropped, mixed, *saved_core)


def attention_backward(call: AttentionBlockCall, needs: tuple[bool, ...], saved: Saved, grad: torch.Tensor) -> Saved:
    """The gradients of forward's tensors."""
    saved_qkv, saved_proj, (dropped, mixed, *saved_core) = saved[:8], saved[8:12], saved[12:]
    grad = rows_of(grad)
    inner = call.before_dropout(grad, dropped)
    needs_proj = (any(needs[:5]), *needs[5:])
    context_grad, *proj_grads = linear.backward(call.proj, needs_proj, saved_proj, inner)
    if context_grad is None or mixed is None:
        return (*[None] * 5, *proj_grads)
    channels = call.split.channels
    by_head = context_grad.view(*call.lead, context_grad.shape[-1] // channels, channels).permute(call.heads_first)
    attend: Any = attention.backward if isinstance(call.core, AttentionCall) else attention.cudnn_backward
    pieces = [call.tokens(t) for t in attend(call.core, (), (*call.heads(mixed), *saved_core), by_head)]
    g, db = call.first.joined_grad(pieces, call.split.rows, GRAD_OUTPUT, transpose=needs[3], dbias=needs[4])
    residual_grad = grad if needs[0] else None
    dx, *qkv_grads = layernorm_linear.operand_backward(call.first, needs, saved_qkv, g, residual_grad=residual_grad)
    return (None if dx is None else call.whole(dx), *qkv_grads, db, *proj_grads)


class LayerCall(Call):
    """Both halves."""

    def __init__(self, attention: AttentionBlockCall, mlp: BlockCall) -> None:
        super().__init__(attention.layer, attention.dtype)
        self.fp8, self.halves = attention.fp8, (attention, mlp)

    def constants(self) -> Any:
        found = tuple(half.constants() for half in self.halves)
        return None if None in found else found

    def collect(self, every: Tensors, forward: Tensors, backward: Tensors) -> None:
        for half in self.halves:
            half.collect(every, forward, backward)

    def taken(self, x: Any, trains: bool) -> Any:
        return self.halves[0].taken(x, trains)

    def split(self, needs: tuple[bool, ...]) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """`needs` of the halves."""
        first = needs[:_ATTENTION_TENSORS]
        return first, (any(first), *needs[_ATTENTION_TENSORS:])


def layer_forward(
    call: LayerCall, needs: tuple[bool, ...], x: torch.Tensor, *weights: torch.Tensor | None
) -> tuple[torch.Tensor, Saved]:
    """y `[..., hidden]` of x `[..., hidden]`; `weights` are the first half's and the second's."""
    (attention, mlp), (needs_attention, needs_mlp) = call.halves, call.split(needs)
    arguments: Any = (weights[: _ATTENTION_TENSORS - 1], weights[_ATTENTION_TENSORS - 1 :])
    h, saved = attention_forward(attention, needs_attention, x, *arguments[0])
    y, more = mlp_forward(mlp, needs_mlp, h, *arguments[1])
    return y, saved + more


def layer_backward(call: LayerCall, needs: tuple[bool, ...], saved: Saved, grad: torch.Tensor) -> Saved:
    """The gradients of forward's tensors."""
    (attention, mlp), (needs_attention, needs_mlp) = call.halves, call.split(needs)
    dh, *mlp_grads = mlp_backward(mlp, needs_mlp, saved[-_MLP_SAVED:], grad)
    if dh is None:
        return (*[None] * _ATTENTION_TENSORS, *mlp_grads)
    return (*attention_backward(attention, needs_attention, saved[:-_MLP_SAVED], dh), *mlp_grads)


def _parameters(module: torch.nn.Module, names: tuple[str, ...]) -> list[Any]:
    """Parameters by name, at a fraction of the time of `Module.__getattr__`, which finds what is not plainly one."""
    plain = module._parameters
    return [plain[name] if name in plain else getattr(module, name) for name in names]


def _parts(attention: torch.nn.Module) -> tuple[Any, Any, Any]:
    """The modules of an attention behind a norm of its own, likewise."""
    modules = attention._modules
    return modules["layernorm_qkv"], modules["core_attention"], modules["proj"]


def untouched(part: torch.nn.Module, kind: type[torch.nn.Module]) -> bool:
    """Whether nobody replaced, graphed or hooked a part of a layer, so that it need not be called as a module."""
    return not (
        type(part).forward is not kind.forward
        or "forward" in part.__dict__
        or part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        or _has_any_global_hook()
    )


def is_mlp_block(mlp: Any) -> bool:
    """Whether `mlp_block` may run for it."""
    return untouched(mlp, LayerNormMLP) and not mlp.return_layernorm_output


def is_attention_block(module: Any) -> bool:
    """Whether `attention_block` may run for it: self-attention behind a norm of its own."""
    if not untouched(module, MultiheadAttention) or module.attention_type != "self" or not module.input_layernorm:
        return False
    qkv, core, proj = _parts(module)
    return (
        not module.return_layernorm_output
        and untouched(qkv, LayerNormLinear)
        and untouched(core, DotProductAttention)
        and untouched(proj, Linear)
        and (core.attention_backend == "exact" or module.num_gqa_groups == module.num_attention_heads)
    )


def is_small(parameters: int, x: torch.Tensor) -> bool:
    """Whether `layer_block` should run for a layer of two such halves: the host decides about its time.

    A checkpoint notes a random state as it is when a half's call is made, so the halves must take turns.
    """
    return not torch.compiler.is_compiling() and not recompute.active() and parameters + 30 * x.numel() <= SMALL


def _mlp_arguments(mlp: Any, h: torch.Tensor, dropout: Dropout, is_first_microbatch: bool | None) -> Any:
    """The call of an MLP's half, and its parameters; `TransformerLayer` has checked h, here and for the next."""
    names = ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    return BlockCall(mlp.call(h, is_first_microbatch), dropout, h.shape), _parameters(mlp, names)


def _attention_arguments(
    module: Any, x: torch.Tensor, mask: Mask, mask_type: str, dropout: Dropout, is_first_microbatch: bool | None
) -> Any:
    """The call of an attention's half, and its parameters."""
    qkv, core, proj = _parts(module)
    first = qkv.call(x, is_first_microbatch)
    call = AttentionBlockCall(
        first,
        dropout,
        core.attention_call(x, first.dtype, mask_type, attention.full_mask(mask_type, mask)),
        proj.call(x, is_first_microbatch),
        module.split_call(first.dtype, module.num_attention_heads // module.num_gqa_groups),
        x.shape,
        module.qkv_format == "sbhd",
    )
    norm = _parameters(qkv, ("layer_norm_weight", "layer_norm_bias"))
    return call, (*norm, qkv.joined_weight(), qkv.joined_bias(), proj.weight, proj.joined_bias())


def mlp_block(mlp: Any, h: torch.Tensor, dropout: Dropout, is_first_microbatch: bool | None) -> torch.Tensor:
    """y of h `[..., hidden]`."""
    call, tensors = _mlp_arguments(mlp, h, dropout, is_first_microbatch)
    return differentiable(mlp_forward, mlp_backward, call, h, *tensors)


def attention_block(
    module: Any,
    x: torch.Tensor,
    mask: Mask,
    mask_type: str,
    dropout: Dropout,
    is_first_microbatch: bool | None,
    mlp: Any = None,
) -> torch.Tensor:
    """h of x `[s, b, hidden]` or `[b, s, hidden]`; `mlp`, if given, is what `mlp_block` runs of h next."""
    call, tensors = _attention_arguments(module, x, mask, mask_type, dropout, is_first_microbatch)
    if mlp is not None:
        call.next = mlp, dropout, is_first_microbatch
    return differentiable(attention_forward, attention_backward, call, x, *tensors)


def layer_block(
    module: Any,
    mlp: Any,
    x: torch.Tensor,
    mask: Mask,
    mask_type: str,
    dropout: Dropout,
    is_first_microbatch: bool | None,
) -> torch.Tensor:
    """y of x `[s, b, hidden]` or `[b, s, hidden]`: `mlp_block` of `attention_block`."""
    first, tensors = _attention_arguments(module, x, mask, mask_type, dropout, is_first_microbatch)
    second, more = _mlp_arguments(mlp, x, dropout, is_first_microbatch)
    return differentiable(layer_forward, layer_backward, LayerCall(first, second), x, *tensors, *more)
