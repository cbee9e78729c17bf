"""`RotaryPositionEmbedding`, the angles of `rotary_pos_emb`, and `apply_rotary_pos_emb`, which rotates by them.

    inv_freq[i] = fp32( 1 / base^(2 i / dim) )          in float64, one rounding; i < dim / 2
    position[s] = fp32(s + offset)                      with interpolation fp32( · fp32(1 / factor))
    angle[s, i] = fp32( position[s] · inv_freq[i] )     twice side by side; interleaved: each twice in turn

Transformer Engine computes inv_freq in fp32 on its GPU, whose last bits no other machine repeats. Here a CPU and a GPU
have the same. Sources: RoPE, arXiv 2104.09864; interpolation, 2306.15595.
"""

from collections.abc import Callable
from typing import Any

import torch

from reference.arguments import check_arguments
from reference.nn.attentions.apply_rotary import rotated, rotated_at
from reference.nn.core.checks import check_tensor, has_numbers
from reference.nn.core.parameters import DeviceDefault
from reference.state.target_device import probe_target


class RotaryPositionEmbedding(DeviceDefault, torch.nn.Module):
    """Angles for `rotary_pos_emb`, with Transformer Engine's arguments. `inv_freq` stays fp32 in `.to(dtype)`.

    Args:
        dim: channels that are rotated, an even number.
        rotary_percent: below 1, the part of `dim` that is rotated.
        seq_len_interpolation_factor: positions are divided by it; it goes with pretrained_max_position_embeddings.
        pretrained_max_position_embeddings: for sequences longer than the product of both, positions are scaled to this
            length. Neither acts without the other.
        rotary_base: the base of the frequencies.
        interleaved: for `rotary_pos_interleaved=True`.

    Source: Transformer Engine's `pytorch/attention/rope.py`.
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        check_arguments("RotaryPositionEmbedding", locals())
        super().__init__()
        self.dim = int(dim * rotary_percent) if rotary_percent < 1 else int(dim)
        if self.dim < 2 or self.dim % 2:
            raise ValueError(
                f"RotaryPositionEmbedding: dim={dim!r} with rotary_percent={rotary_percent!r} rotates {self.dim} "
                f"channels; an even number from 2 on is accepted."
            )
        pair = (seq_len_interpolation_factor, pretrained_max_position_embeddings)
        if (pair[0] is None) != (pair[1] is None):
            raise ValueError(
                f"RotaryPositionEmbedding: seq_len_interpolation_factor={pair[0]!r} with "
                f"pretrained_max_position_embeddings={pair[1]!r}, of which neither acts without the other; both or "
                f"None of them are accepted."
            )
        self.rotary_base = float(rotary_base)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.interleaved = interleaved
        self.register_buffer("inv_freq", self._frequencies(self.resolve_device(None)))

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        values = [1.0 / self.rotary_base ** (i / self.dim) for i in range(0, self.dim, 2)]
        return torch.tensor(values, dtype=torch.float64, device="cpu").float().to(device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Follow the module's device; the dtype stays fp32, and from the meta device the frequencies are made anew."""
        kept, device = self.inv_freq, probe_target(fn, self.inv_freq.device).device
        self.inv_freq = kept = self._frequencies(device) if kept.is_meta else kept
        super()._apply(fn, recurse)
        self.inv_freq = kept.to(device)
        return self

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """fp32 angles `[max_seq_len, 1, 1, dim]` of the positions from `offset` on."""
        check_arguments("RotaryPositionEmbedding.forward", {"max_seq_len": max_seq_len, "offset": offset})
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        learned, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if learned is not None and factor is not None:
            positions *= 1 / (max_seq_len / learned if max_seq_len > learned * factor else factor)
        angles = positions[:, None] * self.inv_freq
        both = torch.stack((angles, angles), dim=-1 if self.interleaved else 1)
        return both.reshape(max_seq_len, 1, 1, self.dim)

    def extra_repr(self) -> str:
        return f"{self.dim}, rotary_base={self.rotary_base}, interleaved={self.interleaved}"


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate `t` by angles: the op of the layers (`twin::rotary`), differentiable with respect to `t`.

    Args:
        t: `[s, b, h, d]`, `[b, s, h, d]` with "bshd" or `[t, h, d]` with "thd"; fp32, bf16 or fp16, of any strides.
        freqs: fp32 `[positions, 1, 1, d2]`, one for each position, d2 even and at most d.
        start_positions: int32 or int64 `[b]`, the position of each sequence's first token; None is 0. On a GPU it is
            checked there: an assertion ends the program.
        interleaved: pair neighbouring channels.
        fused: accepted as in Transformer Engine; the numbers are always the fused ones, with one rounding.
        cu_seqlens: with "thd" int32 `[b + 1]`: where each sequence begins, and t, where the last one ends.
        cp_size, cp_rank: only 1 and 0 are offered.

    Returns:
        a contiguous tensor of t's shape and dtype.
    """
    name = "apply_rotary_pos_emb"
    given = {"tensor_format": tensor_format, "interleaved": interleaved, "fused": fused}
    check_arguments(name, {**given, "cp_size": cp_size, "cp_rank": cp_rank})
    check_tensor(name, "t", t)
    check_tensor(name, "freqs", freqs)
    if t.dim() != len(tensor_format):
        raise ValueError(f"{name}: t has shape {list(t.shape)}; {list(tensor_format)} is accepted.")
    length = 0 if tensor_format == "thd" else t.shape[tensor_format.index("s")]  # of "thd" not known here
    fits = freqs.dtype == torch.float32 and freqs.dim() == 4 and freqs.shape[1:3] == (1, 1)
    if not fits or freqs.shape[0] < length or freqs.shape[3] % 2 or freqs.shape[3] > t.shape[-1]:
        raise ValueError(
            f"{name}: freqs is {freqs.dtype} {list(freqs.shape)}; float32 [positions, 1, 1, channels] is accepted, "
            f"with {length} positions or more and an even number of channels up to {t.shape[-1]}."
        )
    if freqs.device != t.device:
        raise RuntimeError(f"{name}: freqs is on {freqs.device} and t on {t.device}; one device is accepted.")
    if tensor_format != "thd" and cu_seqlens is not None:
        raise ValueError(f"{name}: cu_seqlens goes with tensor_format='thd'; None is accepted.")
    if tensor_format == "thd":
        batch = cu_seqlens.shape[0] - 1 if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.dim() == 1 else 0
        _check_ints(name, "cu_seqlens", cu_seqlens, (torch.int32,), batch + 1 if batch > 0 else -1, t.device)
    else:
        batch = t.shape[tensor_format.index("b")]
    if start_positions is not None:
        _check_ints(name, "start_positions", start_positions, (torch.int32, torch.int64), batch, t.device)
    elif tensor_format != "thd":
        return rotated(t, freqs.detach(), interleaved, tensor_format)
    positions = _positions(name, t, freqs.shape[0], tensor_format, cu_seqlens, start_positions)
    return rotated_at(t, freqs.detach(), interleaved, positions)


def _check_ints(
    name: str, which: str, x: Any, dtypes: tuple[torch.dtype, ...], length: int, device: torch.device
) -> None:
    """Refuse what is not a dense vector of `length` (-1: of 2 or more) integers on `device`."""
    accepted = f"{' or '.join(map(str, dtypes))} [{length if length >= 0 else 'sequences + 1'}] is accepted"
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name}: {which}={x!r}; {accepted}.")
    if x.dtype not in dtypes or x.shape != (length,):
        raise ValueError(f"{name}: {which} is {x.dtype} {list(x.shape)}; {accepted}.")
    if x.device != device:
        raise RuntimeError(f"{name}: {which} is on {x.device} and t on {device}; one device is accepted.")


def _positions(
    name: str, t: torch.Tensor, count: int, tensor_format: str, ends: torch.Tensor | None, starts: torch.Tensor | None
) -> torch.Tensor:
    """int64, each token's row of the `count` angles, in the order of t's first dimensions."""
    if ends is not None:
        token = torch.arange(t.shape[0], dtype=torch.int64, device=t.device)
        ends = ends.long()
        batch = torch.searchsorted(ends[1:].contiguous(), token, right=True).clamp(max=ends.shape[0] - 2)
        positions = token - ends[batch]
        fits = (ends.diff() >= 0).all() & (ends[0] == 0) & (ends[-1] == t.shape[0])
        _require(fits, f"{name}: cu_seqlens must start with 0, not fall, and end with t's {t.shape[0]} tokens.")
        positions = positions if starts is None else positions + starts.long()[batch]
    else:
        assert starts is not None
        place = torch.arange(t.shape[tensor_format.index("s")], dtype=torch.int64, device=t.device)
        first, second = (place, starts.long()) if tensor_format == "sbhd" else (starts.long(), place)
        positions = first[:, None] + second
    fits = ((positions >= 0) & (positions < count)).all()
    _require(fits, f"{name}: freqs has {count} positions, and a token's position is not among them.")
    return positions


def _require(fits: torch.Tensor, sentence: str) -> None:
    """Raise the sentence if not `fits`; on a GPU without waiting for it."""
    if has_numbers(fits):
        if not bool(fits):
            raise ValueError(sentence)
    elif fits.device.type != "meta":
        torch._assert_async(fits, sentence)
