"""`torch.compile(fullgraph=True)` runs the layers with eager mode's bits, FP8 state included, and compiles once."""

import ast
import contextlib
import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

import reference as te
from reference.state import scaling

# The compiler's own: it uses what PyTorch deprecates, and looks at every tensor's grad.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
BF16 = torch.bfloat16
HIDDEN, HEADS = 32, 2


def attention_input(heads: int = HEADS, values: int = 8) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(4, 2, heads, size, dtype=BF16, requires_grad=True) for size in (8, 8, values))


def hidden() -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, 2, HIDDEN, dtype=BF16, requires_grad=True),)


LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "Linear": (lambda: te.Linear(HIDDEN, 48, params_dtype=BF16), hidden),
    "LayerNorm": (lambda: te.LayerNorm(HIDDEN, params_dtype=BF16), hidden),
    "RMSNorm": (lambda: te.RMSNorm(HIDDEN, params_dtype=BF16), hidden),
    "LayerNormLinear": (lambda: te.LayerNormLinear(HIDDEN, 48, params_dtype=BF16), hidden),
    "LayerNormMLP": (lambda: te.LayerNormMLP(HIDDEN, 64, activation="swiglu", params_dtype=BF16), hidden),
    "DotProductAttention": (lambda: te.DotProductAttention(HEADS, 8, attention_dropout=0.1), attention_input),
    "DotProductAttention of two sizes": (
        lambda: te.DotProductAttention(HEADS, (8, 16)),
        lambda: attention_input(2, 16),
    ),
    "MultiheadAttention": (
        lambda: te.MultiheadAttention(HIDDEN, HEADS, input_layernorm=True, fuse_qkv_params=True, params_dtype=BF16),
        hidden,
    ),
    "TransformerLayer": (lambda: te.TransformerLayer(HIDDEN, 64, HEADS, params_dtype=BF16), hidden),
}


