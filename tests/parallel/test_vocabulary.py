"""A vocabulary that ranks share, and whole models that `parallelize_module` cuts, have the words of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.tensor_ranks import (
    BACKENDS,
    BF16,
    RECIPES,
    again_too,
    compare,
    device_type,
    here,
    in_one,
    numbers,
    on_ranks,
    part,
    twice,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import reference as te
from reference.parallel.styles import ColwiseParallel, LayerParallel, RowwiseParallel

F32, F16 = torch.float32, torch.float16
IGNORED = -100


def embedding(
    group: Any, count: int, rank: int, dtype: torch.dtype, sequence: bool, padding: int | None
) -> dict[str, torch.Tensor]:
    """Rows of a table with -0 and NaN in it, some of them often, and its gradient."""
    torch.manual_seed(2)
    given: dict[str, Any] = {"tp_group": group, "sequence_parallel": sequence, "params_dtype": dtype}
    layer = te.Embedding(24, 16, padding, **given)
    found = {"drawn": layer.weight.detach().clone()}
    with torch.no_grad():
        for row, word in ((3, -0.0), (20, -0.0), (21, float("nan"))):
            if 0 <= row - rank * len(layer.weight) < len(layer.weight):
                layer.weight[row - rank * len(layer.weight)] = word
    ids = torch.randint(0, 24, (72, 6), generator=torch.Generator().manual_seed(3))
    ids[:40, 2], ids[50, 3], ids[51, 4] = 20, 3, 21
    ids = here(ids)
    out = layer(ids)
    out.backward(part(numbers(4, 72, 6, 16).to(dtype), 0 if sequence else None, rank, count))
    assert layer(ids[:0]).shape == (0, 6, 16)
    return {"out": out.detach(), "weight.grad": layer.weight.grad, **found}  # type: ignore[dict-item]


EMBEDDINGS = {
    f"{dtype} {sequence} {padding}": (dtype, sequence, padding)
    for dtype, sequence, padding in ((BF16, True, None), (F32, False, 20), (F16, True, -21))
}


def loss(
    group: Any, count: int, rank: int, dtype: torch.dtype, classes: int, rows: int, smoothing: float, reduce: bool
) -> dict[str, torch.Tensor]:
    x = part(numbers(1, rows, 1, classes).to(dtype), 2, rank, count).requires_grad_()
    target = torch.randint(0, classes, (rows, 1), generator=torch.Generator().manual_seed(5))
    target[1:2] = IGNORED
    found = te.parallel_cross_entropy(x, here(target), smoothing, reduce, group)
    found.backward(here(torch.tensor(0.7) if reduce else torch.linspace(-1, 2, rows)[:, None]))
    return {"loss": found.detach(), "dx": x.grad}  # type: ignore[dict-item]


LOSSES = {
    f"{case}": case
    for case in (
        (BF16, 20012, 5, 0.1, False), (F32, 8192, 4, 0.0, True), (F16, 32, 7, 0.3, True), (BF16, 16, 1, 0.0, False),
        (BF16, 20, 0, 0.0, False),
    )
}  # fmt: skip


def trained(
    layers: torch.nn.ModuleDict,
    run: Callable[[torch.Tensor], torch.Tensor],
    recipe: Any,
    steps: int,
    batch: int,
    group: Any,
) -> dict[str, torch.Tensor]:
    """Losses and gradients of `steps` steps; `run` gives the logits of ids `[12, batch]`."""
    optimizer, found = torch.optim.SGD(layers.parameters(), lr=0.5), {}
    for step in range(steps):
        ids = here(torch.randint(0, 512, (13, batch), generator=torch.Generator().manual_seed(step)))
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            logits = run(ids[:-1])
        one = te.parallel_cross_entropy(logits, ids[1:], reduce_loss=True, dist_process_group=group)
        one.backward()
        found[f"{step}.loss"] = one.detach()
        found |= {f"{step}.{name}.grad": p.grad.clone() for name, p in layers.named_parameters()}  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return found


def model(group: Any, count: int, rank: int, recipe: str, sequence: bool) -> dict[str, torch.Tensor]:
    """Three steps of embedding, a layer, logits and loss."""
    torch.manual_seed(6)
    given: dict[str, Any] = {"params_dtype": BF16, "tp_group": group, "sequence_parallel": sequence}
    table, middle = te.Embedding(512, 128, **given), te.LayerNormMLP(128, 512, set_parallel_mode=True, **given)
    head = te.LayerNormLinear(128, 512, bias=False, parallel_mode="column", **given)
    layers = torch.nn.ModuleDict({"table": table, "middle": middle, "head": head})
    return trained(layers, lambda ids: head(middle(table(ids))), RECIPES[recipe], 3, 4, group)


MODELS = {f"{recipe}": (recipe, recipe != "blocks") for recipe in ("delayed", "blocks")}


def styled(
    group: Any, count: int, rank: int, sequence: bool, more: Any = (("softmax_type", "off-by-one"),)
) -> dict[str, torch.Tensor]:
    """Two steps of a model that was whole on each rank, with rank 0's weights."""
    torch.manual_seed(6 + rank)
    layers = torch.nn.ModuleDict({"table": te.Embedding(512, 256, params_dtype=BF16)})
    layers["block"] = te.TransformerLayer(256, 256, 4, params_dtype=BF16, **dict(more))
    head = te.Linear(256, 512, bias=False, params_dtype=BF16)
    head.weight = layers["table"].weight
    layers["head"] = head
    torch.manual_seed(9)
    if group is not None:
        plan = {"table": RowwiseParallel(sequence), "bl*k": LayerParallel(sequence), "head": ColwiseParallel(sequence)}
        parallelize_module(layers, init_device_mesh(device_type(), (count,)), plan)  # type: ignore[arg-type]
    return trained(layers, lambda ids: head(layers["block"](layers["table"](ids))), RECIPES["delayed"], 2, 2, group)


