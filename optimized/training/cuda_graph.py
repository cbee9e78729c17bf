"""A microbatch's forward and backward as a CUDA graph: the same launches, which the host makes by one call.

A graph holds addresses. It reads its bytes from a buffer, its parameters, scales and random states where they always
are, and it leaves the gradients in its own memory. The seeds of its masks are drawn before each replay
(`reference.state.graph_seeds`), so the bits are those of a step without a graph.
"""

from collections.abc import Callable
from functools import partial

import torch

Run = Callable[[torch.Tensor], torch.Tensor]


class Graph:
    """`run(windows)`, captured; it has run before, so that every kernel is loaded.

    Args:
        run: from windows uint8 [sequence + 1, rows] to the loss fp32 [], without a wait for the GPU.
        windows: what it is captured with.
        pool: memory that it shares with other graphs of the same step, which run in the order of their capture.
    """

    def __init__(self, run: Run, windows: torch.Tensor, pool: "torch.cuda._POOL_HANDLE") -> None:
        self.windows = windows.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.loss = run(self.windows)

    def __call__(self, windows: torch.Tensor) -> torch.Tensor:
        """The loss of other windows."""
        self.windows.copy_(windows)
        self.graph.replay()
        return self.loss.clone()


class Step:
    """The microbatches of a step: the first one, which casts the weights and makes the gradients, and all others.

    Args:
        run: from the number of a microbatch and its windows to its loss.
        parameters: their gradients are None now; each replay of the first microbatch writes them anew.
        windows: of any microbatch.
        count: microbatches of a step.
    """

    def __init__(
        self,
        run: Callable[[int, torch.Tensor], torch.Tensor],
        parameters: list[torch.nn.Parameter],
        windows: torch.Tensor,
        count: int,
    ) -> None:
        pool = torch.cuda.graph_pool_handle()
        self.graphs = [Graph(partial(run, number), windows, pool) for number in range(min(count, 2))]
        self.gradients = [(p, p.grad) for p in parameters]

    def __call__(self, number: int, windows: torch.Tensor) -> torch.Tensor:
        """The loss of microbatch `number`; its gradients are added to those of the ones before it."""
        if number == 0:
            for parameter, gradient in self.gradients:
                parameter.grad = gradient
        return self.graphs[min(number, 1)](windows)
