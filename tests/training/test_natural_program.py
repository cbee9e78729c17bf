"""The program that a user writes first, two hundred steps to the bit, with a CPU and a GPU agreeing in each.

An embedding, transformer layers with dropout, a head and its loss, all of it in FP8, and FusedAdam with fp32 masters.
Nothing is arranged for equal bits: 16-bit parameters, the table and the head apart, torch's generator for the masks.
"""

import json
from typing import Any

import pytest
import torch
from shared.training_text import corpus

import optimized  # whose import registers the kernels
import reference as te
from optimized import measure
from optimized.compare import fp8_state
from optimized.training import checkpoint
from reference.support import files

GOLDEN = measure.ROOT / "tests" / "golden" / "natural_program.json"
SHORT, LONG, EVERY = 10, 200, 10
RECIPES: dict[str, Any] = {
    "delayed": lambda: te.DelayedScaling(amax_history_len=16),
    "current": te.recipe.Float8CurrentScaling,
}

pytestmark = pytest.mark.usefixtures("one_thread")


class GPT(torch.nn.Module):
    """Bytes [s, b] and those after them to the loss."""

    def __init__(self, device: str) -> None:
        super().__init__()
        common: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device}
        options: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "self_attn_mask_type": "causal"}
        self.embedding = te.Embedding(256, 64, **common)
        self.layers = torch.nn.ModuleList(te.TransformerLayer(64, 256, 2, **options, **common) for _ in range(2))
        self.head = te.Linear(64, 256, **common)

    def forward(self, text: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(text)
        for layer in self.layers:
            hidden = layer(hidden)
        return te.cross_entropy(self.head(hidden), after)


def digest(model: GPT, optimizer: torch.optim.Optimizer, step: int) -> str:
    """SHA-256 of parameters, masters, moments, FP8 state and torch's generator."""
    found = {"generator": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        state = optimizer.state[parameter].items()
        found |= {f"{name}/{part}": x for part, x in state if isinstance(x, torch.Tensor)}
    for name, module in model.named_modules():
        found |= {f"{name}.{part}": x for part, x in fp8_state(module).items()}
    return checkpoint.digest(found, step, step)


def hashes(recipe: Any, steps: int, device: str = "cpu") -> dict[str, list[Any]]:
    """By number of the step, its loss and the SHA-256 of all state after it."""
    assert optimized.TransformerLayer
    found = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        model = GPT(device)
        optimizer = te.optimizers.FusedAdam(model.parameters(), lr=2e-3, master_weights=True)
        for step in range(1, steps + 1):
            window = corpus().batch(17, step, 4, 32).to(device).long()
            optimizer.zero_grad()
            with te.autocast(recipe=recipe):
                loss = model(window[:-1], window[1:])
            loss.backward()
            optimizer.step()
            if step <= SHORT or step % EVERY == 0:
                found[str(step)] = [float(loss.detach()), digest(model, optimizer, step)]
    return found


def recorded(name: str, steps: int) -> dict[str, list[Any]]:
    return {step: one for step, one in json.loads(GOLDEN.read_text())[name].items() if int(step) <= steps}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_its_first_steps_have_the_recorded_hashes(name: str, device: str) -> None:
    assert hashes(RECIPES[name](), SHORT, device) == recorded(name, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_hundred_steps_have_the_recorded_hashes(name: str, device: str) -> None:
    found = hashes(RECIPES[name](), LONG, device)
    assert found == recorded(name, LONG)
    assert found[str(LONG)][0] < 2.0  # and it has learned: 5.6 at its start


def record() -> None:
    """`PYTHONPATH=.:tests python tests/training/test_natural_program.py` records the hashes anew, on a CPU, in a
    minute."""
    found = {name: hashes(recipe(), LONG) for name, recipe in RECIPES.items()}
    files.write(GOLDEN, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    record()
