"""Arguments of recipes, contexts and functions: each acts, is refused, or is listed with the reason why it does not.

What is switched on and off is a parameter, too: a setting of what is off is refused or listed.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.argument_values import BF16, numbers

import reference as te
from reference.memory.recompute import activation_recompute_forward
from reference.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from reference.state.autocast import autocast
from reference.state.model_init import quantized_model_init

Run = Callable[[dict[str, Any]], Any]
REDUCES = "the maximum over one rank is the rank's own; tests/nn/core/test_distributed.py has several"
OFF_CONTEXT = "Transformer Engine's programs always give them, and `enabled` says whether they are meant"


def bits(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [bits(one) for one in x]
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach().dequantize() if isinstance(x, te.QuantizedTensor) else x.detach()
    return x.dtype, x.shape, x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def layer_of() -> Any:
    torch.manual_seed(3)
    return te.MultiheadAttention(32, 2, attention_dropout=0.0, params_dtype=BF16, input_layernorm=True, device="cpu")


def trained(layer: Any, **context: Any) -> Any:
    """What three steps in an autocast leave: outputs, gradients, scales."""
    found: list[Any] = []
    for step in range(3):
        x = (numbers(step, 16, 2, 32) * 4.0**-step).requires_grad_()
        with autocast(**context):
            y = layer(x)
        y.backward(numbers(9, *y.shape))
        found += [y, x.grad, *(p.grad for p in layer.parameters())]
    for part in layer.modules():
        found += [x for one in getattr(part, "fp8_meta", {}).values() for x in tensors_of(one)]
    return bits(found)


def tensors_of(meta: Any) -> list[torch.Tensor]:
    return [x for x in vars(meta).values() if isinstance(x, torch.Tensor)] if hasattr(meta, "__dict__") else []


def of_recipe(kind: Any) -> Run:
    return lambda given: trained(layer_of(), recipe=kind(**given))


def of_autocast(given: dict[str, Any]) -> Any:
    return trained(layer_of(), **given)


def of_init(given: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    with quantized_model_init(**given):
        layer = te.Linear(32, 32, params_dtype=BF16, device="cpu")
    weight: Any = layer.weight
    kept = getattr(weight, "get_high_precision_init_val", lambda: None)()
    rows = layer.fp8_meta.get("scaling_fwd")
    return bits([weight, kept, None if rows is None else rows.amax_history])


def of_offload(given: dict[str, Any]) -> Any:
    context, _ = te.get_cpu_offload_context(**given)
    return type(context).__name__, getattr(context, "num_layers", None), getattr(context, "model_layers", None)


def of_recompute(given: dict[str, Any]) -> Any:
    context = activation_recompute_forward(**given)
    with context:
        return bool(te.recompute.here().first_runs), bool(te.recompute.here().recomputations)


def of_rotation(given: dict[str, Any]) -> Any:
    t = numbers(1, 4, 2, 2, 16)
    return bits(te.apply_rotary_pos_emb(t, torch.arange(128.0).view(8, 1, 1, 16), **given))


def of_loss(function: Any) -> Run:
    first = (
        (numbers(1, 6, 8),) if function is not te.fused_linear_cross_entropy else (numbers(1, 6, 16), numbers(2, 8, 16))
    )
    tensors = [x.float() for x in first]

    def run(given: dict[str, Any]) -> Any:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = function(*leaves, torch.tensor([1, 2, 3, 4, 1, 1]), **given)
        out.sum().backward()
        return bits([out, *(x.grad for x in leaves)])

    return run


def of_cache(given: dict[str, Any]) -> Any:
    params = te.InferenceParams(**given)
    layer = te.MultiheadAttention(32, 2, params_dtype=BF16, device="cpu", attention_dropout=0.0)
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(0.1)
        params.pre_step({"a": 4, "b": 4})
        out = layer(numbers(1, 4, 2, 32), inference_params=params)
    return bits([out, *params.cache[1], params.pre_step_seqlens])


def of_quantizer(kind: Any) -> Run:
    def run(given: dict[str, Any]) -> Any:
        given = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in given.items()}
        quantizer = kind(**given)
        x = quantizer(numbers(1, 16, 32))
        empty = quantizer.make_empty((16, 16)).device.type
        return bits([x, x._data, x._transpose, x._scale_inv, given.get("amax"), empty])

    return run


CACHE: dict[str, Any] = {"max_batch_size": 2, "max_sequence_length": 8, "num_heads_kv": 2, "head_dim_k": 16}
CACHE |= {"dtype": BF16, "device": "cpu"}
GIVEN = {"scale": torch.ones(1), "amax": torch.zeros(1), "fp8_dtype": te.DType.kFloat8E4M3}
# What is run: the function that is called with the arguments, the signature, the states in which it is.
CURRENT = Float8CurrentScaling()
CALLS: dict[str, tuple[Any, Run, list[dict[str, Any]]]] = {
    "DelayedScaling": (DelayedScaling, of_recipe(DelayedScaling), [{"amax_history_len": 4}, {"amax_history_len": 1}]),
    "Float8BlockScaling": (
        Float8BlockScaling, of_recipe(Float8BlockScaling), [{}, {"w_block_scaling_dim": 1}],
    ),
    "Float8CurrentScaling": (Float8CurrentScaling, of_recipe(Float8CurrentScaling), [{}]),
    "Float8RowwiseScaling": (
        Float8RowwiseScaling, of_recipe(Float8RowwiseScaling), [{}, {"weight_gradient": "high_precision"}],
    ),
    "MXFP8BlockScaling": (MXFP8BlockScaling, of_recipe(MXFP8BlockScaling), [{}]),
    "NVFP4BlockScaling": (NVFP4BlockScaling, of_recipe(NVFP4BlockScaling), [{}]),
    "autocast": (
        autocast, of_autocast,
        [{}, {"enabled": False}, {"recipe": CURRENT}, {"enabled": False, "recipe": CURRENT}],
    ),
    "InferenceParams": (te.InferenceParams, of_cache, [CACHE]),
    "Float8Quantizer": (te.Float8Quantizer, of_quantizer(te.Float8Quantizer), [GIVEN]),
    "Float8CurrentScalingQuantizer": (
        te.Float8CurrentScalingQuantizer, of_quantizer(te.Float8CurrentScalingQuantizer),
        [{"fp8_dtype": te.DType.kFloat8E4M3, "device": "cpu"}],
    ),
    "quantized_model_init": (quantized_model_init, of_init, [{}, {"enabled": False}]),
    "get_cpu_offload_context": (
        te.get_cpu_offload_context, of_offload, [{"enabled": True, "num_layers": 1, "model_layers": 3}, {}],
    ),
    "activation_recompute_forward": (
        activation_recompute_forward, of_recompute, [{"activation_recompute": True}, {"activation_recompute": False}],
    ),
    "apply_rotary_pos_emb": (te.apply_rotary_pos_emb, of_rotation, [{}]),
    "cross_entropy": (te.cross_entropy, of_loss(te.cross_entropy), [{}, {"reduction": "none"}]),
    "parallel_cross_entropy": (
        te.parallel_cross_entropy, of_loss(te.parallel_cross_entropy), [{}, {"reduce_loss": True}],
    ),
    "fused_linear_cross_entropy": (te.fused_linear_cross_entropy, of_loss(te.fused_linear_cross_entropy), [{}]),
}  # fmt: skip
REQUIRED = ["logits", "target", "inp", "hidden", "weight", "t", "freqs"]
VALUES: dict[str, list[Any]] = {
    "margin": [2], "fp8_format": [Format.E4M3, Format.HYBRID], "amax_history_len": [2],
    "amax_compute_algo": ["most_recent"],
    "scaling_factor_compute_algo": [max], "backward_override": ["high_precision", "dequantized"],
    "params_dtype": [BF16],
    "override_linear_precision": [(True, False, False)], "device": ["cpu", "meta"], "amax_reduction_group": ["a group"],
    "recipe": [DelayedScaling(margin=3, amax_history_len=7), CURRENT], "num_layers": [2], "model_layers": [2],
    "offload_stream": ["a stream"], "tensor_format": ["bshd"], "start_positions": [torch.tensor([1, 2])],
    "cu_seqlens": [torch.tensor([0, 2], dtype=torch.int32)], "cp_size": [2], "cp_rank": [1], "ignore_index": [1],
    "ignore_idx": [1], "reduction": ["sum", "none"], "label_smoothing": [0.3], "chunk_size": [1],
    "dist_process_group": [None], "_input": [torch.zeros(1)], "max_batch_size": [3], "max_sequence_length": [9],
    "num_heads_kv": [1], "head_dim_k": [32], "head_dim_v": [32], "dtype": [torch.float16], "total_num_pages": [1],
    "page_size": [1], "max_ctx_len": [5], "qkv_format": ["sbhd"], "custom_cache_manager": ["one"],
    "scale": [torch.full((1,), 2.0)], "amax": [torch.full((1,), 99.0)], "fp8_dtype": [te.DType.kFloat8E5M2],
    "amax_epsilon": [1000.0], "fp4_format": [Format.E4M3], "nvfp4_4over6": ["all"], "nvfp4_4over6_err_mode": ["MSE"],
    "nvfp4_4over6_e4m3_use_256": ["none"], "weight_gradient": ["high_precision", "fp8"],
}  # fmt: skip
# What is not read: where (the state's arguments that say so; {} is everywhere), and why it may be given.
UNREAD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "DelayedScaling.reduce_amax": ([{}], REDUCES),
    "DelayedScaling.params_dtype": ([{}], "Megatron gives it"),
    "DelayedScaling.device": ([{}], "Megatron gives it"),
    "DelayedScaling.amax_compute_algo": ([{"amax_history_len": 1}], "of one amax the largest is the last"),
    "MXFP8BlockScaling.enable_2d_quantization": (
        [{}], "a power of two leaves a number's digits: it acts on weights of very different sizes, in its own tests",
    ),
    "InferenceParams.max_ctx_len": ([{}], "Transformer Engine's programs give it; max_sequence_length is the limit"),
    "InferenceParams.qkv_format": ([{}], "Transformer Engine's programs give it; a layer's own format counts"),
    "autocast.recipe": ([{"enabled": False}], OFF_CONTEXT),
    "autocast.calibrating": ([{"enabled": True}, {"recipe": CURRENT}], "with FP8 on they are anyway, or never"),
    "quantized_model_init.recipe": ([{"enabled": False}], OFF_CONTEXT),
    "quantized_model_init.preserve_high_precision_init_val": ([{"enabled": False}], OFF_CONTEXT),
    "get_cpu_offload_context.double_buffering": ([{}], "as in Transformer Engine"),
    "get_cpu_offload_context.offload_weights": ([{}], "a DeprecationWarning says that it has no effect"),
    **{
        f"get_cpu_offload_context.{name}": ([{"enabled": False}], OFF_CONTEXT)
        for name in ("num_layers", "model_layers", "offload_activations")
    },
    "activation_recompute_forward.recompute_phase": ([{"activation_recompute": False}], "Megatron always gives it"),
    "apply_rotary_pos_emb.fused": ([{}], "the numbers are the fused ones"),
    "parallel_cross_entropy.is_cg_capturable": ([{}], "it always is"),
}  # fmt: skip
CASES = [
    (name, n, argument)
    for name, (function, _, states) in CALLS.items()
    for n in range(len(states))
    for argument in inspect.signature(function).parameters
    if argument not in REQUIRED and VALUES.get(argument) != [None]
]


@pytest.mark.sample(28)
@pytest.mark.filterwarnings("ignore:get_cpu_offload_context. offload_weights:DeprecationWarning")
@pytest.mark.parametrize(("name", "n", "argument"), CASES)
def test_each_setting_acts_or_is_refused(name: str, n: int, argument: str) -> None:
    function, run, states = CALLS[name]
    state = states[n]
    full = {key: one.default for key, one in inspect.signature(function).parameters.items()} | state
    where = UNREAD.get(f"{name}.{argument}", ([], ""))[0]
    unread = any(all(full[key] == value for key, value in one.items()) for one in where)
    before, found = run(dict(state)), []
    for value in VALUES.get(argument, [not full[argument]]):
        if not isinstance(value, torch.Tensor) and value == full[argument]:
            continue
        try:
            found.append("ignored" if run({**state, argument: value}) == before else "acts")
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            found.append(str(error))
    sentences = [one for one in found if one not in ("acts", "ignored")]
    assert all(argument in one or "is accepted" in one or "are accepted" in one for one in sentences)
    assert ("acts" not in found) if unread else ("ignored" not in found), found


def test_the_list_names_settings() -> None:
    names = {
        f"{name}.{one}" for name, (function, *_) in CALLS.items() for one in inspect.signature(function).parameters
    }
    assert set(UNREAD) <= names


def test_every_recipe_is_among_them() -> None:
    offered = {name for name, one in vars(te.recipe).items() if isinstance(one, type) and issubclass(one, Recipe)}
    assert offered - {"Recipe"} <= set(CALLS)
