"""Row-wise scaling beside torchao's, compiled (docs/results/rowwise_torchao.json).

Two linear maps with a GELU between them, hidden 4096, 16384 inside, 8192 tokens, bf16, no biases: ours by row, run
eagerly, and the same weights in `torch.nn.Linear`s that torchao converts and torch.compile compiles. They take turns
with blocks of a few steps, forward and backward, timed by the host's clock as `layer.timed` says.

Words are compared of one linear map of 4096 × 4096 and 8192 tokens, without a compiler: y, dx and dw of normally
distributed numbers. They are to be equal, in bf16 and without a bias. The casts have the same scales, which are powers
of two (`reference.ops.casts.cast_rowwise`); so the products have the same words, although torchao multiplies by the
scales in other places (`reference.ops.gemms.gemm_fp8_rowwise`).

Where torchao cannot be imported, only ours and bf16 are timed.
"""

import copy
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import torch

import optimized as te
from optimized import measure
from optimized.bench import Payload, Progress, result, silent
from optimized.bench.kernels.gemm import differing
from optimized.bench.layers import layer
from optimized.bench.table import Table, percent, table

NAME = "rowwise_torchao"
WHAT = "row-wise linear maps, against torchao compiled"
KERNELS = ("activation", "amax", "cast_rowwise", "cast_transpose", "current_scale", "gemm", "gemm_fp8_rowwise")
RECIPES = {"rowwise": "fp8", "rowwise_with_gw_hp": "high_precision"}
BF16 = "bf16, compiled"
TOKENS, HIDDEN, FFN = 8192, 4096, 16384

Model = torch.nn.Module


def plain(hidden: int, ffn: int, device: str) -> Model:
    """The stack in plain PyTorch."""
    maps = (
        torch.nn.Linear(*sizes, bias=False, device=device, dtype=torch.bfloat16)
        for sizes in ((hidden, ffn), (ffn, hidden))
    )
    return torch.nn.Sequential(next(maps), torch.nn.GELU(approximate="tanh"), next(maps))


def ours(model: Model, device: str) -> Model:
    """The stack with our linear maps, of the same weights."""
    made = copy.deepcopy(model)
    for name, one in list(made.named_children()):
        if isinstance(one, torch.nn.Linear):
            sizes = (one.in_features, one.out_features)
            linear: Any = te.Linear(*sizes, bias=False, params_dtype=torch.bfloat16, device=device)
            with torch.no_grad():
                linear.weight.copy_(one.weight)
            setattr(made, name, linear)
    return made


def theirs(model: Model, name: str) -> Model:
    """The stack with torchao's linear maps, of the same weights."""
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(name)
    return float8.convert_to_float8_training(copy.deepcopy(model), config=config)  # type: ignore[no-any-return]


def step(model: Any, x: torch.Tensor, grad: torch.Tensor, recipe: Any = None) -> list[torch.Tensor]:
    """y, dx and the gradients of the weights."""
    x.grad = None
    model.zero_grad(set_to_none=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def words(name: str, tokens: int, hidden: int) -> dict[str, dict[str, int]]:
    """Words compared and different of one linear map, in torchao's order of `name`, without a compiler."""
    linear = torch.nn.Sequential(torch.nn.Linear(hidden, hidden, bias=False, device="cuda", dtype=torch.bfloat16))
    x, grad = (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    recipe = te.recipe.Float8RowwiseScaling(weight_gradient=RECIPES[name])
    mine = [one.clone() for one in step(ours(linear, "cuda"), x, grad, recipe)]
    other = step(theirs(linear, name), x, grad)
    return {
        what: {"compared": a.numel(), "different": differing(a.contiguous(), b.contiguous())}
        for what, a, b in zip(("y", "dx", "dw"), mine, other, strict=True)
    }


def blocks(model: Model, x: torch.Tensor, grad: torch.Tensor, library: bool) -> dict[str, Callable[[int], object]]:
    """What is timed, by name; torchao's where the `library` is there."""
    stacks: dict[str, tuple[Any, Any]] = {BF16: (torch.compile(copy.deepcopy(model)), None)}
    for name, gradient in RECIPES.items():
        recipe = te.recipe.Float8RowwiseScaling(weight_gradient=gradient)
        stacks[f"ours, {name}"] = (ours(model, "cuda"), recipe)
        if library:
            stacks[f"theirs, {name}"] = (torch.compile(theirs(model, name)), None)

    def block(name: str) -> Callable[[int], object]:
        one, recipe = stacks[name]
        return lambda steps: [step(one, x, grad, recipe) and None for _ in range(steps)]

    return {name: block(name) for name in stacks}


def run(progress: Progress = silent, repeats: int = 7, inner: int = 8) -> Payload:
    library = importlib.util.find_spec("torchao") is not None
    torch.manual_seed(1)
    compared = {name: words(name, TOKENS, HIDDEN) for name in RECIPES if library}
    progress(0.3)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    timed = blocks(plain(HIDDEN, FFN, "cuda"), x, grad, library)
    for one in timed.values():
        one(5)
    samples = layer.timed(timed, repeats, inner)
    progress(1.0)
    of_theirs = {
        name: statistics.median(
            a / b for a, b in zip(samples[f"ours, {name}"], samples[f"theirs, {name}"], strict=True)
        )
        for name in compared
    }
    return result(
        "milliseconds of forward and backward of two linear maps, ours and torchao's; words of one",
        KERNELS,
        sizes={"tokens": TOKENS, "hidden": HIDDEN, "ffn": FFN},
        torchao=measure.version("torchao"),
        ms={name: measure.summary(values) for name, values in samples.items()},
        of_theirs=of_theirs,
        words=compared,
    )


def counts(payload: Payload, *names: str) -> tuple[str, str]:
    """Words compared and different under recipes, of y, dx and dw together."""
    found = [one for name in names for one in payload["words"][name].values()]
    compared, different = (sum(one[key] for one in found) for key in ("compared", "different"))
    return f"{compared:,}", f"{different:,}"


def equality(payload: Payload) -> list[tuple[str, ...]]:
    """README's row of what has the same bits; none where torchao was not installed."""
    what, which = "our row-wise `Linear` and torchao's on one GPU", "y, dx and dw, two recipes"
    return [(what, *counts(payload, *payload["words"]), which)] if payload["words"] else []


def tables(payload: Payload) -> list[Table]:
    """One row for each recipe: milliseconds, ours over torchao's, and words."""
    ms = {name: f"{one['median']:.2f}" for name, one in payload["ms"].items()}
    rows = []
    for name in RECIPES:
        beside = ("–",) * 4
        if name in payload["words"]:
            share = percent(payload["of_theirs"][name])
            beside = (ms[f"theirs, {name}"], share, *counts(payload, name))
        rows.append((f"`{name}`", ms[f"ours, {name}"], *beside, ms[BF16]))
    sizes = payload["sizes"]
    how = (
        "Milliseconds of forward and backward of two linear maps and the GELU between them, hidden "
        f"{sizes['hidden']}, {sizes['ffn']} inside, {sizes['tokens']:,} tokens. Words: y, dx and dw of one linear map "
        f"of {sizes['hidden']} × {sizes['hidden']}, without a compiler."
    )
    theirs = f"torchao {payload['torchao']}, compiled" if payload["words"] else "torchao"
    columns = ("recipe", "ours", theirs, "share of its time", "words compared", "words different", "bf16, compiled")
    return [table(payload, "Row-wise scaling, here and in torchao", columns, rows, how)]
