"""`twin::attention_amax` and `twin::attention_backward_amax`: the words of attention, and the amax of its results."""

import pytest
import torch
from shared.bits import assert_same_bits

import reference as te
from reference.ops.attentions.attention_amax import in_passing
from reference.ops.attentions.attention_options import Options
from reference.recipes.current_scaling import Current, Float8CurrentScaling

twin = torch.ops.twin


def drawn(d: int = 16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    q, k, v, grad = (torch.randn(30, 2, h, d).bfloat16().permute(1, 2, 0, 3) for h in (4, 2, 2, 4))
    return q, k, v, grad


@pytest.mark.parametrize("value", [1.0, 0.0, torch.inf, torch.nan])
def test_the_amax_is_that_of_the_results(value: float) -> None:
    q, k, v, grad = drawn()
    v[0, 0, 0, 0] = value
    options = Options(0.25, "causal", -1, -1)
    results = twin.attention(q, k, v, *options)
    *found, amax = twin.attention_amax(q, k, v, *options)
    for a, b in zip(found, results, strict=True):
        assert_same_bits(a, b)
    assert amax.tolist() == [[float(results[0].float().nan_to_num(0.0, torch.inf).abs().max())]]
    grads = twin.attention_backward(grad, q, k, v, *results, *options)
    *found, amax = twin.attention_backward_amax(grad, q, k, v, *results, *options)
    for a, b in zip(found, grads, strict=True):
        assert_same_bits(a, b)
    largest = max(float(x.float().nan_to_num(0.0, torch.inf).abs().max()) for x in grads)
    assert amax.tolist() == [[largest]]


def test_where_kernels_find_it() -> None:
    q, k, v, _ = drawn()
    plain = Options(0.25, "causal", -1, -1)
    assert in_passing(q, k, v, plain._replace(dropout=0.1, rng_state=torch.zeros(2, dtype=torch.int64)))
    one, wide = torch.zeros(2, dtype=torch.int32), drawn(136)
    for options in (
        plain._replace(dropout=0.1, rng_state=torch.zeros(5, dtype=torch.int64)),
        plain._replace(bias=torch.zeros(1, 1, 30, 30)),
        plain._replace(sinks=torch.zeros(4)),
        plain._replace(q_lengths=one, kv_lengths=one),
        plain._replace(key_segment=16),
    ):
        assert not in_passing(q, k, v, options)
    assert not in_passing(*wide[:3], plain)
    assert not in_passing(q[:, :, :0], k, v, plain)


def results(recipe: object, **options: object) -> list[torch.Tensor]:
    torch.manual_seed(4)
    shared = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "params_dtype": torch.bfloat16, "device": "cpu"}
    layer = te.TransformerLayer(64, 96, 4, self_attn_mask_type="causal", **shared, **options)
    x = torch.randn(24, 2, 64).bfloat16().requires_grad_()
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(torch.randn_like(y))
    return [y, x.grad, *[one.grad for one in layer.parameters()]]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_gqa_groups": 2, "bias": False}, {"fuse_qkv_params": True}, {"normalization": "RMSNorm"}],
)
def test_a_layer_that_is_told_the_amax_has_the_words_of_one_that_reads_it(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    knowing = Current.knowing

    def watched(self: Current, amax: torch.Tensor | None) -> Current:
        told.append(amax)
        return knowing(self, amax)

    monkeypatch.setattr(Current, "knowing", watched)
    found = results(Float8CurrentScaling(), **options)
    assert len(told) == 2
    assert all(amax is not None for amax in told)
    monkeypatch.setattr(Current, "reads_amax", False)
    for a, b in zip(found, results(Float8CurrentScaling(), **options), strict=True):
        assert_same_bits(a, b)
    assert told[2:] == [None, None]
