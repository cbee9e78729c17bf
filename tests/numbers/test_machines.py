"""Codes, sums, amaxes and random numbers on other machines: instruction sets of torch's and NumPy's, and threads."""

import contextlib
import io
import os
import subprocess
import sys

import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
from shared.bits import torch_threads

DIGEST = """
import hashlib, torch
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
from reference import formats, philox
from reference.ops.casts.dbias import sum_rows
digest = hashlib.sha256()
words = torch.arange(-(2**15), 2**15, dtype=torch.int16)
for fmt in formats.FORMATS:
    for dtype in (torch.bfloat16, torch.float16):
        for scale in (1.0, 148.7, 1e-30):
            digest.update(formats.cast(words.view(dtype), fmt, scale).view(torch.uint8).numpy().tobytes())
grad = torch.arange(-(2**31), 2**31, 16411, dtype=torch.int64).to(torch.int32).view(torch.float32)
grad = torch.where(grad.abs() < 1e30, grad, 0)[: 260_000].reshape(-1, 1000)
digest.update(sum_rows(grad).numpy().tobytes())
digest.update(formats.amax(grad).numpy().tobytes())
digest.update(philox.normal((200_000,), seed=3).numpy().tobytes())
plain = not any(__cpu_features__[name] for name in __cpu_dispatch__)
print(torch.backends.cpu.get_cpu_capability(), plain, digest.hexdigest())
"""


@pytest.mark.parametrize("capability", ["default", pytest.param("avx2", marks=pytest.mark.slow)])
def test_instruction_sets_and_thread_counts_give_the_same_bits(capability: str) -> None:
    """The plainest CPU's kernels on one thread (of NumPy none that is chosen at run time: AVX2, AVX-512, FMA) and this
    CPU's on two: codes, dbias, amax, and normal numbers, of which tests/numbers/test_philox.py has the golden digest.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    if capability == "default":
        environment["NPY_DISABLE_CPU_FEATURES"] = " ".join(name for name in __cpu_dispatch__ if __cpu_features__[name])
    there = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True)
    assert there.returncode == 0, there.stderr
    name, plain, digest = there.stdout.split()
    assert name == capability.upper()
    assert plain == "True" or capability != "default"
    with torch_threads(2), contextlib.redirect_stdout(io.StringIO()) as here:
        exec(DIGEST, {})
    assert here.getvalue().split()[2] == digest
