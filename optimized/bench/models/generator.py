"""The inference engine: `te.Generator` beside Hugging Face's compiled decoding and plain PyTorch in a CUDA graph; the
memory of pages; the price of a written order of attention's keys (docs/results/generator.json).

**Decoding.** Four layers of Llama 3 8B's shape with its whole vocabulary, random weights, greedy. Who decodes and what
its cache holds is in `generator_contestants`. At each batch and context the host's clock measures blocks of steps, from
a step's beginning until its tokens are numbers on the host; ours also computes log-probabilities, and has the tokens of
a step when the next one is on its way. Contestants take turns where their caches fit the GPU together, and otherwise
run one after the other. Hugging Face's forward is compiled for each size, so it comes last, size by size, as long as
there is time: compilation has `COMPILING` seconds at most.

**Attention** of one query of each head with all keys of one sequence, alone: sixteen calls in a CUDA graph, each with
keys of its own, so that L2 does not hold them. Ours scores keys of a head side by side, and goes along its chain of
outputs in order, one block of threads for 64 channels.

**Memory** of caches for sequences of mixed lengths, in pages and without: the bytes of their tensors, and the most that
torch's allocator held beside the weights until a step of one token each had run.

A part that fails, or for which there is no time, leaves a sentence in `missing`; the others stand.
"""

import contextlib
import gc
import importlib.util
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import optimized as te
from optimized import measure
from optimized.bench import Payload, Progress, result, silent
from optimized.bench.layers import decode, layer
from optimized.bench.layers.layer_models import Case
from optimized.bench.models.generator_contestants import Engine, HuggingFace, Loop, Model, Weights, fill, their_model
from optimized.bench.table import Table, table
from reference.ops.library import twin

NAME = "generator"
WHAT = "te.Generator, pages, a written order"
KERNELS = tuple(sorted({*decode.KERNELS, "attention_gaps", "likeliest", "rotary_append"}))
LAYERS, VOCABULARY, LONGEST = 4, 128256, 32768
CASE = Case("Llama 3 8B", 4096, 14336, 32, LONGEST, 1, torch.bfloat16, True, 0.0, True, 8, True)
PAIRS = (*itertools.product((1, 32, 256), (512, 2048, 8192)), (1, LONGEST))  # batches and contexts
THEIR_PAIRS = ((1, 512), (32, 512), (256, 512), (1, 2048), (32, 2048), (256, 2048), (1, 8192), (32, 8192), (256, 8192))
REPEATS, STEPS, UNCOUNTED = 5, 10, 2  # blocks, the steps of each, and steps at its beginning that are not counted
TOGETHER = 60 << 30  # bytes of caches up to which contestants take turns
SHOWN = 512  # README's context
SECONDS, COMPILING = 200.0, 45.0  # of the whole run, and of Hugging Face's part
OURS, SEGMENTED, OURS_16 = "Twin Engine, FP8", "Twin Engine, FP8, segments", "Twin Engine, bf16"
SEGMENT = 4096  # keys; a shorter text has one chain in either case
LOOP, LOOP_16 = "PyTorch, FP8, CUDA graph", "PyTorch, bf16, CUDA graph"
THEIRS = decode.THEIR_MODEL
SEQUENCES, LENGTHS, PAGE = 32, (100, 8192), 128
CALLS = 16


