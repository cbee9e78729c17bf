"""A small GPT learns to sort digits by GRPO in FP8, and what the trainer computes is what the rollout computed.

    python examples/grpo.py                        on a Hopper GPU if there is one, else on the CPU; one hash on both
    python examples/grpo.py --rollout bf16         the usual way: the rollout runs in another precision
    python examples/grpo.py --rollout other-order  or in the trainer's, but products add in another order

A prompt is four digits and ">", and the answer is the same digits in order: "3141>" wants "1134". The reward is the
share of places that are right. A few supervised steps teach the model what an answer looks like (the **warm start**).
Then each update is

    rollout      `te.Generator` draws GROUP answers to each of PROMPTS prompts, and gives their log-probabilities, old
    advantage    A = (reward - mean of its group) / (standard deviation of its group + 1e-4)
    trainer      one forward of all texts gives new, the log-probabilities of the same tokens
    loss         mean over tokens of -min(r A, clip(r, 1 - CLIP, 1 + CLIP) A), with the ratio r = exp(new - old)
    update       backward, gradient clipping, FusedAdam

This is GRPO (Shao et al., "DeepSeekMath", arXiv 2402.03300) with one update for each rollout and no reference model.
There the policy that wrote and the one that learns are the same, so every r should be 1. In most systems it is not,
since two engines compute it. Here `torch.equal(old, new)` is checked at each update, so r is exactly 1 and

    KL           mean of r - 1 - log r over tokens (Schulman's k3), is exactly 0.

Why a CPU and a GPU get one hash: the layers, the optimizer, the sampler and log-probabilities are this library's; of
torch's own operations those remain that round each number once, on zeros and ones; everything else is done on the host.
"""

import argparse
import hashlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import twin_engine.reference as te  # layers on the CPU or, with --device cuda, on a GPU

DIGITS, ARROW, VOCABULARY = 4, 10, 16
TEXT = 2 * DIGITS + 1  # a prompt, ">", an answer
HIDDEN, HEADS, LAYERS = 64, 4, 2
WARM_START, WARM_RATE, RATE, BETAS, LARGEST_NORM = 40, 4e-3, 1e-3, (0.9, 0.95), 1.0
PROMPTS, GROUP, CLIP = 16, 8, 0.2
ROLLOUTS = ("exact", "bf16", "other-order")
BF16 = torch.bfloat16


class GPT(torch.nn.Module):
    """Tokens [s, b] to logits [s, b, VOCABULARY]; the layers run in FP8, or with `fp8=False` in bf16."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        common = {"params_dtype": BF16, "device": device}
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True, **common}
        self.table, self.norm = te.Embedding(VOCABULARY, HIDDEN, **common), te.LayerNorm(HIDDEN, **common)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(HIDDEN, 4 * HIDDEN, HEADS, layer_number=i + 1, **options) for i in range(LAYERS)
        )
        self.head = te.Linear(HIDDEN, VOCABULARY, bias=False, **common)
        self.register_buffer("angles", te.RotaryPositionEmbedding(HIDDEN // HEADS)(TEXT).to(device))
        self.recipe = te.DelayedScaling(amax_history_len=4)
        te.init_fp8_state(self.layers, self.recipe)

    def forward(self, text: torch.Tensor, cache: te.InferenceParams | None = None, fp8: bool = True) -> torch.Tensor:
        h = self.table(text)
        with te.autocast(enabled=fp8, recipe=self.recipe):
            for layer in self.layers:
                h = layer(h, rotary_pos_emb=self.angles, inference_params=cache)
        return self.head(self.norm(h))

    @torch.no_grad()
    def turn_mlps(self) -> None:
        """Reverse the order of each MLP's hidden units: the same codes and products, which fc2 adds in another order.

        Twice leaves everything as it was.
        """
        for layer in self.layers:
            mlp = layer.layernorm_mlp
            for parameter, dim in ((mlp.fc1_weight, 0), (mlp.fc1_bias, 0), (mlp.fc2_weight, 1)):
                parameter.copy_(parameter.flip(dim))


class Update(NamedTuple):
    """What an update has seen: the mean reward, and of the ratios r the KL, the extremes, and how many were clipped.

    `clipped` is the share of tokens whose gradient the clip removes, `equal` is torch.equal(old, new).
    """

    number: int
    reward: float
    equal: bool
    kl: float
    least: float
    largest: float
    clipped: float


def draw_prompts(count: int, generator: torch.Generator) -> torch.Tensor:
    """Prompts int64 [count, DIGITS + 1] on the host."""
    digits = torch.randint(10, (count, DIGITS), generator=generator)
    return torch.cat([digits, torch.full((count, 1), ARROW)], 1)


def reward(text: list[int]) -> float:
    """The share of an answer's places that are right."""
    right = sorted(text[:DIGITS])
    return sum(a == b for a, b in zip(text[DIGITS + 1 :], right, strict=True)) / DIGITS


def advantages(rewards: list[float]) -> list[float]:
    """Of groups of GROUP answers each, in the order of `rewards`; in float64 on the host."""
    found: list[float] = []
    for first in range(0, len(rewards), GROUP):
        group = rewards[first : first + GROUP]
        mean = sum(group) / GROUP
        deviation = (sum((x - mean) ** 2 for x in group) / GROUP) ** 0.5
        found += [(x - mean) / (deviation + 1e-4) for x in group]
    return found


