"""Step 5, training: a byte-level GPT learns the standard library's sources, in bf16 and in FP8."""

import math

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from optimized import measure
from optimized.bench.models import training_plot
from optimized.commands.report import Report, escape
from optimized.commands.steps import Outcome, Progress
from optimized.commands.steps.style import COLOURS, figure
from optimized.compare import Tally
from optimized.cuda.device import hopper
from optimized.training.corpus import Corpus
from optimized.training.model import PRODUCTS
from optimized.training.monitor import TENSORS, Run, train, write
from optimized.training.settings import Settings
from reference.numbers import formats
from reference.support import palette

PRODUCT_COLOURS = dict(zip(PRODUCTS, (palette.DARK_BLUE, palette.RED, palette.DARK_GREEN, palette.INK), strict=True))
PROMPT = b"def __init__(self, "
TITLES = {"input": "input (E4M3)", "weight": "weight (E4M3)", "grad_output": "gradient (E5M2)"}


def bits(run: Run) -> np.ndarray:
    """The loss of each step in bits per byte."""
    return np.array(run.losses) / math.log(2)


def smooth(values: np.ndarray, reach: int) -> np.ndarray:
    """The mean of each value and its neighbours up to `reach` places away, as far as there are any."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    first, last = np.maximum(places - reach, 0), np.minimum(places + reach, len(values) - 1)
    return (sums[last + 1] - sums[first]) / (last + 1 - first)


def final(run: Run) -> float:
    """The mean loss of the last tenth of the steps, in bits per byte."""
    values = bits(run)
    return float(values[-max(1, len(values) // 10) :].mean())


def loss_picture(runs: list[Run]) -> Figure:
    """The loss curves of both runs, and their difference."""
    fig = figure(9, 4.4)
    curve, gap = fig.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    window = len(runs[0].losses) // 40
    for run, width, alpha in zip(runs, (4.5, 1.4), (0.55, 1.0), strict=True):
        colour = COLOURS[run.precision.lower()]
        curve.plot(bits(run), color=colour, alpha=0.2, linewidth=0.7)
        curve.plot(smooth(bits(run), window), color=colour, linewidth=width, alpha=alpha, label=run.precision)
    difference = bits(runs[1]) - bits(runs[0])
    gap.axhline(0, color=palette.GREY, linewidth=0.7)
    gap.plot(difference, color=COLOURS["fp8"], alpha=0.3, linewidth=0.7)
    gap.plot(smooth(difference, window), color=COLOURS["fp8"], linewidth=1.5)
    curve.set(ylabel="bits per byte")
    curve.legend(loc="upper right")
    gap.set(xlabel="step", ylabel="FP8 − bf16")
    return fig


def scale_picture(run: Run, layers: int) -> Figure:
    """The amax and scale of every tensor of the last layer, step by step."""
    fig = figure(9, 6.2)
    grid = fig.subplots(3, 2, sharex=True)
    for row, name in enumerate(TENSORS):
        for (product, colour), width in zip(PRODUCT_COLOURS.items(), (1.8, 1.5, 1.2, 1.0), strict=True):
            key = (f"layer {layers - 1} {product}", name)
            for axes, values in zip(grid[row], (run.amax, run.scale), strict=True):
                later = values[key][1:]  # the scale of the first step is 1
                axes.step(range(1, len(later) + 1), later, color=colour, linewidth=width, alpha=0.85, label=product)
                axes.set_yscale("log", base=2)
        for axes in grid[row]:  # whole powers of two below and above, so that two ticks at least are there
            low, high = np.log2(axes.get_ylim())
            axes.set_ylim(2.0 ** math.floor(low), 2.0 ** math.ceil(high))
        grid[row][0].set_title(f"{TITLES[name]}: amax")
        grid[row][1].set_title("scale")
    fig.legend(*grid[0][0].get_legend_handles_labels(), ncols=4, fontsize=9, loc="outside upper right")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    return fig


def _code_panel(axes: Axes, counts: torch.Tensor, lost: float, fmt: formats.Format8, colour: str) -> None:
    """Draw the share of elements on each code, signs together; zero is written, not drawn."""
    magnitudes = (counts[:128] + counts[128:]).double().numpy()
    share = 100 * magnitudes / magnitudes.sum()
    axes.bar(range(1, fmt.largest_code + 1), share[1 : fmt.largest_code + 1], 1.0, color=colour)
    wanted = [-12, -8, -4, 0, 4, 8, 12] if fmt is formats.E5M2 else [-8, -5, -2, 1, 4, 7]
    ticks = [(e + fmt.bias) << fmt.mantissa_bits for e in wanted if e + fmt.bias >= 1]
    axes.set_xticks(ticks, [f"$2^{{{e}}}$" for e in wanted if e + fmt.bias >= 1])
    used = int((magnitudes[: fmt.largest_code + 1] > 0).sum())
    text = f"{used} magnitudes used\nbecame zero: {100 * lost:.2g} %\nlargest: {share[fmt.largest_code]:.2g} %"
    axes.text(0.02, 0.97, text, transform=axes.transAxes, va="top", size=8.5)
    axes.set_xlim(0, 128)
    axes.set_ylim(0, 1.45 * float(np.max(share[1 : fmt.largest_code + 1])) + 1e-9)


def codes_picture(run: Run) -> Figure:
    """The FP8 codes in use in the first and in the last step."""
    fig = figure(9, 4.4)
    grid = fig.subplots(2, 3)
    for row, moment in enumerate(("first step", "last step")):
        for column, name in enumerate(TENSORS):
            fmt = formats.E5M2 if name == "grad_output" else formats.E4M3
            key = (moment, name)
            _code_panel(grid[row][column], run.codes[key], run.lost[key], fmt, COLOURS[name])
            if row == 0:
                grid[row][column].set_title(TITLES[name])
        grid[row][0].set_ylabel(f"{moment}\n% of elements")
    return fig


def _introduce(report: Report, corpus: Corpus, settings: Settings) -> None:
    tokens = settings.rows * settings.sequence
    report.text(
        f"The text is the standard library's own source code: {corpus.files:,} files, {len(corpus.data):,} bytes "
        f"(<code>{corpus.digest}</code>), already on this machine. A GPT of {settings.layers} causal "
        f"<code>te.TransformerLayer</code>s ({settings.heads} heads, {settings.hidden} → {4 * settings.hidden} → "
        f"{settings.hidden}), tables for bytes and places before them and a norm and the table of bytes after "
        f"them, guesses each byte from the up to {settings.sequence} before it: {settings.steps} steps of "
        f"{tokens} guesses. It is trained twice from the same start on the same bytes: once in bf16, once with the "
        "layers in FP8 with delayed scaling (HYBRID), where the first step only finds the scales and updates nothing. "
        "Parameters are fp32, the optimizer is Adam."
    )


def _pictures(report: Report, runs: list[Run], settings: Settings) -> None:
    fp8 = runs[1]
    report.picture(
        loss_picture(runs),
        "<b>FP8 follows bf16.</b> A model that knows nothing needs 8 bits for a byte. Faint: each step; "
        f"strong: the mean over neighbours. At the end: bf16 {final(runs[0]):.2f}, FP8 {final(fp8):.2f} bits per "
        "byte. The lower panel is the difference, step by step on the same bytes. (A GPT worth reading "
        "sees many thousand times more text than a minute of a CPU.)",
        "Loss curves of bf16 and FP8 training",
    )
    report.picture(
        scale_picture(fp8, settings.layers),
        "<b>Scales follow amaxes.</b> Left: the largest magnitude of each tensor at each step, for the four "
        "linear maps of the last layer. Right: the scale its cast used. It is 1 in the first step (not drawn), then "
        f"the format's largest value over the largest amax of the {settings.amax_history_len} steps before: it "
        "steps down one step after an amax has grown, and up again when the large one has left the history.",
        "amax and scale of each tensor over the training steps",
    )
    lost = {key: f"{100 * share:.2g} %" for key, share in fp8.lost.items()}
    report.picture(
        codes_picture(fp8),
        "<b>Which codes are used</b> (the last layer's projection; bars are magnitudes in order, signs together, "
        "without zeros). In the first step the scale is 1: weight and gradient sit at the bottom of their ranges; "
        f"{lost['first step', 'weight']} and {lost['first step', 'grad_output']} of their nonzero elements become 0. "
        f"In the last step their scales have moved them to the top: {lost['last step', 'weight']} and "
        f"{lost['last step', 'grad_output']} do. The right edge of each panel is the format's largest value; hardly "
        "anything reaches it.",
        "Histograms of FP8 codes in the first and last step",
    )


def _recorded(report: Report) -> None:
    """The same model, trained for longer on a GPU."""
    if not (measure.RESULTS / "training.json").is_file():
        return
    payload = measure.read_result("training")
    fig = figure(9, 3.4)
    training_plot.curves(fig.subplots(), payload["runs"])
    ends = ", ".join(f"{run['precision']} {run['validation'][-1][1] / math.log(2):.2f}" for run in payload["runs"])
    gpu_name = payload["provenance"]["gpu"]["name"]
    report.picture(
        fig,
        f"<b>Recorded on an {gpu_name}:</b> the same model, {payload['settings']['steps']} steps. Lines: means over "
        f"{training_plot.WINDOW} steps. Dots: text that the model was not trained on; at the end {ends} bits per byte. "
        "One run of each does not tell which is better: <code>twin bench seeds</code> has more, of a larger model.",
        f"Loss curves of bf16 and FP8 training, recorded on an {gpu_name}",
    )


def run(report: Report, corpus: Corpus, settings: Settings, progress: Progress) -> Outcome:
    gpu, tally = hopper(), Tally()
    runs = []
    for name, fp8 in (("bf16", False), ("FP8", True)):
        runs.append(train(corpus, settings, fp8, gpu, progress(f"training in {name}", settings.steps)))
        tally.merge(runs[-1].tally)
    report.section("Training in bf16 and in FP8", "GPU = CPU in every word" if tally.equal else "")
    _introduce(report, corpus, settings)
    if gpu is not None:
        report.text(
            "This machine has a Hopper GPU, so both trainings ran on both sides at once, CPU and GPU from the same "
            f"start. After each of the {settings.steps} steps the loss, gradients, weights, moments, FP8 state and "
            f"random states were compared: <b>{tally}</b>."
        )
    else:
        report.text(
            "There is no Hopper GPU here, so FP8 is a simulation on the CPU: it has the GPU's numbers, not its speed."
        )
    _pictures(report, runs, settings)
    _recorded(report)
    length = 240 if settings.steps > 100 else 40
    tick = progress("writing a sample of text", 2 * length)
    texts = [write(one, PROMPT, length, tick) for one in runs]
    report.text("What the two models write after <code>" + escape(PROMPT.decode()) + "</code>:")
    report.columns(*((one.precision, text) for one, text in zip(runs, texts, strict=True)))
    result = "; ".join(f"{one.precision} {bits(one)[0]:.2f} → {final(one):.2f} bits/byte" for one in runs)
    return Outcome("Training", result) if gpu is None else Outcome("Training", f"{result}; GPU: {tally}", tally.equal)
