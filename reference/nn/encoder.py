"""A whole encoder layer as one pair of functions: what `TransformerLayer` runs where nobody looks at its parts.

It is the pairs of the parts one after the other, with the same roundings and therefore the same bits, and does at once
what they do apart:

    all four weights are cast in one launch                       FP8, unless they are cached
    h = x + dropout(context·wᵀ + b), y = h + dropout(a·w2ᵀ + b)   an epilogue of the products, in FP8
    the residual's gradient is added by the norm's backward       two roundings, as of two modules
    db of proj and of fc2 by the cast of their gradient           where `dbias` would read it once more

One autograd node instead of seven is what a small layer gains most from.
"""

from typing import Any

import torch

from reference.compiled import before
from reference.nn import attention, layernorm_linear, layernorm_mlp, linear, multihead_attention
from reference.nn.attention import AttentionCall, CudnnCall, DotProductAttention
from reference.nn.autograd import differentiable
from reference.nn.dropout import Generator
from reference.nn.layernorm_linear import LayerNormLinear
from reference.nn.layernorm_mlp import FC1_WEIGHT, FC2_WEIGHT, LayerNormMLP, hidden_forward
from reference.nn.linear import INPUT, WEIGHT, Linear
from reference.nn.multihead_attention import MultiheadAttention, SplitCall
from reference.nn.precision import Call, Weight, keep, prepare, rows_of
from reference.ops.library import twin

Saved = tuple[torch.Tensor | None, ...]

# Where the parts' tensors lie among what is saved; attention's, whose number depends on its backend, between them.
QKV, CORE, PROJ, MLP = slice(8), slice(8, -19), slice(-19, -15), slice(-15, -2)


class EncoderCall(Call):
    """One forward of an encoder layer: the calls of its parts, and its dropout."""

    def __init__(
        self,
        parts: tuple[Call, Call, Call],
        split: SplitCall,
        core: AttentionCall | CudnnCall,
        lead: torch.Size,
        sequence_first: bool,
        dropout: tuple[float, Generator],
    ) -> None:
        super().__init__(parts[0].layer, parts[0].dtype)
        self.fp8 = parts[0].fp8
        self.qkv, self.proj, self.mlp = parts
        self.split, self.core, self.lead = split, core, lead
        self.heads_first = (1, 2, 0, 3) if sequence_first else (0, 2, 1, 3)
        self.tokens_first = (2, 0, 1, 3) if sequence_first else (0, 2, 1, 3)
        self.p, self.generator = dropout

    def take(self) -> torch.Tensor | None:
        """The random state of the next dropout."""
        return self.generator.take() if self.p > 0 else None

    def heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v `[b, heads, s, channels]` of the projection; a backward makes the views anew."""
        pieces, _ = multihead_attention.split_forward(self.split, (), mixed.view(*self.lead, -1))
        return tuple(piece.permute(self.heads_first) for piece in pieces)

    def before_dropout(self, grad: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """The gradient on the other side of the dropout that drew from `state`."""
        return twin.dropout_backward(grad, self.p, state) if self.p > 0 else grad


def forward(
    call: EncoderCall,
    needs: tuple[bool, ...],
    x: torch.Tensor,
    norm1_weight: torch.Tensor,
    norm1_bias: torch.Tensor | None,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor | None,
    norm2_weight: torch.Tensor,
    norm2_bias: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, Saved]:
    """y `[tokens, hidden]` of x `[tokens, hidden]`."""
    qkv_w, proj_w, fc1_w, fc2_w = prepare(
        [
            (call.qkv, Weight("weight", qkv_weight, WEIGHT, any(needs[:3]))),
            (call.proj, Weight("weight", proj_weight, WEIGHT, any(needs[:5]))),
            (call.mlp, Weight("fc1_weight", fc1_weight, FC1_WEIGHT, any(needs[:9]))),
            (call.mlp, Weight("fc2_weight", fc2_weight, FC2_WEIGHT, any(needs[:11]))),
        ]
    )
    mixed: Any
    mixed, saved_qkv = layernorm_linear.forward(call.qkv, needs[:5], x, norm1_weight, norm1_bias, qkv_w, qkv_bias)
    attend: Any = attention.forward if isinstance(call.core, AttentionCall) else attention.cudnn_forward
    out, saved_core = attend(call.core, (any(needs[:5]),), *call.heads(mixed))
    context = rows_of(out.permute(call.tokens_first).flatten(2))

    state = call.take()
    dropped = before(state)
    operand = call.proj.input(context, INPUT, transpose=needs[5])
    weight = call.proj.weight("weight", proj_w, WEIGHT, transpose=any(needs[:5]))
    h = call.proj.residual(operand, weight, call.proj.bias(proj_bias), x, call.p, state)
    saved_proj = (*keep(operand), *keep(weight))

    a, w2, _, saved_mlp = hidden_forward(
        call.mlp, (any(needs[:7]), *needs[7:]), h, norm2_weight, norm2_bias, fc1_w, fc1_bias, fc2_w
    )
    state = call.take()
    saved = (*saved_qkv, mixed, *saved_core[3:], *saved_proj, *saved_mlp, dropped, before(state))
    return call.mlp.residual(a, w2, call.mlp.bias(fc2_bias), h, call.p, state), saved


def backward(call: EncoderCall, needs: tuple[bool, ...], saved: Saved, grad: torch.Tensor) -> Saved:
    """The gradients of forward's tensors."""
    grad = grad.contiguous()
    inner, *mlp_grads = layernorm_mlp.backward(
        call.mlp,
        (any(needs[:7]), *needs[7:]),
        saved[MLP],
        call.before_dropout(grad, saved[-1]),
        residual_grad=grad,
    )
    if inner is None:
        return (*[None] * 7, *mlp_grads)
    dropped = call.before_dropout(inner, saved[-2])
    needs_proj = (any(needs[:5]), *needs[5:7])
    context_grad, *proj_grads = linear.backward(call.proj, needs_proj, saved[PROJ], dropped)
    if context_grad is None:
        return (*[None] * 5, *proj_grads, *mlp_grads)
    by_head = context_grad.view(*call.lead, -1, call.split.channels).permute(call.heads_first)
    attend: Any = attention.backward if isinstance(call.core, AttentionCall) else attention.cudnn_backward
    mixed: Any
    mixed, *saved_core = saved[CORE]
    gradients = attend(call.core, (), (*call.heads(mixed), *saved_core), by_head)
    pieces = (t.permute(call.tokens_first) for t in gradients)
    mixed_grad: Any
    (mixed_grad,) = multihead_attention.split_backward(call.split, (), (), *pieces)
    qkv_grads = layernorm_linear.backward(
        call.qkv, needs[:5], saved[QKV], mixed_grad.flatten(0, 1), residual_grad=inner if needs[0] else None
    )
    return (*qkv_grads, *proj_grads, *mlp_grads)


