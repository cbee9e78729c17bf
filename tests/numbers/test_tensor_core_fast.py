"""The compiled path against the readable model, in every bit, and against NumPy's clock."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import torch_threads

from optimized.recordings import tensor_core_cases as inputs
from reference.numbers import tensor_core
from reference.numbers.tensor_core import fast, model, simd
from reference.support import notice

ROOT = Path(__file__).parents[2]


def codes(rng: np.random.Generator, fmt: model.FloatFormat, shape: tuple[int, int], style: str) -> np.ndarray:
    """Random codes of one style."""
    bits = 1 + fmt.exponent_bits + fmt.fraction_bits
    dtype = np.uint8 if bits == 8 else np.uint16
    if style == "bits":  # every code, NaN and infinities among them
        return rng.integers(0, 1 << bits, shape).astype(dtype)
    top = (1 << fmt.exponent_bits) - (2 if fmt.has_infinity else 1)
    low, high = {
        "any": (0, top),
        "near one": (fmt.bias - 2, fmt.bias + 2),
        "subnormal": (0, 1),
        "high": (max(0, top - 3), top),
        "half way up": (int(top * 0.73), int(top * 0.76)),  # bf16: products around 2^128
        "half way down": (int(top * 0.2), int(top * 0.3)),  # bf16: products around 2^-126
        "sparse": (0, top),
        "rare specials": (fmt.bias - 2, fmt.bias + 2),
    }[style]
    field = rng.integers(low, high + 1, shape)
    fraction = rng.integers(0, 1 << fmt.fraction_bits, shape)
    if not fmt.has_infinity:
        fraction = np.where(field == top, np.minimum(fraction, 6), fraction)
    word = (((rng.integers(0, 2, shape) << fmt.exponent_bits) | field) << fmt.fraction_bits) | fraction
    if style == "sparse":
        word = np.where(rng.integers(0, 8, shape) > 0, 0, word)
    if style == "rare specials":
        infinity = ((1 << fmt.exponent_bits) - 1) << fmt.fraction_bits
        word = np.where(rng.integers(0, 200, shape) == 0, infinity, word)
        word = np.where(rng.integers(0, 2000, shape) == 0, (1 << (bits - 1)) - 1, word)
    return word.astype(dtype)


STYLES = [
    "bits",
    "any",
    "near one",
    "subnormal",
    "high",
    "half way up",
    "half way down",
    "sparse",
    "rare specials",
]


def assert_equal(kind: str, a: np.ndarray, b: np.ndarray, split_k: int | None = None) -> None:
    """fast.gemm_words and model.gemm_words agree in every word."""
    a_format, b_format, instruction = inputs.KINDS[kind]
    operands = model.Operands(a, a_format, b, b_format, instruction)
    got = fast.gemm_words(operands, split_k)
    expected = model.gemm_words(operands, split_k)
    wrong = np.argwhere(got != expected)
    if len(wrong):
        m, n = (int(i) for i in wrong[0])
        pytest.fail(
            f"{kind} {a.shape} x {b.shape}, split_k={split_k}: {len(wrong)} of {got.size} words differ, "
            f"first at [{m}, {n}]: fast {got[m, n]:08x}, model {expected[m, n]:08x}"
        )


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(list(inputs.KINDS)),
    shape=st.tuples(st.integers(0, 80), st.integers(0, 80), st.integers(0, 300)),
    styles=st.tuples(st.sampled_from(STYLES), st.sampled_from(STYLES)),
    split=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_any_codes(kind, shape, styles, split, seed):
    m, n, depth = shape
    rng = np.random.default_rng(seed)
    a_format, b_format, instruction = inputs.KINDS[kind]
    a, b = codes(rng, a_format, (m, depth), styles[0]), codes(rng, b_format, (n, depth), styles[1])
    assert_equal(kind, a, b, 128 if split and instruction is model.FP8_STEP else None)


@pytest.mark.sample(27)
@pytest.mark.parametrize("kind", inputs.KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_styles_with_full_tiles(kind, style):
    rng = np.random.default_rng([*kind.encode(), *style.encode()])
    a_format, b_format, instruction = inputs.KINDS[kind]
    a, b = codes(rng, a_format, (66, 224), style), codes(rng, b_format, (70, 224), style)
    assert_equal(kind, a, b)
    if instruction is model.FP8_STEP:
        assert_equal(kind, a, b, 128)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_the_recorded_inputs_one_after_another(kind):
    """Each case's exponents in one step and another's in the next, so that C meets all of them."""
    a_format, b_format, instruction = inputs.KINDS[kind]
    steps = [c for c in inputs.cases(1, "strung") if c.name.startswith(kind) and c.a.shape[2] == instruction.k]
    order = np.random.default_rng(1).permutation(2 * len(steps)) % len(steps)
    a = np.concatenate([steps[i].a[0] for i in order], axis=1)
    b = np.concatenate([steps[i].b[0] for i in order], axis=1)
    assert_equal(kind, a, b)
    for names in (("zeros", "sparse", "tiny_c"), ("uniform", "cancel", "zeros", "subnormal")):
        some = [c for name in names for c in steps if c.name.endswith("." + name)] * 3
        a, b = (np.concatenate([getattr(c, side)[0] for c in some], axis=1) for side in "ab")
        assert_equal(kind, a, b)
        if a_format is b_format:
            assert_equal(kind, b, a)


@pytest.mark.parametrize("kind", ["e4m3.e5m2", "bf16.bf16"])
@pytest.mark.parametrize(
    ("m", "n", "depth"),
    [(1, 1, 1), (1, 200, 33), (200, 1, 15), (8, 1100, 40), (1100, 8, 40), (2100, 70, 17), (3, 5, 2000)],
)
def test_shapes(kind, m, n, depth):
    rng = np.random.default_rng(m * n + depth)
    a_format, b_format, instruction = inputs.KINDS[kind]
    a, b = codes(rng, a_format, (m, depth), "rare specials"), codes(rng, b_format, (n, depth), "any")
    assert_equal(kind, a, b)
    if instruction is model.FP8_STEP:
        assert_equal(kind, a, b, 128)


@pytest.mark.parametrize("kind", ["e4m3.e4m3", "fp16.fp16"])
def test_rows_are_cut_for_the_cache(monkeypatch, kind):
    monkeypatch.setattr(fast, "_ROWS", 16)
    rng = np.random.default_rng(8)
    fmt = inputs.KINDS[kind][0]
    for m, n in ((200, 70), (70, 200), (33, 5)):
        assert_equal(kind, codes(rng, fmt, (m, 144), "any"), codes(rng, fmt, (n, 144), "any"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_many_random_products(kind):
    """A minute each: 162 products of 256 x 128 words, every pair of styles among them."""
    rng = np.random.default_rng(list(kind.encode()))
    a_format, b_format, instruction = inputs.KINDS[kind]
    for number in range(2 * len(STYLES) ** 2):
        left, right = STYLES[number % len(STYLES)], STYLES[number // len(STYLES) % len(STYLES)]
        depth = int(rng.integers(1, 400))
        a, b = codes(rng, a_format, (256, depth), left), codes(rng, b_format, (128, depth), right)
        assert_equal(kind, a, b, 128 if number % 2 and instruction is model.FP8_STEP else None)


@pytest.mark.parametrize("m", [0, 2])
@pytest.mark.parametrize("n", [0, 3])
def test_nothing_to_add_is_plus_zero(m, n):
    for dtype in (torch.float8_e4m3fn, torch.float16):
        out = tensor_core.gemm(torch.zeros(m, 0, dtype=dtype), torch.zeros(n, 0, dtype=dtype))
        assert out.shape == (m, n)
        assert (out.view(torch.int32) == 0).all()


@pytest.mark.sample(3)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_many_products_in_one_call(kind, threads):
    """Each has the words it has alone, with infinities and NaN in one of them only, too, or in a start value."""
    a_format, b_format, instruction = inputs.KINDS[kind]
    for shape in ((5, 30, 40, 70), (3, 70, 20, 33), (2, 200, 130, 40), (0, 3, 4, 5), (4, 0, 3, 2), (2, 3, 4, 0)):
        many, m, n, depth = shape
        rng = np.random.default_rng(shape)
        a, b = codes(rng, a_format, (many * m, depth), "any"), codes(rng, b_format, (many * n, depth), "near one")
        a, b = a.reshape(many, m, depth), b.reshape(many, n, depth)
        if a.size and b.size:
            a[1, 0], b[-1, :, 0] = np.iinfo(a.dtype).max, codes(rng, b_format, (1, n), "bits")
        starts = [None, rng.standard_normal((many, m, n)).astype(np.float32).view(np.uint32)]
        starts += [np.full((many, m, n), model.INF_WORD, np.uint32)]
        starts += [rng.integers(0, 1 << 32, (many, m, n), np.uint32)]
        for c in starts:
            for split in (None, 128) if instruction is model.FP8_STEP else (None,):
                with torch_threads(threads):
                    got = fast.gemm_words(model.Operands(a, a_format, b, b_format, instruction), split, c)
                assert got.shape == (many, m, n)
                for number in range(many):
                    one = model.Operands(a[number], a_format, b[number], b_format, instruction)
                    assert (got[number] == model.gemm_words(one, split, None if c is None else c[number])).all()


def test_as_many_matrices_of_each_are_needed():
    a = torch.zeros(2, 3, 4, dtype=torch.float16)
    for b in (a[:1], a[0]):
        with pytest.raises(ValueError, match=r"a has shape \(2, 3, 4\) and b .*; as many matrices of each are needed"):
            tensor_core.gemm(a, b)
    with pytest.raises(ValueError, match="a matrix"):
        tensor_core.step(a, a)
    with pytest.raises(ValueError, match="a matrix"):
        tensor_core.gemm(a[None], a[None])
    assert tensor_core.gemm(a, a, c=torch.ones(2, 3, 3)).eq(1).all()
    with pytest.raises(ValueError, match=r"float32 \(2, 3, 3\)"):
        tensor_core.gemm(a, a, c=torch.ones(3, 3))


def test_infinities_that_come_before_and_after_an_overflow():
    """bf16 sums can leave fp32's range: then it matters which infinity was first."""
    big, inf = 2.0**100, float("inf")
    rows = torch.zeros(4, 48)
    rows[0, 0], rows[0, 16] = big, -inf  # overflow, then the other infinity: NaN
    rows[1, 0], rows[1, 16] = -inf, big  # an infinity takes no notice of finite terms
    rows[2, 0], rows[2, 1] = big, -inf  # within one step: the infinity
    rows[3, 0], rows[3, 16] = big, inf
    columns = torch.full((5, 48), big)
    columns[4, 32], rows[0, 32] = inf, -1.0  # an infinity on either side: still NaN
    rows[1:, 32] = torch.tensor([-1.0, -1.0, 1.0])
    a, b = rows.to(torch.bfloat16), columns.to(torch.bfloat16)
    out = tensor_core.gemm(a, b)
    assert out[0].isnan().all()
    assert (out[1:3] == -inf).all()
    assert (out[3] == inf).all()
    for left, right in ((a, b), (b, a)):
        pair = (x.view(torch.int16).numpy().view(np.uint16) for x in (left, right))
        assert_equal("bf16.bf16", *pair)


