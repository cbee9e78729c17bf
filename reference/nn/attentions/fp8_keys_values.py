"""Keys and values in FP8: in the cache of a model that writes text, and as its trainer sees them.

    codes, scale_inv = cast_rowwise(x)      of each head of each token, x [d]: E4M3, a scale that is a power of two
    numbers          = codes · scale_inv    exact in bf16: a code has 4 significant bits

Attention then reads the numbers, by `twin::attention` or `twin::attention_paged_codes` in one order. So its words are
those of 16-bit attention over the dequantized cache. A scale is of one head of one token, so nobody else's
tokens change it.

In training k, after rotary embedding, and v are replaced by these numbers, and their gradients reach what was cast
unchanged (straight through). A trainer of such a model has the words of a server whose cache has codes; a cache of 16
bits has them, too, since such a model's keys and values are dequantized before they enter it.

Source of the rounding: `reference.ops.casts.cast_rowwise`, with torchao's least amax.
"""

from typing import Any

import torch

from reference.ops.attentions.attention_paged_codes import CODES, numbers_of
from reference.ops.casts import cast_rowwise  # noqa: F401  (declares the op)
from reference.ops.library import twin

EPSILON = 1e-12


def codes_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x bf16 `[.., h, d]` -> codes `[.., h, d]` and scale_inv fp32 `[.., h]`, contiguous."""
    codes, scale_inv = twin.cast_rowwise(x.contiguous().view(-1, x.shape[-1]), CODES, True, EPSILON)
    return codes.view(x.shape), scale_inv.view(x.shape[:-1])


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x bf16 `[.., h, d]` through codes and back."""
    return numbers_of(*codes_of(x))


def keys_and_values_in_fp8(model: torch.nn.Module, enabled: bool = True) -> torch.nn.Module:
    """Let all attention of `model` read keys and values that have gone through FP8 codes; returns the model.

    Training and inference then agree, and `te.Generator(model)` keeps codes in its cache. State dicts do not have it.

    Args:
        model: its attention is exact, of bf16, with heads of a multiple of 16 channels; others are refused when they
            run.
        enabled: False undoes it.
    """
    cores: list[Any] = [module for module in model.modules() if hasattr(module, "fp8_kv")]
    if not cores:
        raise ValueError(
            f"keys_and_values_in_fp8: model={type(model).__name__} has no attention of this package; one layer of it "
            f"or more is accepted (Hugging Face's models get them by te.convert(model, blocks=True))."
        )
    for core in cores:
        core.fp8_kv = bool(enabled)
    return model


def check_core(layer: str, core: Any, dtype: torch.dtype) -> None:
    """Refuse a forward of attention whose keys and values go through FP8 codes, if it cannot; `layer` names it."""
    sizes = (core.hidden_size_per_attention_head_k, core.hidden_size_per_attention_head_v)
    fits = core.attention_backend == "exact" and core.cp_name is None and not any(size % 16 for size in sizes)
    if fits and dtype == torch.bfloat16 and not core.attends_in_fp8():
        return
    parallel = core.cp_name is not None
    raise NotImplementedError(
        f"{layer}: keys and values in FP8 with {dtype} activations, heads of {sizes} channels, attention_backend="
        f"{core.attention_backend!r}, fp8_dpa={core.attends_in_fp8()} and context parallelism={parallel} is "
        f"not offered; bfloat16, multiples of 16, 'exact', False and False are accepted."
    )
