"""`twin bench attention` and `attention_long`, small and on the CPU: the sides that are timed compute one attention."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from shared.on_a_cpu import OnACpu

from optimized import measure
from optimized.bench.kernels import attention, attention_long

twin = torch.ops.twin


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, p: float = 0.0) -> torch.Tensor:
    """PyTorch's attention, by the kernel of its choice."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=causal, dropout_p=p, enable_gqa=True)


def output(found: Any) -> torch.Tensor:
    """Without what is kept for backward."""
    return found if isinstance(found, torch.Tensor) else found[0]  # type: ignore[no-any-return]


def is_near(found: torch.Tensor, wanted: torch.Tensor, share: float) -> None:
    """Refuse noise of more than this share of the numbers."""
    assert found.shape == wanted.shape
    assert float((found.double() - wanted.double()).norm() / wanted.double().norm()) < share


def results(sides: dict[str, Callable[[], Any]], forward: str, backward: str) -> Sequence[torch.Tensor]:
    """The output, and the gradients of q, k and v."""
    return [output(sides[forward]()), *sides[backward]()[:3]]


@pytest.mark.parametrize("mask", ["causal", "none"])
def test_ours_and_cudnns_are_one_attention(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, with fewer heads of keys than of queries. bf16 has steps of 1/256 at most."""
    monkeypatch.setattr(attention, "cudnn", plain)
    with OnACpu():
        sides = attention._pair(2, 4, 2, 32, 64, mask, 0.0)
        ours, theirs = (results(sides, f"{whose}forward", f"{whose}backward") for whose in ("", "cuDNN "))
    assert len(theirs) == 4  # the output and three gradients
    for found, wanted in zip(ours, theirs, strict=True):
        is_near(found, wanted, 0.01)


@pytest.mark.parametrize("mask", ["causal", "none"])
def test_attention_of_codes_is_that_of_their_numbers(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are PyTorch's attention of the bf16 numbers; codes have steps of 1/8 at most."""
    given: list[torch.Tensor] = []

    def noted(*args: Any) -> Any:
        given[:] = args[:3]
        return twin.attention(*args)

    ops = types.SimpleNamespace(attention=noted, attention_fp8=twin.attention_fp8)
    monkeypatch.setattr(attention, "twin", ops)
    with OnACpu():
        found = {name: call() for name, call in attention._in_fp8(2, 4, 32, 64, mask).items()}
    wanted = plain(*given, causal=mask == "causal")
    for name, share in {"bf16": 0.01, "FP8": 0.1}.items():
        is_near(output(found[name]), wanted, share)


def test_each_way_attends_to_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch does, whose keys of one text lie in another order."""
    monkeypatch.setattr(attention_long, "LEAST_BYTES", 1)
    monkeypatch.setattr(attention_long, "flash", plain)
    monkeypatch.setattr(measure, "graph", lambda call, calls: functools.partial(call, 0))
    with OnACpu():
        found: dict[str, Any] = {name: call() for name, call in attention_long._step(1, 512).items()}
    wanted = found.pop("flash")
    assert list(found) == list(attention_long.WAYS)
    for out in found.values():
        is_near(output(out).flatten(), wanted.transpose(1, 2).flatten(), 0.01)
