"""Packed sequences for attention's ops, of the cases of `attention_cases`; NaN lies between sequences."""

from typing import Any

import numpy as np
import torch
from shared.attention_cases import Case, inputs

from reference.ops.attentions.attention_options import Options

twin = torch.ops.twin


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def starts_of(lengths: torch.Tensor, gaps: list[int]) -> torch.Tensor:
    """The first gap before the first sequence, the others after each."""
    ends = np.cumsum([gaps[0], *(n + gap for n, gap in zip(lengths.tolist(), gaps[1:], strict=True))])
    return int32(*ends.tolist())


def rows_of(lengths: torch.Tensor, starts: torch.Tensor) -> list[slice]:
    return [slice(first, first + n) for first, n in zip(starts.tolist(), lengths.tolist(), strict=False)]


def packed_of(x: torch.Tensor, rows: list[slice], tokens: int) -> torch.Tensor:
    """x `[b, h, s, d]` as `[tokens, h, d]`, NaN where no sequence lies."""
    found = torch.full((tokens, x.shape[1], x.shape[3]), torch.nan, dtype=x.dtype)
    for one, where in zip(x, rows, strict=True):
        found[where] = one[:, : where.stop - where.start].transpose(0, 1)
    return found


def packed_inputs(case: Case, gaps: list[int], after: int) -> tuple[dict[str, Any], dict[str, list[slice]]]:
    """The padded inputs of a case with lengths, packed; and where sequences of queries and of keys lie."""
    cpu, where = inputs(case), {}
    for side, names in (("q", ("q", "grad")), ("kv", ("k", "v"))):
        lengths = cpu[f"{side}_lengths"]
        cpu[f"{side}_starts"] = starts = starts_of(lengths, gaps)
        where[side] = rows_of(lengths, starts)
        for name in names:
            cpu[name] = packed_of(cpu[name], where[side], int(starts[-1]) + after)
    return cpu, where


def packed_run(case: Case, cpu: dict[str, Any], device: Any = "cpu") -> dict[str, torch.Tensor]:
    """Every result by name, on the CPU."""
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in cpu.items()}
    q, k, v, grad, state = (there[name] for name in ("q", "k", "v", "grad", "rng_state"))
    names = ("bias", "slopes", "sinks", "q_lengths", "kv_lengths", "q_starts", "kv_starts")
    more = {name: there[name] for name in names}
    more |= {"mask": there["mask"], "longest_q": case.sq, "longest_kv": case.skv, "key_segment": case.key_segment}
    options = Options(case.softmax_scale, case.mask_type, *case.window, dropout=case.dropout, **more)
    before = None if state is None else state.clone()
    results = out, m, inv = twin.attention(q, k, v, *options._replace(rng_state=state))
    given = (grad, q, k, v, *results, *options._replace(rng_state=before))
    found = dict(zip(("out", "m", "inv", "dq", "dk", "dv"), (*results, *twin.attention_backward(*given)), strict=True))
    if there["sinks"] is not None:
        where = there["q_lengths"], there["q_starts"]
        found["dsinks"] = twin.attention_sink_backward(grad, out, m, inv, there["sinks"], *where)
    if there["bias"] is not None:
        found["dbias"] = twin.attention_bias_backward(*given)
    found |= {} if state is None else {"rng_state": state}
    return {name: x.cpu() for name, x in found.items()}
