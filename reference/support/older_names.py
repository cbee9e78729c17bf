"""Modules by the names that they had before they stood in rooms: `reference.nn.linear` is `reference.nn.layers.linear`.

Pickles and checkpoints name classes by their module, and programs import by it. Both go on: an older name is another
name of the same module. Nothing here imports by one, so a module costs nothing that nobody asks for.
"""

import importlib
import importlib.util
import sys

from reference.support.aliases import Aliases

# Of each side: the folder where modules were, the room where they are, and which; `old>new` where the last name has
# changed, too.
_ROOMS = {
    "reference": (
        ("", "numbers", "denormals elementary formats philox tensor_core"),
        ("numbers.tensor_core", "numbers.tensor_core", "kernels>simd"),
        ("", "recipes", "quantized quantizer roles"),
        ("", "state", "autocast capture>graph_seeds model_init moved>target_device scaling threads"),
        ("state", "state", "applied_device>target_device"),
        ("nn", "state", "weight_store"),
        ("parallel", "parallel", "chain>ordered_reduce"),
        ("", "memory", "marks>offload_marks offload recompute rng_tracker unchanged>recompute_inputs"),
        ("memory", "memory", "marks>offload_marks unchanged>recompute_inputs"),
        ("nn", "float8", "float8_kept>float8_storage float8_like float8_part float8_quantizer float8_tensor"),
        ("nn", "float8", "quantized_tensor"),
        ("nn", "checkpoints", "checkpoint_format packed_state transformer_engine_state"),
        ("", "checkpoints", "pickled sealed>checked_safetensors"),
        ("checkpoints", "checkpoints", "sealed>checked_safetensors"),
        ("nn", "nn.core", "attributes autograd checkpoints>state_dict checks context delayed>delayed_wgrad dropout"),
        ("nn", "nn.core", "fp8_state hook init module observed>observed_quantizer parameters"),
        ("nn", "nn.core", "one_rank>context_parallel"),
        ("", "nn.core", "compiled fp8_checkpoint>fp8_state_io"),
        ("nn.core", "nn.core", "fp8_checkpoint>fp8_state_io observed>observed_quantizer one_rank>context_parallel"),
        ("nn", "nn.layers", "cross_entropy embedding fused_linear_cross_entropy layernorm layernorm_linear"),
        ("nn", "nn.layers", "layernorm_mlp linear"),
        ("nn", "nn.attentions", "attention>dot_product_attention attention_bias attention_block>multihead_pair"),
        ("nn", "nn.attentions", "attention_fp8 attention_lengths attention_of_torch>torch_attention"),
        ("nn", "nn.attentions", "attention_options>attention_extras"),
        ("nn.attentions", "nn.attentions", "attention_options>attention_extras"),
        ("nn", "nn.attentions", "attention_prepared>multihead_plan attention_reads>no_grad_inputs"),
        ("nn", "nn.attentions", "cached>inference_step core_attention>exact_attention core_call>dot_product_plan"),
        ("nn", "nn.attentions", "core_pair>dot_product_pair head_norms"),
        ("nn.attentions", "nn.attentions", "attention_around>multihead_around_torch attention_block>multihead_pair"),
        ("nn.attentions", "nn.attentions", "attention_of_torch>torch_attention attention_prepared>multihead_plan"),
        ("nn.attentions", "nn.attentions", "attention_reads>no_grad_inputs core_attention>exact_attention"),
        ("nn.attentions", "nn.attentions", "core_call>dot_product_plan core_pair>dot_product_pair"),
        (
            "nn",
            "nn.attentions",
            "heads inference>kv_cache multihead_attention packing rotary_embedding rotated>apply_rotary",
        ),
        ("nn.attentions", "nn.attentions", "inference>kv_cache"),
        ("generation", "generation", "cache_for>new_kv_cache"),
        ("nn", "nn.transformer", "blocks>halves transformer_layer transformer_layer_checks"),
        ("", "graphs", "graph graph_capture pipeline_order"),
        ("inspect.recorded_step", "inspect.recorded_step", "named>tensor_names"),
        ("recorded_step", "inspect.recorded_step", "named>tensor_names"),
        ("", "inspect", "anomaly precision recorded_step sample statistics"),
        ("", "te", "placeholders stand_in"),
        ("", "support", "dtensor files groups nested not_offered notice numba_jit transforms workers"),
        ("ops", "ops.casts", "amax cast cast_stats cast_transpose cat_cast_transpose dbias multi_cast_transpose"),
        ("ops", "ops.casts", "scale_update"),
        ("ops", "ops.gemms", "gemm gemm_fp8 gemm_fused"),
        ("ops", "ops.attentions", "attention attention_backward attention_bias attention_fp8 attention_fp8_backward"),
        ("ops", "ops.attentions", "attention_heads attention_lengths attention_options attention_packed"),
        ("ops", "ops.attentions", "attention_sink attention_sinks>attention_sink_weights rotary softmax"),
        ("ops.attentions", "ops.attentions", "attention_sinks>attention_sink_weights"),
        ("ops", "ops.norms", "norm"),
        ("ops", "ops.activations", "activation"),
        ("ops", "ops.random", "dropout normal"),
        ("ops", "ops.vocabulary", "cross_entropy embedding"),
        ("ops", "ops.optimizers", "adafactor adam adam_capturable adam_states clip_grads grad_norm sgd"),
    ),
    "optimized": (
        ("", "", "replay>tapes"),
        ("replay", "tapes", "relative>relocation calls>call_groups launches>tape player>runner watch>tape_recorder"),
        ("tapes", "tapes", "calls>call_groups launches>tape player>runner watch>tape_recorder"),
        ("ops", "ops.casts", "amax cast cast_stats cast_transpose cat_cast_transpose dbias multi_cast_transpose"),
        ("ops", "ops.casts", "scale_update"),
        ("ops", "ops.gemms", "gemm gemm_config gemm_fp8 gemm_fp8_split_k gemm_fused gemm_operands gemm_tile"),
        ("ops", "ops.attentions", "attention attention_backward attention_bias attention_fp8 attention_fp8_backward"),
        ("ops", "ops.attentions", "attention_sink rotary softmax"),
        ("ops", "ops.norms", "norm norm_backward norm_cast_transpose"),
        ("ops", "ops.activations", "activation"),
        ("ops", "ops.random", "dropout normal"),
        ("ops", "ops.vocabulary", "cross_entropy embedding"),
        ("ops", "ops.optimizers", "adafactor adam adam_capturable adam_states clip_grads grad_norm sgd"),
        ("", "cuda", "ahead>precompile compiler device launch packaged>wheel_cubins tensor_map"),
        ("cuda", "cuda", "ahead>precompile packaged>wheel_cubins"),
        ("training", "training", "captured>cuda_graph watched>monitor"),
        ("bench", "bench", "copies>memory_bound"),
        ("bench", "bench.kernels", "activation adam attention attention_plot cast cross_entropy cublaslt embedding"),
        ("bench", "bench.kernels", "gemm gemm_epilogue gemm_equality gemm_shapes norm"),
        ("bench", "bench.layers", "decode first_step ladder layer layer_models layer_plot layer_sweep layer_tables"),
        ("bench", "bench.layers", "stats timeline tutorial_layers"),
        ("bench", "bench.models", "seeds single_gpu single_gpu_memory single_gpu_models single_gpu_plot"),
        ("bench", "bench.models", "single_gpu_tables train trainer training training_plot"),
    ),
}
NAMES: dict[str, str] = {}
"""Older name → name."""
for _side, _moves in _ROOMS.items():
    for _folder, _room, _names in _moves:
        for _one in _names.split():
            _was, _, _is = _one.partition(">")
            NAMES[".".join(filter(None, (_side, _folder, _was)))] = ".".join(filter(None, (_side, _room, _is or _was)))
