"""The loop a user would write first: Adam, `loss.backward()`, then inference under autocast, on either side."""

import warnings

import pytest
import torch

import optimized
import reference

SIDES = [pytest.param("cpu", id="reference"), pytest.param("cuda", marks=pytest.mark.gpu, id="optimized")]


def corpus(device: str) -> torch.Tensor:
    """Bytes of a sentence, again and again: 4 rows of 33."""
    text = b"the same bits on a laptop and on an H200; " * 8
    return torch.tensor(list(text[: 4 * 33]), device=device).view(4, 33)


@pytest.mark.parametrize("device", SIDES)
@pytest.mark.parametrize("fp8", [False, True])
def test_adam_learns_and_inference_agrees(device: str, fp8: bool) -> None:
    te = reference if device == "cpu" else optimized
    torch.manual_seed(0)
    dtype = {"params_dtype": torch.bfloat16}
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(256, 64, dtype=torch.bfloat16),
            "layer": te.TransformerLayer(
                64, 128, 4, params_dtype=torch.bfloat16, hidden_dropout=0, attention_dropout=0
            ),
            "norm": te.LayerNorm(64, **dtype),
            "head": te.Linear(64, 256, **dtype),
        }
    ).to(device)
    recipe = te.DelayedScaling(amax_history_len=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = corpus(device)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=fp8, recipe=recipe):
            hidden = model["layer"](model["embedding"](tokens.t()))
            return model["head"](model["norm"](hidden)).transpose(0, 1)

    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits(data[:, :-1]).float().flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
    model.eval()
    scales = [m.fp8_meta["scaling_fwd"].scale.clone() for m in model.modules() if getattr(m, "fp8_meta", {})]
    with torch.no_grad():
        predicted = logits(data[:, :-1]).argmax(-1)
    assert (predicted == data[:, 1:]).float().mean() > 0.5, "a byte in 256 by chance"
    after = [m.fp8_meta["scaling_fwd"].scale for m in model.modules() if getattr(m, "fp8_meta", {})]
    assert len(after) == (4 if fp8 else 0)
    assert all(torch.equal(a, b) for a, b in zip(scales, after, strict=True)), "inference moves no scale"


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_a_step_never_waits_for_the_gpu(fp8: bool) -> None:
    """Dropout's seeds, FP8 scales and Adam's numbers go to the GPU with the launches, not by copies that wait."""
    sizes = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "params_dtype": torch.bfloat16, "device": "cuda"}
    layer = optimized.TransformerLayer(64, 128, 4, **sizes)
    optimizer = optimized.optimizers.FusedAdam(layer.parameters(), master_weights=True)
    x = torch.randn(32, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def step() -> None:
        with optimized.autocast(enabled=fp8):
            out = layer(x)
        out.backward(torch.ones_like(out))
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes state, compiles, records
    try:
        with warnings.catch_warnings(action="ignore"):  # of the mode, that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
