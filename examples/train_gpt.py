"""Train a byte-level GPT in FP8, to the bit: a CPU and a Hopper GPU print the same hashes, and so does a resumed run.

    python examples/train_gpt.py                       on a Hopper GPU if there is one, else on the CPU
    python examples/train_gpt.py --device cpu --steps 20
    python examples/train_gpt.py --resume              go on from run.safetensors, after a kill at any moment

`twin train` has more: sizes, metrics, evaluation, recording. This file has what a training program needs, and no more.
"""

import argparse
import hashlib
import json
import math
import sysconfig
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import twin_engine as te  # its layers also run on the CPU
from twin_engine.reference.support import files

LAYERS, HIDDEN, HEADS, SEQUENCE, ROWS = 2, 128, 2, 64, 4
MICROBATCHES, RATE, WARMUP, DROPOUT, LARGEST_NORM = 2, 2e-3, 10, 0.1, 1.0
BF16 = torch.bfloat16


class GPT(torch.nn.Module):
    """Bytes [sequence, rows] and the bytes after them to the mean loss. Parameters are fp32, activations bf16."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        common = {"params_dtype": torch.float32, "device": device}
        self.bytes = te.Embedding(256, HIDDEN, **common)
        self.places = te.Embedding(SEQUENCE, HIDDEN, **common)
        options = {"hidden_dropout": DROPOUT, "attention_dropout": DROPOUT, "self_attn_mask_type": "causal", **common}
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(HIDDEN, 4 * HIDDEN, HEADS, fuse_qkv_params=True, **options) for _ in range(LAYERS)
        )
        self.norm = te.LayerNorm(HIDDEN, **common)
        self.head = te.Linear(HIDDEN, 256, bias=False, **common)

    def forward(self, text: torch.Tensor, after: torch.Tensor, recipe: te.DelayedScaling, first: bool) -> torch.Tensor:
        places = torch.arange(len(text), device=text.device)[:, None].expand(text.shape)
        with torch.autocast(text.device.type, BF16):
            h = (self.bytes(text) + self.places(places)).to(BF16)
            with te.autocast(recipe=recipe):
                for layer in self.layers:
                    # FP8 weights are cast in the first microbatch of a step; activations are recomputed in backward.
                    h = te.checkpoint(layer, h, is_first_microbatch=first)
            return te.cross_entropy(self.head(self.norm(h)), after)


def read_text() -> torch.Tensor:
    """The sources of a few modules of Python's standard library, uint8."""
    folder = Path(sysconfig.get_path("stdlib"))
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sorted(folder.glob("*.py")))), dtype=torch.uint8)


def windows(text: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bytes int64 [SEQUENCE + 1, ROWS] at places from torch's CPU generator, whose state is in the checkpoint."""
    starts = torch.randint(len(text) - SEQUENCE, (ROWS,), device="cpu")
    return text[starts + torch.arange(SEQUENCE + 1)[:, None]].to(device).long()


def rate(step: int, steps: int) -> float:
    """The learning rate; rounded to nine digits, since libraries' cosines differ in the last bit."""
    falling = (1 + math.cos(math.pi * step / steps)) / 2
    return float(f"{RATE * min(1, (step + 1) / WARMUP) * falling:.9g}")


class Run:
    """Everything that the next step depends on."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)  # of weights, masks and places
        self.model, self.device, self.step = GPT(device), device, 0
        self.recipe = te.DelayedScaling(amax_history_len=16)
        te.init_fp8_state(self.model.layers, self.recipe)
        self.optimizer = te.optimizers.FusedAdam(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        for parameter in self.model.parameters():
            self.optimizer.initialize_state(parameter)

    def train(self, text: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """One step; the losses of its microbatches."""
        self.optimizer.zero_grad()
        losses = []
        for part in range(MICROBATCHES):
            window = windows(text, self.device)
            loss = self.model(window[:-1], window[1:], self.recipe, part == 0)
            loss.backward(torch.full_like(loss, 1 / MICROBATCHES))
            losses.append(loss.detach())
        te.optimizers.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        if self.step > 0:  # all scales are 1 in the first step, which only finds better ones
            self.optimizer.param_groups[0]["lr"] = rate(self.step, steps)
            self.optimizer.step()
        self.step += 1
        return losses

    def tensors(self) -> dict[str, torch.Tensor]:
        """All state by name: weights, FP8 state, moments, torch's generator."""
        fp8 = {  # of layers that run in FP8; the head's key has nothing
            f"{name}.{key}.{part}": getattr(module.fp8_meta[key], part)
            for name, module in self.model.layers.named_modules()
            for key in ("scaling_fwd", "scaling_bwd")
            if key in getattr(module, "fp8_meta", {})
            for part in ("scale", "amax_history")
        }
        found = {name: p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            found |= {f"{name}/{part}": x for part, x in self.optimizer.state[p].items()}
        return {**found, **fp8, "generator": torch.get_rng_state()}

    def digest(self) -> str:
        """SHA-256 of all state: the same on a CPU and on a GPU."""
        found = hashlib.sha256(str(self.step).encode())
        for name, x in sorted(self.tensors().items()):
            found.update(name.encode() + x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def save(self, path: Path) -> None:
        """Replace the checkpoint, whole or not at all."""
        here = {name: x.cpu().contiguous() for name, x in self.tensors().items()}
        about = {"step": str(self.step), "sha256": self.digest()}
        files.write(path, safetensors.torch.save(here, about))

    def load(self, path: Path) -> None:
        """Go on where `save` was called."""
        with safetensors.safe_open(path, framework="pt") as opened:
            about, saved = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        with torch.no_grad():
            for name, x in self.tensors().items():
                x.copy_(saved[name])
        torch.set_rng_state(saved["generator"])
        self.step = int(about["step"])
        if self.step > 1:
            self.optimizer.param_groups[0]["step"] = self.step - 1
        if self.digest() != about["sha256"]:
            raise files.Damaged(f"{path} is damaged: its numbers are not those that were written.")


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("run.safetensors"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    run, text = Run(torch.device(args.device)), read_text()
    if args.resume and args.output.exists():
        run.load(args.output)
    while run.step < args.steps:
        losses = run.train(text, args.steps)
        loss = sum(map(float, losses)) / len(losses)
        print(json.dumps({"step": run.step, "loss": loss, "sha256": run.digest()}), flush=True)
        if not all(x.isfinite().all() for x in (*losses, *run.model.parameters())):
            raise SystemExit(f"Step {run.step} has a NaN or an infinity; {args.output} was not written again.")
        if run.step % 10 == 0 or run.step == args.steps:
            run.save(args.output)


if __name__ == "__main__":
    main()
