"""What a step under FSDP2 asks of the host, seen on a pretended GPU: layers are played from tapes, checks are few."""

import cProfile
import gc
import pstats
from typing import Any

import pytest
import torch
from shared.dry_shards import RANKS, DryShards

import optimized as te
from optimized.tapes import call_groups
from reference.parallel import GradientOrder

BF16 = torch.bfloat16


class Step:
    """A training step of a stack of layers under FSDP2."""

    def __init__(self, gpu: DryShards, layers: int, ordered: bool, kept: bool) -> None:
        self.recipe = te.DelayedScaling(amax_history_len=4)
        with te.quantized_model_init(enabled=kept, recipe=self.recipe):
            options: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "fuse_qkv_params": True}
            self.model: Any = torch.nn.Sequential(
                *(te.TransformerLayer(128, 256, 2, params_dtype=BF16, **options) for _ in range(layers))
            )
        self.order = GradientOrder(RANKS) if ordered else None
        gpu.shard(*self.model, self.model, order=self.order)
        self.optimizer: Any = te.optimizers.FusedAdam(self.model.parameters(), lr=0.01, master_weights=True)
        self.x = torch.empty(32, 2, 128, dtype=BF16, device="cuda")

    def microbatch(self) -> None:
        with te.autocast(recipe=self.recipe):
            y = self.model(self.x)
        y.backward(torch.empty_like(y))

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        if self.order is None:
            self.microbatch()
        else:
            for _ in self.order.microbatches(self.model, RANKS):
                self.microbatch()
        self.optimizer.step()


@pytest.mark.parametrize(
    ("ordered", "kept"), [(False, False), (True, False), (True, True)], ids=["plain", "ordered", "weights in FP8"]
)
def test_layers_are_played(ordered: bool, kept: bool) -> None:
    """From the fourth step on a layer runs none of its Python, forward or backward, wherever its weights lie."""
    layers = 3
    gc.collect()  # a model of before that is alive has scales to update, until it goes
    with DryShards(written=False) as gpu:
        gpu.tapes()
        step = Step(gpu, layers, ordered, kept)
        for number in range(6):
            misses, hits = call_groups.counts.misses, call_groups.counts.hits
            step()
            if number >= 3:
                assert call_groups.counts.misses == misses, f"step {number} measured or recorded a call"
                assert call_groups.counts.hits == hits + 2 * layers + 2, "both directions, and their scales' updates"


def test_weights_in_fp8_are_cast_together() -> None:
    """After the optimizer: one launch for all of them, one exchange of their amaxes."""
    with DryShards() as gpu:
        gpu.tapes()
        step = Step(gpu, 3, ordered=True, kept=True)
        for _ in range(5):
            step()
        gpu.lines.clear()
        step()
        after = gpu.lines[next(i for i, line in enumerate(gpu.lines) if line.startswith("adam.")) :]
    launched = [line.split("(")[0].split(" ")[0] for line in after]
    kinds = ["adam.adam", "multi_cast_transpose.multi_cast_transpose", "cat", "c10d::allreduce_", "_foreach_copy_"]
    assert sorted(set(launched)) == sorted(kinds)
    assert [launched.count(kind) for kind in kinds[1:]] == [1, 1, 1, 1]


def test_transposed_codes_are_made_once_by_each_backward() -> None:
    """A layer's two halves make those of their two weights in a launch each, whose layer is a pair of functions; a
    step gathers twice, and makes them once."""
    layers = 3
    with DryShards(written=False) as gpu:
        gpu.tapes()
        step = Step(gpu, layers, ordered=True, kept=True)
        for _ in range(5):
            step()
        before = len(gpu.launches)
        step()
        launched = [one.kernel.kernel for one in gpu.launches[before:]]
    assert launched.count("multi_transpose") == layers


def profiled(layers: int, ordered: bool, kept: bool) -> Any:
    """What `pstats.Stats.stats` has of the second step."""
    with DryShards(written=False) as gpu:
        gpu.tapes()
        step = Step(gpu, layers, ordered=ordered, kept=kept)
        step()
        profile = cProfile.Profile()
        profile.enable()
        step()
        profile.disable()
    stats: Any = pstats.Stats(profile)
    return stats.stats


def test_a_gathering_does_not_look_at_signatures_of_functions() -> None:
    """FSDP2 asks for that of `fsdp_pre_all_gather`, which is known: once in a step for each weight and gathering."""
    calls = {name: count for (_, _, name), (count, *_) in profiled(2, ordered=False, kept=True).items()}
    assert calls.get("fsdp_pre_all_gather") == 2 * 2 * 4
    assert calls.get("_signature_from_function", 0) < 2 * 2 * 4


def test_checks_of_a_step_grow_with_the_model() -> None:
    """Python calls of the written order, and of walks over modules: of twice the layers at most twice as many."""

    def calls(layers: int) -> int:
        found = profiled(layers, ordered=True, kept=False)
        watched = ("reference/parallel/", "torch/nn/modules/module.py")
        return sum(count for (file, *_), (count, *_) in found.items() if any(one in file for one in watched))

    assert calls(6) <= 2 * calls(3)
