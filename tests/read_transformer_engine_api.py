"""Reads Transformer Engine's public PyTorch API off its Python source into transformer_engine_api.json: names only.

    python tests/read_transformer_engine_api.py <the folder of transformer_engine/> tests/transformer_engine_api.json

The file that lies here was read from release 2.20.2: the wheel transformer_engine_cu12-2.20.2, which holds the Python
source. Nothing is imported. A parameter is written as in the signature, "bias=True", annotations left out; "*" and
"/" mean what they mean in Python.
"""

import ast
import json
import sys
from pathlib import Path

VERSION = "2.20.2"
PYTORCH = "transformer_engine/pytorch/"
PACKAGES = {
    "te": PYTORCH + "__init__.py",
    "recipe": "transformer_engine/common/recipe/__init__.py",
    "optimizers": PYTORCH + "optimizers/__init__.py",
    "ops": PYTORCH + "ops/__init__.py",
}
MODULES = {"quantization": PYTORCH + "quantization.py"}  # whose own classes and functions are names
CALLABLES = {
    "Linear": ("module/linear.py", "__init__", "forward"),
    "LayerNorm": ("module/layernorm.py", "__init__"),
    "RMSNorm": ("module/rmsnorm.py", "__init__"),
    "LayerNormLinear": ("module/layernorm_linear.py", "__init__", "forward"),
    "LayerNormMLP": ("module/layernorm_mlp.py", "__init__", "forward"),
    "DotProductAttention": ("attention/dot_product_attention/dot_product_attention.py", "__init__", "forward"),
    "MultiheadAttention": ("attention/multi_head_attention.py", "__init__", "forward"),
    "TransformerLayer": ("transformer.py", "__init__", "forward"),
    "InferenceParams": ("attention/inference.py", "__init__", "allocate_memory", "pre_step", "reset"),
    "RotaryPositionEmbedding": ("attention/rope.py", "__init__", "forward"),
    "apply_rotary_pos_emb": ("attention/rope.py", ""),
    "is_fp8_available": ("quantization.py", ""),
    "is_mxfp8_available": ("quantization.py", ""),
    "is_fp8_block_scaling_available": ("quantization.py", ""),
    "is_nvfp4_available": ("quantization.py", ""),
    "is_bf16_available": ("utils.py", ""),
    "get_default_recipe": ("quantization.py", ""),
    "FusedAdam": ("optimizers/fused_adam.py", "__init__", "step"),
    "FusedSGD": ("optimizers/fused_sgd.py", "__init__", "step"),
    "get_cpu_offload_context": ("cpu_offload.py", ""),
    "autocast": ("quantization.py", "__init__"),
    "fp8_autocast": ("quantization.py", ""),
    "quantized_model_init": ("quantization.py", ""),
    "fp8_model_init": ("quantization.py", ""),
    "make_graphed_callables": ("graph.py", ""),
    "checkpoint": ("distributed.py", ""),
    "parallel_cross_entropy": ("cross_entropy.py", ""),
    "Float8Quantizer": ("tensor/float8_tensor.py", "__init__"),
    "Float8CurrentScalingQuantizer": ("tensor/float8_tensor.py", "__init__"),
    "Quantizer": ("quantized_tensor.py", "quantize", "update_quantized", "make_empty", "set_usage"),
}
OPERATIONS = {  # of `ops`: the file, and the class whose constructor it has
    "Linear": ("linear.py", "Linear"),
    "BasicLinear": ("basic/basic_linear.py", "BasicLinear"),
    "Bias": ("basic/bias.py", "Bias"),
    "LayerNorm": ("basic/layer_norm.py", "LayerNorm"),
    "RMSNorm": ("basic/rmsnorm.py", "RMSNorm"),
    "GELU": ("basic/activation.py", "_ActivationOperation"),
    "SwiGLU": ("basic/swiglu.py", "SwiGLU"),
    "Dropout": ("basic/dropout.py", "Dropout"),
    "ConstantScale": ("basic/constant_scale.py", "ConstantScale"),
    "Reshape": ("basic/reshape.py", "Reshape"),
    "AddExtraInput": ("basic/add_extra_input.py", "AddExtraInput"),
    "MakeExtraOutput": ("basic/make_extra_output.py", "MakeExtraOutput"),
    "Sequential": ("sequential.py", "Sequential"),
}
CLASSES = {  # whose methods are names
    "Linear": PYTORCH + "module/linear.py",
    "LayerNormLinear": PYTORCH + "module/layernorm_linear.py",
    "LayerNormMLP": PYTORCH + "module/layernorm_mlp.py",
    "DotProductAttention": PYTORCH + "attention/dot_product_attention/dot_product_attention.py",
    "MultiheadAttention": PYTORCH + "attention/multi_head_attention.py",
    "TransformerLayer": PYTORCH + "transformer.py",
    "InferenceParams": PYTORCH + "attention/inference.py",
    "RotaryPositionEmbedding": PYTORCH + "attention/rope.py",
    "CudaRNGStatesTracker": PYTORCH + "distributed.py",
    "FusedAdam": PYTORCH + "optimizers/fused_adam.py",
    "FusedSGD": PYTORCH + "optimizers/fused_sgd.py",
    "Recipe": "transformer_engine/common/recipe/__init__.py",
    "Quantizer": PYTORCH + "quantized_tensor.py",
    "Float8Quantizer": PYTORCH + "tensor/float8_tensor.py",
    "Float8CurrentScalingQuantizer": PYTORCH + "tensor/float8_tensor.py",
    "QuantizedTensor": PYTORCH + "quantized_tensor.py",
    "Float8Tensor": PYTORCH + "tensor/float8_tensor.py",
    "FP8GlobalStateManager": PYTORCH + "quantization.py",
}
BASES = {"LayerNorm": "ops/basic/layer_norm.py", "RMSNorm": "ops/basic/rmsnorm.py"}  # take what **kwargs passes on


