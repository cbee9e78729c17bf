"""Step 2, one `Linear` in four ways: in plain PyTorch, in 16 bits, in FP8 before its scales are known, and after."""

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure

import reference as te
from optimized.commands.report import Report
from optimized.commands.steps import Outcome
from optimized.commands.steps.style import COLOURS, figure
from optimized.compare import Tally
from optimized.cuda.device import hopper
from reference.numbers import philox
from reference.support import palette

TOKENS, IN_FEATURES, OUT_FEATURES = 256, 512, 256
# Magnitudes as in training: activations of order 1, weights as Transformer Engine initialises them, gradients of a mean
# over about ten thousand tokens.
STD = {"x": 1.0, "weight": 0.023, "gradient": 1e-5}
NAMES = ("output", "dgrad", "wgrad")
SUBSCRIPT = {"output": "y = x·wᵀ + b", "dgrad": "dx = g·w", "wgrad": "dw = gᵀ·x"}


@dataclass(frozen=True)
class Variant:
    """One way to compute the layer: its three results, and what changed since the variant before it."""

    name: str
    changed: str
    colour: str
    results: dict[str, torch.Tensor]


def sqnr(exact: torch.Tensor, got: torch.Tensor) -> float:
    """Signal to quantisation noise in dB: 10·log10(Σ exact² / Σ (exact − got)²)."""
    signal, noise = exact.double(), exact.double() - got.double()
    return float(10 * torch.log10((signal * signal).sum() / (noise * noise).sum()))


def _data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [tokens, in], weight [out, in], bias [out], gradient [tokens, out] in fp32, the same on every machine."""
    x = philox.normal((TOKENS, IN_FEATURES), std=STD["x"], seed=1)
    weight = philox.normal((OUT_FEATURES, IN_FEATURES), std=STD["weight"], seed=2)
    bias = philox.normal((OUT_FEATURES,), std=STD["weight"], seed=3)
    gradient = philox.normal((TOKENS, OUT_FEATURES), std=STD["gradient"], seed=4)
    return x, weight, bias, gradient


def _collect(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    assert x.grad is not None
    assert weight.grad is not None
    return {"output": out.detach(), "dgrad": x.grad.clone(), "wgrad": weight.grad.clone()}


def _step(module: Any, x: torch.Tensor, gradient: torch.Tensor, fp8: bool) -> dict[str, torch.Tensor]:
    """One forward and backward on the module's device; the results stay there."""
    where = module.weight.device
    inp = x.bfloat16().to(where).requires_grad_()
    module.zero_grad(set_to_none=True)
    with te.autocast(enabled=fp8, recipe=te.DelayedScaling(amax_history_len=4)):
        out = module(inp)
    out.backward(gradient.bfloat16().to(where))
    return _collect(out, inp, module.weight)


def variants() -> tuple[list[Variant], Tally]:
    """The four variants on the CPU; on a Hopper machine each is compared, word for word, with the GPU's."""
    x, weight, bias, gradient = _data()
    gpu, tally = hopper(), Tally()
    plain_x, plain_w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = torch.nn.functional.linear(plain_x, plain_w, bias)
    out.backward(gradient)
    found = [Variant("plain PyTorch, fp32", "", "fp32", _collect(out, plain_x, plain_w))]

    module: Any = te.Linear(IN_FEATURES, OUT_FEATURES, params_dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)
    twin = None if gpu is None else copy.deepcopy(module).to(gpu)
    for name, changed, fp8 in (
        ("te.Linear, bf16", "operands and results rounded to 8 bits of significand", False),
        (
            "te.Linear, FP8, first step",
            "operands cast to FP8 with scale 1: gradients are at the bottom of E5M2's range",
            True,
        ),
        ("te.Linear, FP8, second step", "scales from the first step's amaxes: every tensor fills its range", True),
    ):
        results = _step(module, x, gradient, fp8)
        if twin is not None:
            for key, there in _step(twin, x, gradient, fp8).items():
                tally.add(results[key], there)
        found.append(Variant(name, changed, "fp8" if fp8 else "bf16", results))
    return found, tally


