"""What stands for a name of Transformer Engine's that Twin Engine has not: it can be imported, but not used.

A program may import a name, annotate with it, subclass it, ask `isinstance`, and never use it. So a placeholder of a
class is a class without objects, one of a function is a function, and one of a value is an object; whoever makes,
calls or reads one gets a sentence. `table` says what each of Transformer Engine's modules holds.
"""

import functools
import json
from abc import ABCMeta
from pathlib import Path
from typing import Any, NoReturn

from reference.support import not_offered

TABLE = Path(__file__).parent / "transformer_engine.json"

# Why modules' names are not offered, by the beginning of their names below transformer_engine; the first that fits.
_REASONS = {
    "pytorch.permutation pytorch.router pytorch.ep pytorch.triton pytorch.module.grouped_linear "
    "pytorch.module.fp8_padding pytorch.module.fp8_unpadding": not_offered.EXPERTS,
    "pytorch.distributed pytorch.attention.dot_product_attention.context_parallel": not_offered.PARALLEL,
    "pytorch.attention.inference": "te.InferenceParams holds one cache of each layer, without pages",
    "pytorch.attention": not_offered.ATTENTION,
    "pytorch.ops": not_offered.OPS,
    "pytorch.tensor pytorch.quantized_tensor": not_offered.QUANTIZED,
    "pytorch.custom_recipes common.recipe": not_offered.RECIPES,
    "pytorch.export pytorch.onnx": not_offered.EXPORT,
    "pytorch.cpu_offload": not_offered.OFFLOAD,
    "debug": "te.collect_stats, te.detect_anomaly and te.record look into a model here",
}
# Of older releases.
OLDER = {
    "transformer_engine.pytorch.module.base": "get_workspace get_cublas_workspace_size_bytes "
    "get_multi_stream_cublas_workspace",
    "transformer_engine.pytorch.cpp_extensions": "fp8_gemm gemm cast_to_fp8 cast_from_fp8 fp8_cast_transpose_fused",
    "transformer_engine.pytorch.fp8": "get_fp8_group",
}


@functools.cache
def table() -> dict[str, dict[str, list[str]]]:
    """Module → "class", "function", "value" and "defines" (the classes that are its own) → names, private ones too."""
    raw: dict[str, dict[str, str]] = json.loads(TABLE.read_text("utf-8"))
    return {module: {what: names.split() for what, names in groups.items()} for module, groups in raw.items()}


def kind_of(module: str, name: str) -> str | None:
    """What `module.name` is in Transformer Engine: "class", "function" or "value"; None if there is no such name."""
    groups = table().get(module, {})
    found = next((what for what in ("class", "function", "value") if name in groups.get(what, ())), None)
    return "function" if found is None and name in OLDER.get(module, "").split() else found


def sentence(module: str, name: str, package: str) -> str:
    """Why there is none; `package` is ours in that module's place."""
    known = not_offered.sentence(package, name)
    if known is not None:
        return known
    below = module.removeprefix("transformer_engine.")
    groups = ((start, why) for starts, why in _REASONS.items() for start in starts.split())
    why = next((why for start, why in groups if below.startswith(start)), None)
    why = next((reasons[name] for reasons in not_offered.REASONS.values() if name in reasons), why)
    return f"{module}.{name} is not offered by Twin Engine: {why or not_offered.INTERNAL}."


class _NoObjects(ABCMeta):
    """The class of classes that only have a name; `ABCMeta`, so that an abstract class can be a base beside one."""

    _sentence: str

    def __getattr__(cls, name: str) -> NoReturn:
        text = f"type object {cls.__name__!r} has no attribute {name!r}"
        raise AttributeError(text if name.startswith("_") else cls._sentence, name=name, obj=cls)

    def _refuse(cls, *args: Any) -> Any:
        raise NotImplementedError(cls._sentence)

    __getitem__ = __iter__ = _refuse  # as of an enumeration


class _Value:
    """A value that cannot be read."""

    def __init__(self, text: str) -> None:
        vars(self)["_sentence"] = text

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(self._sentence)

    __call__ = __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = __int__ = __float__ = __index__ = _refuse
    __setitem__ = __delitem__ = __setattr__ = __enter__ = __exit__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __or__ = __and__ = __neg__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __ror__ = __rand__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(self._sentence)


def make(module: str, name: str, kind: str, text: str) -> Any:
    """The placeholder of `module.name`."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(text)

    if kind == "class":
        about = {"__new__": refuse, "__init__": refuse, "__doc__": text, "__module__": module, "_sentence": text}
        return _NoObjects(name, (), about)
    if kind == "value":
        return _Value(text)
    refuse.__name__ = refuse.__qualname__ = name
    refuse.__module__, refuse.__doc__ = module, text
    return refuse
