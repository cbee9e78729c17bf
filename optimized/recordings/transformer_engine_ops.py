"""A recorded call of an op of Transformer Engine, made again by the corresponding op of this project.

Each function takes the call's settings and its recorded tensors, and returns its results by the recorded names.
"""

from typing import Any

import torch

from optimized.recordings.transformer_engine_cases import Tensors
from reference.ops.casts.cast_blocks import blocks_of, scale_shape
from reference.ops.library import twin
from reference.recipes.block_scaling import InBlocks
from reference.recipes.current_scaling import Current
from reference.recipes.quantized import Quantized
from reference.recipes.quantizer import NormPlan, Quantizer


def scaling_of(call: dict[str, Any], given: Tensors) -> tuple[torch.Tensor, torch.Tensor, int, torch.dtype]:
    """A call's scale, a history of its own, its row and the dtype, as casts of delayed scaling take them."""
    return given["scale"], torch.zeros(1, 1), 0, getattr(torch, call["dtype"])


def named(names: str, results: Any, scaling: Any = None) -> Tensors:
    """Results by these names, with the amax where `scaling` has its history."""
    found = dict(zip(names.split(), results, strict=True))
    return found if scaling is None else {**found, "amax": scaling[1][0]}


def _cast(call: dict[str, Any], given: Tensors) -> Tensors:
    scaling = scaling_of(call, given)
    return named("codes scale_inv", twin.cast(given["x"], *scaling), scaling)


def _cast_dbias(call: dict[str, Any], given: Tensors) -> Tensors:
    scaling = scaling_of(call, given)
    return named("codes codes_t scale_inv dbias", twin.cast_transpose_dbias(given["x"], *scaling), scaling)


def _norm(call: dict[str, Any], given: Tensors) -> Tensors:
    scaling = scaling_of(call, given)
    norm = (given["gamma"], given.get("beta"), call["eps"], call["zero_centered"], call["kind"])
    return named("codes codes_t scale_inv mean rstd", twin.norm_cast_transpose(given["x"], *norm, *scaling), scaling)


def _norm_backward(call: dict[str, Any], given: Tensors) -> Tensors:
    statistics = (given.get("mean", torch.empty(0)), given["rstd"])
    operands = (given["grad"], given["x"], given["gamma"], *statistics)
    return named("dx dgamma dbeta", twin.norm_backward(*operands, call["zero_centered"], call["kind"], None))


def _activation(call: dict[str, Any], given: Tensors) -> Tensors:
    scaling = scaling_of(call, given)
    return named("codes codes_t scale_inv", twin.activation_cast_transpose(given["x"], call["op"], *scaling), scaling)


def _gelu_backward(call: dict[str, Any], given: Tensors) -> Tensors:
    scaling = scaling_of(call, given)
    results = twin.activation_backward_cast_transpose_dbias(given["grad"], given["x"], "gelu", *scaling)
    return named("codes codes_t scale_inv dbias", results, scaling)


def _gemm(call: dict[str, Any], given: Tensors) -> Tensors:
    a, b = (given[key].t().contiguous() if call[f"{key}_t"] else given[key] for key in ("a", "b"))
    scales = (given["a_scale_inv"], given["b_scale_inv"])
    how = "split" if call["split"] else "fast"
    return {"out": twin.gemm_fp8(a, b, *scales, given.get("bias"), getattr(torch, call["out_dtype"]), how)}


def _quantizer(call: dict[str, Any]) -> Quantizer:
    """The quantizer by which a call casts, of current or block scaling."""
    dtype = getattr(torch, call["dtype"])
    if call["recipe"] == "current":
        return Current(dtype, call["power_of_two"], 0.0)
    return InBlocks(dtype, call["square"], "power_of_two" if call["power_of_two"] else "fp32")


def _halves(call: dict[str, Any], found: Quantized) -> Tensors:
    """Codes and scales as they are recorded: without the padding of scales, and in blocks also of the transpose."""
    row, column = found
    assert row.scales is not None
    if call["recipe"] == "current":
        return {"codes": row.codes, "scale_inv": row.scales}
    assert column is not None
    assert column.scales is not None
    rows, columns = row.codes.shape
    of_rows, of_columns = (blocks_of(columns), blocks_of(rows)) if call["square"] else (rows, columns)
    return {
        "codes": row.codes,
        "scale_inv": row.scales[:, :of_rows],
        "codes_t": column.codes[:, :rows],
        "scale_inv_t": column.scales[:, :of_columns],
    }


def _quantize(call: dict[str, Any], given: Tensors) -> Tensors:
    return _halves(call, _quantizer(call).quantize(given["x"], True))


def _quantize_dbias(call: dict[str, Any], given: Tensors) -> Tensors:
    found, dbias = _quantizer(call).grad(given["x"], True, True)
    assert dbias is not None
    return {**_halves(call, found), "dbias": dbias}


def _quantize_norm(call: dict[str, Any], given: Tensors) -> Tensors:
    plan, x = NormPlan(call["eps"], call["zero_centered"], call["kind"]), given["x"]
    found, mean, rstd = _quantizer(call).norm(x, given["gamma"], given.get("beta"), plan, x.dtype, True)
    return {**_halves(call, found), "mean": mean, "rstd": rstd}


def _quantize_activation(call: dict[str, Any], given: Tensors) -> Tensors:
    kind = call["op"].removeprefix(f"{call['recipe']} ")
    return _halves(call, _quantizer(call).activated(given["x"], kind, True)[1])


def _in_16_bits(call: dict[str, Any], given: Tensors) -> Tensors:
    kind = call["op"].removesuffix(" in 16 bits")
    if "grad" not in given:
        return {"out": twin.activation(given["x"], kind)}
    return {"dx": twin.activation_backward(given["grad"], given["x"], kind.removesuffix("_backward"))}


def _gemm_blocks(call: dict[str, Any], given: Tensors) -> Tensors:
    a, b, scales = given["a"], given["b"], []
    for key, operand in (("a", a), ("b", b)):
        found = given[f"{key}_scale_inv"]
        padded = torch.zeros(scale_shape(len(operand), operand.shape[1], call[f"{key}_square"]), device="cpu")
        padded[:, : found.shape[1]] = found
        scales.append(padded)
    squares = (call["a_square"], call["b_square"])
    return {"out": twin.gemm_fp8_blocks(a, b, *scales, *squares, given.get("bias"), getattr(torch, call["out_dtype"]))}


OPS = {
    "cast": _cast,
    "cast_dbias": _cast_dbias,
    "norm": _norm,
    "norm_backward": _norm_backward,
    "gelu": _activation,
    "swiglu": _activation,
    "gelu_backward": _gelu_backward,
    "swiglu_backward": lambda call, given: {"dx": twin.activation_backward(given["grad"], given["x"], "swiglu")},
    "gemm": _gemm,
    "bias_dropout_add": lambda call, given: {
        "out": twin.bias_dropout_add(given["x"], given["bias"], given["residual"], 0.0, None)
    },
    "add": lambda call, given: {"out": given["x"] + given["y"]},
    "dbias": lambda call, given: {"dbias": twin.dbias(given["x"])},
    **dict.fromkeys(("current cast", "block cast"), _quantize),
    "current cast_dbias": _quantize_dbias,
    **dict.fromkeys(("current norm", "block norm"), _quantize_norm),
    **dict.fromkeys(("current gelu", "current swiglu"), _quantize_activation),
    **dict.fromkeys(("gelu in 16 bits", "swiglu in 16 bits", "gelu_backward in 16 bits"), _in_16_bits),
    "block gemm": _gemm_blocks,
}
