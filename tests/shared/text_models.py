"""Models that write text, and the words that each request must get."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from shared.inference_cases import HIDDEN, Decoder

import reference as te
from reference.generation.sampling import sample

VOCABULARY, ROOM = 48, 64


class Model(torch.nn.Module):
    """Numbers [s, b] to logits [s, b, V], or batch first."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.decoder = Decoder(**options)
        common: dict[str, Any] = {"params_dtype": self.decoder.dtype, "device": "cpu"}
        torch.manual_seed(7)
        self.table = te.Embedding(VOCABULARY, HIDDEN, **common)
        self.norm = te.LayerNorm(HIDDEN, **common)
        self.head = te.Linear(HIDDEN, VOCABULARY, **common)

    def forward(self, text: torch.Tensor, **more: Any) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.decoder(self.table(text), **more)))
        return found


@functools.cache
def model_of(name: str) -> Model:
    """A model whose scales training has found."""
    options = {"window": {"window_size": (7, 0)}, "batch first": {"attn_input_format": "bshd"}, "plain": {}}
    model = Model(layers=2, num_gqa_groups=2, **options[name])
    model.decoder.trained()
    with torch.no_grad():  # of different words, and not the likeliest ones alone
        model.head.weight.mul_(6)
    return model.eval()


def whole(model: Model, text: Sequence[int]) -> torch.Tensor:
    """The trainer's forward: logits [s, V]."""
    tokens = torch.tensor(text)
    return model(tokens[None] if model.decoder.dim else tokens[:, None]).view(len(text), VOCABULARY)


@torch.no_grad()
def alone(model: Model, prompt: Sequence[int], count: int, one: te.Sampling) -> list[int]:
    """The new tokens, by a forward of the whole text for each."""
    text = list(prompt)
    for _ in range(count):
        text += sample(whole(model, text)[-1:].contiguous(), [one], [len(text)]).tolist()
    return text[len(prompt) :]


@torch.no_grad()
def check(model: Model, prompt: Sequence[int], found: Any, count: int, one: te.Sampling) -> None:
    """Tokens as by the trainer's forward, and log-probabilities as by its loss.

    One forward of the whole text, as in training: `test_a_rows_logits_do_not_depend_on_later_tokens`.
    """
    assert len(found.tokens) == count
    text = [*prompt, *found.tokens]
    logits = whole(model, text[:-1])[len(prompt) - 1 :].contiguous()
    assert found.tokens == sample(logits, [one] * count, list(range(len(prompt), len(text)))).tolist()
    losses = te.cross_entropy(logits, torch.tensor(found.tokens), reduction="none")
    assert found.logprobs == (-losses).tolist()