class Run:
    """A model, its optimizer and its generator of texts."""

    def __init__(self, device: torch.device, rollout: str = "exact", seed: int = 0) -> None:
        if rollout not in ROLLOUTS:
            raise ValueError(f"rollout={rollout!r}; one of {ROLLOUTS} is accepted.")
        torch.manual_seed(seed)
        self.model, self.device, self.kind, self.seed, self.number = GPT(device), device, rollout, seed, 0
        self.prompts = torch.Generator().manual_seed(seed)
        self.optimizer = te.optimizers.FusedAdam(
            self.model.parameters(), lr=WARM_RATE, betas=BETAS, weight_decay=0.0, master_weights=True
        )
        self.generator = te.Generator(
            self.model,
            lambda tokens, cache: self.model(tokens, cache, rollout != "bf16"),
            max_batch_size=PROMPTS * GROUP,
            max_sequence_length=TEXT,
            page_size=DIGITS + 1,  # so that a group shares the page of its prompt
        )

    def _losses(self, text: torch.Tensor) -> torch.Tensor:
        """-log p of the answers' tokens, fp32 [DIGITS, b], of texts [b, TEXT]: the trainer's forward."""
        text = text.to(self.device).t().contiguous()
        logits = self.model(text[:-1])[DIGITS:]
        return te.cross_entropy(logits, text[DIGITS + 1 :], reduction="none")

    def _step(self) -> None:
        te.optimizers.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.generator.forget()  # its keys are those of other weights

    def warm_up(self, steps: int = WARM_START) -> None:
        """Supervised steps; the rate falls to a tenth of itself."""
        self.model.train()
        for step in range(steps):
            prompts = draw_prompts(PROMPTS * GROUP, self.prompts)
            text = torch.cat([prompts, prompts[:, :DIGITS].sort(1).values], 1)
            losses = self._losses(text)
            losses.backward(torch.full_like(losses, 1 / losses.numel()))
            self.optimizer.param_groups[0]["lr"] = WARM_RATE * (1 - 0.9 * step / steps)
            self._step()
        self.optimizer.param_groups[0]["lr"] = RATE

    def rollout(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Texts int64 [b, TEXT] on the host, and their answers' log-probabilities, fp32 [DIGITS, b]."""
        self.model.eval()
        prompts = draw_prompts(PROMPTS, self.prompts).repeat_interleave(GROUP, 0).tolist()
        first = (self.seed << 32) + self.number * len(prompts)  # each answer has a stream of its own
        each = [te.Sampling(1.0, seed=first + i) for i in range(len(prompts))]
        if self.kind == "other-order":
            self.model.turn_mlps()
        try:
            done = self.generator.generate(prompts, DIGITS, each)
        finally:
            if self.kind == "other-order":
                self.model.turn_mlps()
        texts = [prompt + one.tokens for prompt, one in zip(prompts, done, strict=True)]
        return torch.tensor(texts), torch.tensor([one.logprobs for one in done]).t().contiguous()

    def update(self) -> Update:
        """One rollout, and one step on it."""
        texts, old = self.rollout()
        rewards = [reward(text) for text in texts.tolist()]
        gain = torch.tensor(advantages(rewards), dtype=torch.float32).to(self.device)

        self.model.train()
        losses = self._losses(texts)
        old = old.to(self.device)
        ratio = (-losses - old).exp()
        limited = ratio.clamp(1 - CLIP, 1 + CLIP)
        objective = torch.minimum(ratio * gain, limited * gain)
        objective.backward(torch.full_like(objective, -1 / objective.numel()))
        self._step()

        self.number += 1
        r = ratio.detach().double()
        removed = ((gain > 0) & (r > 1 + CLIP)) | ((gain < 0) & (r < 1 - CLIP))
        equal = torch.equal(old, -losses.detach())
        kl = float((r - 1 - r.log()).mean())
        mean = sum(rewards) / len(rewards)
        return Update(self.number, mean, equal, kl, float(r.min()), float(r.max()), float(removed.double().mean()))

    def updates(self, count: int) -> Iterator[Update]:
        """So many updates."""
        for _ in range(count):
            yield self.update()

    def digest(self) -> str:
        """SHA-256 of all parameters, by name."""
        found = hashlib.sha256()
        for name, p in sorted(self.model.named_parameters()):
            found.update(name.encode() + p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rollout", choices=ROLLOUTS, default="exact")
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begun = time.perf_counter()
    run = Run(torch.device(given.device), given.rollout, given.seed)
    run.warm_up()
    print(f"warm start: {WARM_START} supervised steps, {time.perf_counter() - begun:.1f} s", flush=True)
    for one in run.updates(given.updates):
        print(
            f"{one.number:3}  reward {one.reward:.3f}  equal {one.equal}  KL {one.kl:.3g}  "
            f"r {one.least:.4f} to {one.largest:.4f}  clipped {one.clipped:.2%}",
            flush=True,
        )
        if given.rollout == "exact" and not (one.equal and one.kl == 0):
            raise SystemExit(f"Update {one.number}: the trainer's log-probabilities are not the rollout's.")
    print(f"{time.perf_counter() - begun:.1f} s\nSHA-256 of the parameters: {run.digest()}")


if __name__ == "__main__":
    main()
