"""What a forward of attention takes beside its tensors, a mask and a window: a bias, lengths, a cache."""

from typing import Any, NamedTuple

from reference.nn.attention_bias import NO_BIAS, Bias
from reference.nn.attention_lengths import NO_LENGTHS, Lengths
from reference.nn.inference import InferenceParams


class Options(NamedTuple):
    """Those arguments of a forward, by what they are."""

    bias: Bias = NO_BIAS
    lengths: Lengths = NO_LENGTHS
    inference: InferenceParams | None = None

    @property
    def fuses(self) -> bool:
        """Whether an attention block takes them; otherwise a layer runs module by module."""
        return not (self.bias.given or self.lengths.given)

    def of_self(self) -> "Options":
        """As self-attention sees them: keys have the queries' lengths."""
        return self._replace(lengths=self.lengths.for_self())

    def of_cross(self) -> "Options":
        """As a decoder's cross-attention sees them: without a cache."""
        return self._replace(inference=None)

    def arguments(self) -> dict[str, Any]:
        """Those that are given, by a forward's names."""
        found = self.bias.arguments() if self.bias.given else {}
        found |= self.lengths.arguments() if self.lengths.given else {}
        return found if self.inference is None else {**found, "inference_params": self.inference}

    def check_cache(self, layer: str, layout: str) -> None:
        """Refuse what does not go with `inference_params`, if it is given."""
        if self.inference is not None and (layout == "thd" or not self.fuses):
            raise NotImplementedError(
                f"{layer}: inference_params with the layout {layout!r}, a bias or cu_seqlens_* is not offered; 'sbhd' "
                f"and 'bshd' without them are accepted (pre_step gives the lengths)."
            )


NO_OPTIONS = Options()
