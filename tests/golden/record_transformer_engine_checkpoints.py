"""Record, on an H200, checkpoints of Transformer Engine's layers, and how it goes on from them and from ours.

    PYTHONPATH=. python tests/golden/record_transformer_engine_checkpoints.py FOLDER   with the library
    PYTHONPATH=. python tests/golden/record_transformer_engine_checkpoints.py --dry    anywhere, with `reference` for it

transformer_engine_checkpoints.pt holds, for some of `optimized.recordings.transformer_engine_cases`:

    theirs      a state dict after three steps, and the results of the fourth
    stateless   the same under recipes whose scales are found anew in each step
    ours        what Transformer Engine saves after it has loaded `te.transformer_engine_state_dict` of three steps by
                `reference`, and the results of its fourth step
    attention   state dicts of a layer with its own attention, in 16 bits and in FP8
    keys        the names and shapes in the state dicts of other layers
    older       state in the forms of older releases, made of a layer's by their lines
"""

import importlib
import io
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import reference
from optimized import measure
from optimized.recordings.transformer_engine_cases import Run, first_parameters, inputs, updated
from reference.support import files

NAMES = ("Linear, bf16", "Linear, fp16", "LayerNormLinear, bf16", "LayerNormMLP, gelu, bf16", "TransformerLayer, bf16")
STATELESS = (
    "Linear, current scaling, bf16",
    "Linear, block scaling, bf16",
    "LayerNormLinear, block scaling, bf16",
    "LayerNormMLP, gelu, block scaling, bf16",
)
DONE = 3  # steps before a checkpoint
FILE = "transformer_engine_checkpoints.pt"
BF16 = {"params_dtype": torch.bfloat16}
LAYERS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "LayerNorm": ("LayerNorm", (32,), {}),
    "RMSNorm": ("RMSNorm", (32,), {}),
    "DotProductAttention": ("DotProductAttention", (2, 16), {}),
    "Linear in parts": ("Linear", (32, 48), {"parameters_split": ("query", "key", "value")}),
    "LayerNormMLP, swiglu, no bias": ("LayerNormMLP", (32, 48), {"activation": "swiglu", "bias": False}),
    "MultiheadAttention, cross": ("MultiheadAttention", (32, 2), {"attention_type": "cross", "input_layernorm": True}),
    "TransformerLayer, fused": ("TransformerLayer", (32, 48, 2), {"fuse_qkv_params": True}),
    "TransformerLayer, decoder": ("TransformerLayer", (32, 48, 2), {"layer_type": "decoder"}),
    "TransformerLayer, output_layernorm, RMSNorm": (
        "TransformerLayer",
        (32, 48, 2),
        {"output_layernorm": True, "normalization": "RMSNorm", "num_gqa_groups": 1},
    ),
}


def fresh(name: str, library: Any, recipes: Any, device: str) -> Run:
    if library is not reference:
        importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager.reset()
    return Run(name, library, recipes, device)


def trained(name: str, library: Any, recipes: Any, device: str) -> Run:
    """A case's layer after `DONE` steps, with the parameters of the next."""
    run = fresh(name, library, recipes, device)
    parameters = first_parameters(name, run.shapes())
    for step in range(DONE):
        run.load(parameters)
        parameters = updated(parameters, run.step(*inputs(name, step)))
    run.load(parameters)
    return run


