"""`twin::attention` and its backward on the CPU: float64, the written order, masks, dropout, refusals."""

import dataclasses
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from shared.attention_cases import CASES, LAYOUTS, MASKS, Case, check_against_float64, exact, hidden_pairs, inputs, run
from shared.bits import assert_same_bits, torch_threads
from shared.numba_code import assert_no_double

from reference.numbers import elementary, tensor_core
from reference.ops.attentions import attention, attention_backward, attention_heads
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


@pytest.mark.parametrize("case", [Case(sq=20, skv=30), Case(sq=20, skv=30, dropout=0.5, layout="sbhd")])
def test_fake_tensors(case: Case) -> None:
    given = inputs(case)
    rest = (1.0, "none", -1, -1, None, case.dropout)
    tests = ("test_schema", "test_faketensor")
    q, k, v, state = (given[name] for name in ("q", "k", "v", "rng_state"))
    torch.library.opcheck(twin.attention.default, (q, k, v, *rest, state), test_utils=tests)
    saved = twin.attention(q, k, v, *rest, None if state is None else state.clone())
    torch.library.opcheck(
        twin.attention_backward.default, (given["grad"], q, k, v, *saved, *rest, state), test_utils=tests
    )


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
