"""Record what Python references of others cast blocks to: `tests/golden/block_casts.npz` and `blocks_of_128.json`.

    git clone https://github.com/NVIDIA/TransformerEngine DIR
    git clone https://github.com/deepseek-ai/DeepGEMM OTHER
    PYTHONPATH=.:tests python tests/golden/record_block_casts.py DIR OTHER

They run on a CPU. The npz has words of MXFP8 and NVFP4, the json digests of blocks of 128. Neither library is
installed: files are imported by themselves, with a stand-in for the base class of Transformer Engine's quantizers. The
recordings note the commits.

    transformer_engine/pytorch/custom_recipes/reference_nvfp4.py    NVFP4QuantizerRef: quantize, qgemm
    tests/pytorch/test_mxfp8_2d_quantize.py                         _mxfp8_2d_quantize_reference, _float_to_e8m0
    tests/pytorch/references/blockwise_quantizer_reference.py       BlockwiseQuantizerReference
    DeepGEMM, deep_gemm/utils/math.py                               per_token_, per_channel_ and per_block_cast_to_fp8
"""

import ast
import importlib
import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from shared.block_vectors import (
    BLOCKS_OF_128,
    NOT_FINITE,
    ODD,
    PATH,
    VECTORS,
    WHOLE,
    Vector,
    canonical,
    digests,
    kind_of,
    made,
)

from reference.support import files

KINDS = {"rows": ((1, 16), False), "square": ((16, 16), False), "hadamard": ((1, 16), True)}


class Quantizer:
    """What the references need of Transformer Engine's."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


def nvfp4_reference(root: Path) -> Any:
    """Transformer Engine's module `reference_nvfp4`."""
    for name in ("", ".pytorch", ".pytorch.custom_recipes", ".pytorch.tensor"):
        module = sys.modules[f"transformer_engine{name}"] = ModuleType(f"transformer_engine{name}")
        module.__path__ = [str(root.joinpath("transformer_engine", *name.split(".")[1:]))]
    stand_ins: dict[str, dict[str, Any]] = {
        "quantized_tensor": {"Quantizer": Quantizer, "QuantizedTensorStorage": type("QuantizedTensorStorage", (), {})},
        "tensor.utils": {"is_custom": lambda *_: True},
    }
    for name, attributes in stand_ins.items():
        module = sys.modules[f"transformer_engine.pytorch.{name}"] = ModuleType(name)
        vars(module).update(attributes)
    return importlib.import_module("transformer_engine.pytorch.custom_recipes.reference_nvfp4")


def mxfp8_reference(root: Path) -> dict[str, Any]:
    """Functions of a test of Transformer Engine's, which itself needs a GPU."""
    tree = ast.parse((root / "tests/pytorch/test_mxfp8_2d_quantize.py").read_text("utf-8"))
    wanted = ("_float_to_e8m0", "_e8m0_to_scale_inv", "_mxfp8_2d_quantize_reference")
    constants = ("MXFP8_BLOCK_SIZE", "FP8_E4M3_MAX")
    tree.body = [
        one
        for one in tree.body
        if (isinstance(one, ast.FunctionDef) and one.name in wanted)
        or (isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) in constants)
    ]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(tree, "test_mxfp8_2d_quantize.py", "exec"), names)
    return names


def nvfp4(reference: Any, vector: Vector, kind: str) -> dict[str, torch.Tensor]:
    """Codes, scales and amax of an input and of its transpose."""
    tile, transformed = KINDS[kind]
    element = reference.reference_utils.Fp4Formats.E2M1
    found = reference.NVFP4QuantizerRef(element, quant_tile_shape=tile, with_rht=transformed).quantize(made(vector))
    words = {"codes": found.data, "scales": canonical(found.scale), "amax": found.global_amax_row}
    return words | {"codes_t": found.data_t, "scales_t": canonical(found.scale_t), "amax_t": found.global_amax_col}


def mxfp8(reference: dict[str, Any], vector: Vector) -> dict[str, torch.Tensor]:
    """Codes and scales of square blocks; and of rows, by the reference's parts."""
    x = made(vector)
    codes, scales, _ = reference["_mxfp8_2d_quantize_reference"](x)
    wide = x.float().view(x.shape[0], -1, 32)
    of_rows = reference["_float_to_e8m0"](wide.abs().amax(dim=-1))
    rows = (wide / reference["_e8m0_to_scale_inv"](of_rows)[..., None]).to(torch.float8_e4m3fn).view(x.shape)
    return {"square codes": codes, "square scales": scales, "rows codes": rows, "rows scales": of_rows}


