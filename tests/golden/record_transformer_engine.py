"""Record, on an H200, training steps of Transformer Engine's layers: results, and every op's arguments and results.

    PYTHONPATH=. python tests/golden/record_transformer_engine.py FOLDER            on a Hopper GPU, with the library
    PYTHONPATH=. python tests/golden/record_transformer_engine.py FOLDER --recipes  those of current and block scaling
    PYTHONPATH=. python tests/golden/record_transformer_engine.py --compare         anywhere: docs/results

Nothing of Twin Engine computes here. Cases, inputs and the steps are `optimized.recordings.transformer_engine_cases`'s.
While a step runs, the functions of Transformer Engine's extension through which its modules call kernels (casts, norms,
activations, GEMMs) are wrapped: each call's tensors are noted with what else the comparison needs. A tensor whose words
are already stored, or are an input or a parameter of the step, is stored as a reference to them.

The library is not installed with this project (docs/layer.md).
"""

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimized import measure
from optimized.cuda.device import hopper
from optimized.recordings import transformer_engine
from optimized.recordings.reader import provenance
from optimized.recordings.transformer_engine import RECORDING, RECORDING_RECIPES, recording_of
from optimized.recordings.transformer_engine_cases import (
    CASES,
    Run,
    Tensors,
    first_parameters,
    inputs,
    known,
    updated,
)
from reference.support import files

Call = dict[str, Any]
FP8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def words_of(tensor: torch.Tensor) -> tuple[str, bytes]:
    """Dtype and bytes, which say whether two tensors hold the same words."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return short(tensor.dtype), flat.view(torch.uint8).numpy().tobytes()


class Store:
    """Every different array once: `place` gives where it is, `[number or name of the step's start, shape]`."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.arrays: list[tuple[str, int, int]] = []
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._start: dict[tuple[str, bytes], str] = {}

    def begin(self, start: Tensors) -> None:
        """From here on the tensors of `start` are known by name."""
        self._start = {words_of(tensor): name for name, tensor in start.items()}

    def place(self, tensor: torch.Tensor) -> list[Any]:
        key = words_of(tensor)
        if key in self._start:
            return [self._start[key], list(tensor.shape)]
        if key not in self._numbers:
            self._numbers[key] = len(self.arrays)
            first = self.data.find(key[1])  # it may be a part of another: q's gradient, of q's, k's and v's
            if first < 0:
                first = len(self.data)
                self.data += key[1]
            self.arrays.append((key[0], first, len(key[1])))
        return [self._numbers[key], list(tensor.shape)]


def fp8_dtype(value: Any) -> torch.dtype:
    """The torch dtype of Transformer Engine's name of an FP8 format."""
    text = f"{value!r} {value} {getattr(value, 'name', '')}"
    (found,) = (dtype for name, dtype in FP8.items() if name in text)
    return found


def rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.dim() > 2 else tensor.detach()


def codes(tensor: Any) -> torch.Tensor:
    """The codes `[rows, columns]` of an FP8 tensor of Transformer Engine's."""
    data = getattr(tensor, "_data", None)
    if data is None:
        data = tensor._transpose
        data = data.reshape(data.shape[0], -1).t()
    return rows(data.contiguous()).view(torch.uint8).view(fp8_dtype(tensor._fp8_dtype))


