"""`GraphedStep`: a step of one token of each sequence, as a CUDA graph for each batch size.

Launching a short step's ops one by one takes longer than they do. A graph launches them at once.

    rows     the batch's sequences, rounded up to a power of two, at most max_batch_size; others are copies of the first
    first    step of so many rows runs as it is: kernels are compiled and loaded, layers make their caches
    second   is captured, and the graph replayed
    others   are replayed, after their places were copied to where the graph reads them (`FixedStep`)

A step is the forward, the draw of each row's next token and its loss, and `FixedStep.end`: the tokens that it has drawn
lie where the next step reads its own, so that this one can be launched before anybody has seen them.

A graph is of one setting of `te.autocast` and of `torch.autocast`, and of one way to draw: the likeliest tokens alone,
draws, or draws of which some rows have limits (`Drawing`). The next step overwrites what this one has found. The words
are those of the step without a graph, since a row depends on no other row, and neither on how many there are.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch

from reference.generation.sampling import Drawing, Sampling, limited_rows
from reference.nn.attentions.fixed_step import FixedStep
from reference.nn.attentions.kv_cache import InferenceParams
from reference.state import autocast
from reference.support import unwritten


class Found(NamedTuple):
    """What a step has found on the device: each row's next token, int64 [rows], and its loss, fp32 [rows]."""

    tokens: torch.Tensor
    losses: torch.Tensor


Forward = Callable[[torch.Tensor, Drawing | None], Found]


def rows_of(sequences: int, most: int) -> int:
    """Rows of the step of so many sequences: the next power of two, or the largest batch."""
    return min(1 << (sequences - 1).bit_length(), most)


class GraphedStep:
    """Steps of `forward`, from tokens int64 [rows] to those that follow on them, drawn by a `Drawing` or None.

    Args:
        forward: the step.
        weights: what it reads and no step writes; a product may load them before what it multiplies is there.
    """

    def __init__(self, forward: Forward, weights: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        self._forward, self._weights = forward, weights
        self.forget()

    def forget(self) -> None:
        """Capture anew, as after weights were moved."""
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, Callable[[], object]] = {}  # each replays one
        self._drawings: dict[tuple[int, int], Drawing] = {}
        self._pool: Any = None
        self._settings: list[Sampling] | None = None
        self._draws = False

    def __call__(
        self,
        tokens: list[int] | torch.Tensor | None,
        settings: list[Sampling],
        positions: list[int],
        cache: InferenceParams,
    ) -> FixedStep:
        """The token that follows on the new one of each sequence, which `pre_step` has said. Nobody waits for the GPU.

        Args:
            tokens: as `InferenceParams.hold` takes them.
            settings, positions: of each sequence, as `sample` takes them. A list of settings is not changed later.

        Returns:
            Where tokens and losses will lie.
        """
        rows = rows_of(len(settings), cache.max_batch_size)
        fixed = cache.hold(tokens, rows)
        drawing = self._drawing(rows, settings, positions, cache.device)
        device, state = cache.device, autocast.current()
        both = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        drawn_as = None if drawing is None else drawing.limited
        key = (rows, drawn_as, state.enabled and state.recipe, torch.is_inference_mode_enabled(), both)
        if key not in self._graphs and (key not in self._seen or not self.can_capture(device)):
            self._seen.add(key)
            self.run(fixed, drawing)
        else:
            if key not in self._graphs:
                self._graphs[key] = self.capture(fixed, drawing)
            self._graphs[key]()
            cache.replayed()
        cache.ended()
        return fixed

    def _drawing(
        self, rows: int, settings: list[Sampling], positions: list[int], device: torch.device
    ) -> Drawing | None:
        """How the step draws; None where all rows take their likeliest token. Rows beside the batch's are as row 0."""
        if settings is not self._settings:  # most steps have those of the step before
            self._settings, self._draws = settings, any(one.temperature for one in settings)
        if not self._draws:
            return None
        more = rows - len(settings)
        settings, positions = settings + settings[:1] * more, positions + positions[:1] * more
        limited = len(limited_rows(settings))
        limited = limited and rows_of(limited, rows)
        if (rows, limited) not in self._drawings:
            self._drawings[rows, limited] = Drawing(rows, limited, device)
        drawing = self._drawings[rows, limited]
        drawing.fill(settings, positions)
        return drawing

    def run(self, fixed: FixedStep, drawing: Drawing | None) -> None:
        """The step; its tokens take the place of those that it has read."""
        fixed.end(*self._forward(fixed.tokens, drawing))

    def can_capture(self, device: torch.device) -> bool:
        """Whether there are graphs."""
        return device.type == "cuda"

    def capture(self, fixed: FixedStep, drawing: Drawing | None) -> Callable[[], object]:
        """What replays the step as a graph.

        The forward runs once before, with waits refused: one that a capture meets ends it, and PyTorch would leave the
        process on the capture's stream and its generator in the capture.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, waits, stay = torch.cuda.CUDAGraph(), torch.cuda.get_sync_debug_mode(), tuple(self._weights())
        try:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # PyTorch: the mode is a prototype
                    torch.cuda.set_sync_debug_mode("error")
                with unwritten.held(stay):
                    self._forward(fixed.tokens, drawing)
            finally:
                torch.cuda.set_sync_debug_mode(waits)
            with torch.cuda.graph(graph, pool=self._pool), unwritten.held(stay):
                self.run(fixed, drawing)
        except RuntimeError as error:
            raise RuntimeError(
                f"Generator: cuda_graphs=True, and a step of {fixed.rows} tokens cannot be captured ({error}); a "
                f"forward that does not wait for the GPU is accepted, or cuda_graphs=False."
            ) from error
        return graph.replay  # type: ignore[no-any-return]
