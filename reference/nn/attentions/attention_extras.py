"""What a forward of attention takes beside its tensors, a mask and a window: a bias, lengths, a cache."""

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import torch

from reference.arguments import check_arguments
from reference.nn.attentions.attention_bias import NAMES as BIAS
from reference.nn.attentions.attention_bias import NO_BIAS, Bias, check_bias, check_sinks
from reference.nn.attentions.attention_lengths import NAMES as LENGTHS
from reference.nn.attentions.attention_lengths import NO_LENGTHS, Lengths, check_lengths, check_padding
from reference.nn.attentions.kv_cache import InferenceParams
from reference.nn.core.checks import NO_WINDOWS, Names, check_cudnn, check_grid, check_mask


class Extras(NamedTuple):
    """Those arguments of a forward, by what they are."""

    bias: Bias = NO_BIAS
    lengths: Lengths = NO_LENGTHS
    inference: InferenceParams | None = None

    @staticmethod
    def checked(
        layer: str, layout: str, inference: InferenceParams | None, given: dict[str, Any], **more: Any
    ) -> "Extras":
        """Those arguments of the forward of a layer with a default `layout`, after a check of `given` and of `more`.

        `given`: by name all that is off by default, a bias and lengths among them; not `locals()`, which a compiler
        does not trace.
        """
        check_arguments(f"{layer}.forward", given | more)
        bias, lengths = Bias(*[given[name] for name in BIAS]), Lengths(*[given[name] for name in LENGTHS])
        layout = layout if more.get("qkv_format") is None else more["qkv_format"]
        check_padding(layer, lengths, given["pad_between_seqs"], layout)
        return Extras(bias, lengths, inference)

    def of_self(self) -> "Extras":
        """As self-attention sees them: keys have the queries' lengths."""
        if self is NO_EXTRAS or not self.lengths.given:
            return self
        return self._replace(lengths=self.lengths.for_self())

    def of_cross(self) -> "Extras":
        """As a decoder's cross-attention sees them: without a cache."""
        return self if self.inference is None else self._replace(inference=None)

    def arguments(self) -> dict[str, Any]:
        """Those that are given, by a forward's names."""
        found = self.bias.arguments() if self.bias.given else {}
        found |= self.lengths.arguments() if self.lengths.given else {}
        return found if self.inference is None else {**found, "inference_params": self.inference}

    def check_cache(self, layer: str, layout: str) -> None:
        """Refuse what does not go with `inference_params`, if it is given."""
        if self.inference is None:
            return
        if not isinstance(self.inference, InferenceParams):
            raise TypeError(f"{layer}: inference_params={self.inference!r}; None or InferenceParams is accepted.")
        if (layout == "thd" and not self.inference.packed) or self.bias.given or self.lengths.given:
            raise NotImplementedError(
                f"{layer}: inference_params with the layout {layout!r}, a bias or cu_seqlens_* is not offered; 'sbhd' "
                f"and 'bshd' without them are accepted, and 'thd' with InferenceParams(qkv_format='thd') (pre_step "
                f"gives the lengths)."
            )

    def check(
        self,
        layer: str,
        names: Names,
        core: Any,
        mask_type: str,
        window: tuple[int, int],
        mask: Any,
        shape: tuple[int, int, int, int],
        tokens: tuple[int, int] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Refuse what `core`, a DotProductAttention, does not take, without what a cache refuses.

        `shape` [b, h, sq, skv], `dtype`, `device`: of its activations; `tokens`: of queries and of keys in "thd".
        """
        check_sinks(layer, core, self.bias, dtype)
        if core.return_max_logit and (dtype == torch.float32 or core.attention_backend != "exact"):
            raise NotImplementedError(
                f"{layer}: return_max_logit=True in {dtype} with attention_backend={core.attention_backend!r} is not "
                f"offered, because PyTorch's attention shows no scores; bfloat16 and float16 are accepted with 'exact'."
            )
        if self.lengths.given:
            check_lengths(layer, self.lengths, mask_type, shape, tokens, device)
        if self.lengths.read_by(mask_type):
            if not (mask is None or isinstance(mask, (torch.Tensor, tuple))):
                raise TypeError(f"{layer}: {names[0]}={mask!r}; None, a bool tensor or two are accepted.")
            if mask is not None and tokens is None:  # it is not read, and a diagonal does not depend on it
                check_mask(layer, names, mask_type, mask, NO_WINDOWS[0], shape, device)
        elif self.inference is None:
            check_mask(layer, names, mask_type, mask, window, shape, device, self.bias.bias_type)
        if self.bias.given:
            check_bias(layer, self.bias, dtype, shape, device)
        if core.attention_backend == "cudnn":
            check_cudnn(dtype, device, shape[2:], mask_type, window, self.bias.bias_type)
        elif dtype != torch.float32 and device.type == "cuda":
            check_grid(layer, shape[0], shape[1], device)


NO_EXTRAS = Extras()


def defaults_of(forward: Callable[..., Any], names: str) -> dict[str, Any]:
    """What a bias, lengths and `names` have by default, in this order: where all are that, nothing need be checked."""
    parameters = signature(forward).parameters
    return {name: parameters[name].default for name in (*BIAS, *LENGTHS, *names.split())}


Tensors = tuple[torch.Tensor | None, ...]


def unpacked(layer: str, given: Tensors, qkv: Any, kv: Any, dim: int, layout: str, cached: bool) -> Tensors:
    """q, k and v as views of `qkv_layer`, or of query_layer and `kv_layer`; `dim` is where 3, or 2, of them lie.

    `given`: query_layer, key_layer and value_layer.
    """
    if qkv is None and kv is None:
        raise ValueError(
            f"{layer}: qkv_interleave_dim={dim} without qkv_layer and kv_layer, whose layout it is; -3 is accepted, or "
            f"one of these."
        )
    name, x, parts = ("qkv_layer", qkv, 3) if qkv is not None else ("kv_layer", kv, 2)
    alone = given if parts == 3 else (*given[1:], qkv)
    if any(t is not None for t in alone) or (parts == 3 and kv is not None) or cached:
        raise ValueError(
            f"{layer}: {name} with the tensors that it contains, with the other packed tensor or with "
            f"inference_params; {'it alone' if parts == 3 else 'query_layer and kv_layer'} is accepted."
        )
    dims = len(layout) + 1
    if not isinstance(x, torch.Tensor) or x.is_nested or x.dim() != dims or x.shape[dim] != parts or x.stride(-1) != 1:
        shown = f"is {list(x.shape)}" if isinstance(x, torch.Tensor) and not x.is_nested else f"is {type(x).__name__}"
        at = dims + dim
        accepted = [*layout[:at], str(parts), *layout[at:]]
        raise ValueError(
            f"{layer}: {name} {shown}; a tensor [{', '.join(accepted)}] is accepted with {layout!r} and "
            f"qkv_interleave_dim={dim}, its last dimension contiguous."
        )
    views = [x.select(dim, n) for n in range(parts)]
    return tuple(views) if parts == 3 else (given[0], *views)
