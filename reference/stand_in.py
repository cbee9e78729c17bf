"""`install_as_transformer_engine`: afterwards `import transformer_engine.pytorch as te` gives Twin Engine.

    import reference
    reference.install_as_transformer_engine()                 # or `optimized`

    import transformer_engine.pytorch as te                   # unmodified programs from here on
    from transformer_engine.common.recipe import DelayedScaling, Format

So Accelerate's `mixed_precision="fp8"`, Lightning's `TransformerEnginePrecision` and a model's own subclasses of
`te.Linear` run as they are, on a CPU too. Megatron-Core's extension is imported and trains a model; placeholders stand
for what it names and Twin Engine has not, and refuse to be made or called. Package metadata name "transformer-engine",
in the release whose API this is, as these libraries ask for. A name that Twin Engine does not offer raises the same
sentence as `te.<name>`.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NoReturn

from reference import not_offered
from reference.nn.module import TransformerEngineBaseModule
from reference.recompute import activation_recompute_forward

VERSION = "2.20.2"
"""The release of Transformer Engine whose names and arguments Twin Engine has (tests/transformer_engine_api.json)."""
ROOT = "transformer_engine"
_PACKAGE = "twin_engine"  # a name of `reference` and `optimized` in a clone and in a wheel

_LAYERS = "Linear LayerNormLinear LayerNormMLP LayerNorm RMSNorm"
_QUANTIZERS = "Float8CurrentScalingQuantizer Float8Quantizer Quantizer"
_ATTENTIONS = "DotProductAttention MultiheadAttention"
# Modules of transformer_engine.pytorch, and what of the package they hold.
NAMES = {
    "module": _LAYERS,
    "module.linear": "Linear",
    "module.layernorm_linear": "LayerNormLinear",
    "module.layernorm_mlp": "LayerNormMLP",
    "module.layernorm": "LayerNorm",
    "module.rmsnorm": "RMSNorm",
    "attention": f"{_ATTENTIONS} InferenceParams RotaryPositionEmbedding apply_rotary_pos_emb",
    "attention.inference": "InferenceParams",
    "attention.dot_product_attention": "DotProductAttention",
    "attention.multi_head_attention": "MultiheadAttention",
    "attention.rope": "RotaryPositionEmbedding apply_rotary_pos_emb",
    "transformer": "TransformerLayer",
    "distributed": "checkpoint CudaRNGStatesTracker",
    "cpu_offload": "get_cpu_offload_context",
    "cross_entropy": "parallel_cross_entropy",
    "graph": "make_graphed_callables",
    "utils": "is_bf16_available",
    "tensor": f"{_QUANTIZERS} Float8Tensor QuantizedTensor",
    "tensor.float8_tensor": f"{_QUANTIZERS} Float8Tensor",
    "float8_tensor": "Float8Tensor",
    "quantized_tensor": "QuantizedTensor Quantizer",
    "constants": "DType",
}
# What is no attribute of the package.
KINDS: dict[str, dict[str, Any]] = {
    "module.base": {"TransformerEngineBaseModule": TransformerEngineBaseModule},
    "distributed": {"activation_recompute_forward": activation_recompute_forward},
}
# Names that Megatron-Core needs while it is imported, as base classes and annotations, whether or not it will use them.
PLACEHOLDERS = {
    "": "GroupedLinear",
    "ops": "Sequential FusibleOperation",
    "router": "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss fused_topk_with_score_function",
}
_ROUTER = "te.router is not offered by Twin Engine: there are no layers for a mixture of experts."


class _Distribution(importlib.metadata.Distribution):
    """The metadata of a package that is not there."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {ROOT}\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: {ROOT} is Twin Engine, which has no files of that name.")


