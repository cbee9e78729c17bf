"""`GraphedStep`: the forward of one token of each sequence, as a CUDA graph for each batch size.

Launching a short step's ops one by one takes longer than they do. A graph launches them at once.

    rows     the batch's sequences, rounded up to a power of two, at most max_batch_size; others are copies of the first
    first    step of so many rows runs as it is: kernels are compiled and loaded, layers make their caches
    second   is captured, and the graph replayed
    others   are replayed, after their tokens and places were copied to where the graph reads them (`FixedStep`)

A graph is of one setting of `te.autocast` and of `torch.autocast`. Logits lie in the memory that all graphs share: they
are those of the last step. The words are those of the step without a graph, since a row depends on no other row, and
neither on how many there are.
"""

import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from reference.nn.attentions.inference import InferenceParams
from reference.state import autocast


class Captured(NamedTuple):
    """Runs the step again, and where its logits are then."""

    replay: Callable[[], object]
    logits: torch.Tensor


def rows_of(sequences: int, most: int) -> int:
    """Rows of the step of so many sequences: the next power of two, or the largest batch."""
    return min(1 << (sequences - 1).bit_length(), most)


class GraphedStep:
    """Steps of `forward`, tokens int64 [rows] to logits [rows, V]."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._forward = forward
        self.forget()

    def forget(self) -> None:
        """Capture anew, as after weights were moved."""
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, Captured] = {}
        self._pool: Any = None

    def __call__(self, tokens: list[int], cache: InferenceParams) -> torch.Tensor:
        """Logits [sequences, V] of the next token of each sequence, which `pre_step` has said."""
        rows = rows_of(len(tokens), cache.max_batch_size)
        device, state = cache.device, autocast.current()
        both = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        key = (rows, state.enabled and state.recipe, torch.is_inference_mode_enabled(), both)
        fixed = cache.hold(tokens, rows)
        if key in self._graphs:
            logits = self._replay(key, cache)
        elif key in self._seen and self.can_capture(device):
            self._graphs[key] = self.capture(fixed)
            logits = self._replay(key, cache)
        else:
            self._seen.add(key)
            logits = self._forward(fixed)
        return logits[: len(tokens)]

    def _replay(self, key: Hashable, cache: InferenceParams) -> torch.Tensor:
        captured = self._graphs[key]
        captured.replay()
        cache.replayed()
        return captured.logits

    def can_capture(self, device: torch.device) -> bool:
        """Whether there are graphs."""
        return device.type == "cuda"

    def capture(self, tokens: torch.Tensor) -> Captured:
        """The step of these tokens as a graph.

        The step runs once before, with waits refused: one that a capture meets ends it, and PyTorch would leave the
        process on the capture's stream and its generator in the capture.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, waits = torch.cuda.CUDAGraph(), torch.cuda.get_sync_debug_mode()
        try:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # PyTorch: the mode is a prototype
                    torch.cuda.set_sync_debug_mode("error")
                self._forward(tokens)
            finally:
                torch.cuda.set_sync_debug_mode(waits)
            with torch.cuda.graph(graph, pool=self._pool):
                logits = self._forward(tokens)
        except RuntimeError as error:
            raise RuntimeError(
                f"Generator: cuda_graphs=True, and a step of {len(tokens)} tokens cannot be captured ({error}); a "
                f"forward that does not wait for the GPU is accepted, or cuda_graphs=False."
            ) from error
        return Captured(graph.replay, logits)
