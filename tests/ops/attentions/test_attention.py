"""`twin::attention` and its backward: float64, the written order, masks, dropout, refusals.

On an H200 they equal their definition on the CPU in every bit: results, statistics and all gradients.
"""

import dataclasses
import itertools
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from shared.attention_cases import (
    BIASES,
    CASES,
    LAYOUTS,
    MASKS,
    Case,
    check_against_float64,
    exact,
    hidden_pairs,
    inputs,
    run,
    to_cuda,
)
from shared.bits import assert_same_bits, torch_threads
from shared.numba_code import assert_no_double

import optimized  # noqa: F401  (registers the CUDA ops)
from optimized.cuda import launch
from optimized.ops.attentions import attention_backward as launched_backward
from reference.numbers import elementary, tensor_core
from reference.ops.attentions import attention, attention_backward, attention_heads
from reference.ops.attentions.attention import MASK_TYPES
from reference.ops.attentions.attention_lengths import Entry
from reference.ops.random.dropout import threshold

twin = torch.ops.twin
DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_type", attention.MASK_TYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_against_float64(dtype: torch.dtype, mask_type: str, mask: str) -> None:
    check_against_float64(Case(2, 2, 2, 150, 170, 48, dtype, mask_type, mask, dropout=0.1))


@settings(max_examples=20, deadline=None)
@given(case=CASES)
def test_any_shape_against_float64(case: Case) -> None:
    check_against_float64(case)


def test_the_bound_is_not_idle() -> None:
    """An error of three units in the last place of P would be found: the bound can fail."""
    case = Case(sq=40, skv=40, dtype=torch.float16)
    given = inputs(case)
    truth, bound = exact(case, given)
    wrong = truth["out"] * (1 + 2.0**-8)
    assert bool(((wrong - truth["out"]).abs() > bound["out"]).any())