PARTS = (
    ("self_attention", MultiheadAttention),
    ("self_attention.layernorm_qkv", LayerNormLinear),
    ("self_attention.core_attention", DotProductAttention),
    ("self_attention.proj", Linear),
    ("layernorm_mlp", LayerNormMLP),
)


def is_one(layer: Any) -> bool:
    """Whether an encoder layer may run as one: nobody replaced, graphed or hooked a part of it."""
    owners = {"": layer, "self_attention": layer.self_attention}
    for path, kind in PARTS:
        owner, _, name = path.rpartition(".")
        part = owners[owner]._modules[name]
        if type(part).forward is not kind.forward or "forward" in part.__dict__:
            return False
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return False
    core = layer.self_attention.core_attention
    return core.attention_backend == "exact" or core.num_gqa_groups == core.num_attention_heads


def run(
    layer: Any, x: torch.Tensor, mask: attention.Mask, mask_type: str, is_first_microbatch: bool | None
) -> torch.Tensor:
    """A layer of which `is_one` is true, of x `[s, b, hidden]` or `[b, s, hidden]`."""
    first, core, mlp = layer.self_attention, layer.self_attention.core_attention, layer.layernorm_mlp
    qkv, proj = first.layernorm_qkv, first.proj
    qkv.check_input(x, qkv.in_features)
    calls = tuple(part.call(x, is_first_microbatch) for part in (qkv, proj, mlp))
    sequence_first = first.qkv_format == "sbhd"
    kind = attention.check_mask_type("DotProductAttention", mask_type)
    length = x.shape[0 if sequence_first else 1]
    call = EncoderCall(
        calls,
        first.split_call(x.dtype, first.num_attention_heads // first.num_gqa_groups),
        core.attention_call(x.dtype, kind, attention.full_mask(kind, mask, length, length)),
        x.shape[:-1],
        sequence_first,
        (layer.hidden_dropout if layer.training else 0.0, layer.generator),
    )
    tensors = (
        *(qkv.layer_norm_weight, qkv.layer_norm_bias, qkv.joined_weight(), qkv.joined_bias()),
        *(proj.weight, proj.joined_bias()),
        *(mlp.layer_norm_weight, mlp.layer_norm_bias),
        *(mlp.fc1_weight, mlp.fc1_bias, mlp.fc2_weight, mlp.fc2_bias),
    )
    return differentiable(forward, backward, call, rows_of(x), *tensors).view(x.shape)