def half(tensor: Any, of_rows: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One half of a tensor in blocks, itself or its transpose: codes `[rows, K]`, and its scales without their padding.

    None where that half is not there.
    """
    name = "rowwise" if of_rows else "columnwise"
    data, scales = (getattr(tensor, f"_{name}_{what}") for what in ("data", "scale_inv"))
    if data is None:
        return None
    data = rows(data) if of_rows else data.detach().reshape(len(data), -1)
    count = -(-data.shape[1] // 128) if tensor._is_2D_scaled else len(data)
    return data.view(fp8_dtype(tensor._fp8_dtype)), scales.detach()[:, :count].contiguous()


def quantized(tensor: Any, quantizer: Any) -> Tensors:
    """Results of a cast: codes, scale_inv, and the amax if it was noted; in blocks also those of the transpose."""
    if quantizer is None:
        return {"out": rows(tensor)}
    if hasattr(tensor, "_is_2D_scaled"):
        halves = {"": half(tensor, True), "_t": half(tensor, False)}
        return {
            f"{name}{end}": value
            for end, found in halves.items()
            if found is not None
            for name, value in zip(("codes", "scale_inv"), found, strict=True)
        }
    found = {"codes": codes(tensor), "scale_inv": tensor._scale_inv.detach().reshape(1)}
    return found | ({"amax": quantizer.amax.detach().reshape(1)} if hasattr(quantizer, "amax") else {})


def scaled(quantizer: Any, **tensors: Any) -> tuple[Tensors, Call]:
    """Arguments of an op that casts, taken before it runs; those that name the recipe if it is not delayed scaling."""
    given = {key: rows(value) for key, value in tensors.items() if value is not None}
    if quantizer is None:
        return given, {}
    more: Call = {"dtype": short(fp8_dtype(quantizer.dtype))}
    if hasattr(quantizer, "scale"):
        return given | {"scale": quantizer.scale.detach().reshape(1).clone()}, more
    assert quantizer.amax_epsilon == 0.0, "amax_epsilon is set"
    more["power_of_two"] = bool(quantizer.force_pow_2_scales)
    if not hasattr(quantizer, "block_scaling_dim"):
        return given, more | {"recipe": "current"}
    return given, more | {"recipe": "block", "square": quantizer.block_scaling_dim == 2}


def named(op: str, more: Call) -> str:
    """An op's name in the recording: delayed scaling's have none before it."""
    return f"{more['recipe']} {op}" if "recipe" in more else op


# A note: what an op is given, plain attributes, and then a function of its results.
Note = tuple[str, Tensors, Call, Callable[[Any], Tensors]]


def note_quantize(x: Any, quantizer: Any, output: Any = None, *_: Any, **__: Any) -> Note:
    given, more = scaled(quantizer, x=x)
    return named("cast", more), given, more, lambda out: quantized(out if output is None else output, quantizer)


def note_bgrad_quantize(x: Any, quantizer: Any) -> Note:
    given, more = scaled(quantizer, x=x)
    return named("cast_dbias", more), given, more, lambda out: {**quantized(out[1], quantizer), "dbias": out[0]}


def note_norm(kind: str) -> Callable[..., Note]:
    def note(x: Any, gamma: Any, *rest: Any) -> Note:
        beta, rest = (rest[0], rest[1:]) if kind == "layernorm" else (None, rest)
        eps, _, quantizer, _, _, zero_centered = rest
        given, more = scaled(quantizer, x=x, gamma=gamma, beta=beta)
        more |= {"kind": kind, "eps": eps, "zero_centered": zero_centered}
        statistics = ("mean", "rstd") if kind == "layernorm" else ("", "rstd")

        def results(out: Any) -> Tensors:
            found = {name: value for name, value in zip(statistics, out[1:], strict=True) if name}
            return {**quantized(out[0], quantizer), **found}

        return named("norm", more), given, more, results

    return note


def note_norm_backward(kind: str) -> Callable[..., Note]:
    def note(grad: Any, x: Any, *rest: Any) -> Note:
        names = ("mean", "rstd", "gamma") if kind == "layernorm" else ("rstd", "gamma")
        given = {"grad": rows(grad), "x": rows(x), **dict(zip(names, rest[:-2], strict=True))}
        outs = ("dx", "dgamma", "dbeta")[: 3 if kind == "layernorm" else 2]
        more = {"kind": kind, "zero_centered": rest[-1]}
        return "norm_backward", given, more, lambda out: dict(zip(outs, (rows(out[0]), *out[1:]), strict=True))

    return note


def note_activation(op: str) -> Callable[..., Note]:
    def note(x: Any, quantizer: Any) -> Note:
        given, more = scaled(quantizer, x=x)
        name = f"{op} in 16 bits" if quantizer is None else named(op, more)
        return name, given, more, lambda out: quantized(out, quantizer)

    return note


def note_dbias_dgelu(grad: Any, x: Any, quantizer: Any) -> Note:
    given, more = scaled(quantizer, grad=grad, x=x)
    return "gelu_backward", given, more, lambda out: {**quantized(out[1], quantizer), "dbias": out[0]}


def note_dgelu(grad: Any, x: Any, quantizer: Any) -> Note:
    assert quantizer is None, "GELU's gradient is cast without a bias"
    given = {"grad": rows(grad), "x": rows(x)}
    return "gelu_backward in 16 bits", given, {}, lambda out: {"dx": rows(out)}


def note_sum(x: torch.Tensor, dim: Any = None, **_: Any) -> Note | None:
    """Of `Tensor.sum`: the gradient of a bias, which the modules add in torch where they cast in blocks."""
    if x.dim() != 2 or dim != 0 or x.element_size() != 2:
        return None
    return "dbias", {"x": x.detach()}, {}, lambda out: {"dbias": out}


def note_dswiglu(grad: Any, x: Any, quantizer: Any) -> Note:
    assert quantizer is None, "a gated activation's gradient was not cast apart"
    return "swiglu_backward", {"grad": rows(grad), "x": rows(x)}, {}, lambda out: {"dx": rows(out)}


def note_gemm(*args: Any, **_: Any) -> Note:
    a, a_is_n, b, b_is_k, _, quantizer, _, bias, _, gelu, _, grad, _, _, accumulate, split = args
    assert quantizer is None, "a GEMM's output is cast"
    assert not gelu, "a GEMM has an activation"
    assert not accumulate, "a GEMM accumulates"
    blocks = hasattr(a, "_is_2D_scaled")
    if blocks:
        found = {"a": half(b, not b_is_k), "b": half(a, a_is_n)}
        given = {key: operand[0] for key, operand in found.items()}
        given |= {f"{key}_scale_inv": operand[1] for key, operand in found.items()}
        more: Call = {"a_square": bool(b._is_2D_scaled), "b_square": bool(a._is_2D_scaled), "split": bool(split)}
    else:
        given = {
            "a": codes(b),
            "b": codes(a),
            "a_scale_inv": b._scale_inv.reshape(1),
            "b_scale_inv": a._scale_inv.reshape(1),
        }
        more = {"a_t": bool(b_is_k), "b_t": not a_is_n, "split": bool(split)}
    if bias is not None and bias.numel() and not grad:
        given["bias"] = bias

    def results(out: Any) -> Tensors:
        more["out_dtype"] = short(out[0].dtype)
        return {"out": rows(out[0])}

    return "block gemm" if blocks else "gemm", given, more, results


def note_bias_dropout_add(x: Any, bias: Any, residual: Any, probability: float) -> Note:
    assert probability == 0.0, "dropout is on"
    given = {"x": rows(x), "bias": bias, "residual": rows(residual)}
    return "bias_dropout_add", given, {}, lambda out: {"out": rows(out)}


NOTES: dict[str, Callable[..., Note | None]] = {
    "quantize": note_quantize,
    "bgrad_quantize": note_bgrad_quantize,
    "layernorm_fwd": note_norm("layernorm"),
    "rmsnorm_fwd": note_norm("rmsnorm"),
    "layernorm_bwd": note_norm_backward("layernorm"),
    "rmsnorm_bwd": note_norm_backward("rmsnorm"),
    "gelu": note_activation("gelu"),
    "swiglu": note_activation("swiglu"),
    "dbias_dgelu": note_dbias_dgelu,
    "dgelu": note_dgelu,
    "dswiglu": note_dswiglu,
    "generic_gemm": note_gemm,
}


class Trace:
    """The calls of a step."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls: list[Call] = []
        self.problems: set[str] = set()
        self.hidden: list[torch.Tensor] = []  # gradients of what a layer adds to its residual stream

    def add(self, op: str, given: Tensors, more: Call, results: Tensors) -> None:
        places = [{key: self.store.place(value) for key, value in part.items()} for part in (given, results)]
        self.calls.append({"op": op, "in": places[0], "out": places[1], **more})

    def wrapped(self, function: Callable[..., Any], note: Callable[..., Note | None]) -> Callable[..., Any]:
        """`function`, noting its calls; what cannot be noted is a problem to print, and the step goes on.

        Where `note` returns None, the call is none to note.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            noted = None
            try:
                found = note(*args, **kwargs)
                if found is not None:
                    op, given, more, results = found
                    noted = {key: value.detach().clone() for key, value in given.items()}
            except Exception as error:  # time on the machine is dear: whatever else there is, is recorded
                self.problems.add(f"{getattr(function, '__name__', function)}: {error!r}")
            out = function(*args, **kwargs)
            if noted is not None:
                try:
                    self.add(op, noted, more, results(out))
                except Exception as error:
                    self.problems.add(f"{op}: {error!r}")
            if note is note_bias_dropout_add:
                out.register_hook(self.hidden.append)
            return out

        return call


@contextmanager
def tracing(trace: Trace, sums: bool) -> Iterator[None]:
    """Wrap the extension's functions, wherever the modules look them up, and with `sums` `Tensor.sum`."""
    homes = [
        importlib.import_module(name)
        for name in ("transformer_engine_torch", "transformer_engine.pytorch.cpp_extensions")
    ]
    patches = [(home, name, note) for home in homes for name, note in NOTES.items() if hasattr(home, name)]
    layers = importlib.import_module("transformer_engine.pytorch.transformer")
    patches.append((layers, "bias_dropout_add_fused_train", note_bias_dropout_add))
    plain = layers.get_bias_dropout_add
    if sums:
        patches.append((torch.Tensor, "sum", note_sum))
    before = [(home, name, getattr(home, name)) for home, name, _ in patches]
    try:
        for home, name, note in patches:
            setattr(home, name, trace.wrapped(getattr(home, name), note))
        layers.get_bias_dropout_add = lambda training: trace.wrapped(plain(training), note_bias_dropout_add)
        yield
    finally:
        layers.get_bias_dropout_add = plain
        for home, name, function in before:
            setattr(home, name, function)


def residual_stream(trace: Trace, gradient: torch.Tensor, results: Tensors) -> None:
    """What autograd adds in a whole layer: the gradients of the residual stream, and of the biases beside it."""
    norms = [call for call in trace.calls if call["op"] == "norm_backward"]  # the MLP's, the attention's
    last, middle = (grad.detach().cpu() for grad in trace.hidden)
    assert words_of(last) == words_of(gradient), "the gradient of y is another"
    size = middle.shape[-1]
    trace.add("dbias", {"x": gradient.reshape(-1, size)}, {}, {"dbias": results["d layernorm_mlp.fc2_bias"]})
    trace.add("dbias", {"x": middle.reshape(-1, size)}, {}, {"dbias": results["d self_attention.proj.bias"]})
    for norm, grad, out in zip(norms, (gradient, middle), (middle, results["dx"]), strict=True):
        trace.calls.append(
            {
                "op": "add",
                "in": {"x": norm["out"]["dx"], "y": trace.store.place(grad.reshape(-1, size))},
                "out": {"out": trace.store.place(out.reshape(-1, size))},
            }
        )


def record(name: str, store: Store, library: Any, recipes: Any, device: str) -> list[dict[str, Any]]:
    """The steps of a case."""
    case = CASES[name]
    importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager.reset()
    os.environ |= case.environment
    run = Run(name, library, recipes, device)
    for key in case.environment:
        del os.environ[key]
    parameters = first_parameters(name, run.shapes())
    found = []
    for step in range(case.steps):
        x, gradient = inputs(name, step)
        store.begin(known(x, gradient, parameters))
        run.load(parameters)
        trace = Trace(store)
        with tracing(trace, sums=case.recipe == "block"):
            results = run.step(x, gradient)
        if case.layer == "TransformerLayer":
            try:
                residual_stream(trace, gradient, results)
            except Exception as error:
                trace.problems.add(f"the residual stream: {error!r}, of {len(trace.hidden)} gradients")
        if step == 0:
            print(f"{name}: {' '.join(call['op'] for call in trace.calls)}", flush=True)
        for problem in sorted(trace.problems):
            print(f"{name}, step {step}: NOT NOTED: {problem}", flush=True)
        found.append({"results": {key: store.place(value) for key, value in results.items()}, "calls": trace.calls})
        parameters = updated(parameters, results)
    return found


def write(folder: Path, recording: str, store: Store, cases: dict[str, Any], origin: dict[str, Any]) -> None:
    """The two files of `recording`."""
    index = json.dumps({"arrays": store.arrays, "cases": cases}, separators=(",", ":")).encode()
    path = folder / f"{recording}.npz"
    with files.replacing(path) as file:
        np.savez_compressed(file, index=np.frombuffer(index, np.uint8), data=np.frombuffer(bytes(store.data), np.uint8))
    files.write(folder / f"{recording}.json", json.dumps(origin, indent=2) + "\n")
    print(f"{path}: {len(store.arrays):,} arrays, {len(store.data):,} bytes, {path.stat().st_size / 1e6:.2f} MB")


def compare() -> None:
    """docs/results/transformer_engine.json: words equal and different, by op and by case."""
    found = transformer_engine.summary()
    path = measure.write_result("transformer_engine", {**found, "provenance": provenance(RECORDING)})
    for row in found["ops"]:
        print(f"{row['op']:32}{row['part']:12}{row['compared']:>9,}{row['different']:>9,}  {row.get('why', '')}")
    print(path)


def main() -> int:
    recipes_too = sys.argv[2:] == ["--recipes"]
    if len(sys.argv) != (3 if recipes_too else 2):
        print(__doc__)
        return 2
    if sys.argv[1] == "--compare":
        compare()
        return 0
    if hopper() is None or importlib.util.find_spec("transformer_engine") is None:
        sys.exit("Recording needs a Hopper GPU and Transformer Engine; --compare needs neither.")
    if not Path(sys.argv[1]).is_dir():
        sys.exit(f"{sys.argv[1]!r} is no folder; the recording goes into one.")
    library, recipes = (importlib.import_module(f"transformer_engine.{name}") for name in ("pytorch", "common.recipe"))
    recording = RECORDING_RECIPES if recipes_too else RECORDING
    names = [name for name in CASES if recording_of(name) == recording]
    store, cases = Store(), {}
    for name in names:
        try:
            cases[name] = record(name, store, library, recipes, "cuda")
        except Exception:  # the other cases are recorded all the same
            print(f"{name}: NOT RECORDED", flush=True)
            traceback.print_exc(file=sys.stdout)
    origin = {"what": "training steps of Transformer Engine's layers; recorded by record_transformer_engine.py"}
    origin |= measure.provenance([])
    write(Path(sys.argv[1]), recording, store, cases, origin)
    failed = [name for name in names if name not in cases]
    print(f"recorded: {len(cases)} of {len(names)} cases", *(f"  {name}" for name in cases), sep="\n")
    print(f"not recorded: {len(failed)}", *(f"  {name}" for name in failed), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
