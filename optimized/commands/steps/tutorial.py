"""Step 3, one layer in five ways: plain PyTorch, te's modules, te's fused modules, a TransformerLayer, and FP8."""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import reference as te
from optimized.bench.layers.tutorial_layers import (
    BasicTransformerLayer,
    FusedLayer,
    ModulesLayer,
    share,
    transformer_layer,
)
from optimized.commands.report import Report
from optimized.commands.steps import Outcome, Progress
from optimized.commands.steps.style import figure
from optimized.compare import Tally, differing
from optimized.cuda.device import hopper
from reference.nn.core import init
from reference.numbers import philox
from reference.support import palette

HIDDEN, FFN, HEADS, SEQUENCE, BATCH = 128, 512, 4, 64, 2
GRADIENT = 1e-5  # as in training, where the loss is a mean over about ten thousand tokens
RECIPE = {"fp8_format": te.Format.HYBRID, "amax_history_len": 16, "amax_compute_algo": "max"}
SHOWN = {"y": "y", "dx": "dx", "dw": "fc1.weight"}
Results = dict[str, torch.Tensor]

PARTS = ("LayerNorm", "QKV", "attention", "projection", "+", "LayerNorm", "fc1", "GELU", "fc2", "+")
PYTORCH, LIBRARY, EIGHT = palette.PALE, palette.GREY, palette.YELLOW  # of boxes: no tensors
ALONE = tuple((place, place + 1) for place in range(len(PARTS)))
FUSED = ((0, 2), (2, 3), (3, 4), (4, 5), (5, 9), (9, 10))
BOXES = {  # the first part and the end of each box; which boxes are te's; their colour
    "plain PyTorch": (ALONE, (), PYTORCH),
    "te.Linear,\nte.LayerNorm": (ALONE, (0, 1, 2, 3, 5, 6, 7, 8), LIBRARY),
    "LayerNormLinear,\nLayerNormMLP": (FUSED, (0, 1, 2, 4), LIBRARY),
    "TransformerLayer": (((0, 10),), (0,), LIBRARY),
    "TransformerLayer,\nFP8": (((0, 10),), (0,), EIGHT),
}


@dataclass(frozen=True)
class Step:
    """One way to compute the layer: y, dx and every parameter's gradient; `must_equal` names the step it must equal."""

    name: str
    results: Results
    must_equal: str | None = None


def basic_layer() -> BasicTransformerLayer:
    """The plain layer in bf16. Biases before a residual are 0, as at the start of any training."""
    basic = BasicTransformerLayer(HIDDEN, FFN, HEADS)
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(basic.named_parameters()):
            values = philox.normal(parameter.shape, std=init.WEIGHT_STD, seed=100 + seed)
            if name.startswith("ln") and name.endswith("weight"):
                values += 1
            if name in ("projection.bias", "fc2.bias"):
                values.zero_()
            parameter.copy_(values)
    return basic.bfloat16()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """x and dL/dy `[sequence, batch, hidden]` in bf16."""
    shape = (SEQUENCE, BATCH, HIDDEN)
    return philox.normal(shape, seed=97).bfloat16(), philox.normal(shape, std=GRADIENT, seed=98).bfloat16()


def names_of(layer: torch.nn.Module, basic: BasicTransformerLayer) -> list[str]:
    """The names that `layer`'s parameters have in `basic`, with which it shares them."""
    names = {id(parameter): name for name, parameter in basic.named_parameters()}
    return [names[id(parameter)] for parameter in layer.parameters()]


def one_step(layer: torch.nn.Module, names: list[str], recipe: te.DelayedScaling | None) -> Results:
    """Forward and backward on the layer's device."""
    parameters = list(layer.parameters())
    x, gradient = (t.to(parameters[0].device, parameters[0].dtype, copy=True) for t in inputs())
    layer.zero_grad(set_to_none=True)
    x.requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    y.backward(gradient)
    found: dict[str, Any] = {"y": y.detach(), "dx": x.grad}
    found |= {name: parameter.grad.clone() for name, parameter in zip(names, parameters, strict=True)}  # type: ignore[union-attr]
    return found


