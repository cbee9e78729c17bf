"""PyTorch's current stream, asked for and set without its own functions' questions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reference.support import streams


def _fails(other: Any, now: list[Any]) -> None:
    with streams.On(other):
        assert now == [other]
        assert streams.current(torch.device("cuda", 1)) is other
        raise KeyError


def test_the_stream_from_before_is_current_again_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    now: list[Any] = [SimpleNamespace(device_index=1, name="first")]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: now[0] if index == 1 else None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: now.__setitem__(0, stream))
    first, other = now[0], SimpleNamespace(device_index=1, name="other")
    with pytest.raises(KeyError):
        _fails(other, now)
    assert now == [first]


@pytest.mark.gpu
def test_it_is_torchs() -> None:
    side = torch.cuda.Stream()
    device = torch.device("cuda", torch.cuda.current_device())
    for inside in (False, True):
        with streams.On(side) if inside else torch.cuda.stream(torch.cuda.default_stream()):
            assert streams.current() == streams.current(device) == torch.cuda.current_stream()
            assert (torch.cuda.current_stream() == side) is inside
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
