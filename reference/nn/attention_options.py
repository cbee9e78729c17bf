"""What a forward of attention takes beside its tensors, a mask and a window: a bias, lengths, a cache."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from reference.arguments import check_arguments
from reference.nn.attention_bias import NO_BIAS, Bias, check_bias, check_sinks
from reference.nn.attention_lengths import NAMES, NO_LENGTHS, Lengths, check_lengths
from reference.nn.checks import NO_WINDOWS, Names, check_cudnn, check_grid, check_mask
from reference.nn.inference import InferenceParams


class Options(NamedTuple):
    """Those arguments of a forward, by what they are."""

    bias: Bias = NO_BIAS
    lengths: Lengths = NO_LENGTHS
    inference: InferenceParams | None = None

    @staticmethod
    def checked(layer: str, arguments: Mapping[str, Any]) -> "Options":
        """Those among the arguments of a layer's forward, all of which are checked."""
        check_arguments(f"{layer}.forward", arguments)
        bias = Bias(arguments["core_attention_bias_type"], arguments["core_attention_bias"], arguments["alibi_slopes"])
        return Options(bias, Lengths(*[arguments[name] for name in NAMES]), arguments["inference_params"])

    @property
    def fuses(self) -> bool:
        """Whether an attention block takes them; otherwise a layer runs module by module."""
        return not (self.bias.given or self.lengths.given)

    def of_self(self) -> "Options":
        """As self-attention sees them: keys have the queries' lengths."""
        return self._replace(lengths=self.lengths.for_self()) if self.lengths.given else self

    def of_cross(self) -> "Options":
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
        if layout == "thd" or not self.fuses:
            raise NotImplementedError(
                f"{layer}: inference_params with the layout {layout!r}, a bias or cu_seqlens_* is not offered; 'sbhd' "
                f"and 'bshd' without them are accepted (pre_step gives the lengths)."
            )

    def check(
        self,
        layer: str,
        names: Names,
        core: Any,
        kind: str,
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
        if self.lengths.given:
            check_lengths(layer, self.lengths, kind, shape, tokens, device)
        if self.lengths.read_by(kind):
            if mask is not None and tokens is None:  # it is not read, and a diagonal does not depend on it
                check_mask(layer, names, kind, mask, NO_WINDOWS[0], shape, device)
        elif self.inference is None:
            check_mask(layer, names, kind, mask, window, shape, device, self.bias.kind)
        if self.bias.given:
            check_bias(layer, self.bias, dtype, shape, device)
        if core.attention_backend == "cudnn":
            check_cudnn(dtype, device, shape[2:], kind, window, self.bias.kind)
        elif dtype != torch.float32 and device.type == "cuda":
            check_grid(layer, shape[0], shape[1], device)


NO_OPTIONS = Options()