def steps(tick: Callable[[], None] = lambda: None) -> tuple[list[Step], Results, Tally]:
    """Every step on the CPU, the plain layer in float64, and the comparison with a GPU if there is one."""
    basic, gpu, tally = basic_layer(), hopper(), Tally()
    sizes = (HIDDEN, FFN, HEADS)
    exact_layer = copy.deepcopy(basic).double()
    exact = one_step(exact_layer, names_of(exact_layer, exact_layer), None)
    found = [Step("plain PyTorch", one_step(basic, names_of(basic, basic), None))]
    tick()
    layer = transformer_layer(*sizes)
    fp8 = te.DelayedScaling(**RECIPE)  # type: ignore[arg-type]
    for name, made, recipes, equals in (
        ("te.Linear, te.LayerNorm", ModulesLayer(*sizes), [None], None),
        ("LayerNormLinear, LayerNormMLP", FusedLayer(*sizes), [None], "te.Linear, te.LayerNorm"),
        ("TransformerLayer", layer, [None], "LayerNormLinear, LayerNormMLP"),
        ("TransformerLayer, FP8", layer, [fp8, fp8, fp8], None),
    ):
        share(made, basic)
        names = names_of(made, basic)
        twin = None if gpu is None else copy.deepcopy(made).to(gpu)
        for number, recipe in enumerate(recipes, 1):
            results = one_step(made, names, recipe)
            if twin is not None:
                for key, there in one_step(twin, names, recipe).items():
                    tally.add(results[key], there)
            found.append(Step(f"{name}, step {number}" if recipe else name, results, equals))
            tick()
    return found, exact, tally


def equalities(found: list[Step]) -> Tally:
    """Compare each step with the one that it must equal."""
    by_name = {step.name: step.results for step in found}
    tally = Tally()
    for step in found:
        if step.must_equal is not None:
            for key, tensor in by_name[step.must_equal].items():
                tally.add(tensor, step.results[key])
    return tally


def sqnr(exact: torch.Tensor, got: torch.Tensor) -> float:
    """10·log10(Σ exact² / Σ (exact - got)²) in dB; infinite where they are equal."""
    noise = float((exact.double() - got.double()).square().sum())
    if not noise:
        return math.inf
    return round(10 * math.log10(float(exact.double().square().sum()) / noise), 1) + 0.0  # not -0.0


def _changed(before: Results, now: Results) -> str:
    words = sum(tensor.numel() for tensor in now.values())
    different = sum(differing(before[key], tensor) for key, tensor in now.items())
    return "equal, every bit" if different == 0 else f"{100 * different / words:.0f} % of words differ"


def rows(found: list[Step], exact: Results) -> list[list[str]]:
    """The table: each step compared with the one before it and with float64."""
    changes = [["", ""]]
    for before, now in itertools.pairwise(found):
        error = (before.results["y"].double() - now.results["y"].double()).abs().max()
        changes.append([_changed(before.results, now.results), f"{float(error):.2g}" if error else "0"])
    noise = [[f"{sqnr(exact[key], step.results[key]):.1f} dB" for key in SHOWN.values()] for step in found]
    return [[step.name, *cells, *values] for step, cells, values in zip(found, changes, noise, strict=True)]


def boxes_picture() -> Figure:
    """Which parts each way leaves to PyTorch and which it gives to te; one box is one module."""
    fig = figure(9, 3.7)
    axes = fig.add_subplot()
    for column, (title, (boxes, of_te, colour)) in enumerate(BOXES.items()):
        for place, (first, last) in enumerate(boxes):
            face = colour if place in of_te else PYTORCH
            corner, height = (column * 1.1, first + 0.06), last - first - 0.12
            axes.add_patch(Rectangle(corner, 1.0, height, facecolor=face, edgecolor=palette.LABEL, linewidth=0.8))
        for row, part in enumerate(PARTS):
            axes.text(column * 1.1 + 0.5, row + 0.5, part, ha="center", va="center", size=8.5)
        axes.text(column * 1.1 + 0.5, -0.2, title, ha="center", va="bottom", size=9, weight="bold")
    axes.set(xlim=(-0.1, 5.5), ylim=(10.1, -1.3))
    axes.axis("off")
    return fig


