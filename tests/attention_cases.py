"""Inputs of attention for the tests on either device: shapes, masks, and tensors in the layouts that layers use."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from reference.ops.attention import MASK_TYPES

LAYOUTS = ("bhsd", "bshd", "sbhd", "interleaved")
MASKS = ("none", "padding", "all queries", "arbitrary", "everything")


@dataclass(frozen=True)
class Case:
    """One call: q [b, h, sq, d], k and v [b, hkv, skv, d]."""

    b: int = 1
    hkv: int = 1
    group: int = 1
    sq: int = 64
    skv: int = 64
    d: int = 64
    dtype: torch.dtype = torch.bfloat16
    mask_type: str = "none"
    mask: str = "none"
    dropout: float = 0.0
    layout: str = "bhsd"
    scale: float | None = None
    seed: int = 0

    @property
    def h(self) -> int:
        return self.hkv * self.group

    @property
    def softmax_scale(self) -> float:
        return self.d**-0.5 if self.scale is None else self.scale


def _numbers(generator: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(generator.normal(size=shape).astype(np.float32)).to(dtype)


def _view(generator: np.random.Generator, b: int, h: int, s: int, case: Case) -> torch.Tensor:
    """`[b, h, s, d]` as a view of memory in the case's layout."""
    d = case.d
    if case.layout == "bhsd":
        return _numbers(generator, (b, h, s, d), case.dtype)
    if case.layout == "bshd":
        return _numbers(generator, (b, s, h, d), case.dtype).permute(0, 2, 1, 3)
    if case.layout == "sbhd":
        return _numbers(generator, (s, b, h, d), case.dtype).permute(1, 2, 0, 3)
    return _numbers(generator, (s, b, h, 3, d), case.dtype)[:, :, :, 1].permute(1, 2, 0, 3)


def _mask(generator: np.random.Generator, case: Case) -> torch.Tensor | None:
    if case.mask == "none":
        return None
    if case.mask == "padding":
        lengths = generator.integers(0, case.skv + 1, size=(case.b, 1, 1, 1))
        return torch.from_numpy(np.arange(case.skv)[None, None, None, :] >= lengths)
    shape = (1, 1, case.sq, case.skv) if case.mask == "all queries" else (case.b, case.h, case.sq, case.skv)
    density = 1.0 if case.mask == "everything" else 0.5
    return torch.from_numpy(generator.random(shape) < density)


def inputs(case: Case) -> dict[str, torch.Tensor | None]:
    """q, k, v, grad, mask and rng_state of a case, on the CPU."""
    generator = np.random.default_rng(case.seed)
    return {
        "q": _view(generator, case.b, case.h, case.sq, case),
        "k": _view(generator, case.b, case.hkv, case.skv, case),
        "v": _view(generator, case.b, case.hkv, case.skv, case),
        "grad": _view(generator, case.b, case.h, case.sq, case),
        "mask": _mask(generator, case),
        "rng_state": torch.from_numpy(generator.integers(0, 2**62, size=2)) if case.dropout else None,
    }


def to_cuda(x: torch.Tensor | None) -> torch.Tensor | None:
    """A copy on the GPU with the strides of `x`, holes included."""
    if x is None or x._base is None:
        return None if x is None else x.to("cuda")
    return x._base.to("cuda").as_strided(x.shape, x.stride(), x.storage_offset())


def run(case: Case, given: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Forward and backward: every result, by name."""
    twin = torch.ops.twin
    q, k, v, grad, mask, state = (given[name] for name in ("q", "k", "v", "grad", "mask", "rng_state"))
    before = None if state is None else state.clone()
    rest = (case.softmax_scale, case.mask_type, mask, case.dropout)
    out, m, inv = twin.attention(q, k, v, *rest, state)
    dq, dk, dv = twin.attention_backward(grad, q, k, v, out, m, inv, *rest, before)
    found = {"out": out, "m": m, "inv": inv, "dq": dq, "dk": dk, "dv": dv}
    return found if state is None else {**found, "rng_state": state}


CASES = st.builds(
    Case,
    b=st.integers(1, 2),
    hkv=st.integers(1, 2),
    group=st.integers(1, 3),
    sq=st.integers(1, 300),
    skv=st.integers(1, 300),
    d=st.integers(2, 32).map(lambda eighths: 8 * eighths),
    dtype=st.sampled_from((torch.bfloat16, torch.float16)),
    mask_type=st.sampled_from(MASK_TYPES),
    mask=st.sampled_from(MASKS),
    dropout=st.sampled_from((0.0, 0.0, 0.1, 0.5, 1.0)),
    layout=st.sampled_from(LAYOUTS),
    scale=st.sampled_from((None, None, 1.0, 1e-3, 3.0)),
    seed=st.integers(0, 2**31),
)