class _Finder(importlib.abc.MetaPathFinder):
    """Says why there is no module or name of Transformer Engine's, and gives its metadata."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        owner, _, last = name.rpartition(".")
        text = not_offered.sentence(_PACKAGE, last) if f"{owner}.".startswith(f"{ROOT}.pytorch.") else None
        if text is not None:
            raise ImportError(text, name=name)

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        asked = getattr(context, "name", None)
        same = asked is None or asked.lower().replace("-", "_") == ROOT
        return [_Distribution()] if same else []


_finder = _Finder()


def _placeholder(name: str, sentence: str) -> type:
    """A class that can be a base and an annotation, but says why there are no objects of it."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(sentence)

    return type(name, (), {"__init__": refuse, "__doc__": sentence})


def _module(name: str, offered: Mapping[str, Any], package: str = _PACKAGE) -> ModuleType:
    """A module of that name, which says what it does not offer; `package` is where it would be."""
    made = ModuleType(name, f"Twin Engine in the place of {name}.")
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__path__ = []

    def missing(attribute: str) -> NoReturn:
        text = f"module {name!r} has no attribute {attribute!r}"
        if not attribute.startswith("_"):
            text = (
                f"{name}.{attribute} is not offered by Twin Engine, which stands in for Transformer Engine {VERSION}."
            )
        raise AttributeError(not_offered.sentence(package, attribute) or text, name=attribute, obj=made)

    made.__dict__.update(offered, __getattr__=missing)
    return made


def _modules(package: ModuleType) -> dict[str, ModuleType]:
    """Every module of Transformer Engine that resolves, by full name."""
    start = f"{ROOT}.pytorch"
    found: dict[str, ModuleType] = {
        f"{start}.{name}": _module(f"{start}.{name}", {key: getattr(package, key) for key in keys.split()})
        for name, keys in NAMES.items()
    }
    for name, kinds in KINDS.items():
        vars(found.setdefault(f"{start}.{name}", _module(f"{start}.{name}", {}))).update(kinds)
    for name in ("quantization", "fp8", "optimizers"):
        found[f"{start}.{name}"] = getattr(package, name)
    ops = {name: value for name, value in vars(package.ops).items() if not name.startswith("_")}
    found[f"{start}.ops"] = _module(f"{start}.ops", ops, f"{_PACKAGE}.ops")
    found[start] = _module(start, {name: getattr(package, name) for name in package.__all__})
    for name, absent in PLACEHOLDERS.items():
        path = f"{start}.{name}" if name else start
        module = found.setdefault(path, _module(path, {}))
        for one in absent.split():
            if one not in vars(module):  # by the package
                owner = f"{_PACKAGE}.{name}".rstrip(".")
                setattr(module, one, _placeholder(one, not_offered.sentence(owner, one) or _ROUTER))
    found[f"{ROOT}.common"] = _module(f"{ROOT}.common", {})
    found[f"{ROOT}.common.recipe"] = package.recipe
    found[ROOT] = _module(ROOT, {"__version__": VERSION})
    found[f"{ROOT}_torch"] = _module(f"{ROOT}_torch", {"DType": package.DType})  # programs import it as `tex`
    for name, module in found.items():
        owner, _, last = name.rpartition(".")
        if owner:
            vars(found[owner]).setdefault(last, module)  # te.cross_entropy is a function here
    return found


def install(package: ModuleType) -> None:
    """Let `transformer_engine` mean `package`; a second call with the same package changes nothing."""
    present: Any = sys.modules.get(ROOT)
    if present is not None and _finder in sys.meta_path:
        if present.pytorch.Linear is package.Linear:
            return
        raise RuntimeError(
            f"install_as_transformer_engine: {ROOT} means the other side of Twin Engine in this process; one of "
            f"`reference` and `optimized` is accepted."
        )
    if present is not None or importlib.util.find_spec(ROOT) is not None or _installed():
        raise RuntimeError(
            f"install_as_transformer_engine: the real {ROOT} is installed here; an environment without it is accepted "
            f"(pip uninstall transformer-engine)."
        )
    sys.modules.update(_modules(package))
    sys.meta_path.insert(0, _finder)  # type: ignore[arg-type]


def _installed() -> bool:
    try:
        importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