def noise_picture(found: list[Step], exact: Results) -> Figure:
    """The SQNR of y, dx and dw against float64, for each step."""
    fig = figure(9, 3.2)
    axes = fig.add_subplot()
    colours = {"y": palette.Y, "dx": palette.GRAD, "dw": palette.W}
    for place, (label, key) in enumerate(SHOWN.items()):
        at = [n + 0.27 * (place - 1) for n in range(len(found))]
        bars = axes.bar(at, [sqnr(exact[key], s.results[key]) for s in found], 0.25, color=colours[label], label=label)
        axes.bar_label(bars, fmt="%.0f", size=8, color=palette.LABEL)
    axes.set_xticks(range(len(found)), [step.name.replace(", ", ",\n") for step in found], size=8)
    axes.set(ylabel="SQNR to float64, dB", ylim=(min(0.0, axes.get_ylim()[0]), 72))
    axes.legend(ncols=3, loc="upper right")
    return fig


def _write(report: Report, found: list[Step], exact: Results, equal: Tally) -> None:
    report.text(
        f"One Transformer layer ({HEADS} heads, {HIDDEN} → {FFN} → {HIDDEN}, {SEQUENCE * BATCH} tokens, causal, bf16) "
        "is built five times, each time with more of it from the library. All five have the same parameter tensors. "
        "The last one runs under <code>te.autocast(recipe=te.DelayedScaling(fp8_format=Format.HYBRID, "
        "amax_history_len=16, amax_compute_algo=&quot;max&quot;))</code>."
    )
    report.picture(
        boxes_picture(),
        "<b>The same layer five times.</b> One box is one module. Light grey: PyTorch; grey: te in 16 bits; yellow: te "
        "with eight-bit operands in every linear map. On a GPU, what stays inside a box need not go through memory.",
        "Modules of the five layers as boxes",
    )
    report.table(
        ["layer", "against the row above", "largest error of y", "SQNR y", "SQNR dx", "SQNR dw"],
        rows(found, exact),
        "Compared with the row above: y, dx and all gradients, word by word. SQNR is against the same layer in "
        f"float64; dw is fc1's. Fused modules round where separate ones do: {equal}. (A TransformerLayer adds the two "
        "biases before its residuals separately, each with its own rounding. They are 0 here, as at the start "
        "of any training.)",
    )
    report.picture(
        noise_picture(found, exact),
        "<b>Fusing costs nothing, FP8 costs bits.</b> The four 16-bit layers are equally far from float64. In the "
        f"first FP8 step all scales are 1, and gradients around {GRADIENT:g} are lost at the bottom of E5M2. From the "
        "second step on the scales come from the amaxes. y suffers little, because the residual skips the linear maps.",
        "Bars of SQNR for each way to build the layer",
    )


def run(report: Report, progress: Progress) -> Outcome:
    found, exact, tally = steps(progress("one layer, five ways", 7))
    equal = equalities(found)
    verdict = "GPU = CPU in every word" if tally.equal else "fused = unfused in every word" if equal.equal else ""
    report.section("One layer, five ways", verdict)
    _write(report, found, exact, equal)
    noise = [sqnr(exact["fc1.weight"], step.results["fc1.weight"]) for step in found]
    result = f"dw's SQNR: 16 bits {noise[3]:.1f} dB, FP8 {noise[-1]:.1f} dB; fused against unfused: {equal}"
    if tally.compared:
        report.text(f"This machine has a Hopper GPU: {tally}, CPU against GPU, over all steps but plain PyTorch's.")
        result += f"; GPU: {tally}"
    return Outcome("One layer, five ways", result, equal.equal and (tally.equal or not tally.compared))