def product(reference: Any, vector: Vector) -> torch.Tensor:
    """The GEMM of an input with another one, in fp32."""
    quantizer = reference.NVFP4QuantizerRef(reference.reference_utils.Fp4Formats.E2M1)
    a, b = quantizer.quantize(made(vector)), quantizer.quantize(made(vector, seed=1))
    scales = (a.scale, b.scale)
    found = quantizer.qgemm(a.data, b.data, None, torch.float32, *scales, qresult_x=a, qresult_w=b)
    assert isinstance(found, torch.Tensor)
    return found


def head(root: Path) -> str:
    """The commit of a checkout."""
    found = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def of_transformer_engine(root: Path) -> dict[str, list[str]]:
    """Blocks of 128 by the reference of Transformer Engine's tests."""
    sys.path.insert(0, str(root / "tests/pytorch"))
    reference = importlib.import_module("references.blockwise_quantizer_reference").BlockwiseQuantizerReference()
    found = {}
    for vector, (powers, square, dtype, epsilon) in itertools.product(
        VECTORS,
        itertools.product((True, False), (False, True), (torch.float8_e4m3fn, torch.float8_e5m2), (0.0, 1e-4)),
    ):
        for shape in (WHOLE, ODD):
            one = reference.quantize(
                made(vector, 0, shape), dtype, True, epsilon, powers, (128 if square else 1, 128), False
            )
            kind = kind_of("power_of_two" if powers else "fp32", square, dtype, epsilon, shape, vector)
            found |= {kind: digests(one.data, one.scale), f"{kind}, transposed": digests(one.data_t, one.scale_t)}
    return found


def of_deep_gemm(root: Path) -> dict[str, list[str]]:
    """Blocks of 128 by DeepGEMM's casts."""
    reference = runpy.run_path(str(root / "deep_gemm/utils/math.py"))
    found = {}
    for vector, up, shape in itertools.product(VECTORS, (False, True), (WHOLE, ODD)):
        x, dialect = made(vector, 0, shape), "deep_gemm_ue8m0" if up else "deep_gemm"
        rows, squares = (kind_of(dialect, square, torch.float8_e4m3fn, 1e-4, shape, vector) for square in (False, True))
        found[rows] = digests(*reference["per_token_cast_to_fp8"](x, up))
        found[squares] = digests(*reference["per_block_cast_to_fp8"](x, up))
        if shape == WHOLE:
            codes, scales = reference["per_channel_cast_to_fp8"](x, up)
            found[f"{rows}, transposed"] = digests(codes.t(), scales.t())
    return found


def main() -> None:
    root, other = map(Path, sys.argv[1:])
    of_nvfp4, of_mxfp8 = nvfp4_reference(root), mxfp8_reference(root)
    words: dict[str, torch.Tensor] = {}
    for vector in VECTORS + NOT_FINITE:
        for kind in KINDS:
            if kind != "hadamard" or vector.dtype == torch.bfloat16:
                words |= {f"nvfp4 {kind} {vector} {name}": x for name, x in nvfp4(of_nvfp4, vector, kind).items()}
        words[f"nvfp4 product {vector}"] = product(of_nvfp4, vector)
        if vector in VECTORS:
            words |= {f"mxfp8 {vector} {name}": x for name, x in mxfp8(of_mxfp8, vector).items()}
    arrays = {name: (x.view(torch.uint8) if x.itemsize == 1 else x).numpy() for name, x in words.items()}
    version = (root / "build_tools/VERSION.txt").read_text("utf-8").strip()
    with files.replacing(PATH) as file:
        np.savez_compressed(file, source=np.array(f"{version} {head(root)}"), **arrays)
    sources = {"Transformer Engine": f"{version} {head(root)}", "DeepGEMM": head(other)}
    found = {"sources": sources, "digests": of_transformer_engine(root) | of_deep_gemm(other)}
    files.write(BLOCKS_OF_128, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
