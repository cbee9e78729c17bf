"""examples/nano_fp8.py: alone with NumPy it prints the recorded hash, and layers on a CPU and a GPU have its words."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits
from shared.nano_fp8_layers import GOLDEN, NANO, digest, nano, train

from reference.numbers import elementary, formats
from reference.ops.attentions.attention import attention
from reference.ops.attentions.attention_backward import attention_backward
from reference.ops.gemms.gemm import gemm
from reference.ops.gemms.gemm_fp8 import gemm_fp8
from reference.ops.norms.norm import norm, norm_backward
from reference.ops.vocabulary.cross_entropy import cross_entropy, cross_entropy_backward, cross_entropy_mean

ALONE = """
import runpy, sys

class OnlyNumPy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {"numpy", *sys.stdlib_module_names}:
            raise ImportError(f"{name} is neither NumPy nor Python's own")

sys.meta_path.insert(0, OnlyNumPy())
runpy.run_path("nano_fp8.py", run_name="__main__")
"""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def program() -> Any:
    return nano()


def test_alone_with_numpy_it_prints_the_recorded_hash(tmp_path: Path) -> None:
    shutil.copy(NANO, tmp_path)
    command = [sys.executable, "-I", "-c", ALONE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *steps, found = done.stdout.splitlines()
    recorded = json.loads(GOLDEN.read_text())
    assert steps == [f"step {step} loss {loss:.6f}" for step, loss in enumerate(recorded["losses"])]
    assert found == recorded["sha256"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layers_have_its_words(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = runpy.run_path(str(NANO), run_name="__main__")
    *lines, printed = capsys.readouterr().out.splitlines()
    weights = [torch.from_numpy(weight.value) for weight in done["weights"]]
    found = dict(train(device))
    losses, parameters = {}, {}
    for name, x in found.items():
        (parameters if x.dim() else losses)[name] = x
    assert lines == [f"{name} {float(x):.6f}" for name, x in losses.items()]
    for (name, x), weight in zip(parameters.items(), weights, strict=True):
        assert_same_bits(x, weight, name)
    recorded = json.loads(GOLDEN.read_text())
    assert digest(found) == printed == recorded["sha256"]
    assert [float(x) for x in losses.values()] == recorded["losses"]


def test_it_learns_and_stays_short() -> None:
    losses = json.loads(GOLDEN.read_text())["losses"]
    assert losses[-1] < losses[0] / 2
    lines = NANO.read_text().splitlines()
    assert len(lines) <= 300
    assert all(len(line) <= 100 for line in lines)


# Each of its functions, on numbers that tell orders of sums apart, beside the operation that it is.


def wide(*shape: int, seed: int = 0, powers: int = 8) -> torch.Tensor:
    """bf16 numbers of both signs with exponents from -powers to powers."""
    generator = torch.Generator().manual_seed(seed)
    signed = torch.rand(shape, generator=generator) * 2 - 1
    return (signed * 2.0 ** torch.randint(-powers, powers + 1, shape, generator=generator)).bfloat16()


def same(x: np.ndarray, y: torch.Tensor, what: str) -> None:
    """x has the words of y; +0 and -0 count as one."""
    assert_same_bits(torch.from_numpy(np.ascontiguousarray(x + np.float32(0))), y.float() + 0.0, what)


def test_numbers(program: Any) -> None:
    x = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    x = x.int().view(torch.float32)
    x = x[x.isfinite() & (x.abs() < 2.0**120)]
    same(program.bf16(x.numpy()), x.bfloat16(), "bf16")
    for fmt, own in ((formats.E4M3, program.E4M3), (formats.E5M2, program.E5M2)):
        near = wide(1 << 16, powers=20).float()
        for scale in (1.0, 0.37):
            codes = formats.decode(formats.cast(near, fmt, scale))
            same(program.cast(near.numpy(), np.float32(scale), *own), codes, fmt.name)


def test_fma_rounds_once(program: Any) -> None:
    a, b, c = (np.float32(x) for x in (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60))
    # 1 + 2^-11 + 2^-24 is a tie in fp32, and c, which float64 cannot add to it, decides.
    assert program.fma(a, b, c) == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert program.fma(a, b, -c) == np.float32(1 + 2.0**-11)


def test_functions(program: Any) -> None:
    on_grid = torch.arange(-126 * 32768, 3 * 32768, dtype=torch.float64).mul(2.0**-15).float()
    same(program.exp2(on_grid.numpy()), elementary.exp2_grid(on_grid), "exp2")
    negative = -(wide(1 << 16, powers=10).float().abs())
    same(program.exp(negative.numpy()), elementary.exp(negative), "exp")
    positive = wide(1 << 16, powers=30).float().abs() + 2.0**-40
    same(program.log(positive.numpy()), elementary.log(positive), "log")
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    words = words[words.isfinite() & (words.abs() < 2.0**60)]
    y, slope = program.gelu(words.float().numpy())
    same(y, elementary.qgelu(words), "gelu")
    same(slope, elementary.dqgelu(words), "its slope")


def test_products(program: Any) -> None:
    a, b = wide(48, 320), wide(32, 320, seed=1)
    for x, y in ((a, b), (a * 2.0**-74, b * 2.0**-74)):  # the latter have bits below 2^-158, which are cut
        same(program.tensor_core(x.float().numpy(), y.float().numpy()), gemm(x, y, None, torch.float32), "bf16")
    one = torch.ones(1)
    for first, own in ((formats.E4M3, program.E4M3), (formats.E5M2, program.E5M2)):
        x, y = formats.cast(a, first, 0.1), formats.cast(b, formats.E4M3, 0.1)
        numbers = [formats.decode(codes).numpy() for codes in (x, y)]
        for how, chain in (("fast", 320), ("split", 128)):
            found = program.gemm_fp8(*numbers, np.float32(1), (own, program.E4M3), chain)
            same(found, gemm_fp8(x, y, one, one, None, torch.bfloat16, how), f"{first.name}, {how}")


def test_norm(program: Any) -> None:
    half, hidden = program.SEQUENCE * program.ROWS // 2, program.HIDDEN
    x = torch.cat([wide(half, hidden, powers=2)] * 2)
    along, across = (x / x.float().square().mean(1, keepdim=True).sqrt()).bfloat16(), wide(half, hidden, seed=1)
    # Where numbers all but cancel, the order of their sum shows in 16 bits, too: here dx, there dgamma.
    for grad in (along, torch.cat([across, -across]) + wide(2 * half, hidden, seed=2) * 2.0**-10):
        gamma = torch.ones(hidden).bfloat16() if grad is along else wide(hidden, seed=3)
        weight = program.Weight(gamma.float().numpy())
        y, backward = program.rms_norm(x.float().numpy(), weight)
        wanted, mean, rstd = norm(x, gamma, None, 1e-5, False, "rmsnorm", torch.float32)
        same(y, wanted, "y")
        dx, dgamma, _ = norm_backward(grad, x, gamma, mean, rstd, False, "rmsnorm", None)
        same(backward(grad.float().numpy()), dx, "dx")
        same(weight.grad, dgamma, "dgamma")


@pytest.mark.parametrize("seed", range(0, 40, 4))  # an order of the weights' sum shows in one of 100,000 words
def test_attention(program: Any, seed: int) -> None:
    shape = (32, program.HEADS, program.SEQUENCE, program.HIDDEN // program.HEADS)
    q, k, v, grad = (wide(*shape, seed=seed + number, powers=2) for number in range(4))
    if seed == 0:  # all values nearly one, so that g vᵀ and Σ g · out all but cancel
        v = v[:, :, :1] + v * 2.0**-7
    out, backward = program.attention(*(x.float().numpy() for x in (q, k, v)))
    options = (shape[-1] ** -0.5, "causal", -1, -1, None, 0.0, None)
    wanted, m, inverse = attention(q, k, v, *options)
    same(out, wanted, "out")
    if seed == 0:
        gradients = attention_backward(grad, q, k, v, wanted, m, inverse, *options)
        for name, found, one in zip("qkv", backward(grad.float().numpy()), gradients, strict=True):
            same(found, one, f"d{name}")


def test_loss(program: Any) -> None:
    rows = program.SEQUENCE * program.ROWS
    logits = wide(rows, program.BYTES, powers=4)
    target = torch.arange(rows) * 7 % program.BYTES
    mean, dx = program.cross_entropy(logits.float().numpy(), target.numpy())
    losses, top, inverse = cross_entropy(logits, target, -100, 0.0)
    wanted, divisor = cross_entropy_mean(losses, target, -100, "mean")
    same(np.asarray(mean)[None], wanted[None], "loss")
    grad = cross_entropy_backward(torch.ones(()), divisor, logits, target, top, inverse, -100, 0.0)
    same(dx, grad, "dx")
