"""A GPT as a user writes it: Embedding, TransformerLayer with dropout, a head, the loss, FusedAdam."""

import copy
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

import optimized
import reference as te

VOCABULARY, HIDDEN = 96, 32


class LanguageModel(torch.nn.Module):
    """Numbers [s, b] to a loss; the head is a Linear with a bias, or the table of the embedding."""

    def __init__(self, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        common: dict[str, Any] = {"params_dtype": dtype, "device": "cpu"}
        self.embedding = te.Embedding(VOCABULARY, HIDDEN, padding_idx=0, **common)
        self.layer = te.TransformerLayer(
            HIDDEN, 64, 2, hidden_dropout=0.1, attention_dropout=0.1, self_attn_mask_type="causal", **common
        )
        self.norm = te.LayerNorm(HIDDEN, **common)
        self.head = None if tied else te.Linear(HIDDEN, VOCABULARY, **common)
        self.recipe = te.DelayedScaling(amax_history_len=4)

    def forward(self, text: torch.Tensor, target: torch.Tensor, fp8: bool) -> torch.Tensor:
        with te.autocast(enabled=fp8, recipe=self.recipe):
            hidden = self.norm(self.layer(self.embedding(text)))
            if self.head is None:
                weight = self.embedding.weight
                return te.fused_linear_cross_entropy(hidden, weight, target, ignore_index=0, chunk_size=16)
            logits = self.head(hidden)
        return te.cross_entropy(logits, target, ignore_index=0, label_smoothing=0.05)


def trained(model: torch.nn.Module, device: str, steps: int, fp8: bool) -> list[torch.Tensor]:
    """Losses of some steps; the model is changed."""
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    torch.manual_seed(11)
    text = torch.randint(0, VOCABULARY, (9, 4))
    losses = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)  # of dropout
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(text[:-1].to(device), text[1:].to(device), fp8)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
    return losses


def made(tied: bool, dtype: torch.dtype = torch.bfloat16) -> LanguageModel:
    torch.manual_seed(3)
    return LanguageModel(tied, dtype)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_it_trains_and_repeats_itself(tied: bool, fp8: bool) -> None:
    models = [made(tied) for _ in range(2)]
    first, second = (trained(model, "cpu", 2, fp8) for model in models)
    for a, b in zip(first, second, strict=True):
        assert a.isfinite()
        assert_same_bits(a, b)
    start = made(tied)
    for (name, a), b, c in zip(models[0].named_parameters(), models[1].parameters(), start.parameters(), strict=True):
        assert a.isfinite().all(), name
        assert not torch.equal(a, c), name
        assert_same_bits(a, b, name)
    assert not models[0].embedding.weight[0].any() or tied  # the padding row; a head's gradient reaches it


def test_it_learns() -> None:
    losses = trained(made(tied=False), "cpu", 15, fp8=False)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_five_steps_have_the_same_bits_on_a_gpu(tied: bool, fp8: bool, dtype: torch.dtype) -> None:
    assert optimized.TransformerLayer  # whose import registers the kernels
    here = made(tied, dtype)
    there = copy.deepcopy(here).cuda()
    losses = trained(here, "cpu", 5, fp8), trained(there, "cuda", 5, fp8)
    for step, (a, b) in enumerate(zip(*losses, strict=True)):
        assert_same_bits(a, b, f"loss of step {step}")
    for (name, a), b in zip(here.named_parameters(), there.parameters(), strict=True):
        assert_same_bits(a, b, name)


def scaled(model: LanguageModel, device: str, fp8: bool) -> tuple[list[float], list[float]]:
    """Scales and losses of sixteen steps in fp16 with a scaler whose first scale is too large; changes the model."""
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**21, growth_interval=3)
    torch.manual_seed(11)
    text = torch.randint(0, VOCABULARY, (9, 4)).to(device)
    scales, losses = [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)  # of dropout
        for _ in range(16):
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = model(text[:-1], text[1:], fp8)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            te.optimizers.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            losses.append(float(loss.detach()))
    return scales, losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_scaler_of_torch_finds_a_scale_and_the_model_learns(fp8: bool) -> None:
    scales, losses = scaled(model := made(False, torch.float32), "cpu", fp8)
    falls = [after < before for before, after in zip([2.0**21, *scales], scales, strict=False)]
    assert falls[0]
    assert not all(falls)
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() for p in model.parameters())
    assert (scales, losses) == scaled(made(False, torch.float32), "cpu", fp8)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_a_scaler_of_torch_has_the_same_bits_on_a_gpu(fp8: bool) -> None:
    assert optimized.TransformerLayer
    here = made(False, torch.float32)
    there = copy.deepcopy(here).cuda()
    assert scaled(here, "cpu", fp8) == scaled(there, "cuda", fp8)
    for (name, a), b in zip(here.named_parameters(), there.parameters(), strict=True):
        assert_same_bits(a, b, name)
