"""Record `tensor_core_h200.npz` on an H200: run from the repository's root.

    PYTHONPATH=. python3 tests/golden/record_tensor_core.py [--wide] FOLDER

Writes FOLDER/tensor_core_h200.npz: the D words of every case of optimized/recordings/tensor_core_cases.py, and the
corner of each `torch._scaled_mm` product (cuBLASLt) with fast accumulation on and off. `--wide` adds files with many
more tiles (another seed) and with 16-bit torch.mm, to be compared and thrown away.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path

import numpy as np
import torch

from optimized.cuda import compiler
from optimized.cuda.device import hopper
from optimized.recordings import tensor_core_cases as inputs
from optimized.recordings.tensor_core import DTYPES
from reference.support import files

HERE = Path(__file__).parent


class Stepper:
    """Runs cases on raw wgmma."""

    def __init__(self) -> None:
        from cupy.cuda.function import Module

        self.module = Module()
        self.module.load(compiler.build("wgmma_step", root=HERE).cubin)

    def __call__(self, case: inputs.Case, zero_first: bool = False) -> np.ndarray:
        """D words of one case, [T, 64, 8] uint32."""
        kind = ".".join(case.name.split(".")[:2])
        kernel = self.module.get_function("step_" + kind.replace(".", "_"))
        a, b, c = (torch.from_numpy(x.view(np.uint8)).cuda() for x in (case.a, case.b, case.c))
        d = torch.full(case.c.shape, 0x55555555, dtype=torch.int32, device="cuda")
        pointers = [tensor.data_ptr() for tensor in (a, b, c, d)]
        kernel((len(case.a),), (128,), [*pointers, np.int32(a.shape[2]), np.int32(zero_first)])
        torch.cuda.synchronize()
        return d.cpu().numpy().view(np.uint32)


def scaled_mm(index: int, fast: bool) -> np.ndarray:
    """The corner of one product through cuBLASLt, fp32 words."""
    kind, rows, _, _ = inputs.PRODUCTS[index]
    codes = inputs.product_inputs(index)
    a, b = (torch.from_numpy(x).cuda().view(DTYPES[name]) for x, name in zip(codes, kind.split("."), strict=True))
    one = torch.ones((), device="cuda")
    padding = -rows % 16  # cuBLASLt wants M to be a multiple of 16; zero rows change no other row
    if padding:
        a = torch.cat([a.view(torch.uint8), a.new_zeros((padding, a.shape[1]), dtype=torch.uint8)]).view(a.dtype)
    out = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)
    out = out[:rows]
    return out[: inputs.CORNER[0], : inputs.CORNER[1]].contiguous().view(torch.int32).cpu().numpy().view(np.uint32)


def provenance() -> dict[str, object]:
    """What the words were recorded on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE)
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "nvidia_smi": smi.stdout.strip(),
        "cuda": torch.version.cuda,
        "nvrtc": compiler.nvrtc_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        # "HEAD" where the checkout came without its history: put the hash in by hand afterwards.
        "commit": commit.stdout.strip(),
        "kernel_sha256": compiler.source_hash("wgmma_step", HERE),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def record(folder: Path) -> None:
    """The committed file."""
    step = Stepper()
    arrays: dict[str, np.ndarray] = {}
    checksums: dict[str, int] = {}
    for case in inputs.cases():
        arrays[case.name] = step(case)
        checksums[case.name] = case.checksum()
        if case.name.endswith(".no_c"):  # scale-d = 0 is the same as C = +0
            clean = inputs.Case(case.name, case.a, case.b, np.zeros_like(case.c))
            same = np.array_equal(step(clean), step(case, zero_first=True))
            print(case.name, "scale-d = 0 equals C = +0:", same)
    for index, (kind, m, n, depth) in enumerate(inputs.PRODUCTS):
        for fast in (True, False):
            name = f"product.{kind}.{m}x{n}x{depth}.{'fast' if fast else 'split'}"
            try:
                arrays[name] = scaled_mm(index, fast)
            except RuntimeError as error:  # e.g. no algorithm for a pair of formats
                print(name, "not recorded:", str(error).splitlines()[0][:160])
    about = {"provenance": provenance(), "input_crc32": checksums}
    with files.replacing(folder / "tensor_core_h200.npz") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)


def record_wide(folder: Path) -> None:
    """Many more tiles of each case, and 16-bit products of torch.mm."""
    step = Stepper()
    by_kind: dict[str, dict[str, np.ndarray]] = {}
    for case in inputs.cases(64, "wide"):
        kind = "".join(case.name.split(".")[:2])
        by_kind.setdefault(kind, {})[case.name] = step(case)
    groups = [
        ("fp8a", ["e4m3e4m3", "e5m2e4m3"]),
        ("fp8b", ["e4m3e5m2", "e5m2e5m2"]),
        ("half", ["fp16fp16", "bf16bf16"]),
    ]
    for label, kinds in groups:
        merged = {name: words for kind in kinds for name, words in by_kind[kind].items()}
        with files.replacing(folder / f"wide_{label}.npz") as file:
            np.savez_compressed(file, **merged)
    products: dict[str, np.ndarray] = {}
    for kind in ("bf16", "fp16"):
        for m, n, depth in ((64, 64, 48), (256, 512, 1024), (1024, 1024, 4096), (2048, 1024, 16384)):
            draw = inputs.Bits(f"mm.{kind}.{m}.{n}.{depth}")
            fmt = inputs.KINDS[f"{kind}.{kind}"][0]
            fields = (fmt.bias - 8, fmt.bias + 1)
            a, b = (
                torch.from_numpy(draw.codes(fmt, (count, depth), fields).view(np.int16)).cuda().view(DTYPES[kind])
                for count in (m, n)
            )
            for out in (torch.float32, DTYPES[kind]):
                d = torch.mm(a, b.t(), out_dtype=out)[:32, :32].float().contiguous().view(torch.int32)
                products[f"{kind}.{m}x{n}x{depth}.{out}"] = d.cpu().numpy()
    with files.replacing(folder / "wide_mm.npz") as file:
        np.savez_compressed(file, **products)


def main() -> None:
    """Record into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wide", action="store_true")
    arguments = parser.parse_args()
    if hopper() is None:
        parser.error("recording needs a Hopper GPU; `twin info` says what this machine lacks.")
    if not arguments.folder.is_dir():
        parser.error(f"folder is {str(arguments.folder)!r}; a folder that exists is accepted.")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    started = time.time()
    record(arguments.folder)
    print(f"recorded in {time.time() - started:.1f} s")
    if arguments.wide:
        record_wide(arguments.folder)
        print(f"wide in {time.time() - started:.1f} s")


if __name__ == "__main__":
    main()