def _errors(exact: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """Largest error, and the root mean square error over the root mean square value."""
    error = (exact.double() - got.double()).abs()
    return float(error.max()), float((error.square().mean() / exact.double().square().mean()).sqrt())


def rows(found: list[Variant]) -> list[list[str]]:
    """The table: each variant its change since the one before, and its noise against fp32."""
    table = []
    for before, now in itertools.pairwise(found):
        for key in NAMES:
            largest, relative = _errors(before.results[key], now.results[key])
            name, changed = (now.name, now.changed) if key == "output" else ("", "")
            noise = f"{sqnr(found[0].results[key], now.results[key]):.1f} dB"
            table.append([name, SUBSCRIPT[key], f"{largest:.2g}", f"{100 * relative:.2f} %", noise, changed])
    return table


def picture(found: list[Variant]) -> Figure:
    """SQNR of the three GEMMs for each variant, and wgrad in FP8 against fp32, element by element."""
    fig = figure(9, 3.6)
    bars, before, after = fig.subplots(1, 3, width_ratios=[1.3, 1, 1])
    for place, variant in enumerate(found[1:]):
        heights = [sqnr(found[0].results[key], variant.results[key]) for key in NAMES]
        at = [n + 0.27 * (place - 1) for n in range(3)]
        shade = 0.45 if variant is found[2] else 1.0
        bars.bar(at, heights, 0.25, color=COLOURS[variant.colour], alpha=shade, label=variant.name)
    bars.set_xticks(range(3), NAMES)
    bars.set(title="signal to noise against fp32, dB", ylim=(0, 74))
    bars.legend(fontsize=8, loc="upper center")
    exact = found[0].results["wgrad"].flatten()[:4000]
    limit = 1.05 * float(exact.abs().max())
    for axes, variant in ((before, found[2]), (after, found[3])):
        got = variant.results["wgrad"].float().flatten()[:4000]
        axes.scatter(exact.numpy(), got.numpy(), s=2, color=COLOURS["fp8"], alpha=0.4, rasterized=True)
        axes.plot([-limit, limit], [-limit, limit], color=palette.INK, linewidth=0.7)
        axes.set(title="wgrad, " + variant.name.split(", ")[-1], xlabel="fp32", xlim=(-limit, limit))
        axes.ticklabel_format(style="sci", scilimits=(0, 0))
    before.set_ylabel("FP8")
    return fig


def run(report: Report) -> Outcome:
    found, tally = variants()
    report.section("One Linear, four ways", "GPU = CPU in every word" if tally.equal else "")
    report.text(
        f"A layer of {IN_FEATURES} inputs and {OUT_FEATURES} outputs gets {TOKENS} tokens, forward and backward. "
        "Training needs three matrix products (GEMMs): the output, the gradient of the input (dgrad) and the gradient "
        "of the weight (wgrad)."
    )
    report.table(
        ["variant", "GEMM", "largest change", "RMS change", "SQNR to fp32", "what changed"],
        rows(found),
        "Changes are against the variant before. SQNR, the ratio of signal to quantization noise, is against plain "
        "fp32: more is better, and one bit is worth 6 dB.",
    )
    report.picture(
        picture(found),
        "<b>The second FP8 step is much better than the first.</b> Delayed scaling learns each tensor's largest "
        "magnitude (amax) in one step and uses it in the next. In the first step all scales are 1: gradients "
        f"around {STD['gradient']:g} are about as small as E5M2's smallest value, 2⁻¹⁶ = {2**-16:.1e}, and are rounded "
        "to 0 or to the first few multiples of it (middle). One step later the same gradients fill the range (right).",
        "Bars of SQNR for bf16 and FP8, and scatter plots of the weight gradient",
    )
    result = f"output SQNR to fp32: bf16 {sqnr(found[0].results['output'], found[1].results['output']):.1f} dB, " + (
        f"FP8 {sqnr(found[0].results['output'], found[3].results['output']):.1f} dB"
    )
    if tally.compared:
        report.text(f"This machine has a Hopper GPU: {tally}, CPU against GPU, over the three te.Linear variants.")
        result += f"; GPU: {tally}"
    return Outcome("One Linear, four ways", result, tally.equal if tally.compared else None)
