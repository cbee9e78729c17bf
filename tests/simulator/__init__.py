"""A Hopper GPU on a CPU: it runs the kernels' own source, thread by thread, and so tests their bits without a GPU.

    with Simulator():
        torch.ops.twin.amax(x, history, 0)     # optimized/ops/casts/amax.py on tensors of the CPU

A kernel file is compiled by g++: `prelude.h` stands for what NVRTC knows by itself, the files of `ptx/` for those of
`kernels/ptx`, instruction by instruction. `engine.cpp` runs the blocks; `machine.h` says what they remember.
Registers, caches, times and the memory order of a real GPU are not simulated.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from shared import kernel_arguments

import optimized  # noqa: F401  (registers the ops)
from optimized.cuda import compiler, launch, tensor_map
from optimized.cuda import device as device_checks
from optimized.tapes import call_groups
from optimized.tapes.tape import Copy, Tape
from reference.numbers.elementary import ACTIVATIONS, _recorded, powers_of_two
from simulator.cuda import PretendedCuda

HERE = Path(__file__).parent
FLAGS = ["-std=c++20", "-ffp-contract=off", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-fno-strict-aliasing", "-w"]
# Of a name in an inline function, such as its `__shared__`, dlopen would give every library the first one's memory.
FLAGS += ["-fno-gnu-unique"]
ENGINE_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"]
AT_ONCE, LATE, AT_RANDOM = range(3)  # when asynchronous copies and products happen
_DYNAMIC = re.compile(r"extern\s+__shared__\s+((?:__align__\(\d+\)\s+)?)([\w ]+?)\s+(\w+)\[\];")
_CLUSTER = r"__global__[^;{{}}]*?(?:(TWIN_CLUSTER)|__cluster_dims__\((\w+), 1, 1\))[^;{{}}]*?\b{}\s*\("


def _cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twin-engine" / "simulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compiled(name: str, text: str, flags: Sequence[str]) -> Path:
    """The shared library of a C++ text; kept under a name that hashes everything that it is made of."""
    key = hashlib.sha256()
    for path in sorted(HERE.rglob("*.*h")):
        key.update(path.read_bytes())
    key.update("\0".join([text, *flags]).encode())
    result = _cache() / f"{name}-{key.hexdigest()[:24]}.so"
    if not result.is_file():
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            source = Path(folder) / f"{name}.cpp"
            source.write_text(text)
            command = ["g++", *flags, f"-I{HERE}", str(source), "-o", f"{folder}/out.so"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"g++ refused {name}:\n{done.stderr[:6000]}")
            os.replace(f"{folder}/out.so", result)
    return result


@functools.cache
def engine() -> ctypes.CDLL:
    """The engine, which every kernel uses."""
    path = _compiled("engine", (HERE / "engine.cpp").read_text(), [*FLAGS, *ENGINE_FLAGS])
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    tables = [_recorded()[f"{name}_{dtype}"] for name in ACTIVATIONS for dtype in ("bf16", "fp16")]  # which stay alive
    addresses = (ctypes.c_void_p * len(tables))(*(table.ctypes.data for table in tables))
    library.simulator_tables(ctypes.c_void_p(powers_of_two().ctypes.data), addresses)
    return library


def _text(kernel: str, function: str, defines: Mapping[str, int | str], root: Path) -> str:
    """The C++ of one function of a kernel file, with its headers in it."""
    texts = compiler.program(kernel, root)
    names = list(texts)
    seen: set[str] = set()

    def whole(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        if (HERE / name).is_file():
            return f'#include "{name}"\n'
        lines = []
        for line in texts[name].splitlines():
            found = re.match(r'[ \t]*#[ \t]*include[ \t]*"([^"]+)"', line)
            lines.append(whole(found[1]) if found else "" if line.startswith("#pragma once") else line)
        return "\n".join(lines)

    body = whole(names[0])
    body = _DYNAMIC.sub(r'extern __thread \1\2 \3[] __asm__("simulator_dynamic");', body)
    found = re.search(_CLUSTER.format(function), body)
    cluster = "1" if found is None else "CLUSTER" if found[1] else found[2]
    macros = "".join(f"#define {name} {value}\n" for name, value in sorted(defines.items()))
    return f"""{macros}#include "prelude.h"
#include "kernel.h"
{body}
#ifndef CLUSTER
#define CLUSTER 1
#endif
extern "C" void simulator_entry(void** arguments) {{ simulator::call({function}, arguments); }}
extern "C" unsigned simulator_cluster() {{ return {cluster}; }}
"""


@functools.cache
def _library(kernel: str, function: str, defines: tuple[tuple[str, Any], ...], root: Path) -> ctypes.CDLL:
    engine()
    text = _text(kernel, function, dict(defines), root)
    return ctypes.CDLL(str(_compiled(f"{kernel.replace('/', '-')}-{function}", text, [*FLAGS, "-O1"])))


def _dynamic_begin(library: ctypes.CDLL) -> int:
    """Where in a block's shared memory the dynamic one begins: the same in every thread."""
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.simulator_bind(ctypes.byref(base), ctypes.byref(size))
    dynamic = ctypes.addressof(ctypes.c_ubyte.in_dll(library, "simulator_dynamic"))
    assert base.value is not None
    return dynamic - base.value


