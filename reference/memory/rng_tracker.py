"""`CudaRNGStatesTracker`: named states of torch's generators, for what some ranks draw alike and others do not.

    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1234 + rank)
    layer = te.TransformerLayer(..., get_rng_state_tracker=lambda: tracker)

Layers then draw their weights, and the seeds of dropout (`reference.random`), inside `tracker.fork()`. Here all of
these come from torch's default CPU generator, on either device. A state holds that generator's and, where there is a
GPU, that of the current CUDA device, from which torch's own ops draw.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from reference.memory import recompute
from reference.state import graph_seeds

CPU_BYTES = 5056  # of the state of torch's CPU generator


def _present() -> torch.Tensor:
    """The present state: uint8, the CPU generator's bytes and after them those of the current CUDA device's."""
    parts = [torch.get_rng_state()]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_rng_state())
    return torch.cat(parts)


def _enter(state: torch.Tensor) -> None:
    """Set the generators; a state that a machine without a GPU has made leaves CUDA's as it is."""
    torch.set_rng_state(state[:CPU_BYTES].clone())
    if torch.cuda.is_available() and state.numel() > CPU_BYTES:
        torch.cuda.set_rng_state(state[CPU_BYTES:].clone())


class CudaRNGStatesTracker:
    """Named random states, each of which `fork` makes the present one for a while.

    In a recomputation, this package's or PyTorch's with use_reentrant=False, `fork` brings back the state
    of the first run and leaves the tracker as it is, so masks repeat. In a CUDA graph each replay forks for the masks
    of layers (`reference.state.graph_seeds`); PyTorch's own ops in it draw from PyTorch's CUDA generator.

    Source: Transformer Engine's `pytorch/distributed.py`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name: uint8 tensors on the CPU, for a checkpoint's file."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace all states by the result of `get_states`."""
        for name, state in states.items():
            if not (isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.numel() >= CPU_BYTES):
                raise ValueError(
                    f"CudaRNGStatesTracker.set_states: states[{name!r}]={state!r}; the result of get_states is "
                    f"accepted."
                )
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Keep a new state under `name`: that of generators which `torch.manual_seed(seed)` has seeded."""
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"CudaRNGStatesTracker.add: seed={seed!r}; an int is accepted.")
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"CudaRNGStatesTracker.add: seed={seed}; an int from -2^63 to 2^64 - 1 is accepted.")
        if seed in self.seeds_:
            raise RuntimeError(f"CudaRNGStatesTracker.add: seed={seed} already exists; a new seed is accepted.")
        if name in self.states_:
            raise RuntimeError(f"CudaRNGStatesTracker.add: name={name!r} already exists; a new name is accepted.")
        graph_seeds.refuse("CudaRNGStatesTracker.add")
        outer = _present()
        torch.manual_seed(seed)
        self.states_[name] = _present()
        self.seeds_.add(seed)
        _enter(outer)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the state `name` inside; afterwards the generators have the state from before."""
        if name not in self.states_:
            raise KeyError(f"CudaRNGStatesTracker.fork: name={name!r}; one of {list(self.states_)} is accepted.")
        draws = graph_seeds.present()
        if draws is not None:  # the present states are those of the capture, not of a replay
            with draws.forked(partial(self.fork, name)):
                yield
            return
        graph_seeds.refuse("CudaRNGStatesTracker.fork")
        again, outer = recompute.recomputing(), _present()
        _enter(recompute.recalled(self, self.states_[name]))
        try:
            yield
        finally:
            if not again:
                self.states_[name] = _present()
            _enter(outer)