def refused_styles(group: Any, count: int) -> None:
    mesh, one = init_device_mesh("cpu", (count,)), te.TransformerLayer(96, 256, 3, params_dtype=BF16)
    for style, layer, error, sentence in (
        (LayerParallel(), one, ValueError, "num_attention_heads=3 with tp_size=2; a multiple of 2 is accepted"),
        (
            RowwiseParallel(),
            te.LayerNormLinear(32, 32),
            TypeError,
            "^RowwiseParallel: LayerNormLinear; Colwise",
        ),
        (ColwiseParallel(), torch.nn.Linear(32, 32), TypeError, "^ColwiseParallel: Linear; ColwiseParallel takes"),
        (ColwiseParallel(), te.Linear(32, 33), ValueError, "out_features=33 with tp_size=2"),
        (ColwiseParallel(), te.Linear(32, 32, tp_group=group, parallel_mode="row"), ValueError, "that is whole is"),
    ):
        with pytest.raises(error, match=sentence):
            parallelize_module(layer, mesh, style)
    assert one.layernorm_mlp.tp_size == one.self_attention.proj.tp_size == 1
    one(torch.zeros(4, 1, 96, dtype=BF16))


def refused(group: Any, count: int, rank: int) -> dict[str, torch.Tensor]:
    """Calls that every rank refuses alike, and shapes that differ, which every rank gets to know."""
    given: dict[str, Any] = {"params_dtype": BF16, "tp_group": group}
    table = te.Embedding(24, 16, sequence_parallel=True, **given)
    ids = torch.zeros(3 + rank, 2, dtype=torch.int64)
    logits = torch.zeros(2, 8 + rank)
    linear = te.Linear(256, 256, parallel_mode="column", sequence_parallel=True, **given)
    mlp = te.LayerNormMLP(256, 256, set_parallel_mode=True, **given)
    shape = r"has shape \[{} on the group's rank 0 and \[{} on rank 1; one shape on all ranks is accepted"
    for call, sentence in (
        (lambda: te.Embedding(25, 16, **given), "num_embeddings=25 with tp_size=2; a multiple of 2"),
        (lambda: te.Embedding(24, 16, tp_size=2)(ids), "tp_size=2 and no tp_group"),
        (lambda: table(ids[:3]), r"input has shape \[3, 2\] with sequence_parallel=True and tp_size=2"),
        (lambda: table(ids[:3].repeat(2, 1)[: 2 + 2 * rank]), shape.format(r"2, 2\]", r"4, 2\]")),
        (
            lambda: te.parallel_cross_entropy(logits, ids[:2, 0], dist_process_group=group),
            shape.format(r"2, 8\]", r"2, 9\]"),
        ),
        (lambda: linear(numbers(0, 4 + rank, 1, 256)), shape.format(r"4, 1, 256\]", r"5, 1, 256\]")),
        (lambda: mlp(numbers(0, 4, 1 + rank, 256)), shape.format(r"4, 1, 256\]", r"4, 2, 256\]")),
    ):
        with pytest.raises((ValueError, RuntimeError), match=sentence):
            call()
    for number in (-1, 24):
        with pytest.raises(IndexError, match=f"is {number}; 0 to 23, the rows of the table, are accepted"):
            table(torch.full((2, 1), number))
    with pytest.raises(IndexError, match="is 16; 0 to 15 and ignore_index=-100 are accepted"):
        te.parallel_cross_entropy(logits[:, :8], torch.tensor([1, 16]), dist_process_group=group)
    refused_styles(group, count)
    return {}


