"""The random numbers of dropout: which of torch's seeds and states decide about a mask, and CUDA graphs.

In each forward a layer with dropout draws a seed from torch's default CPU generator, on every device (attention one, a
TransformerLayer one more for its hidden states), and makes its masks from it by Philox
(`reference.ops.random.dropout`). So `torch.manual_seed` or `torch.set_rng_state` decides about the masks on a CPU and
on a GPU, in eager mode, under `torch.compile`, from `make_graphed_callables`, and in a recomputation.
`torch.cuda.manual_seed` alone has no effect.

The same holds in a CUDA graph that you capture yourself by PyTorch: a capture draws nothing, and each replay draws what
the captured step would draw in eager mode (`reference.state.graph_seeds`). A graph that is captured or replayed by
other means draws nothing; each replay advances the offset of the captured state, which gives a new mask. Three
functions reach the states of modules, and one context makes eager mode, or what is captured inside, go on from them
without a draw:

    te.random.seed(7, model)              torch.manual_seed(7), and every state in `model` follows from 7
    saved = te.random.get_state(model)    plain tensors, for a checkpoint: torch's generators and every state in `model`
    te.random.set_state(saved, model)
    with te.random.undrawn(): ...
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from reference.nn.core.dropout import Generator
from reference.numbers import philox
from reference.state import graph_seeds
from reference.state.threads import here

__all__ = ["fork", "get_state", "seed", "set_state", "undrawn"]


def _generators(module: torch.nn.Module | None) -> dict[str, Generator]:
    """The dropout states in `module`, by name."""
    if module is None:
        return {}
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"te.random: module={module!r}; a torch.nn.Module or None is accepted.")
    return {name: part for name, part in module.named_modules() if isinstance(part, Generator)}


def seed(seed: int, module: torch.nn.Module | None = None) -> None:
    """`torch.manual_seed(seed)`, and states in `module` that follow from `seed`: the i-th from Philox's i-th words.

    Args:
        seed: an int from -2^63 to 2^64 - 1, as torch takes it.
        module: contains layers with dropout; None seeds torch's generators alone.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"te.random.seed: seed={seed!r}; an int from -2^63 to 2^64 - 1 is accepted.")
    generators = _generators(module)
    graph_seeds.refuse("te.random.seed")
    torch.manual_seed(seed)
    for i, generator in enumerate(generators.values()):
        low, high, *_ = (int(word[0]) for word in philox.element_words(seed % 2**64, i, 1))
        generator.seed_and_offset.copy_(torch.tensor([low | (high >> 1) << 32, 0], dtype=torch.int64, device="cpu"))


def get_state(module: torch.nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Everything that masks follow from, as plain tensors on the CPU.

    Returns:
        `"torch"` and `"torch.cuda.<i>"`, the states of torch's generators (uint8), and under its name in `module` each
            layer's `[seed, offset]` (int64 `[2]`).
    """
    graph_seeds.refuse("te.random.get_state")
    found = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found |= {f"torch.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return found | {name: part.seed_and_offset.detach().cpu().clone() for name, part in _generators(module).items()}


def set_state(state: Mapping[str, torch.Tensor], module: torch.nn.Module | None = None) -> None:
    """Restore the result of `get_state`.

    Args:
        state: `"torch"`, and an entry for each layer with dropout in `module`. States of GPUs that this process does
            not have are ignored.
        module: has the same layers.
    """
    generators = _generators(module)
    wanted = {"torch", *generators}
    missing = sorted(wanted - state.keys())
    unknown = sorted(name for name in state.keys() - wanted if not name.startswith("torch.cuda."))
    if missing or unknown:
        raise ValueError(
            f"te.random.set_state: state lacks {missing} and has unknown {unknown}; the result of get_state for the "
            f"same module is accepted."
        )
    for name, value in state.items():
        fits = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        if name in generators:
            fits = fits and value.dtype == torch.int64 and value.shape == (2,)
        else:
            fits = fits and value.dtype == torch.uint8 and value.dim() == 1
        if not fits:
            raise ValueError(f"te.random.set_state: state[{name!r}]={value!r}; the result of get_state is accepted.")
    graph_seeds.refuse("te.random.set_state")
    torch.set_rng_state(state["torch"])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for name, value in state.items():
        if name in generators:
            generators[name].seed_and_offset.copy_(value)
        elif name.startswith("torch.cuda.") and int(name.rpartition(".")[2]) < count:
            torch.cuda.set_rng_state(value, int(name.rpartition(".")[2]))


@contextlib.contextmanager
def fork(module: torch.nn.Module | None = None) -> Iterator[None]:
    """Run what is inside and then restore every random state; captured in a CUDA graph, at each replay."""
    draws, generators = graph_seeds.present(), list(_generators(module).values())
    if draws is not None:
        before = [one.seed_and_offset.clone() for one in generators]
        with draws.forked(fork):
            yield
        for one, value in zip(generators, before, strict=True):
            one.seed_and_offset.copy_(value)
        return
    graph_seeds.refuse("te.random.fork")
    saved = get_state(module)
    try:
        yield
    finally:
        set_state(saved, module)


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Inside, layers draw no seeds and continue from their present states, with a new offset for each mask."""
    thread = here()
    outer, thread.undrawn = thread.undrawn, True
    try:
        yield
    finally:
        thread.undrawn = outer