def kept(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict on the CPU; an io.BytesIO as its bytes."""
    return {
        key: torch.frombuffer(bytearray(value.getvalue()), dtype=torch.uint8)
        if isinstance(value, io.BytesIO)
        else value.detach().cpu().clone()
        for key, value in state.items()
    }


def theirs(library: Any, recipes: Any, device: str, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    found = {}
    for name in names:
        run = trained(name, library, recipes, device)
        state = kept(run.layer.state_dict())
        found[name] = {"state": state, "next": run.step(*inputs(name, DONE))}
    return found


def stateless(library: Any, recipes: Any, device: str) -> dict[str, Any]:
    return theirs(library, recipes, device, STATELESS)


def ours(library: Any, recipes: Any, device: str) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        file = io.BytesIO()
        layer = trained(name, reference, reference.recipe, "cpu").layer
        torch.save(reference.transformer_engine_state_dict(layer), file)
        file.seek(0)
        run = Run(name, library, recipes, device)
        print(name, run.layer.load_state_dict(torch.load(file, weights_only=True), strict=True), flush=True)
        state = kept(run.layer.state_dict())
        found[name] = {"state": state, "next": run.step(*inputs(name, DONE))}
    return found


def attention(library: Any, recipes: Any, device: str) -> dict[str, Any]:
    found = {}
    for in_fp8 in (False, True):
        torch.manual_seed(0)
        layer = library.TransformerLayer(128, 128, 2, hidden_dropout=0.0, attention_dropout=0.0, **BF16, device=device)
        x = torch.randn(128, 2, 128, device=device, dtype=torch.bfloat16)
        try:
            with library.autocast(enabled=True, recipe=recipes.DelayedScaling(amax_history_len=4, fp8_dpa=in_fp8)):
                y = layer(x)
            y.sum().backward()
        except Exception:  # no backend for it
            traceback.print_exc(limit=1)
            continue
        state = kept(layer.state_dict())
        found["fp8_dpa" if in_fp8 else "16 bits"] = {k: v for k, v in state.items() if k.endswith("_extra_state")}
    return found


def keys(library: Any, recipes: Any, device: str) -> dict[str, Any]:
    found = {}
    for name, (kind, sizes, arguments) in LAYERS.items():
        on = {} if kind == "DotProductAttention" else {**BF16, "device": device}
        state = getattr(library, kind)(*sizes, **on, **arguments).state_dict()
        found[name] = [(key, list(value.shape)) for key, value in state.items()]
    return found


def older(library: Any, recipes: Any, device: str) -> dict[str, Any]:
    """As `get_extra_state` of releases 1.0, 1.6 (also in ONNX exports) and 1.14 wrote, and 2.0 for current scaling."""
    layer = trained(NAMES[0], library, recipes, device).layer
    forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
    noted = {"fp8_checkpoint": True, "num_gemms": 1, "fp8_max_fwd": 448, "fp8_max_bwd": 57344}
    state = {"scale_fwd": forward.scale, "scale_inv_fwd": 1 / forward.scale, "amax_history_fwd": forward.amax_history}
    state |= {"scale_bwd": backward.scale, "scale_inv_bwd": 1 / backward.scale}
    state |= {"amax_history_bwd": backward.amax_history, "extra_fp8_variables": noted}
    amaxes = {"FWD_AMAX_1": [forward.amax_history[0].clone()]}
    first = {**state, "global_fp8_buffer": amaxes, "global_fp8_state": {"FP8_AUTOCAST_COUNTER": 3, "delete": None}}

    def saved(value: Any) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(value, file)
        return file

    def dumped(value: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)

    on_cpu = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    recipe = recipes.Float8CurrentScaling()
    none = {"2.0, current scaling": dumped({"recipe": recipe, "extra_fp8_variables": noted})}
    none |= {"1.6, no state": saved(None), "1.14, no state": dumped(None)}
    found = {"1.0": saved(first), "1.6": saved(state), "1.6, ONNX": dumped(state), "1.14": dumped(on_cpu)}
    return {"state": kept(layer.state_dict()), "forms": kept(found), "none": kept(none)}


PARTS: dict[str, Callable[[Any, Any, str], dict[str, Any]]] = {
    "theirs": theirs,
    "stateless": stateless,
    "attention": attention,
    "keys": keys,
    "older": older,
    "ours": ours,  # last: `reference` is compiled for it
}


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    if sys.argv[1] == "--dry":
        library, recipes, device = reference, reference.recipe, "cpu"
    else:
        os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"  # read by Transformer Engine when it loads FP8 state
        import transformer_engine.common.recipe as recipes
        import transformer_engine.pytorch as library

        device = "cuda"
    found: dict[str, Any] = {"provenance": json.dumps(measure.provenance([]))}
    for name, part in PARTS.items():
        try:
            found[name] = part(library, recipes, device)
        except Exception:  # the others are recorded all the same
            print(f"{name}: NOT RECORDED", flush=True)
            traceback.print_exc()
        file = io.BytesIO()
        torch.save(found, file)
        if sys.argv[1] != "--dry":
            files.write(Path(sys.argv[1]) / FILE, file.getvalue())
    print(f"{len(file.getvalue()):,} bytes; {', '.join(found)}")
    return len(PARTS) + 1 - len(found)


if __name__ == "__main__":
    sys.exit(main())
