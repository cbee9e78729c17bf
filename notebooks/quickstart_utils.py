"""Helpers of the quickstart: a stopwatch, two plain PyTorch modules, and parameters shared between models.

Names and arguments are those of Transformer Engine's `quickstart_utils.py`, so that its quickstart runs after changing
the import and, on a CPU, the device. Activations are `[sequence, batch, hidden]`; heads are
`[sequence, batch, heads, channels]`.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

import reference as te

CPU_SECONDS = 1.0
"""On a CPU `speedometer` warms up, and then times, for about so long: the reference is not built for 100 runs."""


def speedometer(
    module: torch.nn.Module,
    input: torch.Tensor,
    output_grad: torch.Tensor,
    forward_kwargs: dict[str, Any] = {},  # noqa: B006  (Transformer Engine's signature; never changed)
    fp8_autocast_kwargs: dict[str, Any] | None = None,
    timing_iters: int = 50,
    warmup_iters: int = 50,
    *,
    autocast_kwargs: dict[str, Any] | None = None,
) -> float:
    """Print and return the mean time of one forward and backward pass, in milliseconds.

    On a GPU CUDA events time exactly `timing_iters` runs after `warmup_iters`. On a CPU those are upper limits: each of
    the two phases ends with the first run that finishes after `CPU_SECONDS`, and the line says how many were timed.
    Gradients add up in the parameters' `.grad`, as in any training loop without `zero_grad`.

    Args:
        module: called as `module(input, **forward_kwargs)`.
        input, output_grad: a batch, and dL/d(output) of the output's shape; their device says which clock is read.
        fp8_autocast_kwargs: for `fp8_autocast`, e.g. `{"enabled": True, "fp8_recipe": recipe}`; None is FP8 off.
            `autocast`'s names are taken too: `{"enabled": True, "recipe": recipe}`.
        timing_iters, warmup_iters: runs, at least 1 and at least 0.
        autocast_kwargs: newer name of `fp8_autocast_kwargs`; one of the two is accepted.
    """
    if timing_iters < 1 or warmup_iters < 0:
        raise ValueError(
            f"speedometer: timing_iters={timing_iters}, warmup_iters={warmup_iters}; >= 1 and >= 0 are accepted."
        )
    if fp8_autocast_kwargs is not None and autocast_kwargs is not None:
        raise ValueError("speedometer: fp8_autocast_kwargs and autocast_kwargs are both given; one is accepted.")
    settings = fp8_autocast_kwargs or autocast_kwargs or {"enabled": False}
    # Both context managers are the same on `reference` and `optimized`: the tensor's device decides who computes.
    context = te.fp8_autocast if {"fp8_recipe", "fp8_group"} & settings.keys() else te.autocast

    def run() -> None:
        with context(**settings):
            output = module(input, **forward_kwargs)
        output.backward(output_grad)

    if input.is_cuda:
        mean, note = _time_on_gpu(run, timing_iters, warmup_iters), ""
    else:
        _run_for(run, warmup_iters)
        seconds, runs = _run_for(run, timing_iters)
        mean, note = 1000 * seconds / runs, f" (CPU, mean of {runs} runs)"
    print(f"Mean time: {mean:.3f} ms{note}")
    return mean


def _time_on_gpu(run: Callable[[], None], timing_iters: int, warmup_iters: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(warmup_iters):
        run()
    torch.cuda.synchronize()
    start.record()
    for _ in range(timing_iters):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / timing_iters


def _run_for(run: Callable[[], None], limit: int) -> tuple[float, int]:
    """Run until `limit` runs are done or CPU_SECONDS are over; the seconds it took, and how many runs."""
    begun = time.perf_counter()
    seconds, runs = 0.0, 0
    while runs < limit and (runs == 0 or seconds < CPU_SECONDS):
        run()
        runs += 1
        seconds = time.perf_counter() - begun
    return seconds, runs


class DotProductAttention(torch.nn.Module):
    """softmax(q·kᵀ / sqrt(channels))·v per head, in plain PyTorch.

    Args:
        num_attention_heads, kv_channels: heads, and the size of one.
        attention_dropout: probability of dropping an attention weight in training.
    """

    def __init__(self, num_attention_heads: int, kv_channels: int, attention_dropout: float) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.kv_channels = kv_channels
        self.dropout = torch.nn.Dropout(attention_dropout)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query, key, value `[s, b, heads, channels]` to `[s, b, heads·channels]`.

        attention_mask is bool, True = hidden, broadcastable to `[b, heads, query's s, key's s]`.
        """
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, heads, s, channels]
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.kv_channels**-0.5
        if attention_mask is not None:
            # Not -inf: a row that sees nothing would be NaN. In every 16-bit format exp(-10000 - max) is 0.
            scores = scores.masked_fill(attention_mask, -10000.0)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        return torch.matmul(weights, v).permute(2, 0, 1, 3).flatten(2)


