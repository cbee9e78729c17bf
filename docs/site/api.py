"""The pages of names, which mkdocstrings fills with signatures and docstrings (hooks.py puts them into the site).

Every public name of `reference` stands on one of them: names that no group below has come last.
"""

import importlib
import re
import types
from collections.abc import Iterator

import reference
from reference.nn import operations
from reference.optimizers import __all__ as optimizers
from reference.recipe import __all__ as recipes

LAYERS = (
    *("Linear", "LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP", "DotProductAttention"),
    *("MultiheadAttention", "TransformerLayer", "Embedding", "RotaryPositionEmbedding", "InferenceParams"),
)
GROUPS = {
    "Layers": [f"reference.{name}" for name in LAYERS],
    "FP8 and its recipes": [
        *(f"reference.{name}" for name in ("autocast", "quantized_model_init")),
        *(f"reference.recipe.{name}" for name in recipes),
    ],
    "Writing text": [f"reference.{name}" for name in ("Generator", "Sampling", "DraftModel", "keys_and_values_in_fp8")],
    "Functions and losses": [
        f"reference.{name}"
        for name in ("cross_entropy", "fused_linear_cross_entropy", "apply_rotary_pos_emb", "checkpoint", "convert")
    ],
    "Looking at a training": [
        f"reference.{name}"
        for name in (
            *("collect_stats", "auto_precision", "PrecisionPlan", "detect_anomaly"),
            *("record", "digest", "trail", "diff"),
        )
    ],
    "State and graphs": [
        f"reference.{name}"
        for name in (
            *("init_fp8_state", "load_fp8_state", "transformer_engine_state_dict", "make_graphed_callables"),
            *("get_cpu_offload_context", "mark_not_offload", "CudaRNGStatesTracker"),
        )
    ],
    "Optimizers": [f"reference.optimizers.{name}" for name in optimizers],
    "Single operations, te.ops": [f"reference.nn.operations.{name}" for name in operations.__all__],
}
# Transformer Engine's other names for what is shown, and the module of functions that are.
OLDER = {"fp8", "fp8_autocast", "fp8_model_init", "parallel_cross_entropy", "quantization"}
OPTIONS = "    options:\n      heading_level: 3\n"


def groups() -> dict[str, list[str]]:
    """The groups, and all other public names."""
    shown = {name.rpartition(".")[2] for names in GROUPS.values() for name in names} | {"optimizers", "recipe"}
    rest = [name for name in reference.__all__ if name not in shown | OLDER]
    modules = [name for name in rest if isinstance(getattr(reference, name), types.ModuleType)]
    others = [name for name in rest if name not in modules]
    return {
        **GROUPS,
        "Tensors, and what else there is": [f"reference.{name}" for name in others],
        "Modules": [f"reference.{name}" for name in modules],
    }


def where(name: str) -> str:
    """Where a class or a function is defined: `reference.autocast` is a module's name, too."""
    module, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(module), last)
    return f"{found.__module__}.{found.__qualname__}" if isinstance(found, type | types.FunctionType) else name


def pages() -> Iterator[tuple[str, str]]:
    """The address and the text of each page."""
    for title, names in groups().items():
        stem = "_".join(re.findall(r"\w+", title.lower()))
        text = "".join(f"::: {where(name)}\n{OPTIONS}\n" for name in names)
        yield f"docs/api/{stem}.md", f"# {title}\n\nAll names are those of `import twin_engine as te`.\n\n{text}"
