"""What this machine has, and what is missing for the fast path."""

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from optimized.cuda import compiler, device, wheel_cubins
from optimized.recordings import reader

SUMMARY = "what this machine has, and what is missing for the fast path"
VECTOR_UNITS = ("avx512f", "avx2", "fma", "asimd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`twin info` takes none."""


def _version(*distributions: str) -> str:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _cpu() -> str:
    """The CPU's name, cores and vector units, as far as the system tells."""
    name, units = platform.processor() or platform.machine(), ""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in lines.items()}
        name = fields.get("model name", name)
        flags = set(fields.get("flags", fields.get("Features", "")).split())
        units = ", ".join(unit for unit in VECTOR_UNITS if unit in flags)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores" + (f" ({units})" if units else "")


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return ["none that torch can use"]
    every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{x.name}, compute capability {x.major}.{x.minor}, {x.total_memory / 2**30:.0f} GiB" for x in every]


def _recordings() -> str:
    """How many recordings are here, and which are missing."""
    missing = reader.missing()
    count = f"{len(reader.NAMES) - len(missing)} of {len(reader.NAMES)} files in {reader.DATA}"
    return count + (f"; missing: {', '.join(missing)}" if missing else "")


def _binaries() -> str:
    """How many kernels the package has compiled, and whether they serve the NVRTC of this machine."""
    about = wheel_cubins.about()
    if about is None:
        return "none in the package: each is compiled before its first launch, or by `twin compile`"
    count = f"{about['count']} in the package, by NVRTC {about['nvrtc']}"
    kernel, defines, key = about["first"]
    try:
        same = compiler.key(kernel, defines) == key
    except device.MissingDependency:
        return count
    return count + ("" if same else "; this machine's NVRTC or its headers are others, and kernels are compiled anew")


def facts() -> list[tuple[str, str]]:
    """What this machine has: names and values."""
    return [
        ("CPU", _cpu()),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'not built in'})"),
        ("threads", str(torch.get_num_threads())),
        ("NumPy, numba", f"{_version('numpy')}, {_version('numba')}"),
        *[("GPU", gpu) for gpu in _gpus()],
        ("CuPy", _version("cupy-cuda13x", "cupy")),
        ("NVRTC", _version("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13")),
        ("compiled kernels", _binaries()),
        ("recordings of an H200", _recordings()),
    ]


def run(args: argparse.Namespace, console: Console) -> int:
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts():
        table.add_row(name, escape(value))
    console.print(table)
    missing = device.problems()
    if missing:
        console.print("\nThe reference side runs here: every op and layer on the CPU. The fast path does not, because:")
        for sentence in missing:
            console.print(f"  • {sentence}", markup=False, highlight=False)
    else:
        console.print("\nBoth sides run here: the reference on the CPU, and the kernels on the GPU.")
    return 0