class BasicMLP(torch.nn.Module):
    """hidden → ffn → hidden with tanh GELU between, in plain PyTorch."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.linear1 = torch.nn.Linear(hidden_size, ffn_hidden_size)
        self.linear2 = torch.nn.Linear(ffn_hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result are `[.., hidden]`."""
        return self.linear2(torch.nn.functional.gelu(self.linear1(x), approximate="tanh"))


def share_parameters_with_basic_te_model(te_model: torch.nn.Module, basic_model: torch.nn.Module) -> None:
    """Give a model of `te.Linear` and `te.LayerNorm` the very parameters of the plain one."""
    for name in ("ln1", "qkv_projection", "projection", "ln2", "mlp.linear1", "mlp.linear2"):
        _share(te_model.get_submodule(name), "", basic_model.get_submodule(name))


def share_parameters_with_fused_te_model(te_model: torch.nn.Module, basic_model: torch.nn.Module) -> None:
    """Give a model of `te.LayerNormLinear` (`ln_qkv`) and `te.LayerNormMLP` (`ln_mlp`) the plain one's parameters."""
    _share_norm_linear(te_model.get_submodule("ln_qkv"), basic_model)
    _share(te_model.get_submodule("projection"), "", basic_model.get_submodule("projection"))
    _share_mlp(te_model.get_submodule("ln_mlp"), basic_model)


def share_parameters_with_transformerlayer_te_model(te_model: torch.nn.Module, basic_model: torch.nn.Module) -> None:
    """Give a `te.TransformerLayer` the plain model's parameters.

    They are the same tensors, with one exception. The plain model's QKV projection has rows `[heads, (q, k, v),
    channels]`: a `TransformerLayer(fuse_qkv_params=True)` holds just that and shares it, but the default one holds
    `query_weight`, `key_weight` and `value_weight` apart. Those rows lie scattered in the plain model's weight, so they
    are *copied* into the layer's own parameters.
    """
    attention = te_model.get_submodule("self_attention")
    qkv = attention.get_submodule("layernorm_qkv")
    if hasattr(qkv, "query_weight"):
        _share(qkv, "layer_norm_", basic_model.get_submodule("ln1"))
        _copy_qkv(qkv, basic_model.get_submodule("qkv_projection"), basic_model.num_attention_heads)
    else:
        _share_norm_linear(qkv, basic_model)
    _share(attention.get_submodule("proj"), "", basic_model.get_submodule("projection"))
    _share_mlp(te_model.get_submodule("layernorm_mlp"), basic_model)


def _share_norm_linear(fused: torch.nn.Module, basic_model: torch.nn.Module) -> None:
    _share(fused, "layer_norm_", basic_model.get_submodule("ln1"))
    _share(fused, "", basic_model.get_submodule("qkv_projection"))


def _share_mlp(fused: torch.nn.Module, basic_model: torch.nn.Module) -> None:
    _share(fused, "layer_norm_", basic_model.get_submodule("ln2"))
    _share(fused, "fc1_", basic_model.get_submodule("mlp.linear1"))
    _share(fused, "fc2_", basic_model.get_submodule("mlp.linear2"))


def _share(target: torch.nn.Module, prefix: str, source: torch.nn.Module) -> None:
    """Let `target.<prefix>weight` and `.<prefix>bias` be `source`'s parameters."""
    for name in ("weight", "bias"):
        mine, theirs = getattr(target, prefix + name), getattr(source, name)
        _check_shape(prefix + name, mine, theirs)
        setattr(target, prefix + name, theirs)


@torch.no_grad()
def _copy_qkv(target: torch.nn.Module, source: torch.nn.Module, heads: int) -> None:
    """Copy rows `[heads, (q, k, v), channels]` into `query_*`, `key_*` and `value_*` of rows `[heads, channels]`."""
    for name in ("weight", "bias"):
        whole = getattr(source, name)
        parts = whole.unflatten(0, (heads, 3, -1)).unbind(1)
        for part, values in zip(("query", "key", "value"), parts, strict=True):
            mine = getattr(target, f"{part}_{name}")
            values = values.flatten(0, 1)
            _check_shape(f"{part}_{name}", mine, values)
            mine.data = values.clone()  # takes the plain model's dtype and device, as sharing does


def _check_shape(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    if mine.shape != theirs.shape:
        raise ValueError(
            f"share_parameters: {name} has shape {list(mine.shape)}, the basic model's has {list(theirs.shape)}; "
            f"models of equal sizes are accepted."
        )
