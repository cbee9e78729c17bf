"""A small GPT learns a text, and writes several continuations at once; each is what it would be alone, bit for bit.

    python examples/generate.py                     on a Hopper GPU
    python examples/generate.py --device cpu

Tokens and log-probabilities are the same on both, and `te.cross_entropy` of one forward of the whole text, as a trainer
runs it, gives these log-probabilities.
"""

import argparse
from pathlib import Path

import torch
import twin_engine.reference as te  # layers on the CPU or, with --device cuda, on a GPU

ROOM, RECIPE = 256, te.DelayedScaling()


class GPT(torch.nn.Module):
    """Bytes [s, b] to logits [s, b, 256]; the layers run in FP8."""

    def __init__(self, device: torch.device, hidden: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        bf16 = {"params_dtype": torch.bfloat16, "device": device}
        dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        self.table, self.norm = te.Embedding(256, hidden, **bf16), te.LayerNorm(hidden, **bf16)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(hidden, 4 * hidden, heads, layer_number=i + 1, **dropout, **bf16) for i in range(layers)
        )
        self.head = te.Linear(hidden, 256, **bf16)
        self.register_buffer("angles", te.RotaryPositionEmbedding(hidden // heads)(ROOM).to(device))

    def forward(self, text: torch.Tensor, inference_params: te.InferenceParams | None = None) -> torch.Tensor:
        h = self.table(text)
        with te.autocast(recipe=RECIPE):
            for layer in self.layers:
                h = layer(h, rotary_pos_emb=self.angles, inference_params=inference_params)
        return self.head(self.norm(h))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    text = torch.tensor(list(Path(__file__).read_bytes()))
    torch.manual_seed(1)
    model = GPT(given.device)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=2e-3, master_weights=True)
    for _ in range(given.steps):
        starts = torch.randint(len(text) - 65, (8,))
        window = torch.stack([text[at : at + 65] for at in starts], 1).to(given.device)
        te.cross_entropy(model(window[:-1]), window[1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    generator = te.Generator(model.eval(), max_batch_size=3, max_sequence_length=ROOM, draft_tokens=4)
    prompts = [list(b"    def "), list(b"    def "), list(b"import t"), list(b"te.")]
    samplings = [te.Sampling(), *(te.Sampling(0.7, top_p=0.95, seed=seed) for seed in range(3))]
    for prompt, done in zip(prompts, generator.generate(prompts, 40, samplings), strict=True):
        print(repr(bytes([*prompt, *done.tokens]).decode(errors="replace")), f"{sum(done.logprobs):.4f}")
        whole = torch.tensor([*prompt, *done.tokens], device=given.device)
        with torch.no_grad():
            losses = te.cross_entropy(model(whole[:-1, None])[:, 0], whole[1:], reduction="none")
        assert (-losses[len(prompt) - 1 :]).tolist() == done.logprobs  # the trainer's words


if __name__ == "__main__":
    main()
