"""The tutorial's layer in four forms with the same parameters: plain PyTorch, te's modules, fused modules, one layer.

    h = x + projection(attention(qkv(norm(x))))        y = h + fc2(gelu(fc1(norm(h))))

Activations are `[sequence, batch, hidden]`; QKV's rows are `[heads, (q, k, v), channels]`. Dropout applies to
attention's weights and to the projection's output; a `TransformerLayer` also applies it after the MLP.
Source: Transformer Engine's quickstart.
"""

import functools
from typing import Any

import torch
from torch.nn.functional import dropout

import reference as te

twin = torch.ops.twin


class BasicTransformerLayer(torch.nn.Module):
    """The layer in plain PyTorch; `linear` and `norm` make its parts, `p` is the probability of dropout."""

    def __init__(
        self,
        hidden: int,
        ffn: int,
        heads: int,
        linear: Any = torch.nn.Linear,
        norm: Any = torch.nn.LayerNorm,
        p: float = 0.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.channels, self.p, self.causal = heads, hidden // heads, p, causal
        self.ln1 = norm(hidden)
        self.qkv = linear(hidden, 3 * hidden)
        self.projection = linear(hidden, hidden)
        self.ln2 = norm(hidden)
        self.fc1 = linear(hidden, ffn)
        self.fc2 = linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result are `[sequence, batch, hidden]`."""
        q, k, v = self.mixed(x).unflatten(2, (self.heads, 3 * self.channels)).split(self.channels, dim=3)
        h = x + dropout(self.projection(self.attend(q, k, v)), self.p)
        return h + self.mlp(h)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of x."""
        return self.qkv(self.ln1(x))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of `[s, b, heads, channels]` to `[s, b, hidden]`."""
        return self.attend_heads(*(t.permute(1, 2, 0, 3) for t in (q, k, v))).permute(2, 0, 1, 3).flatten(2)

    def attend_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of `[b, heads, s, channels]`."""
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.channels**-0.5
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.matmul(dropout(torch.softmax(scores, dim=-1), self.p), v)

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        """The feed-forward part, with its norm."""
        return self.fc2(torch.nn.functional.gelu(self.fc1(self.ln2(h)), approximate="tanh"))


class _Gelu(torch.autograd.Function):
    """tanh GELU as Hopper's kernels compute it: `twin::activation`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return twin.activation(x.flatten(0, -2), "gelu").view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        flat = (t.contiguous().flatten(0, -2) for t in (grad, x))
        return twin.activation_backward(*flat, "gelu").view(x.shape)


class ModulesLayer(BasicTransformerLayer):
    """The layer made of `te.LayerNorm`, `te.Linear` and `te.DotProductAttention`: without dropout every bit is defined.

    `init_method` and `params_dtype` are te's.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        heads: int,
        p: float = 0.0,
        causal: bool = True,
        init_method: Any = None,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        norm = functools.partial(te.LayerNorm, params_dtype=params_dtype)
        self.options: dict[str, Any] = {"init_method": init_method, "params_dtype": params_dtype}
        super().__init__(hidden, ffn, heads, functools.partial(te.Linear, **self.options), norm, p, causal)
        mask = "causal" if causal else "no_mask"
        self.attention = te.DotProductAttention(heads, self.channels, attention_dropout=p, attn_mask_type=mask)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attention(q, k, v)

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        return self.fc2(_Gelu.apply(self.fc1(self.ln2(h))))


class FusedLayer(ModulesLayer):
    """The layer made of `te.LayerNormLinear` and `te.LayerNormMLP`."""

    def __init__(self, hidden: int, ffn: int, heads: int, *rest: Any, **options: Any) -> None:
        super().__init__(hidden, ffn, heads, *rest, **options)
        del self.ln1, self.qkv, self.ln2, self.fc1, self.fc2
        self.ln_qkv = te.LayerNormLinear(hidden, 3 * hidden, **self.options)
        self.ln_mlp = te.LayerNormMLP(hidden, ffn, output_layer_init_method=self.options["init_method"], **self.options)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return self.ln_qkv(x)

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        return self.ln_mlp(h)


def share(layer: torch.nn.Module, basic: BasicTransformerLayer) -> torch.nn.Module:
    """Make `layer`, any of the tutorial's, share the parameters of `basic`, and return it."""
    for source, targets in (
        ("ln1", ("ln1.", "ln_qkv.layer_norm_", "self_attention.layernorm_qkv.layer_norm_")),
        ("qkv", ("qkv.", "ln_qkv.", "self_attention.layernorm_qkv.")),
        ("projection", ("projection.", "self_attention.proj.")),
        ("ln2", ("ln2.", "ln_mlp.layer_norm_", "layernorm_mlp.layer_norm_")),
        ("fc1", ("fc1.", "ln_mlp.fc1_", "layernorm_mlp.fc1_")),
        ("fc2", ("fc2.", "ln_mlp.fc2_", "layernorm_mlp.fc2_")),
    ):
        names = {name for name, _ in layer.named_parameters()}
        (prefix,) = (target for target in targets if target + "weight" in names)
        path, _, start = prefix.rpartition(".")
        for name in ("weight", "bias"):
            setattr(layer.get_submodule(path), start + name, getattr(basic.get_submodule(source), name))
    return layer


def transformer_layer(hidden: int, ffn: int, heads: int) -> torch.nn.Module:
    """The layer as one `te.TransformerLayer`, without dropout, so that it can be compared."""
    return te.TransformerLayer(hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True)