def test_strides_do_not_matter():
    a = torch.randn(96, 80).to(torch.bfloat16)
    b = torch.randn(48, 80).to(torch.bfloat16)
    plain = tensor_core.gemm(a, b)
    assert torch.equal(plain, tensor_core.gemm(a.t().contiguous().t(), b.t().contiguous().t()))
    assert torch.equal(plain, tensor_core.gemm(torch.cat([a, a], 1)[:, :80], b))


def test_the_bits_do_not_depend_on_the_threads():
    a, b = (torch.randn(300, 512).to(torch.float8_e5m2) for _ in range(2))
    h = torch.randn(300, 512).to(torch.float16)
    seen = []
    for threads in (1, 2, 3, 7):
        with torch_threads(threads):
            seen.append((tensor_core.gemm(a, b), tensor_core.gemm(a, b, "split"), tensor_core.gemm(h, h)))
    for other in seen[1:]:
        assert all(torch.equal(x, y) for x, y in zip(seen[0], other, strict=True))


def test_calls_from_several_threads_at_once():
    a, b = (torch.randn(200, 640).to(torch.float8_e4m3fn) for _ in range(2))
    expected = tensor_core.gemm(a, b)
    wrong = []

    def work() -> None:
        for _ in range(10):
            if not torch.equal(tensor_core.gemm(a, b), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_fp8_path_holds_no_double_and_nothing_is_contracted():
    fast._compiled(False)
    fresh = numba.njit(nogil=True, error_model="numpy")(simd.tiles.py_func)  # cached code has no IR
    fresh.compile(next(found for found in simd.tiles.signatures if found[1].dtype == numba.int8))  # exponents
    text = fresh.inspect_llvm(fresh.signatures[0])
    assert f"fmul <{simd.FLOAT_LANES} x float>" in text
    assert "double" not in text
    for banned in ("fmuladd", "llvm.fma", " fast ", "contract", "reassoc", "afn"):
        assert banned not in text, banned


def test_a_long_compilation_says_so(monkeypatch, capfd):
    finite = fast._finite
    monkeypatch.setattr(fast, "_finite", lambda *given: (time.sleep(0.2), finite(*given))[1])
    monkeypatch.setattr(notice, "PATIENCE", 0.01)
    fast._compiled.__wrapped__(False)
    assert "twin-engine: preparing the tensor-core model" in capfd.readouterr().err
    monkeypatch.setattr(notice, "PATIENCE", 60.0)
    fast._compiled.__wrapped__(False)
    assert capfd.readouterr().err == ""


NARROW = """
import sys
from llvmlite import binding
features = binding.get_host_cpu_features()
for name in list(features):
    if name.startswith("avx512") or (sys.argv[1] == "sse" and name.startswith("avx")):
        features[name] = False
binding.get_host_cpu_features = lambda: features
from reference.numbers.tensor_core import simd
assert simd.FLOAT_LANES == int(sys.argv[2]), simd.FLOAT_LANES
sys.path[:0] = ["tests", "tests/numbers"]
import numpy as np, test_tensor_core_fast as t
for kind, (a, b, step) in t.inputs.KINDS.items():
    for style in t.STYLES:
        rng = np.random.default_rng(5)
        t.assert_equal(kind, t.codes(rng, a, (37, 96), style), t.codes(rng, b, (75, 96), style))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cpu", "lanes"), [("avx2", "haswell", 8), ("sse", "nehalem", 4)])
def test_narrower_registers_give_the_same_bits(tmp_path, name, cpu, lanes):
    environment = os.environ | {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run([sys.executable, "-c", NARROW, name, str(lanes)], check=True, cwd=ROOT, env=environment)


def test_1024_cubed_takes_at_most_20_times_numpys_fp32_product():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((1024, 1024)).astype(np.float32) for _ in range(2))
    x, y = (torch.from_numpy(z).to(torch.float8_e4m3fn) for z in (a, b))
    functions = {"numpy": lambda: a @ b, "ours": lambda: tensor_core.gemm(x, y)}
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(6):  # interleaved, the best of each: a busy machine disturbs both
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    ratio = best["ours"] / best["numpy"]
    assert ratio < 20, f"{ratio:.1f} times NumPy's A @ B; at most 20 is promised, 10 is the goal"
