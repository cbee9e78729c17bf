"""How layers make their parameters: names, splits, dtypes, and the arguments that are not offered."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch


class DeviceDefault:
    """Where a layer's parameters go when its constructor is not told; `optimized` overrides it."""

    default_device = "cpu"

    @classmethod
    def resolve_device(cls, device: torch.device | str | None) -> torch.device:
        """`device`; where it is None torch's default device, if one is set (not "cpu"), else the package's own."""
        if device is None:
            device = torch.get_default_device()
            device = cls.default_device if device.type == "cpu" else device
        return torch.device(device)


Split = Sequence[str] | Mapping[str, int] | None
InitMethod = Callable[[torch.Tensor], Any]

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Transformer Engine's arguments for parallelism and communication, at the value that means "off".
OFF = {
    "sequence_parallel": False,
    "tp_group": None,
    "tp_size": 1,
    "set_parallel_mode": False,
    "return_layernorm_output_gathered": False,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "delay_wgrad_compute": False,
    "symmetric_ar_type": None,
    "save_original_input": False,
    "activation_params": None,
    "bottom_right_diagonal": None,
    "enc_dec_window_size": None,
    "enc_dec_bottom_right_diagonal": None,
    "inference_params": None,
    "core_attention_bias_type": "no_bias",
    "core_attention_bias": None,
    "alibi_slopes": None,
    "checkpoint": False,
    "qk_norm_type": None,
    "softmax_type": "vanilla",
}


def refuse_not_offered(layer: str, arguments: Mapping[str, Any]) -> None:
    """Raise for a constructor argument of Transformer Engine's that asks for what is not here."""
    for name, value in arguments.items():
        if name in OFF and value != OFF[name]:
            raise NotImplementedError(f"{layer}: {name}={value!r} is not offered; {OFF[name]!r} is accepted.")
    if arguments.get("window_size") not in (None, (-1, -1), (-1, 0)):
        raise NotImplementedError(
            f"{layer}: window_size={arguments['window_size']!r} is not offered; None is accepted."
        )
    if arguments.get("parallel_mode") not in (None, "row", "column"):
        raise ValueError(
            f"{layer}: parallel_mode={arguments['parallel_mode']!r}; None, 'row' and 'column' are accepted."
        )


def parameter_dtype(layer: str, dtype: torch.dtype | None) -> torch.dtype:
    """`dtype`, or torch's default; refused where parameters cannot have it."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in PARAMETER_DTYPES:
        raise TypeError(f"{layer}: params_dtype={dtype}; float32, bfloat16 and float16 are accepted.")
    return dtype


def check_sizes(layer: str, **sizes: int) -> None:
    """Refuse sizes below 1."""
    if min(sizes.values()) < 1:
        text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"{layer}: {text}; sizes >= 1 are accepted.")


def split_sizes(layer: str, split: Split, out_features: int) -> dict[str, int]:
    """Parameter-name prefix → rows, as Transformer Engine names them (`"query"` → `query_weight`)."""
    if split is None:
        return {"": out_features}
    if isinstance(split, Mapping):
        sizes = {f"{name.rstrip('_')}_": size for name, size in split.items()}
    else:
        sizes = {f"{name.rstrip('_')}_": out_features // len(split) for name in split}
    if not sizes or sum(sizes.values()) != out_features:
        raise ValueError(
            f"{layer}: parameters_split={split!r} with out_features={out_features}; "
            f"distinct names whose sizes add up to out_features are accepted."
        )
    return sizes


@contextlib.contextmanager
def forked(get_tracker: Callable[[], Any] | None, name: str | None = None) -> Iterator[None]:
    """The random state in which weights are drawn: the tracker's, where one is given."""
    if get_tracker is None:
        yield
        return
    with get_tracker().fork() if name is None else get_tracker().fork(name):
        yield
