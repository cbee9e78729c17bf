"""Runs of a kernel that must give the same bits: again, on two streams at once, and from a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch
from shared.bits import assert_same_bits


def assert_same_again(run: Callable[[], Any]) -> Any:
    """`run` gives a tensor or several, new ones at each call; the result of the first is returned."""
    first = run()
    torch.cuda.synchronize()
    results = [("a second run", run())]
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            results += [("on two streams at once", run()) for _ in range(5)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for tensor in _tensors(captured):
        tensor.view(torch.uint8).fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    for what, found in [*results, ("a graph's replay", captured)]:
        for a, b in zip(_tensors(found), _tensors(first), strict=True):
            assert_same_bits(a, b, what)
    return first


def _tensors(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)
