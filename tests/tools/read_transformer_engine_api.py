"""Reads Transformer Engine's public PyTorch API off its source: names, signatures, attributes, modules; no code.

    python tests/tools/read_transformer_engine_api.py <a clone of Transformer Engine, or its bare git directory>
    [section ...]

writes tests/transformer_engine_api.json (all of it, or the sections named), with the version and commit that each
section was read from, and for `reference.te.stand_in` the names of each module (reference/te/transformer_engine.json).
`names`, `methods`, `submodules` and `callables` were read from the wheel transformer_engine_cu12-2.20.2, whose source
is newer than the public branch that `attributes`, `constructors` and the modules were read from. Nothing is imported. A
parameter is written as in the signature, "bias=True", annotations left out; "*" and "/" mean what they mean in Python.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
CONSTRUCTORS = {  # of `ops`, which the page of the API does not list
    **dict.fromkeys(
        ("GEGLU", "GLU", "QGEGLU", "QGELU", "ReGLU", "ReLU", "SReGLU", "SReLU", "SiLU"),
        ("basic/activation.py", "_ActivationOperation"),
    ),
    "ClampedSwiGLU": ("basic/swiglu.py", "ClampedSwiGLU"),
    "L2Normalization": ("basic/l2normalization.py", "L2Normalization"),
    "Quantize": ("basic/quantize.py", "Quantize"),
}
RECIPES = (  # dataclasses, which it does not list either
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
)
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
ATTRIBUTES = {  # whose constructors' attributes are read
    name: CLASSES.get(name, PYTORCH + path)
    for name, path in {
        "TransformerEngineBaseModule": "module/base.py",
        "LayerNorm": "module/layernorm.py",
        "RMSNorm": "module/rmsnorm.py",
        **{name: path for name, (path, *methods) in CALLABLES.items() if "__init__" in methods},
        "CudaRNGStatesTracker": "distributed.py",
    }.items()
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


def attributes_of(path: Path, owner: str) -> list[str]:
    """The public attributes that a class's constructor sets."""
    body = ast.parse(path.read_text("utf-8")).body
    found = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    inits = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    names = {
        node.attr
        for init in inits
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return sorted(name for name in names if not name.startswith("_"))


def module_name(path: Path, root: Path) -> str:
    """A file's dotted name."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Those of a module, and those under its conditions and in its attempts to import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler)):
            yield from statements(node)
        elif isinstance(node, ast.stmt):
            yield node


def contents(path: Path, module: str) -> dict[str, str]:
    """Name → "class", "function", "value", or the module and name that it is imported from ("a.b:c")."""
    found: dict[str, str] = {}
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in statements(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ClassDef):
            found[node.name] = "class"
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = "function"
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: "value" for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            owner = ".".join(part for part in (start, node.module) if part)
            if owner.startswith("transformer_engine"):
                for alias in node.names:  # a module may have several stars
                    name = f"*{owner}" if alias.name == "*" else alias.asname or alias.name
                    found[name] = f"{owner}:{alias.name}"
    return {name: what for name, what in found.items() if not name.startswith("__")}


def modules(root: Path) -> dict[str, dict[str, str]]:
    """Module → class, function or value → its names, imported ones among them; and the classes it defines.

    Private names, too: programs import `_Linear` and the like.
    """
    paths = {module_name(path, root): path for path in sorted((root / "transformer_engine").rglob("*.py"))}
    kept = re.compile(r"transformer_engine(\.(common|debug|pytorch)(\.(?!setup$)\w+)*)?$")
    raw = {name: contents(path, name) for name, path in paths.items() if kept.match(name)}
    raw["transformer_engine_torch"] = bindings(root)

    def kind(module: str, name: str) -> str | None:
        what = raw.get(module, {}).get(name)
        if f"{module}.{name}" in raw or what == f"{module}:{name}":  # a module
            return None
        if what is None or ":" not in what:
            return what or ("value" if module.startswith("transformer_engine_torch") else None)
        return kind(*what.split(":"))

    def everything(module: str) -> set[str]:
        stars = [what.partition(":")[0] for name, what in raw[module].items() if name[0] == "*"]
        more = (one for star in stars if star in raw for one in everything(star) if one[0] != "_")
        return {name for name in raw[module] if name[0] != "*"}.union(more)

    found: dict[str, dict[str, list[str]]] = {}
    for module, own in raw.items():
        groups = found.setdefault(module, {"class": [], "function": [], "value": [], "defines": []})
        groups["defines"] = sorted(name for name, what in own.items() if what == "class")
        stars = [what.partition(":")[0] for name, what in own.items() if name[0] == "*"]
        for name in sorted(everything(module)):
            owners = (one for one in (module, *stars) if name in raw[one])
            what = next(filter(None, (kind(one, name) for one in owners)), None)
            if what is not None:
                groups[what].append(name)
    return {m: {what: " ".join(names) for what, names in groups.items() if names} for m, groups in found.items()}


def bindings(root: Path) -> dict[str, str]:
    """What the extension in C++ offers to Python."""
    found: dict[str, str] = {}
    paths = (path for part in ("common", "pytorch") for path in (root / "transformer_engine" / part).rglob("pybind*"))
    for path in sorted(paths):
        text = path.read_text("utf-8")
        found |= dict.fromkeys(re.findall(r'm\.def\(\s*"(\w+)"', text), "function")
        # What lies between the names may go on in the next line of a macro, after a backslash.
        found |= dict.fromkeys(re.findall(r'::(?:class_|enum_)<[^"]*?\([\s\\]*m,[\s\\]*"(\w+)"', text), "class")
    return {name: what for name, what in found.items() if not name.startswith("_")}


def operations(root: Path, table: dict[str, tuple[str, str]]) -> dict[str, list[str]]:
    """The constructors of a table's operations."""
    ops = root / PYTORCH / "ops"
    return {
        f"ops.{name}.__init__": parameters(function_of(ops / file, owner, "__init__"))
        for name, (file, owner) in table.items()
    }


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
    callables |= operations(root, OPERATIONS)
    function = function_of(root / PYTORCH / "ops/sequential.py", "Sequential", "forward")
    callables["ops.Sequential.forward"] = parameters(function)
    submodules = {path.relative_to(root / PYTORCH).parts[0] for path in (root / PYTORCH).glob("*/__init__.py")}
    submodules |= {path.stem for path in (root / PYTORCH).glob("*.py")}
    return {
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
        "constructors": {
            **operations(root, CONSTRUCTORS),
            **{name: fields(root / PACKAGES["recipe"], name) for name in RECIPES},
        },
        "attributes": {owner: attributes_of(root / path, owner) for owner, path in ATTRIBUTES.items()},
    }


def main(source: str, *sections: str) -> None:
    """Read the newest commit of `source` and write both files."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", "-C", source, *arguments], capture_output=True, check=True).stdout

    here = Path(__file__).resolve().parents[2]
    target = here / "tests/transformer_engine_api.json"
    with tempfile.TemporaryDirectory() as folder:
        archive = git("archive", "HEAD", "transformer_engine", "build_tools/VERSION.txt")
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        found = read(Path(folder))
        table = modules(Path(folder))
        version = (Path(folder) / "build_tools/VERSION.txt").read_text("utf-8").strip()
    api = json.loads(target.read_text("utf-8"))
    read_now = sections or tuple(found)
    api |= {name: found[name] for name in read_now}
    where = f"{version}, commit {git('rev-parse', 'HEAD').decode().strip()}"
    api["sources"] = api.get("sources", {}) | dict.fromkeys((*read_now, "modules"), where)
    if "callables" in read_now:
        api["version"] = version
    target.write_text(json.dumps(api, indent=1) + "\n", "utf-8")
    (here / "reference/te/transformer_engine.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