def parameters(function: ast.FunctionDef) -> list[str]:
    """`function`'s, without self."""
    arguments = function.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    found = [part.strip() for part in ast.unparse(arguments).split(", ")]
    assert ast.unparse(ast.parse(f"def f({', '.join(found)}): pass")) == f"def f({ast.unparse(arguments)}):\n    pass"
    joined: list[str] = []  # a default may hold a comma
    for part in found:
        if joined and joined[-1].count("(") > joined[-1].count(")"):
            joined[-1] += f", {part}"
        else:
            joined.append(part)
    return [name for name in joined if name not in ("self", "")]


def popped(function: ast.FunctionDef) -> list[str]:
    """The keywords that `function` takes out of its **kwargs."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and len(node.args) == 2]
    pops = [call.args for call in calls if ast.unparse(call.func) == "kwargs.pop"]
    return [f"{ast.literal_eval(name)}={ast.unparse(default)}" for name, default in pops]


def function_of(path: Path, owner: str, name: str) -> ast.FunctionDef:
    """A module's function `owner`, or the method `name` of its class `owner`."""
    body = ast.parse(path.read_text("utf-8")).body
    if name:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner).body
    return [node for node in body if isinstance(node, ast.FunctionDef) and node.name == (name or owner)][-1]


def fields(path: Path, owner: str) -> list[str]:
    """A dataclass's fields."""
    body = ast.parse(path.read_text("utf-8")).body
    found = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner).body
    return [
        f"{node.target.id}={ast.unparse(node.value)}"  # type: ignore[attr-defined,arg-type]
        for node in found
        if isinstance(node, ast.AnnAssign)
    ]


def names(path: Path) -> list[str]:
    """The public names that a module imports from its own package, or defines as classes."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("transformer_engine")):
            if node.names[0].name == "*":
                found.update(names(path.parent / (node.module or "") / "__init__.py"))
            elif node.module != "transformer_engine.common":
                found.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            found.add(node.name)
    return sorted(name for name in found if not name.startswith("_") and name != "torch_version")


def public(body: list[ast.stmt], kinds: tuple[type[ast.stmt], ...]) -> list[str]:
    """The public names of classes or functions that a body defines."""
    found = {node.name for node in body if isinstance(node, kinds)}  # type: ignore[attr-defined]
    return sorted(name for name in found if not name.startswith("_"))


def methods_of(path: Path, owner: str) -> list[str]:
    """The public methods and properties that a class itself defines."""
    body = ast.parse(path.read_text("utf-8")).body
    found = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    return public(found.body, (ast.FunctionDef,))


def read(root: Path) -> dict[str, object]:
    """All of it."""
    callables = {"DelayedScaling": fields(root / PACKAGES["recipe"], "DelayedScaling")}
    for owner, (path, *methods) in CALLABLES.items():
        for method in methods:
            function = function_of(root / PYTORCH / path, owner, method)
            found = parameters(function)
            if not method and popped(function):
                found = [*found[:-1], *popped(function), found[-1]]
            if owner in BASES and method == "__init__":
                base = parameters(function_of(root / PYTORCH / BASES[owner], owner, method))
                new = [name for name in base[base.index("*") + 1 :] if name not in found]
                found = [*found[:-1], "*", *new]  # in the place of **kwargs
            callables[f"{owner}.{method}" if method else owner] = found
    for name, (file, owner) in OPERATIONS.items():
        function = function_of(root / PYTORCH / "ops" / file, owner, "__init__")
        callables[f"ops.{name}.__init__"] = parameters(function)
    function = function_of(root / PYTORCH / "ops/sequential.py", "Sequential", "forward")
    callables["ops.Sequential.forward"] = parameters(function)
    submodules = {path.relative_to(root / PYTORCH).parts[0] for path in (root / PYTORCH).glob("*/__init__.py")}
    submodules |= {path.stem for path in (root / PYTORCH).glob("*.py")}
    return {
        "version": VERSION,
        "names": {
            **{package: names(root / path) for package, path in PACKAGES.items()},
            **{
                module: public(ast.parse((root / path).read_text("utf-8")).body, (ast.ClassDef, ast.FunctionDef))
                for module, path in MODULES.items()
            },
        },
        "methods": {owner: methods_of(root / path, owner) for owner, path in CLASSES.items()},
        "submodules": sorted(name for name in submodules - {"setup"} if not name.startswith("_")),
        "callables": callables,
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n", "utf-8")
