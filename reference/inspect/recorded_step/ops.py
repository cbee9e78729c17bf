"""Which ops of a step run again, and their arguments in JSON."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reference.numbers.formats import WIDE_DTYPES
from reference.ops.library import is_defined

aten = torch.ops.aten
DTYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}
SAFE = {  # torch's name of a dtype → safetensors'
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# Ops of torch's that give the same bits on every device, with the limits of `kind_of`; one overload of each name.
_EXACT = (
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero_.default,
    aten.ones.default, aten.ones_like.default, aten.new_ones.default, aten.fill_.Scalar,
    aten.full.default, aten.full_like.default, aten.new_full.default,
    aten.clone.default, aten.copy_.default, aten._to_copy.default, aten.cat.default,
    aten.add.Tensor, aten.add_.Tensor,
)  # fmt: skip
EXACT = {func._schema.name: func for func in _EXACT}
_CAST = ("codes", "codes_t", "scale_inv")
RESULTS = {
    "cast": ("codes", "scale_inv"),
    "cast_transpose": _CAST,
    "cast_transpose_dbias": (*_CAST, "dbias"),
    "cat_cast_transpose_dbias": (*_CAST, "dbias"),
    "cat_cast_blocks_transpose_dbias": (*_CAST, "scale_inv_t", "dbias"),
    "cast_blocks": ("codes", "scale_inv"),
    "cast_blocks_transpose": (*_CAST, "scale_inv_t"),
    "cast_rowwise": ("codes", "scale_inv"),
    "cast_rowwise_transpose": (*_CAST, "scale_inv_t"),
    "activation_cast_blocks_transpose": (*_CAST, "scale_inv_t"),
    "activation_backward_cast_blocks_transpose_dbias": (*_CAST, "scale_inv_t", "dbias"),
    "activation_scale": ("out", "scale"),
    "activation_backward_scale": ("dx", "scale"),
    "activation_scale_cast_transpose": _CAST,
    "current_scale": ("scale",),
    "multi_current_scale": ("scales",),
    "activation_cast_transpose": _CAST,
    "activation_backward_cast_transpose_dbias": (*_CAST, "dbias"),
    "norm": ("out", "mean", "rstd"),
    "norm_scale": ("out", "mean", "rstd", "scale"),
    "norm_scale_cast_transpose": (*_CAST, "mean", "rstd"),
    "norm_cast": ("codes", "scale_inv", "mean", "rstd"),
    "norm_cast_transpose": (*_CAST, "mean", "rstd"),
    "norm_cast_blocks_transpose": (*_CAST, "scale_inv_t", "mean", "rstd"),
    "norm_backward": ("dx", "dweight", "dbias"),
    "gemm_fp8_activation": ("h", *_CAST),
    "gemm_fp8_activation_scale": ("h", *_CAST),
    "gemm_fp8_activation_backward": (*_CAST, "dbias"),
    "attention": ("out", "m", "inv"),
    "attention_amax": ("out", "m", "inv", "amax"),
    "attention_backward": ("dq", "dk", "dv"),
    "attention_backward_amax": ("dq", "dk", "dv", "amax"),
    "attention_fp8": ("out", "m", "inv"),
    "attention_fp8_backward": ("dq", "dk", "dv"),
    "dbias": ("dbias",),
}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def has_numbers(x: torch.Tensor) -> bool:
    """Whether a tensor can be recorded: dense, with memory, of a dtype that the file has."""
    dense = x.layout is torch.strided and not x.is_meta and not x.is_nested
    return dense and torch._C._has_storage(x) and dtype_name(x.dtype) in SAFE


def kind_of(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> str:
    """ "twin", "torch" or "fed": whether an op of these tensors runs again
    (`reference.inspect.recorded_step.recorder`)."""
    name = func._schema.name
    plain = all(x.layout is torch.strided and dtype_name(x.dtype) in SAFE for x in given)
    if name.startswith("twin::"):
        return "twin" if is_defined(name.removeprefix("twin::")) and plain else "fed"
    if EXACT.get(name) is not func or not plain or not _is_plain((args, kwargs)):
        return "fed"
    dtypes = {x.dtype for x in given} | {x for x in kwargs.values() if isinstance(x, torch.dtype)}
    wide, same = dtypes <= set(WIDE_DTYPES), len(dtypes) <= 1
    if func in (aten.zeros.default, aten.ones.default, aten.full.default) and kwargs.get("dtype") is None:
        return "fed"  # the default dtype may be another in replay
    if func in (aten._to_copy.default, aten.copy_.default):
        return "torch" if same or wide else "fed"
    if func in (aten.add.Tensor, aten.add_.Tensor):
        return "torch" if same and wide and len(given) == 2 and kwargs.get("alpha", 1) == 1 else "fed"
    return "torch" if same or not given else "fed"


def overload(name: str) -> Any:
    """The op that a name means; KeyError if no op of this name runs again."""
    if name.startswith("twin::") and is_defined(name.removeprefix("twin::")):
        return getattr(torch.ops.twin, name.removeprefix("twin::")).default
    return EXACT[name]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [x for part in value for x in tensors_of(part)]


def changed_by(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The arguments that an op changes; every tensor of an op that is neither torch's nor ours."""
    if func.namespace not in ("aten", "twin"):
        return given
    return tensors_of([value for _, value in _changeable(func, args, kwargs)])


