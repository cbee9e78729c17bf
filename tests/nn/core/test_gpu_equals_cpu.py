"""On an H200 layers equal their deep copies on the CPU in every bit, over training steps, dropout on.

Each layer by itself, in every precision, is among the cases of `twin parity` (tests/recordings/test_parity.py); here
are the ways of using one that they have not.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.training_pairs import numbers, states, train_both

import optimized  # noqa: F401  (registers the CUDA implementations)
import reference as te

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {"hybrid": te.Format.HYBRID, "e4m3": te.Format.E4M3}
LAYERS = {
    "Linear": (lambda: te.Linear(64, 64, params_dtype=torch.bfloat16), (24, 64)),
    "TransformerLayer": (lambda: te.TransformerLayer(64, 128, 4, params_dtype=torch.bfloat16), (30, 2, 64)),
}


def recipe_of(fmt: str, algorithm: str = "max") -> te.DelayedScaling:
    return te.DelayedScaling(fp8_format=FORMATS[fmt], amax_history_len=4, amax_compute_algo=algorithm)


def test_rotary_and_recomputed_core_attention(same_bits) -> None:
    layer = te.TransformerLayer(64, 128, 2, params_dtype=torch.bfloat16)
    freqs = (numbers(98, (40, 16), torch.float32).abs() * 5).repeat(1, 2).view(40, 1, 1, 32)
    train_both(
        layer, (40, 2, 64), torch.bfloat16, recipe_of("hybrid"), same_bits, steps=3,
        rotary_pos_emb=freqs, checkpoint_core_attention=True,
    )  # fmt: skip


@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
def test_a_sliding_window(mask_type: str, same_bits) -> None:
    layer = te.TransformerLayer(
        64, 128, 2, params_dtype=torch.bfloat16, self_attn_mask_type=mask_type, window_size=(150, 20)
    )
    train_both(layer, (400, 2, 64), torch.bfloat16, recipe_of("hybrid"), same_bits, steps=2)


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("kind", ["L2Normalization", "RMSNorm", "LayerNorm"])
def test_norms_of_heads(kind: str, before: bool, same_bits) -> None:
    freqs = (numbers(98, (40, 20), torch.float32).abs() * 5).repeat(1, 2).view(40, 1, 1, 40)
    for channels, recipe in ((40, None), (64, recipe_of("hybrid"))):
        layer = te.TransformerLayer(
            128, 128, 4, 2, kv_channels=channels, params_dtype=torch.bfloat16, qk_norm_type=kind,
            qk_norm_before_rope=before,
        )  # fmt: skip
        train_both(layer, (40, 2, 128), torch.bfloat16, recipe, same_bits, steps=3, rotary_pos_emb=freqs)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("parallel", [False, True])
def test_parallel_halves_and_stochastic_depth(parallel: bool, layout: str, same_bits) -> None:
    for rate, recipe in ((0.0, recipe_of("hybrid")), (0.3, recipe_of("hybrid")), (0.3, None)):
        layer = te.TransformerLayer(
            64, 128, 4, params_dtype=torch.bfloat16, parallel_attention_mlp=parallel, drop_path_rate=rate,
            attn_input_format=layout,
        )  # fmt: skip
        train_both(layer, (30, 6, 64), torch.bfloat16, recipe, same_bits, steps=3)


def test_clamped_swiglu(same_bits) -> None:
    params = {"limit": 1.5, "alpha": 0.5, "glu_linear_offset": -0.25}
    layer = te.LayerNormMLP(
        64, 144, activation="clamped_swiglu", activation_params=params, params_dtype=torch.bfloat16
    )  # fmt: skip
    for recipe in (None, recipe_of("hybrid")):
        train_both(copy.deepcopy(layer), (300, 64), torch.bfloat16, recipe, same_bits, steps=3)


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.sampled_from([1, 7, 16, 63, 129, 140]),
    batch=st.sampled_from([1, 2, 3]),
    heads=st.sampled_from([1, 2, 4]),
    channels=st.sampled_from([16, 32, 48]),
    ffn=st.sampled_from([16, 48, 144]),
    dtype=st.sampled_from(list(DTYPES.values())),
)
def test_random_shapes(
    tokens: int, batch: int, heads: int, channels: int, ffn: int, dtype: torch.dtype, same_bits
) -> None:
    layer = te.TransformerLayer(heads * channels, ffn, heads, params_dtype=dtype)
    train_both(layer, (tokens, batch, heads * channels), dtype, recipe_of("hybrid"), same_bits, steps=2)


@pytest.mark.parametrize("name", LAYERS)
def test_checkpoint_changes_no_bit(name: str, same_bits) -> None:
    make, shape = LAYERS[name]
    layer = make().to("cuda")
    other = copy.deepcopy(layer)
    for step in range(3):
        found = []
        for module, run in ((layer, lambda f, x: f(x)), (other, te.checkpoint)):
            x = numbers(step, shape, torch.bfloat16, 1.0 + step).to("cuda").requires_grad_()
            torch.manual_seed(step)
            with te.autocast(recipe=recipe_of("hybrid")):
                y = run(module, x)
            y.backward(torch.ones_like(y))
            found.append([y, x.grad, *(p.grad for p in module.parameters()), *states(module).values()])
        for a, b in zip(*found, strict=True):
            same_bits(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_replays_as_a_cuda_graph(name: str, same_bits) -> None:
    """Scale updates and dropout masks included: each replay is the next training step of the CPU's layer."""
    make, shape = LAYERS[name]
    layer = make()
    gpu = copy.deepcopy(layer).to("cuda")
    recipe = recipe_of("hybrid")
    static = {"x": torch.zeros(shape, dtype=torch.bfloat16), "g": torch.zeros(shape, dtype=torch.bfloat16)}
    device = {name: t.cuda() for name, t in static.items()}
    device["x"].requires_grad_()

    def step(module: torch.nn.Module, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            y = module(x)
        y.backward(g)
        return y

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(gpu, device["x"], device["g"])
            step(layer, static["x"].clone().requires_grad_(), static["g"])
    torch.cuda.current_stream().wait_stream(stream)
    gpu.zero_grad(set_to_none=True)
    device["x"].grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_gpu = step(gpu, device["x"], device["g"])
    for i in range(3):
        x, g = numbers(i, shape, torch.bfloat16, 1.0 + i), numbers(9 + i, shape, torch.bfloat16, 0.1)
        layer.zero_grad(set_to_none=True)
        inp = x.clone().requires_grad_()
        torch.manual_seed(i)
        y = step(layer, inp, g)
        with torch.no_grad():
            device["x"].copy_(x)
            device["g"].copy_(g)
            device["x"].grad.zero_()
            for p in gpu.parameters():
                p.grad.zero_()
        torch.manual_seed(i)
        graph.replay()
        same_bits(y, y_gpu, f"y, replay {i}")
        same_bits(inp.grad, device["x"].grad, f"dx, replay {i}")
        for (name, p), q in zip(layer.named_parameters(), gpu.parameters(), strict=True):
            same_bits(p.grad, q.grad, f"{name}, replay {i}")
        for (name, a), b in zip(states(layer).items(), states(gpu).values(), strict=True):
            same_bits(a, b, f"{name}, replay {i}")


def test_seeds_reach_masks_on_both_devices_in_graphs_and_after_resuming(same_bits) -> None:
    """torch's CPU generator decides, on a GPU and in graphs, too; `te.random` reaches states that draw no seeds."""
    torch.manual_seed(0)
    layer = te.TransformerLayer(64, 128, 4, params_dtype=torch.bfloat16)
    gpu = copy.deepcopy(layer).to("cuda")
    x = numbers(1, (30, 2, 64), torch.bfloat16)
    for module in (layer, gpu):
        torch.manual_seed(5)
        module(x.to(next(module.parameters()).device))
    saved = torch.get_rng_state()
    expected = layer(x)
    torch.set_rng_state(saved)
    same_bits(expected, gpu(x.cuda()), "resumed")
    torch.set_rng_state(saved)
    graphed = te.make_graphed_callables(copy.deepcopy(gpu), (x.cuda(),))
    assert torch.equal(torch.get_rng_state(), saved), "a capture draws no seed"
    same_bits(expected, graphed(x.cuda()), "make_graphed_callables")
    graph, static = torch.cuda.CUDAGraph(), x.cuda()
    with torch.cuda.graph(graph):
        y = gpu(static)
    torch.set_rng_state(saved)
    graph.replay()
    same_bits(expected, y, "a graph of the user's own")
    graph = torch.cuda.CUDAGraph()
    with te.random.undrawn(), torch.cuda.graph(graph):
        y = gpu(static)
    masks = []
    for seed in (3, 4, 3):
        te.random.seed(seed, gpu)
        te.random.seed(seed, layer)
        for _ in range(2):
            graph.replay()
            with te.random.undrawn():
                same_bits(layer(x), y, f"a graph's replay after seed {seed}")
            masks.append(y.clone())
    assert torch.equal(masks[0], masks[4])
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
