"""Step 4, prediction: this CPU computes the words that cuBLASLt computed on an H200."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from optimized import recordings
from optimized.commands.report import Report, escape
from optimized.commands.steps import Outcome, Progress
from optimized.commands.steps.style import figure
from optimized.compare import Tally
from optimized.recordings import linear
from optimized.recordings.tensor_core import Product
from reference.numbers import formats
from reference.support import files, palette

RECORDING = "tensor_core_h200"
SHOWN = ("e4m3.e4m3", 512, 512, 4096)
WORDS_SHOWN = 8


def _plain(product: Product, dtype: torch.dtype) -> torch.Tensor:
    """An ordinary product in `dtype`, in fp32. In float64 every term and sum of these operands is exact."""
    return (formats.decode(product.a).to(dtype) @ formats.decode(product.b).to(dtype).t()).float()


WAYS: dict[str, Callable[[Product], torch.Tensor]] = {
    "this project's model of the tensor core": Product.predict,
    "an ordinary fp32 product": partial(_plain, dtype=torch.float32),
    "the exact sum, rounded to fp32": partial(_plain, dtype=torch.float64),
}


def hexadecimal(tensor: torch.Tensor) -> list[str]:
    """The words of an fp32 tensor."""
    return [f"{word & 0xFFFFFFFF:08X}" for word in tensor.flatten().view(torch.int32).tolist()]


def word_rows(product: Product, count: int = WORDS_SHOWN) -> list[list[str]]:
    """The first words of a product, as the H200 computed them and as each way of computing gives them."""
    table = [["recorded on the H200", *hexadecimal(product.out[0, :count])]]
    table.extend([name, *hexadecimal(way(product)[0, :count])] for name, way in WAYS.items())
    return table


def picture(product: Product) -> Figure:
    """One square for each recorded word: green where the way of computing gives the same 32 bits."""
    fig = figure(9, 3.0)
    panels = fig.subplots(1, len(WAYS))
    for axes, (name, way) in zip(panels, WAYS.items(), strict=True):
        same = way(product).view(torch.int32) == product.out.view(torch.int32)
        colours = ListedColormap([palette.WRONG, palette.GREEN])
        axes.pcolormesh(same.t().numpy(), cmap=colours, vmin=0, vmax=1, edgecolors="white", linewidth=0.8)
        axes.set_aspect("equal")
        axes.invert_yaxis()
        axes.set_title(f"{name}\n{int(same.sum())} of {same.numel()} equal", size=9.5)
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_visible(False)
    return fig


def shown(products: list[Product]) -> Product:
    """The product of the report's picture."""
    for product in products:
        if (product.formats, product.m, product.n, product.k, product.accumulate) == (*SHOWN, "fast"):
            return product
    return products[0]


def _introduce(report: Report, origin: dict[str, Any]) -> None:
    machine = f"{origin['gpu']} (torch {origin['torch']}, CUDA {origin['cuda']}, {origin['date']})"
    report.text(
        f"The words below were computed by cuBLASLt, NVIDIA's matrix library, on an {escape(machine)} and stored. "
        "Now this CPU computes them again, from the same FP8 operands.",
        "Where the bits come from: a tensor core does not add like IEEE arithmetic. One Hopper instruction aligns 32 "
        "products and the running sum to the largest exponent among them, cuts every term off 13 bits below it, adds, "
        "and cuts again. <code>reference/numbers/tensor_core/model.py</code> is that sentence as code.",
    )


def _example(report: Report, product: Product) -> None:
    title = escape(product.title)
    report.table(
        ["", *(f"word {n}" for n in range(WORDS_SHOWN))],
        word_rows(product),
        f"The first words of {title}, in hexadecimal. The last ten bits of an H200's word are zero (13 fraction bits), "
        "which no ordinary sum gives.",
    )
    report.picture(
        picture(product),
        f"<b>Each square is one recorded word</b> of {title}; green: equal in all 32 bits. An fp32 sum is closer to "
        "the exact result than the tensor core's, and still a wrong prediction of what the GPU computes.",
        "Grids of equal and different words for three ways of computing",
    )


def run(report: Report, progress: Progress) -> Outcome:
    try:
        return _predict(report, progress)
    except files.Damaged as missing:
        report.section("The CPU predicts an H200")
        report.text(escape(missing))
        return Outcome("CPU predicts H200", str(missing))


def _predict(report: Report, progress: Progress) -> Outcome:
    products, trainings, origin = list(recordings.products()), list(linear.CASES), recordings.provenance(RECORDING)
    tick = progress("predicting recorded words", len(products) + len(trainings))
    total = Tally()
    by_shape: dict[str, dict[str, str]] = {}
    by_training = []
    for product in products:
        tally = product.compare()
        total.merge(tally)
        shape = f"{product.operands}, {product.m}×{product.n}×{product.k}"
        note = f"K in {product.slices} slices" if product.slices > 1 else ""
        row = by_shape.setdefault(shape, {"note": note})
        row |= {"compared": f"{tally.compared:,}", product.accumulate: f"{tally.different:,}"}
        tick()
    for name in trainings:
        tally = linear.compare(name)
        total.merge(tally)
        by_training.append([name.replace("_", " "), f"{tally.compared:,}", f"{tally.different:,}"])
        tick()
    report.section("The CPU predicts an H200", f"{total.compared:,} words, {total.different:,} different")
    _introduce(report, origin)
    _example(report, shown(products))
    columns = ("compared", "fast", "split", "note")
    report.table(
        ["GEMM by cuBLASLt on the H200", "words", "different: fast", "different: split", ""],
        [[shape, *(row.get(column, "–") for column in columns)] for shape, row in by_shape.items()],
        "<i>Fast</i> accumulation is one chain over all of K, as the forward pass uses it; <i>split</i> adds partial "
        "sums of 128 in fp32, as the backward pass does. Where few tiles share a long K, cuBLASLt computes slices of K "
        "separately and adds them in fp32; so does the prediction there.",
    )
    report.table(
        ["six training steps of an FP8 Linear, by cuBLASLt on the H200", "words", "different"],
        by_training,
        f"Output, both gradients, scales and amax histories of each step. All recordings together: {total}.",
    )
    return Outcome("CPU predicts H200", f"{len(products)} GEMMs, {len(trainings)} trainings: {total}", total.equal)
