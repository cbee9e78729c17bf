"""Training whose every bit is defined: a step on a CPU and on a GPU, and a run that was killed and goes on.

    for each of `accumulate` microbatches:  loss, backward with the gradient groups/accumulate  fp32 sums
    the mean over groups, in a tree         `te.parallel.GradientOrder`; ranks have whole groups
    norm = clip_grad_norm_(...)                                                                  with `clip`
    AdamW with the step's rate

With delayed scaling the first step only finds scales: all of them are 1 in it, and its gradients underflow.

All state is in tensors with names (`Trainer.tensors`) and in two counts. Between steps nothing else is alive: the casts
that later microbatches share are made anew in each step. torch's CPU generator is the trainer's own: it is set before
a step and kept after it. Ranks of torch.distributed's default group, where there is one, share each step; all of them
then have the same state, and a run may go on with another number of them.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reference as te
from optimized.compare import fp8_state
from optimized.training import checkpoint, cuda_graph
from optimized.training.corpus import Corpus
from optimized.training.layout import Layout, Places
from optimized.training.model import GPT, sample
from optimized.training.settings import Settings
from reference.arguments import is_int
from reference.nn.core.dropout import Generator
from reference.numbers import philox
from reference.support import files
from reference.support.dtensor import distributed, full
from reference.support.dtensor import shard as local

MOMENTS = ("exp_avg", "exp_avg_sq")
HELD_OUT_BATCHES = 8


def check_run(settings: Settings, text: Corpus, layout: Layout) -> None:
    """Refuse a run that cannot be made, before ranks communicate.

    Raises:
        ValueError: the ranks that are here cannot have the layout, or the text is too short.
    """
    layout.check(settings, dist.get_world_size() if dist.is_initialized() else 1)
    seen, unseen = text.split()
    if min(len(seen.data), len(unseen.data)) <= settings.sequence:
        raise ValueError(
            f"the text has {len(text.data)} bytes, of which {len(unseen.data)} are held out; more than "
            f"{settings.sequence}, the sequence, must be in both parts."
        )


def check_together(settings: Settings, text: Corpus, layout: Layout) -> None:
    """`check_run` on all ranks, before they make groups: all refuse what one refuses, or what is another run on one.

    Raises:
        ValueError: the first name that differs, with both values; or what `check_run` says, on whichever rank.
    """
    refusal = None
    try:
        check_run(settings, text, layout)
    except ValueError as error:
        refusal = error
    mine = {**asdict(settings), **asdict(layout), "text": text.digest, "bytes": len(text.data)}
    found: list[Any] = [(mine, str(refusal or ""))]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found *= dist.get_world_size()
        dist.all_gather_object(found, (mine, str(refusal or "")))
    first = found[0][0]
    for rank, (one, _) in enumerate(found):
        for name, value in one.items():
            if value != first[name]:
                raise ValueError(
                    f"rank {rank} has {name}={value}, and rank 0 has {first[name]}; the same settings, layout and text "
                    f"are accepted."
                )
    if refusal is not None:
        raise refusal
    for rank, (_, sentence) in enumerate(found):
        if sentence:
            raise ValueError(f"rank {rank}: {sentence}")


class Trainer:
    """A model, its optimizer and its text.

    Args:
        shard: divide parameters, gradients and moments between the ranks that share a step (FSDP2's `fully_shard`).
        tensor, context: how many ranks share each microbatch: its layers' weights, or its tokens
            (`optimized.training.layout`). The others share the step.

        With any of the three, all ranks must call `evaluate`, `digest` and `save`; with one of the last two nobody
        calls `sample`.

    Attributes:
        step: steps that were made.
        norm: the gradient's norm in the last step, fp32 [] on the device; None without clipping.
    """

    def __init__(
        self,
        settings: Settings,
        text: Corpus,
        device: torch.device | str = "cpu",
        shard: bool = False,
        tensor: int = 1,
        context: int = 1,
    ) -> None:
        layout = Layout(shard, tensor, context)
        check_together(settings, text, layout)
        self.settings, self.text = settings, text
        self.seen, self.unseen = text.split()
        self.places = Places(layout)
        self.model = GPT(settings, device, self.places.tensor, self.places.context)
        self.recipe = settings.recipe()
        if isinstance(self.recipe, te.DelayedScaling):
            te.init_fp8_state(self.model.layers, self.recipe)
        self.order = te.parallel.GradientOrder(settings.groups, self.places.data)
        self._sharded, self._captures = (
            shard,
            not shard and layout.inner == 1,
        )  # a microbatch and weights that no ranks share
        if shard:
            self._shard()
        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = te.optimizers.FusedAdam(groups, lr=0.0, betas=settings.betas)
        for _, parameter in named:
            self.optimizer.initialize_state(parameter)
        self.step, self.updates = 0, 0
        self.norm: torch.Tensor | None = None
        self._loaded = False  # a step has run here
        self._captured: cuda_graph.Step | None = None
        generators = [one for one in self.model.modules() if isinstance(one, Generator)]
        self._generators = generators
        self._draws = len(generators) if settings.dropout > 0 else 0  # seeds that a microbatch takes
        self._share = torch.tensor(settings.groups / settings.accumulate, dtype=torch.float32, device=self.model.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self._random = torch.get_rng_state()

    def _mesh(self) -> Any:
        """The ranks that share parameters."""
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        kind, data = self.model.device.type, self.places.data
        return init_device_mesh(kind, (self.order.ranks,)) if data is None else DeviceMesh.from_group(data, kind)

    def _shard(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self._mesh()
        # A layer's result is a view, which nothing here changes in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        for module in (*self.model.layers, self.model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        te.parallel.tree_reduce_scatter(self.model, self.order)

    # --- a step ------------------------------------------------------------------------------------------

    def train(self, capture: bool = True) -> torch.Tensor:
        """One step; the losses of its microbatches, fp32 [accumulate] on the device. Nobody waits for a GPU.

        On a GPU the first step loads the kernels, and later ones replay it as CUDA graphs, unless `capture` is False,
        since who looks at the ops of a step needs its Python, or ranks share a microbatch or the weights.
        """
        with self._generator():
            self.optimizer.zero_grad()
            parameters = list(self.model.parameters())
            count = self.settings.accumulate
            capture = capture and self._loaded and self.model.device.type == "cuda" and self._captures
            share, each = self.order.share(count), count // self.settings.groups
            runs = self.order.runs(count) if self._sharded else share
            losses = torch.zeros(count, dtype=torch.float32, device=self.model.device)
            self._skip(share.start)
            for i in self.order.microbatches(self.model, count):
                # The first of a group makes the gradients, and casts the weights, to the same words in each.
                windows = self._windows(self.seen, self.step * count + i)
                if capture and self._captured is None:  # inside the loop, where a microbatch updates no scales
                    self._captured = cuda_graph.Step(self._microbatch, parameters, windows, each)
                microbatch = self._captured if capture and self._captured else self._microbatch
                loss = microbatch(i % each, windows)
                if i in share:
                    losses[i] = loss
            self._skip(count - runs.stop)
            if self.order.ranks > 1:
                self._agree(losses)
            self._loaded = True
            if self.settings.clip > 0:
                self.norm = self._clip(parameters)
            if self.step > 0 or not isinstance(self.recipe, te.DelayedScaling):
                for group in self.optimizer.param_groups:
                    group["lr"] = self.settings.rate(self.step)
                self.optimizer.step()
                self.updates += 1
        self.step += 1
        return losses

    def _clip(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        """Clip the gradients by the norm of the whole model's, which it returns."""
        if self.places.tensor is None:
            return te.optimizers.clip_grad_norm_(parameters, self.settings.clip)
        named = {f"model/{name}": full(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        norm = te.optimizers.get_total_norm(list(self.places.joined(self.model, named).values()))
        te.optimizers.clip_grads_with_norm_(parameters, self.settings.clip, norm)
        return norm

    def _skip(self, microbatches: int) -> None:
        """Take the seeds of microbatches that other ranks run."""
        philox.draw_seeds(torch.empty(self._draws * microbatches, dtype=torch.int64))

    def _agree(self, losses: torch.Tensor) -> None:
        """All ranks' losses, of which each has its own and zeros; layers' random states as the last microbatch left."""
        group = self.places.data
        dist.all_reduce(losses, group=group)
        if self._draws:
            states = torch.stack([one.state[:2] for one in self._generators])
            dist.broadcast(states, group=group, group_src=self.order.ranks - 1)
            for one, found in zip(self._generators, states, strict=True):
                one.state[:2].copy_(found)

    def _microbatch(self, number: int, windows: torch.Tensor) -> torch.Tensor:
        first = None if self.settings.accumulate == 1 else number == 0
        loss = self.model.loss(windows, self.recipe, first)
        loss.backward(self._share)  # a division of the loss would be a product on a GPU
        return loss.detach()

    def _windows(self, text: Corpus, number: int) -> torch.Tensor:
        """Microbatch `number` on the device; from pinned memory, so that the host does not wait for the copy."""
        windows = text.batch(self.settings.seed, number, self.settings.rows, self.settings.sequence)
        if self.model.device.type != "cuda":
            return windows
        return windows.pin_memory().to(self.model.device, non_blocking=True)

    @contextmanager
    def _generator(self) -> Iterator[None]:
        """torch's CPU generator is this trainer's inside."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            yield
            self._random = torch.get_rng_state()

    # --- a look at the model -----------------------------------------------------------------------------

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Run forwards inside that leave no trace: no dropout, and FP8 state as before."""
        kept = {name: x.clone() for name, x in self._fp8().items()}
        self.model.eval()
        try:
            with self._generator(), torch.no_grad():
                yield
        finally:
            self.model.train()
            for name, x in self._fp8().items():
                x.copy_(kept[name])

    def evaluate(self, batches: int = HELD_OUT_BATCHES) -> float:
        """The mean loss, in nats per byte, of batches of the held-out text that are always the same."""
        if not is_int(batches) or batches < 1:
            raise ValueError(f"Trainer.evaluate: batches={batches!r}; an int from 1 is accepted.")
        with self._undisturbed():
            losses = [self.model.loss(self._windows(self.unseen, i), self.recipe) for i in range(batches)]
        return sum(map(float, losses)) / batches

    def sample(self, prompt: bytes, length: int, progress: Callable[[], object] = lambda: None) -> bytes:
        """`prompt`, continued by `length` bytes; `progress` is called after each."""
        with self._undisturbed():
            return sample(self.model, self.recipe, prompt, length, progress)

    # --- all state ---------------------------------------------------------------------------------------

    def _fp8(self) -> dict[str, torch.Tensor]:
        named = self.model.layers.named_modules()
        return {f"fp8/layers.{at}.{name}": x for at, one in named for name, x in fp8_state(one).items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that the next step depends on, or changes, by name; the tensors themselves."""
        found = {f"model/{name}": p.detach() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            found |= {f"optimizer/{name}/{part}": self.optimizer.state[parameter][part] for part in MOMENTS}
        found |= self._fp8()
        for name, module in self.model.named_modules():
            if isinstance(module, Generator):
                found[f"random/{name}"] = module.state[:2]  # a rank's place in a tensor may follow
        return {**found, "random/torch": self._random}

    def whole(self) -> dict[str, torch.Tensor]:
        """`tensors()`, of which none is divided between ranks; all ranks ask for them."""
        return self.places.joined(self.model, {name: full(x) for name, x in self.tensors().items()})

    def about(self) -> dict[str, Any]:
        """What is no tensor: the settings, the counts, and which text it is."""
        counts = {"step": self.step, "updates": self.updates}
        return {"settings": asdict(self.settings), **counts, "text": self.text.digest, "bytes": len(self.text.data)}

    def digest(self) -> str:
        """The SHA-256 of all state, the same on a CPU and on a GPU."""
        return checkpoint.digest(self.whole(), self.step, self.updates)

    def save(self, path: Path | None) -> str | None:
        """Write all state, whole or not at all; its SHA-256. None: another rank writes it."""
        tensors = self.whole() if path is not None or self._sharded or self.places.tensor is not None else {}
        return None if path is None else checkpoint.write(path, tensors, self.about())

    def load(self, path: Path) -> None:
        """Go on where the trainer that wrote `path` was; everything is checked before anything is changed.

        Raises:
            reference.support.files.Damaged: it is no whole checkpoint.
            ValueError: it is one of other settings, or of another text.
        """
        saved, about = checkpoint.read(path)
        mine = self.about()
        settings = Settings(**about["settings"])
        differs = settings.differences(self.settings)
        if differs:
            both = (settings, self.settings)
            then, now = (", ".join(f"{name}={getattr(one, name)}" for name in differs) for one in both)
            raise ValueError(f"{path} was written with {then}; this run has {now}.")
        if (about["text"], about["bytes"]) != (mine["text"], mine["bytes"]):
            raise ValueError(
                f"{path} was trained on a text of {about['bytes']:,} bytes ({about['text']}); this one has "
                f"{mine['bytes']:,} ({mine['text']})."
            )
        live, saved = self.tensors(), self.places.part(self.model, saved)
        here, there = ({name: (x.dtype, x.shape) for name, x in one.items()} for one in (live, saved))
        if here != there:
            raise files.Damaged(f"{path} is damaged: it does not have the tensors of its settings.")
        with torch.no_grad():
            for name, x in live.items():
                local(x).copy_(local(distributed(saved[name].to(x.device), x)))
        self.step, self.updates = about["step"], about["updates"]
        for group in self.optimizer.param_groups:
            if self.updates:
                group["step"] = self.updates
