"""The time to the first training step in a new process: with nothing compiled, with a wheel's kernels, and with the
cache of a run before (docs/results/first_step.json).

The layer is the first one of `twin bench layer`: forward and backward in FP8 of 8192 tokens of 4096 channels. Each way
has a process of its own, whose clock begins when the process is started; it notes when the imports are done, the layer
is made (which wakes the GPU), the first step, a second one, and the first step of another batch size have ended, each
after a synchronisation. The cache folder is empty but where it says otherwise; NVIDIA's own cache, of what its driver
compiles, is not used, since cubins need none. Files of PyTorch and Python are in the page cache, as a run before has
read them: a machine that has just been started also waits for its disk.

What a wheel carries (optimized/cuda/wheel_cubins.py): if this is a wheel with compiled kernels, or a clone in which
`compile --wheel` was run, and they serve this machine's NVRTC, then these. Otherwise what the first process compiled is
packed in the same form.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import optimized as te
from optimized import measure
from optimized.bench import Payload, Progress, result, silent
from optimized.bench.table import Table, table
from optimized.cuda import compiler, wheel_cubins
from reference.support import files

NAME = "first_step"
WHAT = "from a process's start to the first step's end"
KERNELS = (
    *("activation_cast_transpose", "attention", "attention_backward", "attention_backward_ends", "cast_transpose"),
    *("cat_cast_transpose", "dbias", "gemm_fp8", "gemm_fp8_fused", "multi_cast_transpose", "norm_backward"),
    *("norm_cast_transpose", "norm_total", "scale_update"),
)
HIDDEN, FFN, HEADS, SEQUENCE = 4096, 16384, 32, 2048
BATCHES = (4, 2)  # of the first steps, and of the step after them
COMPILED, WHEEL, CACHED = "nothing compiled", "kernels of a wheel", "kernels in the cache"
PHASES = ("import", "layer", "first step", "second step", "first step of batch 2")


def steps(start: float) -> dict[str, Any]:
    """Run the layer's first steps.

    Args:
        start: when the process was started, by `time.time`.

    Returns:
        `seconds`: of each phase, in order; `compiled`: how many kernels NVRTC compiled in it.
    """
    ends, counts = [time.time()], [0]

    def note() -> None:
        torch.cuda.synchronize()
        ends.append(time.time())
        counts.append(len(compiler.compiled))

    layer = te.TransformerLayer(
        HIDDEN, FFN, HEADS, fuse_qkv_params=True, params_dtype=torch.bfloat16, hidden_dropout=0.0,
        attention_dropout=0.0, init_method=_normal, output_layer_init_method=_normal,
    )  # fmt: skip
    note()
    for batch in (BATCHES[0], *BATCHES):
        layer.zero_grad()
        x = torch.randn(SEQUENCE, batch, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(recipe=te.DelayedScaling()):
            out = layer(x)
        out.backward(torch.ones_like(out))
        note()
    compiled = [0, *(after - before for before, after in itertools.pairwise(counts))]
    seconds = [after - before for before, after in itertools.pairwise([start, *ends])]
    return {"seconds": seconds, "compiled": compiled}


def _normal(weight: torch.Tensor) -> None:
    """Draw on the GPU, which takes less time than on the CPU."""
    torch.nn.init.normal_(weight, 0, 0.023)


def process(cache: Path, cubins: Path, into: Path | None = None) -> dict[str, Any]:
    """What `steps` finds in a process of its own.

    Args:
        cache: the folder of its caches.
        cubins: where it finds what a wheel carries.
        into: where it packs at its end what it has compiled.
    """
    command = [sys.executable, "-m", f"{__package__}.{NAME}", str(cubins), "" if into is None else str(into)]
    done = subprocess.run(
        [*command, repr(time.time())],
        cwd=None if measure.INSTALLED else measure.ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def pack(folder: Path) -> int:
    """Pack what this process has compiled as a wheel would carry it; return the number of kernels."""
    found: dict[str, dict[str, bytes]] = {}
    for name in compiler.compiled:
        content = files.kept("cubin", name)
        if content is not None:
            found.setdefault(name.rpartition("-")[0], {})[name] = content
    wheel_cubins.write(folder, found, {"nvrtc": compiler.nvrtc_version()})
    return sum(map(len, found.values()))


def carried() -> Path | None:
    """The folder of the kernels that this wheel carries, or that wheels of this clone will; None if they do not serve.

    They serve the NVRTC and the CUDA headers that compiled them.
    """
    for folder in (wheel_cubins.FOLDER, measure.ROOT / ".wheel" / "cubins"):
        about = folder / "about.json"
        if about.is_file():
            said = files.record(about)
            kernel, defines, key = said["first"]
            if said["kernels"] == wheel_cubins.digest() and compiler.key(kernel, defines) == key:
                return folder
    return None


def run(progress: Progress = silent, repeats: int = 2) -> Payload:
    found: dict[str, list[Mapping[str, Any]]] = {COMPILED: [], WHEEL: [], CACHED: []}
    wheel = carried()
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            room = Path(name)
            nothing, cubins = room / "none", room / "cubins"
            cubins.mkdir()
            found[COMPILED].append(process(room / "cache", nothing, cubins))
            found[WHEEL].append(process(room / "empty", wheel or cubins))
            found[CACHED].append(process(room / "cache", nothing))
            count = files.record((wheel or cubins) / "about.json")["count"]
        progress((repeat + 1) / repeats)
    rows = [
        {
            "name": name,
            "seconds": {phase: [one["seconds"][i] for one in samples] for i, phase in enumerate(PHASES)},
            "compiled": dict(zip(PHASES, samples[0]["compiled"], strict=True)),
        }
        for name, samples in found.items()
    ]
    what = "seconds of the first training steps in a new process"
    sizes = {"hidden": HIDDEN, "ffn": FFN, "heads": HEADS, "sequence": SEQUENCE, "batches": BATCHES}
    packed = {"kernels": count, "of": "this layer alone" if wheel is None else "every default"}
    cores = len(os.sched_getaffinity(0))
    return result(what, KERNELS, repeats=repeats, sizes=sizes, cores=cores, packed=packed, rows=rows)


def tables(payload: Payload) -> list[Table]:
    """Seconds of each phase, by what is compiled."""
    rows = []
    for row in payload["rows"]:
        seconds = [statistics.median(row["seconds"][phase]) for phase in PHASES]
        compiled = row["compiled"]
        cells = (f"{sum(seconds[:3]):.1f}", *(f"{one:.2f}" for one in seconds))
        kernels = f"{sum(list(compiled.values())[:3])} + {compiled[PHASES[-1]]}"
        rows.append((row["name"], *cells, kernels))
    sizes, packed = payload["sizes"], payload["packed"]
    how = (
        f"Seconds of a new process, {payload['cores']} cores: a TransformerLayer of {sizes['hidden']} channels in FP8, "
        f"forward and backward of {sizes['batches'][0]} × {sizes['sequence']} tokens, then of {sizes['batches'][1]} × "
        f"{sizes['sequence']}. The last column: kernels that NVRTC compiled for the first steps, and for the other "
        "batch size."
    )
    note = f"The wheel's kernels: {packed['kernels']}, of {packed['of']}. Median of {payload['repeats']} processes."
    columns = ("", "to the first step's end", *PHASES, "kernels compiled")
    return [table(payload, "The first step", columns, rows, how, note)]


if __name__ == "__main__":
    wheel_cubins.FOLDER = Path(sys.argv[1])
    measured = steps(float(sys.argv[3]))
    if sys.argv[2]:
        pack(Path(sys.argv[2]))
    print(json.dumps(measured))
