"""The graders of puzzles.ipynb: each compares an answer, word by word, with what an H200 computed.

A puzzle is a generator: it calls the learner's function and yields (where, got, expected). `grade` compares and says in
one sentence which word is wrong. Expected words come from the recordings of an H200; a recording that keeps only a
digest of its words is trusted after `reference` has given words of that digest (`h200`). Puzzles 1 and 6 are graded by
the definition of the format.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import reference as te
from optimized.compare import FLOAT8, INTEGERS
from optimized.recordings import arrays, case, cases, linear, outputs, products
from optimized.recordings.case import numbers
from optimized.recordings.reader import DATA
from reference import formats, philox
from reference.numbers import elementary
from reference.ops.attentions import attention

Answer = Callable[..., Any]
Checks = Iterator[tuple[str, Any, torch.Tensor]]
E4M3, E5M2 = formats.FORMATS


@dataclass(frozen=True)
class Verdict:
    """Whether a puzzle is solved, and one sentence that says so."""

    solved: bool
    sentence: str


def shown(word: torch.Tensor) -> str:
    """One element as hexadecimal word and value."""
    size = word.element_size()
    bits = int(word.view(INTEGERS[size])) & (1 << 8 * size) - 1
    value = formats.decode(word.reshape(1)).item() if word.dtype in FLOAT8 else word.item()
    return f"0x{bits:0{2 * size}X} ({value:g})"


def as_tensor(got: Any, like: torch.Tensor) -> torch.Tensor | str:
    """An answer as a tensor of `like`'s dtype and shape, or a sentence that says what is wrong with it."""
    if isinstance(got, torch.Tensor | np.ndarray | np.generic) and not isinstance(got, float):
        tensor = torch.as_tensor(got).detach()
        if like.dtype in FLOAT8 and tensor.dtype == torch.uint8:
            tensor = tensor.view(like.dtype)
        if tensor.dtype != like.dtype:
            return f"the answer is {tensor.dtype}, {like.dtype} is expected."
    elif like.dtype in FLOAT8:
        if not (isinstance(got, int) and 0 <= got < 256):
            return f"the answer is {got!r}, a code from 0 to 255 is expected."
        tensor = torch.tensor(got, dtype=torch.uint8).view(like.dtype)
    else:
        try:
            tensor = torch.tensor(got, dtype=like.dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return f"the answer is {got!r}, {like.dtype} is expected."
    if tensor.shape != like.shape:
        return f"the answer has shape {list(tensor.shape)}, {list(like.shape)} is expected."
    return tensor.contiguous()


def wrong_words(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The indices [n, dimensions] at which the words differ; in 16 and 32 bits every NaN is the same."""
    integers = INTEGERS[expected.element_size()]
    unequal = got.view(integers) != expected.contiguous().view(integers)
    if expected.dtype.is_floating_point and expected.dtype not in FLOAT8:
        unequal &= ~(got.isnan() & expected.isnan())
    return unequal.nonzero()


def grade(puzzle: str, answer: Answer) -> Verdict:
    """Call `answer` on all of the puzzle's inputs. An exception in it passes through, with a note of where."""
    if puzzle not in PUZZLES:
        raise ValueError(f"there is no puzzle {puzzle!r}; the puzzles are {', '.join(PUZZLES)}.")
    count, wrong, first = 0, 0, ""
    try:
        for where, got, expected in PUZZLES[puzzle](answer):
            if got is None or (isinstance(got, tuple) and None in got):
                forgotten = f"{where}: the answer is None; is there a path without `return`?"
                return Verdict(False, f"{puzzle}: {forgotten if count else 'not solved yet.'}")
            tensor = as_tensor(got, expected)
            if isinstance(tensor, str):
                return Verdict(False, f"{puzzle}: {where}: {tensor}")
            places = wrong_words(tensor, expected)
            count, wrong = count + expected.numel(), wrong + len(places)
            if len(places) and not first:
                at = tuple(places[0].tolist())
                index = f", index {list(at)}" if at else ""
                first = f"{where}{index}: got {shown(tensor[at])}, expected {shown(expected[at])}."
    except Exception as error:
        error.add_note(f"(while puzzle {puzzle} called your function)")
        raise
    if wrong:
        return Verdict(False, f"{puzzle}: {wrong:,} of {count:,} words are wrong. The first is {first}")
    return Verdict(True, f"{puzzle}: solved, all {count:,} words agree.")


RESULTS: dict[str, bool] = {}
"""Which puzzles `check` found solved, for the scoreboard."""


def check(puzzle: str, answer: Answer) -> None:
    """Grade and print the verdict."""
    verdict = grade(puzzle, answer)
    RESULTS[puzzle] = verdict.solved
    print(verdict.sentence)


@functools.cache
def h200(op: str, name: str, output: str) -> torch.Tensor:
    """An output of a case of `twin parity`: computed here, accepted if its words are those of an H200."""
    case = next(c for c in cases.cases() if (c.op, c.name) == (op, name))
    found = case.run(torch.device("cpu"))[output]
    tally = outputs.read(DATA).compare(case.key(output), found)
    if not tally.equal:
        raise RuntimeError(f"this machine does not give the recorded words of {case.key(output)}: {tally}.")
    return found


def decode(answer: Answer) -> Checks:
    """1. Every E4M3 code's value."""
    values = formats.decode_table(E4M3)
    for code in range(256):
        yield f"code 0x{code:02X}", answer(code), values[code]


def encode(answer: Answer) -> Checks:
    """2. Every bf16 number to E4M3, as an H200 casts it."""
    xs = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float().tolist()
    codes = h200("cast", "bf16 to e4m3, 65,536 words, scale 1.0", "q").flatten()
    for x, code in zip(xs, codes, strict=True):
        yield f"x = {x:g}", answer(x), code


def quantise(answer: Answer) -> Checks:
    """3. fp32 numbers times a scale to E5M2."""
    xs = case.every_word(torch.float32).flatten()
    scale = torch.tensor(37.5)
    yield "q", answer(xs, scale), h200("cast", "fp32 to e5m2, 65,536 words, scale 37.5", "q").flatten()


@dataclass(frozen=True)
class Step:
    """A recorded training step of a Linear: inputs, FP8 scales that it used, and what the H200 gave."""

    x: torch.Tensor
    g: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    scales: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


def linear_steps(name: str) -> Iterator[Step]:
    """The recorded steps of one case; weights move by the recorded gradients."""
    case, recorded = linear.CASES[name], arrays(linear.RECORDING)
    dtype = getattr(torch, case.dtype)
    weight, bias = linear.parameters(name, case)
    before = {"fwd_history": torch.zeros(case.history, 3), "bwd_history": torch.zeros(case.history, 2)}
    scales = {"fwd_scale": torch.ones(3), "bwd_scale": torch.ones(2)}
    for step in range(linear.STEPS):
        x, g = linear.inputs(name, case, step)
        after = {
            key: torch.from_numpy(recorded[f"{name}.{step}.{key}"]).view(
                dtype if key in ("out", "dx", "dw") else torch.float32
            )
            for key in ("out", "dx", "dw", "fwd_scale", "fwd_history", "bwd_scale", "bwd_history")
        }
        yield Step(x, g, weight, bias, scales, before, after)
        weight = (weight.float() - after["dw"].float() * linear.LEARNING_RATE).to(dtype)
        scales, before = after, after


def scale_update(answer: Answer) -> Checks:
    """4. The scales and amax histories of recorded training steps."""
    for name in ("bf16_hybrid_max", "fp16_e4m3_max"):
        for number, step in enumerate(linear_steps(name)):
            for column, tensor in enumerate(("x", "w", "y")):
                history = step.before["fwd_history"][:, column].clone()
                history[0] = step.after["fwd_history"][-1, column]  # what the step's cast noted
                got = answer(step.scales["fwd_scale"][column].clone(), history, 448.0)
                scale, rolled = (None, None) if got is None else got
                where = f"{name}, step {number}, {tensor}"
                yield f"{where}, scale", scale, step.after["fwd_scale"][column]
                yield f"{where}, history", rolled, step.after["fwd_history"][:, column]


def bias_gradient(answer: Answer) -> Checks:
    """5. The sum of a gradient's rows, in the written order."""
    for rows in (64, 63, 65, 1000):
        g = numbers((rows, 48), torch.float32, 31)
        yield f"{rows} rows", answer(g), h200("dbias", f"fp32 [{rows}, 48]", "dbias")


def term(answer: Answer) -> Checks:
    """6. A product of two codes as significand and exponent."""
    for a in range(0, 256, 3):
        for b in range(1, 256, 5):
            if 0x7F not in (a & 0x7F, b & 0x7F):
                f, g = E4M3.fields(a), E4M3.fields(b)
                parts = [8 * (field.exponent > 0) + field.mantissa for field in (f, g)]
                exponent = max(f.exponent, 1) + max(g.exponent, 1) - 14
                signed = (-1) ** (f.sign + g.sign) * parts[0] * parts[1]
                yield f"codes 0x{a:02X}, 0x{b:02X}", answer(a, b), torch.tensor([signed, exponent])


def instruction(answer: Answer) -> Checks:
    """7. One wgmma instruction: 32 products and C."""
    a, b, c, d = (arrays("wgmma_h200")[f"e4m3.e4m3.k32.{name}"] for name in "ABCD")
    for tile, row, column in np.ndindex(*d.shape):
        got = answer(a[tile, row].tolist(), b[tile, column].tolist(), float(c[tile, row, column]))
        yield f"tile {tile}, row {row}, column {column}", got, torch.tensor(d[tile, row, column])


def _product(m: int, n: int, k: int, accumulate: str) -> Any:
    return next(p for p in products() if (p.m, p.n, p.k, p.accumulate) == (m, n, k, accumulate))


def _gemm(answer: Answer, *sizes: tuple[int, int, int], accumulate: str) -> Checks:
    for size in sizes:
        product = _product(*size, accumulate)
        yield product.title, answer(product.a, product.b), product.out


fast = functools.partial(_gemm, accumulate="fast")
split = functools.partial(_gemm, accumulate="split")


def linear_forward(answer: Answer) -> Checks:
    """11. The output of an FP8 Linear, in bf16."""
    for number, step in enumerate(linear_steps("bf16_hybrid_max")):
        scale = step.scales["fwd_scale"]
        got = answer(step.x, step.weight, step.bias, scale[0], scale[1])
        yield f"step {number}, y", got, step.after["out"]


def linear_backward(answer: Answer) -> Checks:
    """12. The gradient of its weight."""
    for number, step in enumerate(linear_steps("bf16_hybrid_max")):
        got = answer(step.g, step.x, step.scales["bwd_scale"][0], step.scales["fwd_scale"][0])
        yield f"step {number}, dw", got, step.after["dw"]


def weights(s: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """p = 2^(s · c − m) [rows, keys] as Hopper computes it, and the sum of each row in four parts: [rows, 4]."""
    p, sums, top = np.empty(tuple(s.shape), np.float32), np.zeros((len(s), 4), np.float32), m.numpy().copy()
    nothing, zero = np.zeros(p.shape, np.bool_), np.float32(0)
    attention.softmax_block(
        s.numpy(), nothing, np.float32(c), top, sums, np.empty_like(top), p, elementary.powers_of_two(), zero
    )
    return torch.from_numpy(p), torch.from_numpy(sums)


def softmax_step(answer: Answer) -> Checks:
    """13. Attention by an online softmax over two blocks of keys."""
    case, heads, queries, keys, width = "bf16, no mask", 2, 70, 150, 64
    q, k, v = (
        philox.normal((n, 1, heads, width), seed=seed).bfloat16().permute(1, 2, 0, 3)[0]
        for n, seed in ((queries, 132), (keys, 133), (keys, 134))
    )
    c = torch.tensor(attention.factor(width**-0.5))
    for head in range(heads):
        m, l, o = torch.full((queries,), -(2.0**100)), torch.zeros(queries, 4), torch.zeros(queries, width)  # noqa: E741
        for block in range(0, keys, 128):
            part = slice(block, block + 128)
            s = te.tensor_core.gemm(q[head], k[head, part])
            got = answer(m, l, o, s, v[head, part], c)
            if got is None:
                yield "m", None, m
                return
            m, l, o = got  # noqa: E741
        inverse = 1 / ((l[:, 0] + l[:, 1]) + (l[:, 2] + l[:, 3]))
        for name, found in (("m", m), ("inv", inverse), ("out", (o * inverse[:, None]).bfloat16())):
            recorded = h200("attention", case, name)[0, head]
            yield f"head {head}, {name}", found, recorded


def rms_norm(answer: Answer) -> Checks:
    """14. RMSNorm of bf16 rows."""
    x, weight = numbers((5, 4096), torch.bfloat16, 101), philox.normal((4096,), 1.0, 0.3, seed=104).bfloat16()
    yield "y", answer(x, weight, 1e-5), h200("rmsnorm", "bf16 5x4096", "y")


def dropout(answer: Answer) -> Checks:
    """15. Dropout's mask and its scaling."""
    x = numbers((45, 100), torch.bfloat16, 161)
    got = answer(x, 0.1, 0x1234567890ABCDEF, 5)
    yield "out", got, h200("bias_dropout_add", "bf16 p=0.1 -", "out")


PUZZLES: dict[str, Callable[[Answer], Checks]] = {
    "1 decode": decode,
    "2 encode": encode,
    "3 quantise": quantise,
    "4 scale_update": scale_update,
    "5 bias_gradient": bias_gradient,
    "6 term": term,
    "7 instruction": instruction,
    "8 fast": lambda answer: fast(answer, (96, 80, 528), (7, 48, 4112)),
    "9 split": lambda answer: split(answer, (96, 80, 528), (7, 48, 4112)),
    "10 slices": lambda answer: fast(answer, (256, 256, 16384)),
    "11 linear_forward": linear_forward,
    "12 linear_backward": linear_backward,
    "13 softmax_step": softmax_step,
    "14 rms_norm": rms_norm,
    "15 dropout": dropout,
}
