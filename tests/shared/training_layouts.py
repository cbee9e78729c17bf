"""The GPT's trainer in layouts that `twin train` does not offer: DDP, HSDP and a pipeline of PyTorch's."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import reference as te
from optimized.training.corpus import Corpus
from optimized.training.model import GPT
from optimized.training.settings import Settings
from optimized.training.trainer import Trainer
from reference.nn.core.dropout import Generator
from reference.numbers import philox
from reference.state import gradient_places


class _Loss(torch.nn.Module):
    """A model whose forward is its loss."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Any) -> torch.Tensor:
        return self.model.loss(*given)


class InDDP(Trainer):
    """DistributedDataParallel with `tree_hook`.

    Attributes:
        most_places: how many weights' gradients backward was to write to DDP's buckets in one step.
    """

    def __init__(self, settings: Settings, text: Corpus, device: torch.device | str = "cpu") -> None:
        super().__init__(settings, text, device)
        self._captures = False  # DDP's hooks are Python
        self.most_places = 0
        self.parallel = DistributedDataParallel(_Loss(self.model), gradient_as_bucket_view=True)
        self.parallel.register_comm_hook(self.order, te.parallel.tree_hook)
        of_model: Any = self.order.microbatches
        self.order.microbatches = lambda model, count: of_model(self.parallel, count)  # type: ignore[method-assign]

    def _microbatch(self, number: int, windows: torch.Tensor) -> torch.Tensor:
        first = None if self.settings.accumulate == 1 else number == 0
        loss: torch.Tensor = self.parallel(windows, self.recipe, first)
        self.most_places = max(self.most_places, len(gradient_places.offered))
        loss.backward(self._share)
        return loss.detach()


class InHSDP(Trainer):
    """`fully_shard` on a mesh [replicas, shards] with replicas of two."""

    def __init__(self, settings: Settings, text: Corpus, device: torch.device | str = "cpu") -> None:
        super().__init__(settings, text, device, shard=True)

    def _mesh(self) -> Any:
        return init_device_mesh(
            self.model.device.type, (self.order.ranks // 2, 2), mesh_dim_names=("replicas", "shards")
        )


class _Stage(torch.nn.Module):
    """The first or the last layers of a GPT, and what stands before or after them."""

    def __init__(self, model: GPT, place: int, recipe: Any, group: Any) -> None:
        super().__init__()
        half = len(model.layers) // 2
        self.layers = model.layers[half:] if place else model.layers[:half]
        if place:
            self.norm, self.head = model.norm, model.head
        else:
            self.bytes, self.places = model.bytes, model.places
        self.place, self.recipe, self.group = place, recipe, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Windows uint8 [sequence + 1, rows], or what the first stage gives, bf16 [sequence, rows, hidden]."""
        with torch.autocast(x.device.type, torch.bfloat16):
            if not self.place:
                text = x.long()[:-1]
                places = torch.arange(len(text), device=x.device)[:, None].expand(text.shape)
                x = (self.bytes(text) + self.places(places)).to(torch.bfloat16)
            with te.autocast(enabled=self.recipe is not None, recipe=self.recipe, amax_reduction_group=self.group):
                for layer in self.layers:
                    x = layer(x, is_first_microbatch=True)
            return self.head(self.norm(x)) if self.place else x


class InPipeline(Trainer):
    """Two ranks with half of the layers each, by PyTorch's GPipe; each group of a step is one microbatch.

    The table of bytes is on both: of a microbatch its gradient is the sum of both, as one process adds them. Each rank
    has the whole model, and gets from the other what that has computed: gradients, scales and random states. So
    clipping and the optimizer are those of one process.
    """

    def __init__(self, settings: Settings, text: Corpus, device: torch.device | str = "cpu") -> None:
        super().__init__(settings, text, device)
        assert settings.groups == settings.accumulate > 1
        self.place = dist.get_rank()
        own = [dist.new_group([rank]) for rank in range(2)][self.place]
        self.order = te.parallel.GradientOrder(settings.groups, own)
        stage = _Stage(self.model, self.place, self.recipe, own)
        here = self.model.device
        between = torch.zeros(settings.sequence, settings.rows, settings.hidden, dtype=torch.bfloat16, device=here)
        windows = torch.zeros(settings.sequence + 1, settings.rows, dtype=torch.uint8, device=here)
        logits = between.new_zeros(settings.sequence, settings.rows, settings.vocabulary)
        ends = (
            (between.requires_grad_(), logits.requires_grad_()) if self.place else (windows, between.requires_grad_())
        )
        of_rank = PipelineStage(stage, self.place, 2, here, *ends)
        self.schedule = ScheduleGPipe(of_rank, 1, loss_fn=self._loss, scale_grads=False)
        self.stage = stage
        drawn = [isinstance(one, Generator) for one in stage.modules()].count(True) if settings.dropout > 0 else 0
        self.others = self._draws - drawn  # seeds that the other stage takes for a microbatch

    @staticmethod
    def _loss(logits: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        return te.cross_entropy(logits, windows.long()[1:])

    def train(self, capture: bool = True) -> torch.Tensor:
        with self._generator():
            self.optimizer.zero_grad()
            count = self.settings.accumulate
            losses = torch.zeros(count, device=self.model.device)
            for (i,) in self.order.pipelined(self.stage, count):
                windows = self._windows(self.seen, self.step * count + i)
                found: list[torch.Tensor] = []
                if self.place:
                    self._take_seeds()
                    self.schedule.step(target=windows, losses=found)
                    losses[i] = found[0].detach()
                else:
                    self.schedule.step(windows)
                    self._take_seeds()
                dist.all_reduce(self.model.bytes.weight.grad)
            dist.broadcast(losses, 1)
            self._exchange()
            parameters = list(self.model.parameters())
            if self.settings.clip > 0:
                self.norm = self._clip(parameters)
            if self.step > 0 or not isinstance(self.recipe, te.DelayedScaling):
                for group in self.optimizer.param_groups:
                    group["lr"] = self.settings.rate(self.step)
                self.optimizer.step()
                self.updates += 1
        self.step += 1
        return losses

    def _take_seeds(self) -> None:
        philox.draw_seeds(torch.empty(self.others, dtype=torch.int64))

    @torch.no_grad()
    def _exchange(self) -> None:
        """Give and get gradients, scales and random states."""
        half = len(self.model.layers) // 2

        def owner(name: str) -> int:
            _, found, rest = name.partition("layers.")
            return int(rest.split(".")[0]) // half if found else int(name.startswith("norm"))

        for name, p in self.model.named_parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.broadcast(p.grad, owner(name))
        for name, x in self.tensors().items():
            if name.startswith(("fp8/", "random/layers")):
                there = x.to(self.model.device)  # a random state's backend is that of gradients
                dist.broadcast(there, owner(name))
                x.copy_(there)
