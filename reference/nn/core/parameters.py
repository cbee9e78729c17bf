"""How layers make their parameters: device, dtype, parts, and random state."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from reference.arguments import check_arguments, is_int
from reference.support.transforms import Unscripted


class DeviceDefault(Unscripted):
    """The device of a layer's parameters when its constructor gets none; `optimized` overrides it."""

    default_device = "cpu"

    @classmethod
    def same_side(cls, layer_type: Any) -> Any:
        """The class by which this layer's package offers `layer_type`: what a layer makes is of its own package."""
        return layer_type

    @classmethod
    def resolve_device(cls, device: torch.device | str | None) -> torch.device:
        """`device`; where it is None torch's default device, if one is set (not "cpu"), else the package's own."""
        if device is None:
            device = torch.get_default_device()
            device = cls.default_device if device.type == "cpu" else device
        return torch.device(device)


def named(module: torch.nn.Module, names: Iterable[str]) -> list[Any]:
    """Parameters by name, faster than by `Module.__getattr__`, which finds other attributes."""
    plain = module._parameters
    return [plain[name] if name in plain else getattr(module, name) for name in names]


def parameter_device(layer: Any) -> torch.device | None:
    """The device of a layer's parameters, wherever they are.

    FSDP with `use_orig_params=False` leaves tensors in their place, views of one parameter of another module;
    `torch.nn.utils.parametrize` computes them from parameters of a module below.
    """
    parametrized = layer._modules.get("parametrizations")
    below = () if parametrized is None else parametrized.parameters()
    attributes = (t for t in vars(layer).values() if isinstance(t, torch.Tensor) and t.numel())
    return next((t.device for t in (*layer._parameters.values(), *attributes, *below) if t is not None), None)


Split = Sequence[str] | Mapping[str, int] | None
InitMethod = Callable[[torch.Tensor], Any]


def parameter_dtype(layer: str, dtype: torch.dtype | None) -> torch.dtype:
    """`dtype`, or torch's default, checked."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    check_arguments(layer, {"params_dtype": dtype})
    return dtype


def split_sizes(layer: str, split: Split, out_features: int) -> dict[str, int]:
    """Parameter-name prefix → rows, as Transformer Engine names them (`"query"` → `query_weight`)."""
    if split is None:
        return {"": out_features}
    names = list(split) if isinstance(split, (Mapping, list, tuple)) else []
    parts = list(split.values()) if isinstance(split, Mapping) else [out_features // len(names) for _ in names]
    sound = all(isinstance(name, str) and name.rstrip("_").isidentifier() for name in names)
    sizes = {f"{name.rstrip('_')}_": size for name, size in zip(names, parts, strict=True)} if sound else {}
    taken = "layer_norm_" in sizes  # the norm's parameters have that name
    if (
        taken
        or not sizes
        or len(sizes) < len(names)
        or not all(is_int(size) and size >= 1 for size in parts)
        or (sum(parts) != out_features)
    ):
        raise ValueError(
            f"{layer}: parameters_split={split!r} with out_features={out_features}; "
            f"distinct names whose sizes add up to out_features are accepted."
        )
    return sizes


@contextlib.contextmanager
def forked(get_tracker: Callable[[], Any] | None, name: str | None = None) -> Iterator[None]:
    """The random state in which weights are drawn: the tracker's, if one is given."""
    if get_tracker is None:
        yield
        return
    with get_tracker().fork() if name is None else get_tracker().fork(name):
        yield
