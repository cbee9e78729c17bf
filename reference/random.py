"""The random numbers of dropout: which of torch's seeds and states decide about a mask, and CUDA graphs.

In each forward a layer that drops draws a seed from torch's default CPU generator, on every device (attention one, a
TransformerLayer one more for its hidden states), and makes its masks of it by Philox (`reference.ops.dropout`). So
after the same `torch.manual_seed`, or with the same `torch.get_rng_state`, the same model drops the same elements, on
a CPU and on a GPU, in eager mode, under `torch.compile`, from `make_graphed_callables`, after resuming, inside
`torch.random.fork_rng`, and when a checkpoint recomputes. `torch.cuda.manual_seed` alone decides nothing.

A CUDA graph that you capture yourself replays kernels and no Python, so it draws nothing: the seed is the one that the
state held at the capture, and each replay advances the state's offset, which gives a new mask. PyTorch has no way to
tell such a graph of a new seed. Three functions reach its states, which are those of the modules that were captured:

    te.random.seed(7, model)              torch.manual_seed(7), and every state in `model` follows from 7
    saved = te.random.get_state(model)    plain tensors, for a checkpoint: torch's generators and every state in `model`
    te.random.set_state(saved, model)

`with te.random.undrawn():` makes eager mode do what such a graph does: on a CPU it reproduces a graph's masks.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from reference import philox
from reference.nn.dropout import Generator
from reference.threads import here

__all__ = ["fork", "get_state", "seed", "set_state", "undrawn"]


def _generators(module: torch.nn.Module | None) -> dict[str, Generator]:
    """The states in `module`, by name."""
    if module is None:
        return {}
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"te.random: module={module!r}; a torch.nn.Module or None is accepted.")
    return {name: part for name, part in module.named_modules() if isinstance(part, Generator)}


def seed(seed: int, module: torch.nn.Module | None = None) -> None:
    """`torch.manual_seed(seed)`, and states in `module` that follow from `seed`: the i-th from Philox's i-th words.

    Args:
        seed: an int from -2^63 to 2^64 - 1, as torch takes it.
        module: with layers that drop; None is torch's generators alone.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"te.random.seed: seed={seed!r}; an int from -2^63 to 2^64 - 1 is accepted.")
    generators = _generators(module)
    torch.manual_seed(seed)
    for i, generator in enumerate(generators.values()):
        low, high, *_ = (int(word[0]) for word in philox.element_words(seed % 2**64, i, 1))
        generator.state.copy_(torch.tensor([low | (high >> 1) << 32, 0], dtype=torch.int64, device="cpu"))


def get_state(module: torch.nn.Module | None = None) -> dict[str, torch.Tensor]:
    """All that masks follow from, as plain tensors on the CPU.

    Returns:
        `"torch"` and `"torch.cuda.<i>"`, the states of torch's generators (uint8), and by its name in `module` each
        layer's `[seed, offset]` (int64 `[2]`).
    """
    found = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found |= {f"torch.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return found | {name: part.state.detach().cpu().clone() for name, part in _generators(module).items()}


def set_state(state: Mapping[str, torch.Tensor], module: torch.nn.Module | None = None) -> None:
    """Put back what `get_state` gave.

    Args:
        state: with `"torch"`, and an entry for each layer of `module` that drops. The states of GPUs that this process
            does not have are left out.
        module: with the same layers.
    """
    generators = _generators(module)
    wanted = {"torch", *generators}
    missing = sorted(wanted - state.keys())
    unknown = sorted(name for name in state.keys() - wanted if not name.startswith("torch.cuda."))
    if missing or unknown:
        raise ValueError(
            f"te.random.set_state: state has no {missing} and too much {unknown}; what get_state gave for the same "
            f"module is accepted."
        )
    for name, value in state.items():
        fits = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        if name in generators:
            fits = fits and value.dtype == torch.int64 and value.shape == (2,)
        else:
            fits = fits and value.dtype == torch.uint8 and value.dim() == 1
        if not fits:
            raise ValueError(f"te.random.set_state: state[{name!r}]={value!r}; what get_state gave is accepted.")
    torch.set_rng_state(state["torch"])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for name, value in state.items():
        if name in generators:
            generators[name].state.copy_(value)
        elif name.startswith("torch.cuda.") and int(name.rpartition(".")[2]) < count:
            torch.cuda.set_rng_state(value, int(name.rpartition(".")[2]))


@contextlib.contextmanager
def fork(module: torch.nn.Module | None = None) -> Iterator[None]:
    """Run what is inside and then put every random state back."""
    saved = get_state(module)
    try:
        yield
    finally:
        set_state(saved, module)


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Inside, layers draw no seeds and go on from the states that they have, as in a CUDA graph."""
    thread = here()
    outer, thread.undrawn = thread.undrawn, []
    try:
        yield
    finally:
        thread.undrawn = outer