def every(group: Any, count: int, rank: int, program: Any, *case: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = program(group, count, rank, *case)
    return found


def dims(program: Any, case: tuple[Any, ...], name: str) -> Any:
    """The dimension along which ranks have parts of a tensor."""
    if program is embedding:
        return (0 if case[1] else None) if name == "out" else 0
    if program is loss:
        return 2 if name == "dx" else None
    if name.endswith("loss") or "layer_norm" in name or "fc2_bias" in name or "proj.bias" in name:
        return None
    return 1 if "fc2_weight" in name or "proj.weight" in name else 0


PROGRAMS: dict[Any, dict[str, tuple[Any, ...]]] = {
    embedding: EMBEDDINGS,
    loss: LOSSES,
    model: MODELS,
    styled: {"": (True,)},
}
CASES = {
    f"{program.__name__} {name}": (program, *case)
    for program, cases in PROGRAMS.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_share_a_vocabulary(count: int, tmp_path: Path) -> None:
    """One start of ranks for all of it."""
    # Of q, k and v a rank of four has 64 rows: no multiple of a chain of split accumulation.
    cases = {name: case for name, case in CASES.items() if count == 2 or case[0] is not styled}
    found = on_ranks(count, tmp_path, every, cases | ({"refused": (refused,)} if count == 2 else {}))
    for name, whole in in_one(every, cases).items():
        program, *case = CASES[name]
        of_ranks = [one[name] for one in found]
        compare(name, whole, of_ranks, lambda tensor, p=program, case=case: dims(p, case, tensor))  # type: ignore[misc]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpus_that_share_a_vocabulary(backend: str, tmp_path: Path) -> None:
    """Over NCCL, twice, with the words of one process on the CPU; over gloo the same on CPUs."""
    cases = {name: case for name, case in CASES.items() if case[0] is not styled}
    without = {"softmax_type": "off-by-one", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    cases["styled without dropout"] = (styled, True, tuple(without.items()))
    found = on_ranks(2, tmp_path, twice, cases, backend)
    for name, whole in in_one(every, cases).items():
        program, *case = cases[name]
        of_ranks = [one[name] for one in found]
        compare(name, again_too(whole), of_ranks, lambda tensor, p=program, case=case: dims(p, case, tensor))  # type: ignore[misc]
