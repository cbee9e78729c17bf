"""Deep dive 16 without transformers: the GPT of `twin train`, with the methods of a Hugging Face model that it calls.

Its layers are Twin Engine's already, so `te.convert` replaces nothing, and gives the model a recipe.
"""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import torch

import reference as te
from optimized.training.model import GPT
from optimized.training.settings import Settings
from reference.support import files

CONFIG = Settings(sequence=64, hidden=96, heads=2, layers=2)


class Model(torch.nn.Module):
    """Numbers of bytes [b, s] to `.logits` [b, s, 256]. The layers run in FP8 inside `te.autocast`, the head never."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        self.gpt = GPT(config)
        with te.quantized_model_init(enabled=False):  # the head's weight is the table's, which is never in FP8
            self.gpt.head = te.Linear(config.hidden, config.vocabulary, bias=False, params_dtype=torch.float32)
        self.gpt.head.weight = self.gpt.bytes.weight

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        text, gpt = input_ids.t(), self.gpt
        places = torch.arange(len(text), device=text.device)[:, None].expand(text.shape)
        h = (gpt.bytes(text) + gpt.places(places)).to(torch.bfloat16)
        for layer in gpt.layers:
            h = layer(h)
        with te.autocast(enabled=False):
            return SimpleNamespace(logits=gpt.head(gpt.norm(h)).transpose(0, 1))

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, do_sample: bool) -> torch.Tensor:
        """`input_ids` [b, s], and so many more, each the likeliest."""
        if do_sample:
            raise ValueError("generate: do_sample=True; False is accepted.")
        for _ in range(max_new_tokens):
            new = self(input_ids).logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, new], 1)
        return input_ids

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the state, FP8 state included."""
        file = io.BytesIO()
        torch.save(self.state_dict(), file)
        files.write(Path(folder) / "model.pt", file.getvalue())

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """A model of `CONFIG` with the state in `folder`."""
        model = cls(CONFIG)
        model.load_state_dict(torch.load(Path(folder) / "model.pt"))
        return model