def _changeable(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of the arguments that an op may change."""
    for name, value, argument in _named(func, args, kwargs):
        # Torch's ops of batch norm do not declare that they change their statistics.
        if name in ("running_mean", "running_var") or (
            argument.alias_info is not None and argument.alias_info.is_write
        ):
            yield name, value


def _named(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any, Any]]:
    for position, argument in enumerate(func._schema.arguments):
        yield argument.name, args[position] if position < len(args) else kwargs.get(argument.name), argument


# --- in JSON -----------------------------------------------------------------------------------------


def encoded(value: Any, numbers: Iterator[int]) -> Any:
    """An argument as JSON; tensors are numbered in their order."""
    if isinstance(value, torch.Tensor):
        return {"read": next(numbers)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [encoded(x, numbers) for x in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": "cpu"}  # replay's
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if value is torch.strided:
        return {"layout": "strided"}
    raise TypeError(f"record: an op has the argument {value!r}, which is not recorded.")


def _is_plain(value: Any) -> bool:
    """Whether `encoded` takes it."""
    try:
        encoded([list(value[0]), list(value[1].values())], iter(range(1 << 30)))
    except TypeError:
        return False
    return True


_CONSTANTS: dict[str, Any] = {
    **{f"dtype {name}": dtype for name, dtype in DTYPES.items()},
    **{f"memory_format {name}": getattr(torch, name) for name in ("contiguous_format", "preserve_format")},
    "device cpu": torch.device("cpu"),
    "layout strided": torch.strided,
}


def decoded(value: Any, read: list[torch.Tensor]) -> Any:
    """An argument from JSON, with what was read for its tensors."""
    if isinstance(value, list):
        return [decoded(x, read) for x in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    return read[content] if tag == "read" else _CONSTANTS[f"{tag} {content}"]


def numbers_of(value: Any) -> list[int]:
    """The numbers of the tensors in an argument from JSON."""
    if isinstance(value, dict):
        return [value["read"]] if "read" in value else []
    return [n for x in value for n in numbers_of(x)] if isinstance(value, list) else []


def mutated(name: str, args: list[Any], kwargs: dict[str, Any]) -> list[int]:
    """The tensors that an op changes, by number, in the order of its writes."""
    return [n for _, value in _changeable(overload(name), args, kwargs) for n in numbers_of(value)]


def argument_name(name: str, args: list[Any], kwargs: dict[str, Any], number: int) -> str:
    """The name of the argument that has the tensor of that number."""
    for of, value, _ in _named(overload(name), args, kwargs):
        numbers = numbers_of(value)
        if number in numbers:
            return of if not isinstance(value, list) else f"{of}[{numbers.index(number)}]"
    return str(number)


def check_arguments(name: str, values: list[Any], reads: int) -> None:
    """Refuse arguments from JSON that `decoded` does not take."""
    for value in values:
        if isinstance(value, list):
            check_arguments(name, value, reads)
        elif isinstance(value, dict):
            if len(value) != 1 or ("read" not in value and " ".join(map(str, *value.items())) not in _CONSTANTS):
                raise ValueError(f"an argument of {name} is {value}")
            if "read" in value and not (type(value["read"]) is int and 0 <= value["read"] < reads):
                raise ValueError(f"an argument of {name} is its tensor {value['read']}, of {reads}")
