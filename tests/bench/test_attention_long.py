"""`twin bench attention_long` on a GPU that only takes notes: what each way launches, and its tables."""

import statistics

import pytest
from shared import dry_runs
from shared.dry_bench import is_summary, is_table
from shared.dry_gpu import DryGpu
from shared.dry_runs import launches, percents, run

from optimized import measure
from optimized.bench.kernels import attention_long
from optimized.ops.attentions import attention_decode


def test_attention_over_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (measure.RESULTS / f"{attention_long.NAME}.json").exists():  # it is not measured yet
        monkeypatch.setattr(dry_runs, "is_what_was_recorded", lambda *given: None)
    ran, cells = run(attention_long), []
    pairs = [(batch, keys) for batch in attention_long.BATCHES for keys in attention_long.KEYS]
    timed = ran.rounds[: len(pairs)]
    for (batch, keys), row, one in zip(pairs, ran.payload["steps"], timed, strict=True):
        assert (row["batch"], row["keys"]) == (batch, keys)
        assert set(one.samples) == set(row["us"]) == {*attention_long.WAYS, "flash"}
        calls, us = attention_long._calls(batch, keys), {}
        assert calls * 4 * batch * keys * 8 * 128 >= attention_long.LEAST_BYTES or calls == 16
        for name, samples in one.samples.items():
            is_summary(row["us"][name], [sample * 1e3 / calls for sample in samples])
            us[name] = statistics.median(samples) * 1e3 / calls
        chain, segments = (
            min(us[f"{order}, {way}"] for way in ("walk", "shared")) for order in ("one chain", "segments")
        )
        shown = [f"{us[name]:.0f}" for name in (*attention_long.WAYS, "flash")]
        ratios = (f"{chain / us['flash']:.2f}×", f"{segments / us['flash']:.2f}×")
        cells.append((f"batch {batch}, {keys:,} keys", *shown, *ratios))
    is_table(ran.tables[0], ran.tables[0].columns, cells)
    cells = []
    for tokens, row, one in zip(attention_long.TEXTS, ran.payload["texts"], ran.rounds[len(pairs) :], strict=True):
        ms = {name: statistics.median(samples) for name, samples in one.samples.items()}
        for name, samples in one.samples.items():
            is_summary(row["ms"][name], samples)
            kernels = launches(one.noted[name])
            assert bool(kernels) != name.startswith("cuDNN"), name
        assert ("SEGMENT=4096" in str(one.noted["forward, segments"])) > ("SEGMENT=4096" in str(one.noted["forward"]))
        plain, segments = (ms[name] + ms["backward"] for name in ("forward", "forward, segments"))
        theirs = ms["cuDNN forward"] + ms["cuDNN backward"]
        shown = [f"{ms[name]:.1f}" for name in ("forward", "forward, segments", "backward")]
        cells.append((f"{tokens:,} tokens", *shown, *percents([segments / plain - 1, theirs / segments])))
    is_table(ran.tables[1], ran.tables[1].columns, cells)


@pytest.mark.parametrize("batch", attention_long.BATCHES)
@pytest.mark.parametrize("keys", attention_long.KEYS)
def test_l2_holds_no_caches_from_one_round_to_the_next(batch: int, keys: int) -> None:
    """The caches of a graph, keys and values in 16 bits, are together larger than an H200's L2."""
    each = batch * keys * 2 * attention_long.GROUPS * attention_long.D * 2
    assert attention_long._calls(batch, keys) * each > 60 << 20


@pytest.mark.parametrize("way", attention_long.WAYS)
def test_each_way_is_what_it_is_called(way: str) -> None:
    """Which kernels a step of one token launches."""
    before = (attention_decode.LEAST_KEYS, attention_decode.WAVES)
    with DryGpu() as gpu, pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention_long, "WAYS", {way: attention_long.WAYS[way]})
        patched.setattr(measure, "graph", lambda call, calls: call(0))
        patched.setattr(attention_long, "flash", lambda *given: None)
        attention_long._step(1, 8192)
    names = [one.kernel.kernel for one in gpu.launches]
    assert ("attention_decode" in names) == way.endswith("shared"), names
    assert ("attention" in names) == way.endswith("walk"), names
    segments = {one.kernel.defines.get("SEGMENT", 0) for one in gpu.launches if one.kernel.name != "attention_gaps"}
    assert segments == {4096 if way.startswith("segments") else 0}
    assert before == (attention_decode.LEAST_KEYS, attention_decode.WAVES)