class _Run:
    """What has been found, what is missing, and the time."""

    def __init__(self, seconds: float) -> None:
        self.begun, self.seconds = time.monotonic(), seconds
        self.missing: dict[str, str] = {}

    def left(self) -> float:
        """Seconds until the run is to end."""
        return self.seconds - (time.monotonic() - self.begun)

    def in_time(self) -> None:
        """Refuse to begin a part for which there is no time."""
        if self.left() < 0:
            raise TimeoutError("the time of the run was used up")

    def say(self, text: str) -> None:
        """Print what was found, at once."""
        print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", flush=True)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the run, whose error is kept as a sentence."""
        try:
            yield
        except Exception as error:
            self.missing[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
            self.say(f"{name} is missing: {self.missing[name]}")


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _rows(run: _Run, blocks: dict[str, Any], batch: int, context: int, repeats: int) -> list[dict[str, Any]]:
    samples = layer.timed({name: one.block for name, one in blocks.items()}, repeats, STEPS, UNCOUNTED)
    rows = []
    for name, values in samples.items():
        ms = measure.spread(values)
        row = {"name": name, "batch": batch, "context": context, "ms": ms}
        rows.append({**row, "tokens_per_second": batch / ms["median"] * 1e3})
        run.say(f"batch {batch}, context {context}, {name}: {ms['median']:.3f} ms a step")
    return rows


def decoding(
    run: _Run, case: Case, vocabulary: int, repeats: int, device: str, tick: Callable[[], object]
) -> list[dict[str, Any]]:
    """Ours and plain PyTorch at each batch and context."""
    makers: dict[str, Callable[[int, int], Any]] = {}
    for name, fp8, segment in ((OURS, True, None), (SEGMENTED, True, SEGMENT), (OURS_16, False, None)):
        with run.part(name):
            run.in_time()
            model = Model(case, LAYERS, vocabulary, fp8, device, segment)
            makers[name] = lambda batch, context, model=model: Engine(model, batch, context)  # type: ignore[misc]
    for name, fp8 in ((LOOP, True), (LOOP_16, False)):
        with run.part(name):
            run.in_time()
            weights = Weights(case, LAYERS, vocabulary, fp8, device)
            makers[name] = lambda batch, context, weights=weights: Loop(  # type: ignore[misc]
                weights, batch, context, compiled=device == "cuda"
            )
    rows: list[dict[str, Any]] = []
    for batch, context in PAIRS:
        size = batch * context * LAYERS * 2 * (case.kv_heads or case.heads) * case.channels * 2
        names = [name for name in makers if name != SEGMENTED or context > SEGMENT]
        alone = len(names) * size > TOGETHER
        for group in [[name] for name in names] if alone else [names]:
            blocks: dict[str, Any] = {}
            for name in group:
                with run.part(f"{name}, batch {batch}, context {context}"):
                    run.in_time()
                    blocks[name] = makers[name](batch, context)
            with run.part(f"batch {batch}, context {context}"):
                run.in_time()
                rows += _rows(run, blocks, batch, context, repeats) if blocks else []
            blocks.clear()
            _free()
        tick()
    return rows


def theirs(run: _Run, case: Case, vocabulary: int, repeats: int, device: str, **options: Any) -> list[dict[str, Any]]:
    """Hugging Face's, for as many sizes as can be compiled in time."""
    if importlib.util.find_spec("transformers") is None:
        run.missing[THEIRS] = "transformers is not installed"
        return []
    rows: list[dict[str, Any]] = []
    with run.part(THEIRS):
        run.in_time()
        model, begun, took = their_model(case, LAYERS, vocabulary, device), time.monotonic(), 0.0
        for batch, context in THEIR_PAIRS:
            name, start = f"{THEIRS}, batch {batch}, context {context}", time.monotonic()
            with run.part(name):
                run.in_time()
                if min(COMPILING - (start - begun), run.left()) < took:
                    raise TimeoutError(f"not compiled; {COMPILING:.0f} seconds were for all compilation")
                entrants = {THEIRS: HuggingFace(model, case, batch, context, **options)}
                run.say(f"{name}: compiled in {time.monotonic() - start:.0f} s")
                rows += _rows(run, entrants, batch, context, repeats)
                entrants.clear()
            layer.clear()
            took = max(took, time.monotonic() - start)
    return rows


def attention(run: _Run, case: Case, repeats: int) -> list[dict[str, Any]]:
    """One query of each head with all keys of one sequence: ours, and PyTorch's kernels."""
    groups, d = case.kv_heads or case.heads, case.channels
    together, rows = case.heads // groups, []
    for context in sorted({context for batch, context in PAIRS if batch == 1 and context >= 2048}):
        pairs = [torch.randn(2, context, groups, d, device="cuda", dtype=case.dtype) for _ in range(CALLS)]
        q = torch.randn(together, groups, d, device="cuda", dtype=case.dtype)
        ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
        pages = torch.arange(context // PAGE, **ints)[None]
        lengths = (
            torch.tensor([together], **ints),
            torch.tensor([context], **ints),
            torch.tensor([0, together], **ints),
        )
        given = (d**-0.5, "none", -1, -1, *lengths, together, context, None)

        def ours(i: int, pairs: Any = pairs, q: Any = q, pages: Any = pages, given: Any = given) -> object:
            keys, values = (x.view(-1, PAGE, groups, d) for x in pairs[i])
            return twin.attention_paged(q, keys, values, pages, *given)

        turned = [one.transpose(1, 2).contiguous()[:, None] for one in pairs]
        rows_of_q = q.transpose(0, 1)[None].contiguous()

        def torchs(backend: SDPBackend, turned: Any = turned, q: Any = rows_of_q) -> Callable[[int], object]:
            def call(i: int) -> object:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, *turned[i])

            return call

        calls = {"in order": ours, "flash": torchs(SDPBackend.FLASH_ATTENTION)}
        calls["cuDNN"] = torchs(SDPBackend.CUDNN_ATTENTION)
        graphs = {}
        for name, each in calls.items():
            with run.part(f"attention alone, {name}, context {context}"):
                run.in_time()
                graphs[name] = measure.graph(each, CALLS)
        for name, values in measure.interleave(graphs, 3 * repeats, 2).items():
            us = measure.spread([value * 1e3 / CALLS for value in values])
            rows.append({"name": name, "context": context, "us": us})
            run.say(f"attention alone, context {context}, {name}: {us['median']:.1f} us")
        del pairs, turned, calls, graphs, ours, torchs
        _free()
    return rows


def _held(model: Model, lengths: list[int], most: int, device: str, **options: Any) -> dict[str, int]:
    """Bytes of a cache for these lengths, and the most that was allocated until a step had run."""
    case = model.case
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sizes = (len(lengths), most, case.kv_heads or case.heads, case.channels, case.dtype)
    cache = te.InferenceParams(*sizes, device=device, **options)
    fill(cache, LAYERS, {i: n - 1 for i, n in enumerate(lengths)})
    cache.pre_step(dict.fromkeys(range(len(lengths)), 1))
    model(torch.zeros(1, len(lengths), dtype=torch.int64, device=device), cache)
    torch.cuda.synchronize()
    tensors = [x for both in (*cache.cache.values(), *cache.scales.values()) for x in both]
    size = sum(x.numel() * x.element_size() for x in tensors)
    return {"bytes": size, "peak_bytes": torch.cuda.max_memory_allocated() - before}


def memory(run: _Run, case: Case, vocabulary: int, device: str) -> dict[str, Any]:
    """Caches of sequences of mixed lengths, in pages and not."""
    draw, (least, most) = random.Random(0), LENGTHS
    lengths = [draw.randint(least, most) for _ in range(SEQUENCES)]
    model, rows = Model(case, LAYERS, vocabulary, False, device), []
    paged = {"is_paged": True, "total_num_pages": sum(-(-n // PAGE) for n in lengths), "page_size": PAGE}
    options: dict[str, dict[str, Any]] = {"without pages": {}, "in pages": paged}
    options["in pages, FP8"] = {**paged, "fp8_kv": True}
    for name, each in options.items():
        with run.part(f"memory, {name}"):
            run.in_time()
            _free()
            found = _held(model, lengths, most, device, **each)
            rows.append({"name": name, **found})
            run.say(f"memory {name}: {found['bytes'] / 2**30:.2f} GiB, at most {found['peak_bytes'] / 2**30:.2f} GiB")
    return {"sequences": SEQUENCES, "tokens": sum(lengths), "longest": most, "page": PAGE, "rows": rows}


@torch.no_grad()
def run(
    progress: Progress = silent,
    repeats: int = REPEATS,
    case: Case = CASE,
    vocabulary: int = VOCABULARY,
    device: str = "cuda",
    seconds: float = SECONDS,
    **options: Any,
) -> Payload:
    """Measure; `options` are for the `torch.compile` of Hugging Face's forward."""
    now, done = _Run(seconds), itertools.count(1)
    found: dict[str, Any] = {"attention": [], "memory": None}

    def tick() -> None:
        progress(next(done) / (len(PAIRS) + 3))

    rows = decoding(now, case, vocabulary, repeats, device, tick)
    _free()
    if device == "cuda":
        with now.part("attention alone"):
            now.in_time()
            found["attention"] = attention(now, case, repeats)
    tick()
    with now.part("memory"):
        now.in_time()
        found["memory"] = memory(now, case, vocabulary, device)
    _free()
    tick()
    layer.clear()
    rows += theirs(now, case, vocabulary, repeats, device, **{"mode": "reduce-overhead", **options})
    tick()
    sizes = {"layers": LAYERS, "hidden": case.hidden, "ffn": case.ffn, "heads": case.heads, "kv_heads": case.kv_heads}
    return result(
        "te.Generator beside others; host clock, blocks of steps from tokens to tokens on the host",
        KERNELS,
        repeats=repeats,
        sizes={**sizes, "vocabulary": vocabulary},
        rows=rows,
        **found,
        missing=now.missing,
        transformers=measure.version("transformers"),
    )


def _decoding_tables(payload: Payload) -> Iterator[Table]:
    speeds: dict[tuple[int, int], dict[str, float]] = {}
    for row in payload["rows"]:
        speeds.setdefault((row["batch"], row["context"]), {})[row["name"]] = row["tokens_per_second"]
    mine, others = (OURS, SEGMENTED, OURS_16), (LOOP_16, THEIRS)
    names = (*mine, LOOP, *others)
    cells = []
    for (batch, context), each in speeds.items():
        best = max((each[name] for name in others if name in each), default=None)
        speed = [f"{each[name]:,.0f}" if name in each else "–" for name in names]
        ratios = [f"{each[name] / best:.2f}×" if best and name in each else "–" for name in mine]
        cells.append((f"batch {batch}, {context:,} tokens", *speed, *ratios))
    sizes, version = payload["sizes"], payload["transformers"]
    how = (
        f"Tokens a second of `te.Generator` with CUDA graphs and of others, {sizes['layers']} layers of Llama 3 8B's "
        f"shape and {sizes['vocabulary']:,} tokens to choose from, greedy; the last columns divide Twin Engine's "
        "by the better of the two others in bf16."
    )
    note = (
        "Plain PyTorch has compiled norms and flash decoding; its FP8 has neither scales nor an amax. Twin Engine also "
        "gives log-probabilities."
    )
    if version:
        note += (
            f" Hugging Face is transformers {version}; – is not measured: for lack of time, or segments of a text that "
        )
        note += "has one."
    if cells:
        yield table(payload, "Decoding with te.Generator", ("", *names, "FP8", "segments", "bf16"), cells, how, note)
    pairs = {context: each for (batch, context), each in speeds.items() if batch == 1}
    alone = {(row["context"], row["name"]): row["us"]["median"] for row in payload["attention"]}
    prices = []
    for context, each in sorted(pairs.items()):
        steps = [
            f"{each[loop] / each[ours]:.2f}×" if ours in each and loop in each else "–"
            for ours, loop in ((OURS, LOOP), (OURS_16, LOOP_16))
        ]
        ops = [alone.get((context, name)) for name in ("in order", "flash", "cuDNN")]
        best_op = min((x for x in ops[1:] if x is not None), default=None)
        ratio = f"{ops[0] / best_op:.1f}×" if ops[0] is not None and best_op is not None else "–"
        prices.append((f"{context:,} tokens", *steps, *("–" if x is None else f"{x:.0f}" for x in ops), ratio))
    if prices:
        columns = ("", "step, FP8", "step, bf16", "in order, µs", "flash, µs", "cuDNN, µs", "attention")
        how = (
            "A step's time with keys in a written order, over plain PyTorch's in the same precision, batch 1; then one "
            "layer's attention alone, and its time over the better of PyTorch's."
        )
        yield table(payload, "The price of a written order", columns, prices, how)


def tables(payload: Payload) -> list[Table]:
    """Decoding, the written order's price, memory."""
    found = list(_decoding_tables(payload))
    if memory := payload["memory"]:
        rows = [
            (row["name"], *(f"{row[name] / 2**30:.2f}" for name in ("bytes", "peak_bytes"))) for row in memory["rows"]
        ]
        how = (
            f"Caches of {memory['sequences']} sequences with {memory['tokens']:,} tokens together, of up to "
            f"{memory['longest']:,}, in {payload['sizes']['layers']} layers: their tensors, and the most that was "
            "allocated beside the weights until a step of one token each had run."
        )
        found.append(table(payload, "A cache in pages", ("", "cache, GiB", "at most, GiB"), rows, how))
    return found


def summary(payload: Payload) -> list[tuple[str, str, str, str]]:
    """README's row: tokens a second after 512 tokens, by batch, beside the others."""
    speeds: dict[str, dict[int, float]] = {}
    for row in payload["rows"]:
        if row["context"] == SHOWN:
            speeds.setdefault(row["name"], {})[row["batch"]] = row["tokens_per_second"]
    mine = speeds[OURS]
    others = {name: speeds[name] for name in (LOOP, LOOP_16, THEIRS) if mine.keys() <= speeds.get(name, {}).keys()}

    def each(values: Iterable[float], form: str) -> str:
        return ", ".join(format(value, form) for value in values)

    batches = each(mine, "d")
    what = f"decoding with `te.Generator`, {payload['sizes']['layers']} layers of Llama 3 8B; batches of {batches}"
    beside = "; ".join(f"{name}: {each((one[n] for n in mine), ',.0f')}" for name, one in others.items())
    faster = "; ".join(f"{each((mine[n] / one[n] for n in mine), '.2f')}×" for one in others.values())
    return [(what, f"{each(mine.values(), ',.0f')} tokens/s", beside, faster)]