_PREFIX = __name__.removesuffix("reference.support.older_names")  # "twin_engine." in a wheel


def current(name: str) -> str | None:
    """The name of a module of an older name, or of one below it; None if the name is no older one."""
    if not name.startswith(_PREFIX):
        return None
    head, below = name.removeprefix(_PREFIX), ""
    while head not in NAMES:
        head, dot, last = head.rpartition(".")
        if not dot:
            return None
        below = f".{last}{below}"
    return f"{_PREFIX}{NAMES[head]}{below}"


def keep_attributes(package: str) -> None:
    """Know at once the modules whose older name is another thing in `package`, as `reference.autocast` is a class.

    Python sets a package's attribute to a module that it imports by a name that it did not know.
    """
    for name, is_now in NAMES.items():
        parent, _, child = name.rpartition(".")
        if f"{_PREFIX}{parent}" == package and child in vars(sys.modules[package]):
            sys.modules[f"{package}.{child}"] = importlib.import_module(f"{_PREFIX}{is_now}")


def _module(name: str) -> str | None:
    """`current`, of a module that is there."""
    found = current(name)
    return None if found is None or importlib.util.find_spec(found) is None else found


# First: a module below an older name would be found in its package's folder, too, and run a second time.
sys.meta_path.insert(0, Aliases(_module))
