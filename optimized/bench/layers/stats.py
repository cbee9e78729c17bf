"""What `collect_stats` costs a training step of a GPT layer in FP8 (docs/results/stats.json).

Four copies of a layer take turns with blocks of a few steps, timed by the host's clock (`bench.layer.timed`): one that
nobody measures, one inside a `with` between two measured steps, and two of which every step is measured, the second
with `Float8CurrentScaling` beside its own recipe. A measured step runs op by op; the others are played from tapes. From
their medians follows what measuring one step in a hundred costs.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import optimized as te
from optimized import measure
from optimized.bench import Payload, Progress, result, silent
from optimized.bench.layers import layer
from optimized.bench.layers.layer_models import Case
from optimized.bench.table import Table, table

NAME = "stats"
WHAT = "what collecting statistics costs a step"
KERNELS = (*layer.KERNELS, "amax", "cast_stats", "current_scale", "multi_current_scale")
EVERY = 100
_BF16 = torch.bfloat16
CASES = (
    Case("GPT, hidden 768", 768, 3072, 12, 512, 4, _BF16, causal=True, dropout=0.1),
    Case("GPT, hidden 4096", 4096, 16384, 32, 2048, 4, _BF16, causal=True, dropout=0.1),
)
OFF, BETWEEN, MEASURED, BESIDE = "off", "between", "measured", "beside"
_NEVER = 1 << 40  # forwards until the next one that is measured


def _step(case: Case) -> tuple[Any, Callable[[], None]]:
    """A layer, and a step of it."""
    normal = functools.partial(torch.nn.init.normal_, std=0.02)  # drawn on the GPU
    options: dict[str, Any] = {"hidden_dropout": case.dropout, "attention_dropout": case.dropout}
    options |= {"init_method": normal, "output_layer_init_method": normal, "params_dtype": case.dtype}
    model = te.TransformerLayer(case.hidden, case.ffn, case.heads, **options)
    x = torch.randn(case.sequence, case.batch, case.hidden, device="cuda", dtype=case.dtype).requires_grad_()
    grad = torch.randn_like(x)

    def step() -> None:
        x.grad = None
        model.zero_grad(set_to_none=True)
        with te.autocast(recipe=te.DelayedScaling()):
            y = model(x)
        y.backward(grad)

    return model, step


def _repeat(step: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        step()


def _measured(model: Any, step: Callable[[], None], recipes: Sequence[te.recipe.Recipe], steps: int) -> None:
    with te.collect_stats(model, every=1, recipes=recipes):
        _repeat(step, steps)


def run(progress: Progress = silent, repeats: int = 15, inner: int = 10) -> Payload:
    rows = []
    for done, case in enumerate(CASES, 1):
        with contextlib.ExitStack() as stack:
            entrants = {name: _step(case) for name in (OFF, BETWEEN, MEASURED, BESIDE)}
            stack.enter_context(te.collect_stats(entrants[BETWEEN][0], every=_NEVER))
            entrants[BETWEEN][1]()  # the first forward is measured
            current = [te.recipe.Float8CurrentScaling()]
            blocks: dict[str, Callable[[int], object]] = {
                OFF: functools.partial(_repeat, entrants[OFF][1]),
                BETWEEN: functools.partial(_repeat, entrants[BETWEEN][1]),
                MEASURED: functools.partial(_measured, *entrants[MEASURED], ()),
                BESIDE: functools.partial(_measured, *entrants[BESIDE], current),
            }
            samples = layer.timed(blocks, repeats, inner, layer.UNCOUNTED)
        times = {name: measure.summary(values) for name, values in samples.items()}
        rows.append({"layer": case.name, "tokens": case.tokens, "ms": times, "cost": cost(times)})
        progress(done / len(CASES))
    what = "a training step of a GPT layer in FP8, with and without statistics"
    return result(what, KERNELS, every=EVERY, repeats=repeats, inner=inner, rows=rows)


def cost(times: dict[str, Any]) -> float:
    """The share of its time that a training loop loses where one step in `EVERY` is measured."""
    off, between, measured = (times[name]["median"] for name in (OFF, BETWEEN, MEASURED))
    return float(((EVERY - 1) * between + measured) / (EVERY * off) - 1)


def tables(payload: Payload) -> list[Table]:
    """Steps that are measured and steps that are not."""
    rows = [
        (
            f"{row['layer']}, {row['tokens']} tokens",
            *(f"{row['ms'][name]['median']:.3f}" for name in (OFF, BETWEEN, MEASURED, BESIDE)),
            f"{100 * row['cost']:.1f} %",
        )
        for row in payload["rows"]
    ]
    columns = ("layer", "off", "between two", "measured", "and another recipe", f"cost of 1 in {payload['every']}")
    how = (
        "Median milliseconds of a training step in FP8: without statistics; `collect_stats` is open, between two "
        "measured steps; it is measured; it is measured and `Float8CurrentScaling` is tried beside. The last column: "
        f"what a training loop loses that measures every {payload['every']}th step."
    )
    return [table(payload, "Statistics", columns, rows, how)]
