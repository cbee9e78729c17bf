"""What `twin::attention` adds to a row's sum for a sink; the formula is in
`reference.ops.attentions.attention_sink`."""

import torch

from reference.numbers.elementary import LOG2E, exp2_grid


def check_sinks(op: str, q: torch.Tensor, sinks: torch.Tensor | None, biased: bool) -> None:
    """Refuse sinks that are not contiguous fp32 `[h]`, and a bias beside them."""
    if sinks is None:
        return
    if biased:
        raise ValueError(f"{op}: sinks and a bias are both given; one of them is accepted.")
    if sinks.dtype != torch.float32 or sinks.shape != q.shape[1:2] or not sinks.is_contiguous():
        raise ValueError(
            f"{op}: sinks must be contiguous torch.float32 [{q.shape[1]}]; got {sinks.dtype} {list(sinks.shape)}."
        )
    if sinks.device != q.device:
        raise ValueError(f"{op}: sinks is on {sinks.device}, q on {q.device}.")


def sink_weights(sink: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """2^(z - m) of the rows m, of one sink."""
    return exp2_grid(sink * torch.tensor(LOG2E, dtype=torch.float32, device="cpu") - m)