def in_the_written_order(given: dict, scale: float, limit: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One head, causal up to `limit` = j - i, as the docstring says it, one scalar at a time."""
    q, k, v = (given[name][0, 0] for name in ("q", "k", "v"))
    (sq, d), skv = q.shape, k.shape[0]
    one, g = np.float32(1), np.float32(384)
    c = np.float32(scale * math.log2(math.e))

    def power(n: np.float32) -> np.float32:
        return elementary.exp2_grid(torch.tensor([n])).numpy()[0]

    def fma(x: np.float32, y: np.float32, z: np.float32) -> np.float32:
        return np.float32(np.longdouble(x) * np.longdouble(y) + np.longdouble(z))

    out, ms, invs = torch.empty(sq, d, dtype=q.dtype), np.empty(sq, np.float32), np.empty(sq, np.float32)
    for i in range(sq):
        total, m, lanes = torch.zeros(1, d), np.float32(-(2.0**100)), [np.float32(0)] * 4
        for first in range(0, skv, 128):
            keys = range(first, min(first + 128, skv))
            s = torch.zeros(1, len(keys))
            for step in range(0, d, 16):
                s = tensor_core.step(q[i : i + 1, step : step + 16], k[keys.start : keys.stop, step : step + 16], s)
            scores = [
                score if j <= i + limit else np.float32(-np.inf) for j, score in zip(keys, s[0].numpy(), strict=True)
            ]
            new = max(m, np.float32(g - fma(-max(scores), c, g)))
            alpha = power(np.float32(m - new))
            base = np.float32(g - new)
            p = [np.float32(0) if x == -np.inf else power(np.float32(fma(x, c, base) - g)) for x in scores]
            for lane in range(4):
                sums = []
                for e in (0, 1):
                    one_sum = np.float32(0)
                    for column in range(2 * lane + e, len(p), 8):
                        one_sum = np.float32(one_sum + p[column])
                    sums.append(one_sum)
                lanes[lane] = fma(lanes[lane], alpha, np.float32(sums[0] + sums[1]))
            total = total * float(alpha)
            weights = torch.tensor(np.array(p)).to(q.dtype)[None]
            for step in range(0, len(p), 16):
                at = slice(first + step, min(first + step + 16, skv))
                total = tensor_core.step(weights[:, step : step + 16], v[at].t(), total)
            m = new
        sum_ = np.float32(np.float32(lanes[0] + lanes[1]) + np.float32(lanes[2] + lanes[3]))
        ms[i], invs[i] = m, np.float32(one / sum_)
        out[i] = (total * float(invs[i])).to(q.dtype)[0]
    return out, torch.from_numpy(ms), torch.from_numpy(invs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skv", [1, 7, 130, 300])
@pytest.mark.parametrize("scale", [0.7, 60.0])  # m stays within 128 of zero, and does not
def test_the_order_is_the_written_one(dtype: torch.dtype, skv: int, scale: float) -> None:
    case = Case(sq=3, skv=skv, d=40, dtype=dtype, mask_type="causal_bottom_right", scale=scale)
    if skv < case.sq:
        case = dataclasses.replace(case, mask_type="causal")
    given = inputs(case)
    expected = in_the_written_order(given, scale, max(skv - 3, 0))
    found = twin.attention(given["q"], given["k"], given["v"], scale, case.mask_type, -1, -1, None, 0.0, None)
    for name, a, b in zip(("out", "m", "inv"), expected, found, strict=True):
        assert_same_bits(a, b[0, 0], name)


def test_the_largest_weight_is_one() -> None:
    """So inv is at most 1, exactly; and where a row sees one key, out is that key's value."""
    given = inputs(Case(sq=300, skv=300, scale=2.5, d=64))
    options = (2.5, "causal", -1, -1, None, 0.0, None)
    out, m, inv = twin.attention(given["q"], given["k"], given["v"], *options)
    assert bool((m.abs() < 128).all())
    assert torch.equal(m, (m * 2**15).round() / 2**15)
    assert bool((inv <= 1).all())
    assert torch.equal(inv[:, :, 0], torch.ones(inv.shape[:2]))
    assert_same_bits(out[:, :, 0], given["v"][:, :, 0], "out")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(dtype: torch.dtype) -> None:
    case = Case(b=2, hkv=2, sq=140, skv=200, dtype=dtype, mask="everything")
    found = run(case, inputs(case))
    zero = torch.zeros(())
    for name in ("out", "inv", "dq", "dk", "dv"):
        assert_same_bits(found[name], zero.to(found[name].dtype).expand(found[name].shape), name)
    assert bool((found["m"] == -(2.0**100)).all())


@pytest.mark.sample(4)
@pytest.mark.parametrize("mask_type", ["causal", "causal_bottom_right"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("sq", "skv"), [(300, 300), (100, 400), (400, 100)])
def test_skipping_hidden_blocks_changes_no_bit(mask_type: str, dropout: float, sq: int, skv: int) -> None:
    """The same mask as a tensor visits every block."""
    case = Case(b=1, hkv=2, group=2, sq=sq, skv=skv, mask_type=mask_type, dropout=dropout)
    given = inputs(case)
    mask = hidden_pairs(case, None)[:1, :1]
    state = given["rng_state"]
    visiting_all = {**given, "mask": mask, "rng_state": None if state is None else state.clone()}
    skipped, whole = run(case, given), run(dataclasses.replace(case, mask_type="none"), visiting_all)
    for name, value in skipped.items():
        assert_same_bits(value, whole[name], name)


@pytest.mark.parametrize("length", [1, 100, 128, 129])
def test_padding_equals_shorter_keys(length: int) -> None:
    case = Case(sq=50, skv=300)
    given = inputs(case)
    mask = (torch.arange(300) >= length)[None, None, None, :]
    padded = run(case, {**given, "mask": mask})
    short = {name: given[name][:, :, :length].contiguous() for name in ("k", "v")}
    cut = run(dataclasses.replace(case, skv=length), {**given, **short})
    for name, value in cut.items():
        assert_same_bits(padded[name][:, :, :length] if name in ("dk", "dv") else padded[name], value, name)


def test_grouped_heads_are_repeated_heads() -> None:
    case = Case(b=2, hkv=2, group=3, sq=64, skv=100, mask_type="causal")
    given = inputs(case)
    repeated = {name: given[name].repeat_interleave(3, 1) for name in ("k", "v")}
    found = run(case, given)
    apart = run(dataclasses.replace(case, hkv=6, group=1), {**given, **repeated})
    for name in ("out", "m", "inv", "dq"):
        assert_same_bits(found[name], apart[name], name)
    # Keys see one long sequence of queries, that of their heads one after the other (64 is a multiple of a step).
    case = dataclasses.replace(case, mask_type="none")
    found = run(case, given)
    joined = {name: given[name].unflatten(1, (2, 3)).flatten(2, 3) for name in ("q", "grad")}
    long = run(dataclasses.replace(case, group=1, sq=192), {**given, **joined})
    for name in ("dk", "dv"):
        assert_same_bits(found[name], long[name], name)


def test_layouts_change_no_bit() -> None:
    base = Case(b=2, hkv=2, sq=70, skv=70, d=24, dropout=0.1, mask_type="causal")
    given = inputs(base)
    expected = run(base, {**given, "rng_state": given["rng_state"].clone()})
    for layout in LAYOUTS:
        views = inputs(dataclasses.replace(base, layout=layout))
        for name in ("q", "k", "v", "grad"):
            views[name].copy_(given[name])
        found = run(base, {**views, "rng_state": given["rng_state"].clone()})
        for name, value in expected.items():
            assert_same_bits(value, found[name], f"{name}, {layout}")
        assert found["out"].stride() == torch.empty_like(views["q"]).stride()


def test_the_number_of_threads_changes_no_bit() -> None:
    case = Case(b=1, hkv=2, sq=200, skv=200, dropout=0.1)
    results = []
    for count in (1, 2):
        with torch_threads(count):
            results.append(run(case, inputs(case)))
    for name, value in results[0].items():
        assert_same_bits(value, results[1][name], name)


@pytest.mark.parametrize("lengths", ["none", "both"])
@pytest.mark.parametrize("bias", ["none", "b1ss", "bh slopes", "sinks"])
def test_heads_computed_together_have_the_bits_of_each_alone(monkeypatch, bias: str, lengths: str) -> None:
    """Of three entries, two heads of keys in each and two of queries on each of them; also in pieces of five."""
    of_bias = {"sinks": True} if bias == "sinks" else {"bias": bias}
    case = Case(
        3, 2, 2, 70, 140, 16, mask="arbitrary", mask_type="causal_bottom_right", dropout=0.2, lengths=lengths, **of_bias
    )
    sizes, found = [], []
    with torch_threads(1):
        for pairs in (1, 5 * 70 * 140, 1 << 30):
            monkeypatch.setattr(attention_heads, "PAIRS", pairs)
            sizes.append([some.count for some in attention_heads.together([Entry(70, 140, None, None)] * 3, 4)])
            found.append(run(case, inputs(case)))
    assert sizes == [[1] * 12, [5, 5, 2], [12]]
    for name, value in found[0].items():
        for other in found[1:]:
            assert_same_bits(value, other[name], name)


def test_each_thread_has_heads() -> None:
    with torch_threads(3):
        pieces = attention_heads.together([Entry(8, 8, None, None), Entry(8, 9, None, None)], 4)
    assert [(some.first, some.count, some.shape) for some in pieces] == [
        *((0, 3, (2, 4, 8, 8)), (3, 1, (2, 4, 8, 8))),
        *((4, 3, (2, 4, 8, 9)), (7, 1, (2, 4, 8, 9))),
    ]
    assert [pair for some in pieces for pair in zip(some.batch.tolist(), some.head.tolist(), strict=True)] == [
        divmod(number, 4) for number in range(8)
    ]


def test_dropout_keeps_the_stated_share() -> None:
    """Of 1.6 million pairs within five standard deviations, in every place of a counter's eight."""
    for p in (0.1, 0.5):
        keep = attention.keep_pairs(3, 1, 1280, 1280, p, torch.tensor([7, 9])).double()
        share = 1 - threshold(p) / 65536
        tiles = keep.view(80, 2, 8, 80, 2, 4, 2).permute(1, 4, 6, 0, 2, 3, 5).reshape(8, -1)  # r, c, e
        deviation = math.sqrt(share * (1 - share) / tiles.shape[1])
        assert bool(((tiles.mean(1) - share).abs() < 5 * deviation).all())


def test_dropout_state() -> None:
    case = Case(sq=50, skv=60, dropout=0.4)
    given = inputs(case)
    state = given["rng_state"]
    start = state.clone()
    first, second = run(case, given), run(case, given)
    assert state.tolist() == [start[0].item(), start[1].item() + 2]
    assert not torch.equal(first["out"], second["out"])
    replay = run(case, {**given, "rng_state": start})
    for name in ("out", "dq", "dk", "dv"):
        assert_same_bits(first[name], replay[name], name)


def test_some_heads_have_the_masks_of_their_place() -> None:
    """Numbers after a state's seed and offset say which heads of each entry are here."""
    q, k, v, grad = (torch.randn(3, 6, 20, 16).to(torch.bfloat16) for _ in range(4))
    state = torch.tensor([3, 1])
    how = (0.25, "causal", -1, -1, None, 0.4)
    out, m, inv = torch.ops.twin.attention(q, k, v, *how, state.clone())
    grads = torch.ops.twin.attention_backward(grad, q, k, v, out, m, inv, *how, state)
    for heads in (slice(0, 2), slice(2, 4), slice(4, 6)):
        placed = torch.tensor([3, 1, 2, 6, heads.start])
        some = [x[:, heads].contiguous() for x in (grad, q, k, v, out, m, inv)]
        assert_same_bits(torch.ops.twin.attention(*some[1:4], *how, placed.clone())[0], some[4], f"{heads}")
        found = torch.ops.twin.attention_backward(*some, *how, placed)
        for one, whole in zip(found, grads, strict=True):
            assert_same_bits(one, whole[:, heads], f"{heads}, backward")


def test_dropout_of_everything() -> None:
    case = Case(sq=20, skv=20, dropout=1.0)
    found = run(case, inputs(case))
    assert not any(found[name].any() for name in ("out", "dq", "dk", "dv"))


def test_dropout_leaves_the_mean() -> None:
    """Averaged over 400 masks, out approaches the one without dropout: within five standard errors, on average."""
    case = Case(sq=8, skv=64, d=8, dtype=torch.float16, dropout=0.25)
    given = inputs(case)
    plain = run(dataclasses.replace(case, dropout=0.0), given)["out"].double()
    runs = torch.stack([run(case, given)["out"].double() for _ in range(400)])
    z = (runs.mean(0) - plain) / (runs.std(0) / 20)
    assert z.abs().mean() < 1.2  # of a standard normal: 0.80
    assert z.abs().max() < 5


def test_no_double_arithmetic() -> None:
    run(Case(sq=5, skv=5, dropout=0.1), inputs(Case(sq=5, skv=5, dropout=0.1)))
    functions = (attention.softmax_block, attention_backward.row_dots, attention_backward.softmax_backward_tile)
    for function in functions:
        assert_no_double(function)


def arguments(**changes: object) -> tuple:
    x = torch.zeros(2, 4, 16, 32, dtype=torch.bfloat16)
    window = {"left": -1, "right": -1}
    given = SimpleNamespace(
        q=x, k=x, v=x, scale=1.0, mask_type="none", **window, mask=None, dropout=0.0, rng_state=None
    )
    return tuple({**vars(given), **changes}.values())


X = torch.zeros(2, 4, 16, 32, dtype=torch.bfloat16)
REFUSALS = [
    ({"q": X[0]}, "q must be 4-D"),
    ({"q": X.float(), "k": X.float(), "v": X.float()}, "must all be torch.bfloat16 or torch.float16"),
    ({"k": X.half()}, "k is torch.float16 and q torch.bfloat16"),
    ({"v": X.transpose(2, 3).contiguous().transpose(2, 3)}, "v must be contiguous in its last dimension"),
    ({"q": X[..., :20], "k": X[..., :20], "v": X[..., :20]}, "multiple of 8 from 8 to 256; got 20"),
    ({"v": X[:, :2]}, "k and v must be"),
    ({"k": X[:, :3], "v": X[:, :3]}, "q's 4 heads must be a multiple of k's heads; k has 3"),
    ({"scale": 0.0}, "scale must be a positive number"),
    ({"scale": math.nan}, "scale must be a positive number"),
    ({"mask_type": "padding"}, "mask_type must be one of none, causal, causal_bottom_right; got 'padding'"),
    ({"mask": torch.zeros(2, 1, 16, 16)}, "mask must be torch.bool"),
    ({"left": -2}, "left and right must each be -1 (no limit) or a number of keys; got -2 and -1"),
    ({"left": 3, "right": -7}, "left and right must each be -1 (no limit) or a number of keys; got 3 and -7"),
    ({"mask": torch.zeros(16, 16, dtype=torch.bool)}, "mask must be 4-D and broadcast"),
    ({"mask": torch.zeros(2, 3, 16, 16, dtype=torch.bool)}, "mask must be 4-D and broadcast"),
    ({"dropout": 1.5}, "dropout probability must be from 0 to 1; got 1.5"),
    ({"dropout": 0.1}, "needs rng_state"),
    ({"dropout": 0.1, "rng_state": torch.zeros(2)}, "rng_state must be a contiguous int64 [2]"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSALS)
def test_refusals(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        twin.attention(*arguments(**changes))


def test_refusals_of_the_backward() -> None:
    x, row = X, torch.zeros(2, 4, 16)
    rest = (1.0, "none", -1, -1, None, 0.0, None)
    for position, wrong, sentence in (
        (0, x[:, :2], "grad must be torch.bfloat16 [2, 4, 16, 32]"),
        (4, x.half(), "out must be torch.bfloat16 [2, 4, 16, 32]"),
        (5, row.double(), "m must be contiguous torch.float32 [2, 4, 16]"),
        (6, row[:, :1], "inv must be contiguous torch.float32 [2, 4, 16]"),
        (0, x.transpose(2, 3).contiguous().transpose(2, 3), "grad must be contiguous in its last dimension"),
    ):
        args = [x, x, x, x, x, row, row]
        args[position] = wrong
        with pytest.raises(ValueError, match=re.escape(sentence)):
            twin.attention_backward(*args, *rest)


def test_gradients_are_refused_outside_a_function() -> None:
    q = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="has no derivative of its own"):
        twin.attention(*arguments(q=q))


def compare(case: Case, change=None) -> None:  # type: ignore[no-untyped-def]
    cpu = inputs(case)
    if change is not None:
        change(cpu)
    cuda = {name: to_cuda(x) for name, x in cpu.items()}
    expected = run(case, cpu)
    for name, value in run(case, cuda).items():
        assert_same_bits(expected[name], value, f"{name} of {case}")


FORCED = list(itertools.product((torch.bfloat16, torch.float16), (64, 128, 256), (0.0, 0.1)))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "d", "dropout"), FORCED)
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_every_configuration(dtype: torch.dtype, d: int, dropout: float, mask_type: str) -> None:
    compare(Case(b=2, hkv=2, group=2, sq=197, skv=261, d=d, dtype=dtype, mask_type=mask_type, dropout=dropout))


@pytest.mark.gpu
@pytest.mark.parametrize(("sq", "skv"), [(700, 700), (130, 600), (600, 130)])
@pytest.mark.parametrize("window", [(0, 0), (100, -1), (-1, 100), (128, 128), (127, 1), (300, 257), (2**31 - 1, 5)])
@pytest.mark.parametrize(("mask_type", "d", "dropout"), [("none", 40, 0.0), ("causal", 128, 0.1), ("none", 136, 0.1)])
def test_windows(window: tuple[int, int], mask_type: str, d: int, dropout: float, sq: int, skv: int) -> None:
    compare(Case(hkv=2, group=2, sq=sq, skv=skv, d=d, mask_type=mask_type, window=window, dropout=dropout))


@pytest.mark.gpu
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_a_long_window_takes_turns(mask_type: str) -> None:
    """More tiles than multiprocessors, so that blocks take tickets; up to five key blocks add to a tile's dq."""
    compare(Case(hkv=8, group=2, sq=1100, skv=1100, d=64, mask_type=mask_type, window=(400, 70)))


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [1, 3 * 384 * 48])
def test_dropout_where_bits_fit_of_some_heads_alone(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one head of keys, or of three, whose 300 queries and keys take 384 * 48 bytes a head of queries."""
    monkeypatch.setattr(launched_backward, "KEEP", keep)
    compare(Case(b=2, hkv=4, group=1, sq=300, skv=300, d=128, mask_type="causal", dropout=0.1))


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "group", "dropout", "lengths"), [(128, 4, 0.0, "none"), (64, 5, 0.1, "both")])
@pytest.mark.parametrize("mask_type", ["causal", "causal_bottom_right"])
def test_parts_of_heads(
    mask_type: str, d: int, group: int, dropout: float, lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last heads of keys, two or all of them, are taken in parts, of one head of the group or of two."""
    monkeypatch.setattr(launched_backward, "AT_LEAST", 7 / launch.processors(0))  # ... of four key blocks
    case = Case(b=2, hkv=2, group=group, sq=400, skv=450, d=d, mask_type=mask_type, dropout=dropout, lengths=lengths)
    compare(case)
    monkeypatch.setattr(launched_backward, "KEEP", 3 * 512 * 64 * group)  # of two heads at a time, where three fit
    compare(replace(case, b=1, hkv=5) if dropout else replace(case, b=1))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_masks(mask: str, mask_type: str) -> None:
    compare(Case(b=2, hkv=1, group=2, sq=300, skv=150, mask=mask, mask_type=mask_type, dtype=torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(("sq", "skv"), [(70, 512), (70, 640), (70, 642), (1, 643), (1, 640)])
def test_a_mask_of_keys(sq: int, skv: int, d: int, dropout: float) -> None:
    """Blocks of keys of which none, one and all are hidden; rows of the mask that start at any byte."""

    def change(given: dict[str, torch.Tensor | None]) -> None:
        mask = torch.zeros(3, 1, 1, skv, dtype=torch.bool)
        mask[0, ..., 127] = mask[1, ..., 128] = mask[2, ..., 256:384] = mask[2, ..., -1] = True
        given["mask"] = mask

    compare(Case(b=3, hkv=2, sq=sq, skv=skv, d=d, dropout=dropout), change)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    compare(Case(b=2, hkv=2, group=1, sq=130, skv=130, d=40, layout=layout, mask_type="causal", dropout=0.1))


@pytest.mark.gpu
@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (1, 129), (128, 128), (129, 1), (64, 65), (512, 17), (257, 640)])
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_ragged(sq: int, skv: int, mask_type: str) -> None:
    compare(Case(hkv=2, group=1, sq=sq, skv=skv, d=24, mask_type=mask_type, dropout=0.25))


@pytest.mark.gpu
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_any_shape(case: Case) -> None:
    compare(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_scores(dtype: torch.dtype) -> None:
    """Weights that underflow, m that jumps by hundreds from block to block."""
    compare(Case(sq=200, skv=400, d=64, dtype=dtype, scale=20.0, mask_type="causal_bottom_right"))


def special(given: dict[str, torch.Tensor | None]) -> None:
    for name, row, value in (("q", 3, "inf"), ("k", 7, "nan"), ("v", 140, "inf"), ("grad", 150, "-inf")):
        given[name][0, 0, row, 1] = float(value)


@pytest.mark.gpu
@pytest.mark.parametrize("mask_type", MASK_TYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_infinity_and_nan(dtype: torch.dtype, mask_type: str) -> None:
    compare(Case(hkv=2, sq=160, skv=160, d=32, dtype=dtype, mask_type=mask_type), special)


@pytest.mark.gpu
@pytest.mark.parametrize(("b", "sq", "skv"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_nothing(b: int, sq: int, skv: int) -> None:
    compare(Case(b=b, sq=sq, skv=skv))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "d", "dropout"), FORCED)
@pytest.mark.parametrize("bias", BIASES[1:])
def test_every_configuration_with_a_bias(dtype: torch.dtype, d: int, dropout: float, bias: str) -> None:
    sizes = {"b": 2, "hkv": 2, "group": 2, "sq": 197, "skv": 261, "d": d, "dtype": dtype, "dropout": dropout}
    compare(Case(**sizes, bias=bias, bias_is_fp32=d == 128, mask_type="causal_bottom_right"))


@pytest.mark.gpu
@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (1, 129), (128, 128), (129, 1), (64, 65), (512, 17), (257, 640)])
@pytest.mark.parametrize(("mask_type", "mask"), [("causal", "none"), ("none", "arbitrary")])
@pytest.mark.parametrize(("bias", "d"), [("11ss", 24), ("1hss", 136), ("h slopes", 72)])
def test_ragged_with_a_bias(sq: int, skv: int, mask_type: str, mask: str, bias: str, d: int) -> None:
    compare(Case(2, 2, 1, sq, skv, d, torch.float16, mask_type, mask, (100, -1), 0.25, bias=bias))


@pytest.mark.gpu
def test_a_bias_of_any_strides() -> None:
    def transposed(cpu: dict[str, torch.Tensor | None]) -> None:
        cpu["bias"] = cpu["bias"].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    compare(Case(2, 2, 2, 150, 140, 64, bias="bhss"), transposed)
    compare(
        Case(2, 2, 2, 150, 140, 64, bias="bhss"),
        lambda cpu: cpu.update(bias=cpu["bias"][:1, :1, :1].expand(2, 4, 150, -1)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_infinity_and_nan_in_a_bias(value: str) -> None:
    def change(cpu: dict[str, torch.Tensor | None]) -> None:
        cpu["bias"][0, 0, 3, 7:140] = float(value)
        cpu["bias"][0, 1, 5] = float(value)

    for d in (64, 128, 256):
        compare(Case(2, 2, 1, 150, 160, d, bias="1hss"), change)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"bias": "1hss"}, {"sinks": True}, {"mask": "arbitrary", "window": (200, 0)}])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("d", "e"), [(192, 128), (64, 128), (128, 40), (96, 256), (8, 16), (256, 8)])
