"""A pipeline by PyTorch's schedules has the words of one process with gradient accumulation."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.tensor_ranks import BF16, RECIPES, compare, in_one, numbers, on_ranks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import reference as te

COUNT, GROUPS, STEPS, STAGES = 8, 2, 3, 2
EACH = COUNT // GROUPS
ROWS, TOKENS, HIDDEN = 1, 16, 32


class Stage(torch.nn.Module):
    """Some of the layers; a microbatch's number decides what they drop."""

    def __init__(self, numbers_of_layers: range, recipe: Any, group: Any) -> None:
        super().__init__()
        self.recipe, self.group = recipe, group
        self.layers = torch.nn.ModuleDict()
        for i in numbers_of_layers:
            torch.manual_seed(i)
            self.layers[str(i)] = te.TransformerLayer(
                *(HIDDEN, 64, 2),
                attn_input_format="bshd",
                hidden_dropout=0.1,
                attention_dropout=0.1,
                params_dtype=BF16,
            )

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe, amax_reduction_group=self.group):
            for i, layer in self.layers.items():
                torch.manual_seed(1000 * int(number) + int(i))
                x = layer(x)
        return x


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y.float() - target.float()).square().mean() / EACH


def batch(step: int, seed: int) -> torch.Tensor:
    """All microbatches of a step."""
    return numbers(100 * step + seed, COUNT * ROWS, TOKENS, HIDDEN, scale=2.0**-4)


def program(group: Any, count: int, rank: int, schedule: str, recipe: str) -> dict[str, torch.Tensor]:
    """Steps of four layers, two on each of two stages; the ranks 0 and 1, and 2 and 3, are pipelines."""
    pipeline = same_stage = run = None
    place, layers = rank % STAGES, range(4)
    if group is not None:
        pipelines = [dist.new_group([first, first + 1]) for first in range(0, count, STAGES)]
        by_stage = [dist.new_group(list(range(one, count, STAGES))) for one in range(STAGES)]
        pipeline, same_stage = pipelines[rank // STAGES], by_stage[place]
        layers = range(2 * place, 2 * place + 2)
    stage = Stage(layers, RECIPES[recipe], same_stage)
    order = te.parallel.GradientOrder(GROUPS, same_stage)
    optimizer = te.optimizers.FusedAdam(stage.parameters(), lr=1e-2)
    if group is not None:
        x, y = (torch.zeros(ROWS, TOKENS, HIDDEN, dtype=BF16, requires_grad=grad) for grad in (place > 0, True))
        of_rank = PipelineStage(stage, place, STAGES, torch.device("cpu"), x, y, group=pipeline)
        kind = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
        run = kind(of_rank, EACH, loss_fn=loss_of, scale_grads=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = batch(step, 1), batch(step, 2)
        if group is None:
            for number in order.microbatches(stage, COUNT):
                rows = slice(number * ROWS, (number + 1) * ROWS)
                loss_of(stage(x[rows], torch.tensor([COUNT * step + number])), target[rows]).backward()
        else:
            for some in order.pipelined(stage, COUNT):
                rows = slice(some.start * ROWS, some.stop * ROWS)
                named = {"number": torch.arange(COUNT * step + some.start, COUNT * step + some.stop)}
                given = () if place else (x[rows],)
                run.step(*given, target=target[rows] if place == STAGES - 1 else None, **named)  # type: ignore[union-attr]
        optimizer.step()
    found = {name: p.detach() for name, p in stage.named_parameters()}
    for name, module in stage.named_modules():
        for key, meta in getattr(module, "fp8_meta", {}).items():
            if key.startswith("scaling"):
                found |= {f"{name} {key} scale": meta.scale, f"{name} {key}": meta.amax_history}
    return found


CASES = {f"{schedule} {recipe}": (schedule, recipe) for schedule in ("gpipe", "1f1b") for recipe in RECIPES}
FAST = {name: case for name, case in CASES.items() if name in ("gpipe delayed", "1f1b delayed", "1f1b blocks")}


@pytest.mark.parametrize(
    ("count", "cases"),
    [(2, FAST), pytest.param(2, CASES, marks=pytest.mark.slow), pytest.param(4, FAST, marks=pytest.mark.slow)],
    ids=["fast", "all", "two pipelines"],
)
def test_two_stages_have_the_words_of_one_process(count: int, cases: dict[str, Any], tmp_path: Path) -> None:
    found = on_ranks(count, tmp_path, program, cases)
    whole = in_one(program, {recipe: ("", recipe) for _, recipe in cases.values()})
    for name, (_, recipe) in cases.items():
        for first in range(0, count, STAGES):
            both: dict[str, torch.Tensor] = {}
            for one in found[first : first + STAGES]:
                assert not both.keys() & one[name].keys()
                both |= one[name]
            compare(name, whole[recipe], [both], lambda _: None)


def test_what_a_pipeline_refuses() -> None:
    order = te.parallel.GradientOrder(2)
    stage = te.Linear(16, 16)
    with pytest.raises(ValueError, match=r"^GradientOrder: 3 microbatches in 2 groups; a multiple of 2 is accepted"):
        next(order.pipelined(stage, 3))
    stage.weight.grad = torch.zeros_like(stage.weight)
    with pytest.raises(ValueError, match=r"^GradientOrder: weight has a gradient before the step's first microbatch"):
        next(order.pipelined(stage, 2))
