"""FP8 state without the weights: for loaders that ignore it, and for distributed checkpoints.

`load_state_dict`, torch.distributed.checkpoint and Hugging Face's `from_pretrained` load a layer's state with its
weights (`reference.checkpoints.checkpoint_format`), whatever its history's length. Two cases need a call:

    te.load_fp8_state(model, "folder")      the weights were loaded in another way, or a loader ignored the state
    te.init_fp8_state(model, recipe)        before a loader that copies into tensors of equal shapes alone, and whose
                                            checkpoint has a history of another length than DelayedScaling's 1024

Transformer Engine's checkpoints load as ours do, and `te.transformer_engine_state_dict(model)` is one
(docs/checkpoints.md).
"""

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from reference.checkpoints import checkpoint_format, transformer_engine_state
from reference.nn.core.module import TransformerEngineBaseModule
from reference.recipe import DelayedScaling

__all__ = ["init_fp8_state", "load_fp8_state", "transformer_engine_state_dict"]


def _layers(model: Any, caller: str) -> dict[str, TransformerEngineBaseModule]:
    """The layers of `model` that cast to FP8, by prefix."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{caller}: model={model!r}; a torch.nn.Module is accepted.")
    return {
        f"{name}." if name else "": module
        for name, module in model.named_modules()
        if isinstance(module, TransformerEngineBaseModule) and module.fp8_weights
    }


def _attentions(model: torch.nn.Module) -> dict[str, Any]:
    """The attentions of `model`, which cast to FP8 under `fp8_dpa`, by prefix."""
    named = model.named_modules()
    return {f"{name}." if name else "": one for name, one in named if hasattr(one, "attends_in_fp8")}


def init_fp8_state(model: torch.nn.Module, recipe: DelayedScaling | None = None) -> None:
    """Create the FP8 state that a run under `recipe` would create, or resize the existing one.

    Args:
        model: a layer, or a module with layers inside.
        recipe: None is `DelayedScaling()`.
    """
    recipe = DelayedScaling() if recipe is None else recipe
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(f"init_fp8_state: recipe={recipe!r}; a recipe.DelayedScaling or None is accepted.")
    layers = _layers(model, "init_fp8_state") | (_attentions(model) if recipe.fp8_dpa else {})
    for layer in layers.values():
        layer.make_state(recipe)


def load_fp8_state(model: torch.nn.Module, source: Mapping[str, Any] | str | Path) -> None:
    """Load the FP8 state of every layer in `model`, and nothing else; check all of it first.

    Args:
        model: a layer, or a module with layers inside.
        source: a state dict; a file of `torch.save` or safetensors; or a folder of torch.distributed.checkpoint or of
            Hugging Face's `save_pretrained`. Keys as in `model.state_dict()`; any form of
            `reference.checkpoints.checkpoint_format`, Transformer Engine's among them. Each rank reads for itself.

    Raises:
        ValueError: the source has no state for some layer, or broken state.
    """
    layers, attentions = _layers(model, "load_fp8_state"), _attentions(model)
    wanted = [name for prefix in (*layers, *attentions) for name in checkpoint_format.names(prefix)]
    found = source if isinstance(source, Mapping) else _read(Path(source), wanted.__contains__)
    for prefix, attention in attentions.items():
        attention.check_state(found, prefix)
        if checkpoint_format.is_ours(found.get(prefix + checkpoint_format.STATE)):
            layers[prefix] = attention
    states, missing = {}, []
    for prefix, layer in layers.items():
        layer.check_present(found, prefix)
        layer.refuse_codes("load_fp8_state", found.get(prefix + checkpoint_format.STATE), prefix.rstrip("."))
        own = {name: found[name] for name in checkpoint_format.names(prefix) if name in found}
        states[prefix] = layer.taken(own, prefix, layer._parameter_device())
        if states[prefix] is None:
            missing.append(prefix.rstrip(".") or "the module")
    if missing:
        raise ValueError(f"load_fp8_state: source has no FP8 state for {', '.join(missing)}; every layer needs it.")
    for prefix, layer in layers.items():
        layer.load_state(states[prefix])


def transformer_engine_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """`model.state_dict()` in the form in which Transformer Engine (2.0 to 2.20) loads it, with `strict=True`, too.

    Each layer's FP8 state is a pickle in a uint8 tensor, which Transformer Engine executes: from 2.18 on only where
    NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 is set. Weights that are kept in FP8 are written as numbers of their dtype.

    Args:
        model: a layer, or a module with layers inside.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"transformer_engine_state_dict: model={model!r}; a torch.nn.Module is accepted.")
    with transformer_engine_state.writing():
        return model.state_dict()


def _read(path: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The entries of a checkpoint on disk whose names are `wanted`."""
    if (path / ".metadata").is_file():
        return _read_distributed(path, wanted)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".pt"))
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise ValueError(
            f"load_fp8_state: source={str(path)!r} is no checkpoint; a file of torch.save or safetensors, or a folder "
            f"of torch.distributed.checkpoint or Hugging Face's, is accepted."
        )
    return {name: value for file in files for name, value in _entries(file, wanted)}


def _entries(file: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            for name in filter(wanted, opened.keys()):
                yield name, opened.get_tensor(name)
        return
    with torch.serialization.safe_globals([io.BytesIO]):  # Transformer Engine 1's state
        whole = torch.load(file, map_location="cpu", weights_only=True)
    if isinstance(whole, Mapping):
        yield from ((name, value) for name, value in whole.items() if wanted(name))


def _read_distributed(path: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        for name, entry in metadata.items()
        if wanted(name) and isinstance(entry, TensorStorageMetadata)
    }
    if state:
        dcp.load(state, checkpoint_id=path, no_dist=True)  # a rank that has no such folder leaves no other waiting
    return state
