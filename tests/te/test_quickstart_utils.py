"""notebooks/quickstart_utils.py: the stopwatch, the shared parameters, and Transformer Engine's quickstart.

Sizes: x [sequence, batch, hidden].
"""

import importlib.util
from pathlib import Path

import pytest
import torch

import reference as te
from reference.recipe import DelayedScaling, Format

_PATH = Path(__file__).parents[2] / "notebooks" / "quickstart_utils.py"
_SPEC = importlib.util.spec_from_file_location("quickstart_utils", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
utils = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(utils)

HIDDEN, FFN, HEADS, SEQUENCE, BATCH = 64, 128, 4, 24, 2
DTYPES = (torch.float16, torch.bfloat16)


class Basic(torch.nn.Module):
    """The quickstart's layer; `linear`, `norm` and `mlp` make its parts."""

    def __init__(self, linear, norm, mlp, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_attention_heads = HEADS
        self.ln1 = norm(HIDDEN, eps=1e-5)
        self.qkv_projection = linear(HIDDEN, 3 * HIDDEN, bias=True)
        self.attention = utils.DotProductAttention(HEADS, HIDDEN // HEADS, dropout)
        self.projection = linear(HIDDEN, HIDDEN, bias=True)
        self.dropout = torch.nn.Dropout(dropout)
        self.ln2 = norm(HIDDEN, eps=1e-5)
        self.mlp = mlp(HIDDEN, FFN)

    def forward(self, x, attention_mask=None):
        q, k, v = self.qkv_projection(self.ln1(x)).unflatten(2, (HEADS, -1)).chunk(3, dim=3)
        x = x + self.dropout(self.projection(self.attention(q, k, v, attention_mask)))
        return x + self.mlp(self.ln2(x))


class TEMLP(torch.nn.Module):
    def __init__(self, hidden, ffn) -> None:
        super().__init__()
        self.linear1 = te.Linear(hidden, ffn, bias=True)
        self.linear2 = te.Linear(ffn, hidden, bias=True)

    def forward(self, x):
        return self.linear2(torch.nn.functional.gelu(self.linear1(x), approximate="tanh"))


class Fused(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_qkv = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, eps=1e-5, bias=True)
        self.attention = utils.DotProductAttention(HEADS, HIDDEN // HEADS, 0.0)
        self.projection = te.Linear(HIDDEN, HIDDEN, bias=True)
        self.dropout = torch.nn.Dropout(0.0)
        self.ln_mlp = te.LayerNormMLP(HIDDEN, FFN, eps=1e-5, bias=True)

    def forward(self, x, attention_mask=None):
        q, k, v = self.ln_qkv(x).unflatten(2, (HEADS, -1)).chunk(3, dim=3)
        x = x + self.dropout(self.projection(self.attention(q, k, v, attention_mask)))
        return x + self.ln_mlp(x)


def basic_model(dtype=torch.float32) -> Basic:
    model = Basic(torch.nn.Linear, torch.nn.LayerNorm, utils.BasicMLP)
    with torch.no_grad():  # γ = 1 and β = 0 would hide a norm that was not shared
        for norm in (model.ln1, model.ln2):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-0.5, 0.5)
    return model.to(dtype)


def te_model(kind: str) -> torch.nn.Module:
    if kind == "basic":
        return Basic(te.Linear, te.LayerNorm, TEMLP)
    if kind == "fused":
        return Fused()
    arguments = {"self_attn_mask_type": "no_mask", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te.TransformerLayer(HIDDEN, FFN, HEADS, fuse_qkv_params=kind == "layer, one qkv", **arguments)


SHARE = {
    "basic": utils.share_parameters_with_basic_te_model,
    "fused": utils.share_parameters_with_fused_te_model,
    "layer, one qkv": utils.share_parameters_with_transformerlayer_te_model,
    "layer, three": utils.share_parameters_with_transformerlayer_te_model,
}


def exact_with_noise(model: Basic, x: torch.Tensor, unit: float, seed: int) -> torch.Tensor:
    """The layer in float64; each value that a 16-bit layer rounds moves by ±unit times itself."""
    model, generator = model.double(), torch.Generator().manual_seed(seed)

    def moved(t: torch.Tensor) -> torch.Tensor:
        sign = torch.randint(0, 2, t.shape, generator=generator) * 2 - 1
        return t * (1 + unit * sign)

    mixed = moved(model.qkv_projection(moved(model.ln1(x)))).unflatten(2, (HEADS, -1))
    q, k, v = (t.permute(1, 2, 0, 3) for t in mixed.chunk(3, dim=3))
    weights = moved(torch.softmax(moved(moved(q @ k.mT) * (HIDDEN // HEADS) ** -0.5), -1))
    context = moved(weights @ v).permute(2, 0, 1, 3).flatten(2)
    x = moved(x + moved(model.projection(context)))
    h = moved(model.mlp.linear1(moved(model.ln2(x))))
    h = moved(torch.nn.functional.gelu(h, approximate="tanh"))
    return moved(x + moved(model.mlp.linear2(h)))


def rms(t: torch.Tensor) -> float:
    return float(t.detach().double().square().mean().sqrt())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SHARE)
def test_shared_parameters_give_the_plain_models_output(kind, dtype):
    """Close to float64 by what rounding can do, and no closer than it must be.

    Bound: a rounding moves a value by at most u = eps/2 times itself, here by ±u always, so with 3 times the mean
    square of evenly spread rounding errors; sums in fp32 are finer by 2^13 (fp16) and 2^16 (bf16). The layers round at
    the moved places, or at fewer, or (TransformerLayer: before a bias, too) at two more of thirteen: 15/13 < 3.
    """
    torch.manual_seed(3)
    basic = basic_model(dtype)
    model = te_model(kind).to(dtype)
    before = rms(model(x := torch.randn(SEQUENCE, BATCH, HIDDEN).to(dtype)) - basic(x))
    SHARE[kind](model, basic)
    out = model(x).detach()
    exact = exact_with_noise(basic, x.double(), 0.0, 0)
    unit = torch.finfo(dtype).eps / 2
    allowed = min(rms(exact_with_noise(basic, x.double(), unit, seed) - exact) for seed in range(4))
    assert rms(out - exact) <= allowed
    assert before > 10 * allowed  # another set of parameters would have been seen


@pytest.mark.parametrize("kind", ["basic", "fused", "layer, one qkv"])
def test_parameters_are_the_same_tensors(kind):
    basic, model = basic_model(), te_model(kind)
    SHARE[kind](model, basic)
    mine, theirs = {id(p) for p in model.parameters()}, {id(p) for p in basic.parameters()}
    assert mine == theirs


def test_three_parameters_of_qkv_are_copies():
    basic, model = basic_model(torch.float16), te_model("layer, three")
    SHARE["layer, three"](model, basic)
    qkv = model.self_attention.layernorm_qkv
    channels = HIDDEN // HEADS
    # Head 2's keys stand after two heads of (q, k, v) and its own q.
    rows = basic.qkv_projection.weight[2 * 3 * channels + channels :][:channels]
    assert torch.equal(qkv.key_weight[2 * channels : 3 * channels], rows)
    basic.qkv_projection.weight.data.zero_()
    assert float(qkv.key_weight.detach().abs().max()) > 0


def test_models_of_other_sizes_are_refused():
    model = te.TransformerLayer(HIDDEN, 2 * FFN, HEADS)
    with pytest.raises(ValueError, match=r"fc1_weight has shape \[256, 64\], the basic model's has \[128, 64\]"):
        utils.share_parameters_with_transformerlayer_te_model(model, basic_model())


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_modules_round_where_separate_ones_do(dtype, same_bits):
    """LayerNorm then Linear, and LayerNormLinear: outputs and every gradient equal in every bit."""
    torch.manual_seed(5)
    basic = basic_model(dtype)
    separate, fused = te_model("basic"), te_model("fused")
    SHARE["basic"](separate, basic)
    SHARE["fused"](fused, basic)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN).to(dtype).requires_grad_()
    grad = torch.randn(SEQUENCE, BATCH, 3 * HIDDEN).to(dtype)
    found = []
    for run in (lambda: separate.qkv_projection(separate.ln1(x)), lambda: fused.ln_qkv(x)):
        basic.zero_grad(set_to_none=True)
        x.grad = None
        y = run()
        y.backward(grad)
        found.append([y, x.grad, *(p.grad for p in (*basic.ln1.parameters(), *basic.qkv_projection.parameters()))])
    for one, other in zip(*found, strict=True):
        same_bits(one, other)


def test_attention_mask():
    """A causal mask on the plain attention; a row that sees nothing stays finite."""
    attention = utils.DotProductAttention(HEADS, 8, 0.0)
    q, k, v = torch.randn(3, SEQUENCE, BATCH, HEADS, 8, dtype=torch.float64)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    out = attention(q, k, v, mask)
    assert torch.equal(out[0], v[0].flatten(1))  # the first token sees itself
    heads_first = [t.permute(1, 2, 0, 3) for t in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    # float64: sums of at most 24 terms of order 1 in another order, each good to 2^-53.
    torch.testing.assert_close(out, wanted.permute(2, 0, 1, 3).flatten(2), rtol=0, atol=1e-13)
    assert bool(attention(q, k, v, torch.ones_like(mask)).isfinite().all())


class Counting(torch.nn.Linear):
    runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(x)


def test_speedometer_counts_and_prints(capsys, monkeypatch):
    monkeypatch.setattr(utils, "CPU_SECONDS", 60.0)
    module = Counting(8, 8)
    x = torch.ones(4, 8)
    mean = utils.speedometer(module, x, x, timing_iters=3, warmup_iters=2)
    assert module.runs == 5
    assert torch.equal(module.bias.grad, torch.full((8,), 20.0))  # five backwards over four rows of ones
    assert capsys.readouterr().out == f"Mean time: {mean:.3f} ms (CPU, mean of 3 runs)\n"
    assert mean > 0


def test_speedometer_stops_in_time_on_a_cpu(capsys, monkeypatch):
    monkeypatch.setattr(utils, "CPU_SECONDS", 1e-9)
    module = Counting(8, 8)
    utils.speedometer(module, torch.ones(4, 8), torch.ones(4, 8))
    assert module.runs == 2  # one warm-up, one timed
    assert "(CPU, mean of 1 runs)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "kwargs",
    [
        {"fp8_autocast_kwargs": {"enabled": True, "fp8_recipe": DelayedScaling(amax_history_len=3)}},
        {"fp8_autocast_kwargs": {"enabled": True, "recipe": DelayedScaling(amax_history_len=3)}},
        {"autocast_kwargs": {"enabled": True, "recipe": DelayedScaling(amax_history_len=3)}},
    ],
)
def test_speedometer_runs_in_fp8(kwargs):
    layer = te.Linear(32, 32)
    x = torch.ones(16, 32)
    utils.speedometer(layer, x, x, timing_iters=1, warmup_iters=1, **kwargs)
    assert layer.fp8_meta["scaling_fwd"].amax_history.shape == (3, 3)


def test_speedometer_refuses():
    x = torch.ones(1, 1)
    with pytest.raises(ValueError, match="timing_iters=0, warmup_iters=1; >= 1 and >= 0"):
        utils.speedometer(torch.nn.Linear(1, 1), x, x, timing_iters=0, warmup_iters=1)
    with pytest.raises(ValueError, match="both given"):
        utils.speedometer(torch.nn.Linear(1, 1), x, x, fp8_autocast_kwargs={}, autocast_kwargs={})


def test_transformer_engines_quickstart_runs(capsys):
    """Its calls in its order, with its defaults (causal, dropout 0.1, q, k and v apart); import and device differ."""
    dtype = torch.float16
    x = torch.rand(SEQUENCE, BATCH, HIDDEN).cpu().to(dtype=dtype)
    dy = torch.rand(SEQUENCE, BATCH, HIDDEN).cpu().to(dtype=dtype)
    basic = Basic(torch.nn.Linear, torch.nn.LayerNorm, utils.BasicMLP, dropout=0.1)
    basic.to(dtype=dtype).cpu()
    quick = {"timing_iters": 1, "warmup_iters": 1}
    utils.speedometer(basic, x, dy, forward_kwargs={"attention_mask": None}, **quick)
    for kind in ("basic", "fused"):
        model = te_model(kind)
        model.to(dtype=dtype).cpu()
        SHARE[kind](model, basic)
        torch.manual_seed(1234)
        y = model(x, attention_mask=None)
        utils.speedometer(model, x, dy, forward_kwargs={"attention_mask": None}, **quick)
    te_transformer = te.TransformerLayer(HIDDEN, FFN, HEADS)
    te_transformer.to(dtype=dtype).cpu()
    utils.share_parameters_with_transformerlayer_te_model(te_transformer, basic)
    torch.manual_seed(1234)
    y = te_transformer(x, attention_mask=None)
    fp8_format = Format.HYBRID
    fp8_recipe = DelayedScaling(fp8_format=fp8_format, amax_history_len=16, amax_compute_algo="max")
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
        y = te_transformer(x, attention_mask=None)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    utils.speedometer(
        te_transformer,
        x,
        dy,
        forward_kwargs={"attention_mask": None},
        fp8_autocast_kwargs={"enabled": True, "fp8_recipe": fp8_recipe},
        **quick,
    )
    assert te.recipe.Format is Format
    assert capsys.readouterr().out.count("Mean time:") == 4