@pytest.fixture(autouse=True)
def one_compilation() -> Iterator[None]:
    """A second compilation of the same code is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def fp8_state(module: torch.nn.Module) -> list[torch.Tensor]:
    """Scales and histories of every layer inside."""
    states = [m.fp8_meta for m in module.modules() if getattr(m, "fp8_meta", None)]
    metas = [state[key] for state in states for key in scaling.KEYS if key in state]
    return [t for meta in metas for t in (meta.scale, meta.amax_history)]


def train(
    run: Callable[..., Any],
    module: torch.nn.Module,
    inputs: Any,
    fp8: bool | None,
    steps: int,
    recipe: te.recipe.Recipe | None = None,
    **extra: Any,
) -> list[torch.Tensor]:
    """Every output, gradient, scale and history of `steps` steps; fp8 None leaves autocast to the module."""
    seen: list[torch.Tensor] = []
    torch.manual_seed(11)  # of the masks
    for step in range(steps):
        tensors = [(t * 2.0**step).detach().requires_grad_() for t in inputs]
        outside = te.autocast(enabled=bool(fp8), recipe=recipe or te.DelayedScaling(amax_history_len=3))
        with contextlib.nullcontext() if fp8 is None else outside:
            out = run(*tensors, **extra)
        out.backward(torch.ones_like(out) * 2.0**-step)
        seen += [out, *(t.grad for t in tensors)]
        for p in module.parameters():
            seen.append(p.grad)
            p.data = p.data - 0.125 * p.grad
            p.grad = None
        seen += [t.clone() for t in fp8_state(module)]
    return seen


def compare_modules(
    eager: torch.nn.Module, inputs: Any, fp8: bool | None, backend: str, *rest: Any, **extra: Any
) -> None:
    """Train a module and its compiled copy."""
    module = copy.deepcopy(eager)
    expected = train(eager, eager, inputs, fp8, *rest, **extra)
    run = torch.compile(module, fullgraph=True, backend=backend)
    actual = train(run, module, inputs, fp8, *rest, **extra)
    for position, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert_same_bits(a, b, f"tensor {position} of {len(expected)}")


def compare(name: str, fp8: bool, backend: str, device: str = "cpu") -> None:
    torch.manual_seed(1)
    build, arguments = LAYERS[name]
    compare_modules(build().to(device), [t.to(device) for t in arguments()], fp8, backend, 4)


# Those that no test below compiles: attention and whole layers are there.
ALONE = [("LayerNormLinear", True), ("RMSNorm", False)]


@pytest.mark.parametrize(
    ("name", "fp8"),
    [
        pytest.param(*one, marks=[] if one in ALONE else pytest.mark.slow)
        for one in itertools.product(LAYERS, (False, True))
    ],
)
def test_a_compiled_layer_has_the_bits_of_eager_mode(name: str, fp8: bool) -> None:
    compare(name, fp8, "aot_eager")


STATELESS = {
    "block": te.recipe.Float8BlockScaling(),
    "rowwise": te.recipe.Float8RowwiseScaling(),
    "current": te.recipe.Float8CurrentScaling(),
}


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param(*one, marks=[] if one == ("Linear", "block") else pytest.mark.slow)
        for one in itertools.product(("Linear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"), STATELESS)
    ],
)
def test_recipes_without_state(name: str, recipe: str) -> None:
    """A fresh layer compiles twice: its first step tells it its recipe. One that has run in eager mode does once."""
    torch.manual_seed(1)
    build, arguments = LAYERS[name]
    eager, inputs = build(), arguments()
    for graphs in (2, 1):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with torch._dynamo.config.patch(error_on_recompile=graphs == 1):
            compare_modules(eager, inputs, True, "aot_eager", 3, STATELESS[recipe])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_inductor_has_the_bits_of_eager_mode() -> None:
    compare("LayerNormMLP", True, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", LAYERS)
def test_inductor_has_the_bits_of_eager_mode_in_every_layer(name: str, fp8: bool) -> None:
    compare(name, fp8, "inductor")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", ["LayerNormMLP", "DotProductAttention", "TransformerLayer"])
def test_a_compiled_layer_has_the_bits_of_eager_mode_on_a_gpu(name: str, fp8: bool, backend: str) -> None:
    import optimized  # noqa: F401  (registers the CUDA implementations)

    compare(name, fp8, backend, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["attention", "layer"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_inductor_compiles_a_layer_that_drops_nothing(fp8: bool, whole: bool) -> None:
    torch.manual_seed(1)
    if whole:
        eager = te.TransformerLayer(HIDDEN, 64, HEADS, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0)
    else:
        eager = te.MultiheadAttention(HIDDEN, HEADS, params_dtype=BF16, attention_dropout=0.0)
    compare_modules(eager, hidden(), fp8, "inductor", 2)


VARIANTS: dict[str, dict[str, Any]] = {
    "decoder": {"layer_type": "decoder"},
    "gqa, swiglu, RMSNorm": {"num_gqa_groups": 1, "activation": "swiglu", "normalization": "RMSNorm"},
    "checkpointed attention": {},
    "rotary, padding": {"self_attn_mask_type": "padding"},
    "sliding window": {"window_size": (1, 0)},
    "parallel, stochastic depth": {"parallel_attention_mlp": True, "drop_path_rate": 0.3},
    "norms of heads, clamped": {"qk_norm_type": "L2Normalization", "activation": "clamped_swiglu"},
    "output layernorm": {"output_layernorm": True, "apply_residual_connection_post_layernorm": True},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformer_layers_of_every_kind(variant: str, backend: str) -> None:
    torch.manual_seed(1)
    eager = te.TransformerLayer(HIDDEN, 64, HEADS, params_dtype=torch.float16, **VARIANTS[variant])
    padding = torch.zeros(2, 1, 1, 4, dtype=torch.bool)
    padding[1, ..., 3:] = True
    extra: dict[str, Any] = {
        "decoder": {"encoder_output": torch.randn(3, 2, HIDDEN, dtype=torch.float16)},
        "checkpointed attention": {"checkpoint_core_attention": True},
        "rotary, padding": {"attention_mask": padding, "rotary_pos_emb": torch.randn(4, 1, 1, 16)},
    }.get(variant, {})
    recipe = te.DelayedScaling(amax_history_len=2, fp8_format=te.Format.E4M3, amax_compute_algo="most_recent")
    compare_modules(eager, [t.to(torch.float16) for t in hidden()], True, backend, 3, recipe, **extra)


class Biased(torch.nn.Module):
    """A layer that adds its last input to attention's scores."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        *x, bias = inputs
        result: torch.Tensor = self.layer(*x, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
        return result


def ends(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


PADDED = {"cu_seqlens_q": ends(0, 4, 7), "cu_seqlens_kv": ends(0, 3, 5)}  # of [4, 2, ..]
PACKED = {"cu_seqlens_q": ends(0, 5, 8), "cu_seqlens_kv": ends(0, 5, 8), "max_seqlen_q": 5, "max_seqlen_kv": 5}
APART = {"cu_seqlens_q_padded": ends(0, 6, 10), "cu_seqlens_kv_padded": ends(0, 6, 10)}
ALIBI = {"core_attention_bias_type": "alibi", "alibi_slopes": torch.tensor([0.5, 0.25])}
CORE = {"softmax_scale": 0.3, "attention_dropout": 0.2}


def attention_layer(kind: str, layout: str = "sbhd", mask: str = "causal", **more: Any) -> Any:
    if kind == "core":
        return te.DotProductAttention(HEADS, 8, qkv_format=layout, attn_mask_type=mask, **CORE, **more)
    if kind == "block":
        return te.MultiheadAttention(HIDDEN, HEADS, qkv_format=layout, attn_mask_type=mask, params_dtype=BF16, **more)
    more = {"self_attn_mask_type": mask, "params_dtype": BF16, **more}
    return te.TransformerLayer(HIDDEN, 64, HEADS, attn_input_format=layout, **more)


# kind of layer, its arguments, those of its forward
OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "core, lengths": ("core", {"mask": "padding_causal"}, PADDED),
    "core, packed": ("core", {"layout": "thd", "mask": "padding_causal_bottom_right"}, {**PACKED, **APART}),
    "core, ALiBi": ("core", {"layout": "bshd"}, ALIBI),
    "core, bias": ("core", {}, {}),
    "block, packed, rotary": ("block", {"layout": "thd", "mask": "padding"}, {**PACKED, "rotary_pos_emb": "angles"}),
    "block, ALiBi": ("block", {}, {"core_attention_bias_type": "alibi"}),
    "block, lengths, recomputed": ("block", {"mask": "padding"}, {**PADDED, "checkpoint_core_attention": True}),
    "layer, lengths": (
        "layer", {"mask": "padding_causal", "window_size": (2, 0)}, {"cu_seqlens_q": PADDED["cu_seqlens_q"]},
    ),
    "layer, packed": ("layer", {"layout": "thd", "mask": "padding"}, PACKED),
    "layer, bias": ("layer", {"layout": "bshd"}, {}),
    "decoder, lengths": ("layer", {"mask": "padding", "layer_type": "decoder", "enc_dec_attn_mask_type": "padding"}, {
        **PADDED, "encoder_output": torch.randn(4, 2, HIDDEN, generator=torch.Generator().manual_seed(5)).to(BF16),
    }),
}  # fmt: skip


FAST = ("core, lengths", "block, ALiBi")


@pytest.mark.parametrize(
    "option", [pytest.param(one, marks=[] if one in FAST else pytest.mark.slow) for one in OPTIONS]
)
def test_lengths_biases_and_packed_sequences(option: str) -> None:
    kind, arguments, extra = OPTIONS[option]
    torch.manual_seed(1)
    layer = attention_layer(kind, **arguments)
    layout = arguments.get("layout", "sbhd")
    shape = {"sbhd": (4, 2), "bshd": (2, 4), "thd": (10,)}[layout]
    if layout == "thd" and "cu_seqlens_q_padded" not in extra:
        shape = (8,)
    sizes = [(HEADS, 8)] * 3 if kind == "core" else [(HIDDEN,)]
    inputs = [torch.randn(*shape, *size, dtype=BF16) for size in sizes]
    if option.endswith("bias"):
        layer = Biased(layer)
        inputs.append(torch.randn(1, HEADS, 4, 4, dtype=BF16))
    if "rotary_pos_emb" in extra:
        extra = {**extra, "rotary_pos_emb": te.RotaryPositionEmbedding(HIDDEN // HEADS)(5)}
    compare_modules(layer, inputs, kind != "core" and layout == "sbhd", "aot_eager", 2, **extra)


def test_other_lengths_do_not_compile_again() -> None:
    layer = attention_layer("core", "thd", "padding").eval()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    qkv = [torch.randn(8, HEADS, 8, dtype=BF16) for _ in range(3)]
    for length in (5, 1, 4):
        given = {**PACKED, "cu_seqlens_q": ends(0, length, 8), "cu_seqlens_kv": ends(0, length, 8)}
        given |= {"max_seqlen_q": 7, "max_seqlen_kv": 7}
        assert_same_bits(layer(*qkv, **given), run(*qkv, **given), f"length {length}")


def test_packed_sequences_without_their_longest_length_are_refused() -> None:
    layer = attention_layer("core", "thd", "padding")
    qkv = [torch.randn(8, HEADS, 8, dtype=BF16) for _ in range(3)]
    given = {"cu_seqlens_q": ends(0, 5, 8), "cu_seqlens_kv": ends(0, 5, 8)}
    with pytest.raises(Exception, match=r"max_seqlen_q=None with qkv_format='thd' under torch.compile is not offered"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(*qkv, **given)


def test_no_function_that_a_compiler_traces_asks_for_its_locals() -> None:
    """PyTorch 2.11's compiler doesn't trace `locals()`, and 2.13's not where a variable is also another scope's."""
    found = []
    for path in Path(te.__file__).parent.glob("nn/**/*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name == "__init__":
                continue
            calls = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
            if any(isinstance(one.func, ast.Name) and one.func.id == "locals" for one in calls):
                found.append(f"{path.name}: {function.name}")
    assert not found


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fp8", [False, True], ids=["dequantized", "fp8"])
def test_weights_that_are_kept_in_fp8(fp8: bool, backend: str) -> None:
    torch.manual_seed(1)
    with te.quantized_model_init(recipe=te.DelayedScaling(amax_history_len=3)):
        eager = te.LayerNormMLP(HIDDEN, 64, params_dtype=BF16)
    compare_modules(eager, hidden(), fp8, backend, 4)


def test_a_weight_that_is_kept_in_fp8_is_written_outside_of_graphs() -> None:
    with te.quantized_model_init():
        weight = te.Linear(16, 16).weight
    write = torch.compile(lambda w: w.mul_(2), backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"is written or copied inside torch\.compile"), torch.no_grad():
        write(weight)


class Four(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([te.Linear(HIDDEN, HIDDEN, params_dtype=BF16) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_layers_compiled_one_by_one_share_their_code_once_their_fp8_state_exists() -> None:
    """Two graphs: that of the first module in an autocast, which asks for the gradients' update, and the others'."""
    torch.manual_seed(1)
    eager, inputs = Four(), hidden()
    train(eager, eager, inputs, True, 1)
    module = copy.deepcopy(eager)
    torch._dynamo.utils.counters.clear()
    for layer in module.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=False):
        actual = train(module, module, inputs, True, 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    for a, b in zip(train(eager, eager, inputs, True, 3), actual, strict=True):
        assert_same_bits(a, b)


class Inside(torch.nn.Module):
    """A module that enters autocast, and recomputes a part, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = te.Linear(HIDDEN, HIDDEN, params_dtype=BF16)
        self.second = te.LayerNormLinear(HIDDEN, HIDDEN, params_dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=te.DelayedScaling(amax_history_len=3)):
            return self.second(te.checkpoint(self.first, x))


def test_autocast_inside_the_compiled_region() -> None:
    """Its end updates every layer of the process: one that is garbage collected meanwhile costs a compilation."""
    torch.manual_seed(1)
    gc.collect()  # a layer that goes while the guards are made fails the compilation
    with torch._dynamo.config.patch(error_on_recompile=False):
        compare_modules(Inside(), hidden(), None, "aot_eager", 4)


class Dropping(torch.nn.Module):
    """A product in FP8, and attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = te.Linear(HIDDEN, HIDDEN, params_dtype=BF16)
        self.core = te.DotProductAttention(HEADS, HIDDEN // HEADS, attention_dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(x).unflatten(-1, (HEADS, -1))
        result: torch.Tensor = self.core(q, q.flip(0), q * 2)
        return result


def test_checkpoint_around_a_compiled_layer() -> None:
    """Two graphs: the first run's and the recomputation's."""
    torch.manual_seed(1)
    eager, inputs = Dropping(), hidden()
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=False):
        actual = train(lambda x: te.checkpoint(compiled, x), module, inputs, True, 3)
    for a, b in zip(train(eager, eager, inputs, True, 3), actual, strict=True):
        assert_same_bits(a, b)


def test_a_new_history_length_compiles_again_and_keeps_the_bits() -> None:
    eager, inputs = te.Linear(HIDDEN, HIDDEN, params_dtype=BF16), hidden()
    module = copy.deepcopy(eager)
    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=False):
        for length in (2, 3):
            recipe = te.DelayedScaling(amax_history_len=length)
            expected = train(eager, eager, inputs, True, 2, recipe)
            for a, b in zip(expected, train(run, module, inputs, True, 2, recipe), strict=True):
                assert_same_bits(a, b, f"length {length}")
    assert module.fp8_meta["scaling_bwd"].amax_history.shape[0] == 3


def test_opcheck_of_what_a_compiler_does_not_look_into() -> None:
    twin = torch.ops.twin
    torch.library.opcheck(twin.snapshot.default, (torch.tensor([3, 4]),), test_utils=("test_schema", "test_faketensor"))
    inputs = (torch.zeros(1, dtype=torch.int64), torch.tensor([3, 4]))
    torch.library.opcheck(twin.draw_seed.default, inputs, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(RuntimeError, match="during backward pass"):
        twin.request_scale_update(torch.ones(2), 0)