def _three(extent: Sequence[int]) -> Any:
    return (ctypes.c_uint * 3)(*extent, *[1] * (3 - len(extent)))


class Simulator(contextlib.ExitStack):
    """Launches run on the CPU while this is entered.

    Args:
        processors: multiprocessors, as persistent kernels see them; so many blocks run at once.
        when: when asynchronous work is done: `AT_ONCE`, `LATE` (as late as the kernel allows) or `AT_RANDOM`.
        seed: of what is random.
        cuda: tensors on "cuda" exist, and ops run in the simulator where theirs are; otherwise all ops of `twin` do.
    """

    def __init__(self, processors: int = 4, when: int = LATE, seed: int = 0, cuda: bool = False) -> None:
        super().__init__()
        self._cuda = cuda
        self.processors, self.when, self.seed = processors, when, seed
        self.launches: list[str] = []
        # Of each launch: bytes of dynamic shared memory that it asks for, and that were written.
        self.shared: list[tuple[launch.Kernel, int, int]] = []
        self._recorded: list[tuple[launch.Kernel, Sequence[Any]]] = []

    def __enter__(self) -> "Simulator":
        super().__enter__()
        patches: list[tuple[Any, str, Any]] = [
            (launch, "launch", self._launch),
            (launch, "_start", self._start),
            (launch, "processors", lambda index: self.processors),
            (launch, "clusters_at_once", lambda kernel, blocks, *rest: max(1, self.processors // blocks)),
            (launch, "current_stream", lambda index: 0),
            (tensor_map, "_driver", lambda: _encode),
            (tensor_map, "_replacer", lambda: _replace),
            (device_checks, "check", lambda index: None),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (call_groups, "_groups", {}),
            (call_groups, "counts", call_groups.Counts()),
            (Tape, "play", lambda launches, device: [one.play(0) for one in launches._entries]),
            (Copy, "play", lambda copy, stream: ctypes.memmove(*copy._arguments)),
        ]
        for owner, name, value in patches:
            self.enter_context(mock.patch.object(owner, name, value))
        self.enter_context(PretendedCuda(everything=not self._cuda))
        tensor_map.encode.cache_clear()
        self.callback(tensor_map.encode.cache_clear)
        return self

    def _launch(
        self,
        kernel: launch.Kernel,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        smem: int = 0,
        *,
        device: int | None = None,
        early: bool = False,
    ) -> None:
        if launch._thread.tape is not None:
            self._recorded.append((kernel, args))
            head = (len(self._recorded) - 1, *[*grid, 1, 1][:3], *[*block, 1, 1][:3], smem)
            launch._thread.tape.append(launch.Launch(kernel, head, args, early))
        self.run(kernel, grid, block, args, smem)

    def _start(self, head: tuple[int, ...], stream: int, pointers: int, early: bool) -> None:
        """Make a launch again, with the arguments that the driver would read."""
        kernel, likes = self._recorded[head[0]]
        self.run(kernel, head[1:4], head[4:7], kernel_arguments.read(likes, pointers), head[7])

    def run(
        self,
        kernel: launch.Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        smem: int = 0,
        root: Path = compiler.KERNELS,
    ) -> None:
        """Run a kernel of a file in `root`; `args` and `smem` as for `launch.launch`.

        Raises:
            RuntimeError: g++ refuses the file, or a thread did what no GPU permits, or no thread goes on.
        """
        self.launches.append(f"{kernel.kernel}.{kernel.name}")
        library = _library(kernel.kernel, kernel.name, tuple(sorted(kernel.defines.items())), root)
        arguments = launch._Arguments(kernel, args)
        message, shared = ctypes.create_string_buffer(4096), ctypes.c_size_t(smem)
        failed = engine().simulator_launch(
            library.simulator_entry,
            library.simulator_bind,
            ctypes.c_void_p(arguments.fill(args)),
            _three(grid),
            _three(block),
            library.simulator_cluster(),
            self.processors,
            self.when,
            ctypes.c_uint64(self.seed),
            ctypes.c_size_t(_dynamic_begin(library)),
            ctypes.byref(shared),
            message,
            ctypes.c_size_t(len(message)),
        )
        self.shared.append((kernel, smem, shared.value))
        if failed:
            raise RuntimeError(f"{kernel.kernel}.{kernel.name}: {message.value.decode()}")


def _encode(words: int, kind: int, rank: int, pointer: int, shape: Any, strides: Any, box: Any, *rest: Any) -> int:
    """In place of the driver's cuTensorMapEncodeTiled: the struct Map of engine.cpp."""
    element = {0: 1, 6: 2, 7: 4, 9: 2}[kind]

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*values, *[0] * count][:count]

    last = [size - 1 for size in shape]
    numbers = (pointer, *padded(strides, 4), *padded(last, 5), *padded(box, 5), element, rest[2] != 0, rank)
    packed = struct.pack("=Q4Q5I5H3B", *numbers)
    ctypes.memmove(words, packed, len(packed))
    return 0


def _replace(words: int, pointer: int) -> int:
    """In place of the driver's cuTensorMapReplaceAddress: the struct begins with the address."""
    ctypes.memmove(words, struct.pack("=Q", pointer), 8)
    return 0


available = shutil.which("g++") is not None