def test_heads_of_two_sizes(d: int, e: int, dropout: float, options: dict) -> None:
    sizes = {"b": 2, "hkv": 2, "group": 2, "sq": 197, "skv": 261, "d": d, "e": e}
    compare(Case(**sizes, mask_type="causal", dropout=dropout, layout="sbhd", **options))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "d", "dropout"), FORCED)
def test_every_configuration_with_sinks(dtype: torch.dtype, d: int, dropout: float) -> None:
    compare(Case(2, 2, 2, 197, 261, d, dtype, "causal_bottom_right", dropout=dropout, sinks=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (1, 129), (129, 1), (512, 17), (600, 640)])
@pytest.mark.parametrize("value", [None, "1e30", "-1e30", "100", "inf", "-inf", "nan"])
def test_sinks(sq: int, skv: int, value: str | None) -> None:
    def change(cpu: dict[str, torch.Tensor | None]) -> None:
        if value is not None:
            cpu["sinks"][1] = float(value)

    compare(Case(2, 2, 1, sq, skv, 72, mask_type="causal", mask="arbitrary", window=(200, 0), sinks=True), change)


@pytest.mark.gpu
def test_a_graph_draws_a_new_mask_at_each_replay() -> None:
    case = Case(hkv=2, sq=100, skv=100, dropout=0.5)
    given = {name: to_cuda(x) for name, x in inputs(case).items()}
    start = given["rng_state"].clone()
    run(case, {**given, "rng_state": start.clone()})  # loads the modules
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case, given)
    given["rng_state"].copy_(start)
    state = start.cpu()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        expected = run(case, {name: None if x is None else x.cpu() for name, x in given.items()} | {"rng_state": state})
        for name, value in captured.items():
            assert_same_bits(expected[name], value, name)
