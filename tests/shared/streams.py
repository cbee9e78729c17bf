"""Streams of several ranks on a CPU, for what ranks do in each other's memory (`reference.parallel.peer_memory`)."""

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reference.parallel import peer_memory
from reference.support import groups

CPU, U8 = torch.device("cpu"), torch.uint8
Work = tuple[Callable[[], bool], Callable[[], None]]  # whether it may begin, and what it does


def _do(change: Callable[[Any], Any], value: Any) -> None:
    change(value)


class Streams:
    """The streams of some ranks, whose work is done later, in any order that they allow.

    All streams of a rank are one, as with CUDA_DEVICE_MAX_CONNECTIONS=1.
    """

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queues: list[deque[Work]] = [deque() for _ in range(ranks)]
        self.rank = 0  # whose calls are made
        self.memory: dict[int, list[torch.Tensor]] = {}
        self.asked = [0] * ranks
        for name in ("copy", "write", "wait", "swap", "shared"):
            monkeypatch.setattr(peer_memory, name, getattr(self, name))
        monkeypatch.setattr(groups, "name_of", lambda group: "some")
        monkeypatch.setattr(groups, "group_of", lambda name: None)
        monkeypatch.setattr(dist, "get_rank", lambda group: self.rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
        monkeypatch.setattr(dist, "barrier", lambda group: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: None, device_index=0)
        stream.wait_event = lambda event: None
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: stream)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *device, priority: stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda one: None)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)

    def enqueue(self, act: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.queues[self.rank].append((ready, act))

    def shared(self, size: int, device: torch.device, group: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        number = self.asked[self.rank]  # all ranks ask for the same memory in the same order
        self.asked[self.rank] += 1
        every = self.memory.setdefault(number, [torch.zeros(size, dtype=U8) for _ in self.queues])
        assert len(every[0]) == size
        return every[self.rank], every

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.enqueue(lambda: _do(to.copy_, source))

    def _word(self, address: int) -> torch.Tensor:
        """The int32 at an address."""
        for memory in (x for every in self.memory.values() for x in every):
            if 0 <= address - memory.data_ptr() < peer_memory.WORDS:
                return memory.view(torch.int32)[(address - memory.data_ptr()) // 4]
        raise AssertionError(address)

    def write(self, address: int, value: int) -> None:
        self.enqueue(lambda: _do(self._word(address).fill_, value))

    def wait(self, address: int, value: int) -> None:
        self.enqueue(lambda: None, lambda: int(self._word(address)) >= value)

    def swap(self, address: int, old: int, new: int) -> None:
        self.enqueue(lambda: _do(self._word(address).fill_, new), lambda: int(self._word(address)) == old)

    def run(self, draw: random.Random) -> None:
        """Do all work; a rank may be as far ahead of the others as its waits allow."""
        while any(self.queues):
            ready = [queue for queue in self.queues if queue and queue[0][0]()]
            assert ready, "all ranks wait"
            # One rank for some time, so that ranks are far apart.
            queue = draw.choice(ready)
            for _ in range(draw.randint(1, 9)):
                if queue and queue[0][0]():
                    queue.popleft()[1]()


def part(sender: int, receiver: int, number: int, size: int) -> torch.Tensor:
    return torch.full((size,), (37 * sender + 11 * receiver + 5 * number) % 256, dtype=U8)
