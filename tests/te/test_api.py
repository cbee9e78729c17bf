"""The public promise: names, arguments, their order and defaults are Transformer Engine's; what is absent says so.

transformer_engine_api.json says what Transformer Engine has; read_transformer_engine_api.py has read it.
"""

import importlib
import inspect
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from tools.write_api_page import API, PACKAGES

import optimized
import reference as te
from reference.support import not_offered

# --- names -------------------------------------------------------------------------------------------


def absent() -> list[tuple[str, str]]:
    names = {**API["names"], "te": sorted({*API["names"]["te"], *API["submodules"]})}
    return [(package, name) for package in PACKAGES for name in names[package] if not hasattr(PACKAGES[package], name)]


@pytest.mark.parametrize(("package", "name"), absent())
def test_a_name_that_is_not_offered_says_so(package: str, name: str) -> None:
    sentence = rf"^{package}\.{name} is not offered by Twin Engine: .+\.$"
    sides = {"te": [te, optimized], "ops": [te.ops, optimized.ops]}.get(package, [PACKAGES[package]])
    for side in sides:
        with pytest.raises(AttributeError, match=sentence):
            getattr(side, name)
        assert not hasattr(side, name)
        with pytest.raises(ImportError, match=sentence):
            exec(f"from {side.__name__} import {name}")


def test_the_table_of_names_holds_no_other() -> None:
    """Neither one that is offered, nor one that Transformer Engine does not have, nor one twice."""
    listed = {name for _, name in absent()}
    names = [name for groups in not_offered.NAMES.values() for text in groups.values() for name in text.split()]
    assert set(names) == listed
    for groups in not_offered.NAMES.values():
        found = [name for text in groups.values() for name in text.split()]
        assert len(found) == len(set(found))


@pytest.mark.parametrize("side", [te, optimized, te.recipe, te.ops, optimized.ops, te.fp8])
def test_unknown_names_behave_as_pythons(side: Any) -> None:
    name = side.__name__
    for unknown in ("Lineal", "__wrapped__", "_private"):
        with pytest.raises(AttributeError, match=f"^module '{name}' has no attribute '{unknown}'$"):
            getattr(side, unknown)
        with pytest.raises(ImportError, match=f"^cannot import name '{unknown}' from '{name}'"):
            exec(f"from {name} import {unknown}")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'reference\.nowhere'$"):
        importlib.import_module("reference.nowhere")


def test_a_submodule_that_is_not_offered_cannot_be_imported() -> None:
    with pytest.raises(ImportError, match=r"^te.attention is not offered by Twin Engine: what is offered of it is an"):
        importlib.import_module("optimized.attention")


@pytest.mark.parametrize("name", API["methods"])
def test_a_method_that_is_not_offered_says_so(name: str) -> None:
    kind = ours(name)
    known = {
        method
        for base in kind.__mro__
        for names in not_offered.METHODS.get(base.__name__, {}).values()
        for method in names.split()
    }
    absent = [method for method in API["methods"][name] if not hasattr(kind, method)]
    for method in absent:
        if issubclass(kind, torch.nn.Module):
            with pytest.raises(AttributeError, match=rf"object has no attribute '{method}'"):
                getattr(kind.__new__(kind), method)
            assert method in known
            continue
        owners = "|".join(base.__name__ for base in kind.__mro__)
        with pytest.raises(AttributeError, match=rf"^({owners})\.{method} is not offered by Twin Engine: .+\.$"):
            getattr(kind, method)


def test_the_table_of_methods_holds_no_other() -> None:
    """Neither one that is offered, nor one that Transformer Engine does not have."""
    for name, groups in not_offered.METHODS.items():
        heirs = [one for one in API["methods"] if ours(name) in ours(one).__mro__]
        every = {method for one in heirs for method in API["methods"][one]}
        listed = [method for names in groups.values() for method in names.split()]
        assert len(listed) == len(set(listed))
        assert set(listed) <= every
        assert not any(hasattr(ours(name), method) for method in listed)


@pytest.mark.parametrize("part", ["recipe", "optimizers"])
def test_both_sides_have_the_same_modules(part: str) -> None:
    """`from optimized.recipe import DelayedScaling` as well as `from reference.recipe import DelayedScaling`."""
    assert importlib.import_module(f"optimized.{part}") is importlib.import_module(f"reference.{part}")


def test_both_sides_offer_the_same_names() -> None:
    assert te.__all__ == optimized.__all__
    assert all(hasattr(side, name) for side in (te, optimized) for name in te.__all__)


# --- signatures --------------------------------------------------------------------------------------

# Where ours differ, and why.
OURS = {
    "device='cuda'": "device=None",  # the package's own: "cpu" for reference, "cuda" for optimized
    "lr=required": "lr=<required parameter>",  # torch.optim's mark of a missing one
    "backward_override=os.getenv('NVTE_BACKWARD_OVERRIDE', None)": "backward_override=None",  # no environment variable
}
EXTRA = {
    # Transformer Engine makes them from the environment.
    "Float8CurrentScaling": [
        "*",
        *(f"fp8_quant_{one}={te.recipe.QParams()!r}" for one in ("fwd_inp", "fwd_weight", "bwd_grad")),
    ],
    # An older release's, and what Megatron-Core gives every class of Transformer Engine's.
    "DelayedScaling": ["*", "override_linear_precision=(False, False, False)", "params_dtype=None", "device=None"],
    "DotProductAttention.__init__": ["*", "device=None", "attention_backend='exact'", "key_segment=None"],
    "MultiheadAttention.__init__": ["*", "attention_backend='exact'", "key_segment=None"],
    "InferenceParams.__init__": ["*", "device=None", "fp8_kv=False"],
    "parallel_cross_entropy": ["cp_group=None"],
    # introductions write use_fp8
    "TransformerLayer.__init__": ["*", "attention_backend='exact'", "key_segment=None", "use_fp8=None"],
}


def ours(name: str) -> Any:
    owner, *rest = name.split(".")
    found = next(getattr(module, owner) for module in PACKAGES.values() if owner in dir(module))
    for part in rest:
        found = getattr(found, part)
    return found


def parameters(function: Callable[..., Any]) -> list[str]:
    """A signature, written as in the file."""
    found: list[str] = []
    for name, one in inspect.signature(function).parameters.items():
        if one.kind is one.KEYWORD_ONLY and not any(text.startswith("*") for text in found):
            found.append("*")
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = (
            str(one.default) if isinstance(one.default, Enum) else getattr(one.default, "__name__", repr(one.default))
        )
        found.append(stars + name if one.default is one.empty else f"{name}={default}")
    return [text for text in found if text != "self"]


def without_environment(text: str) -> str:
    """A parameter whose default Transformer Engine reads from the environment: what it is where nothing is set."""
    name, _, default = text.partition("=")
    if not default.startswith("os.getenv("):
        return OURS.get(text, text)
    unset = types.SimpleNamespace(getenv=lambda variable, value: value)
    return f"{name}={eval(default, {'os': unset})!r}"


SIGNATURES: dict[str, list[str]] = API["callables"] | API["constructors"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_transformer_engines(name: str) -> None:
    wanted = [without_environment(text) for text in SIGNATURES[name]] + EXTRA.get(name, [])
    got = parameters(ours(name))
    if name == "checkpoint":  # all keywords
        wanted, got = sorted(wanted), sorted(got)
    assert got == wanted


def test_names_of_ours_have_transformer_engines_defaults() -> None:
    """What is ours alone has an argument's default from a class of Transformer Engine's that has such an argument."""
    from reference.parallel import styles

    defaults: dict[str, set[str]] = {}
    for text in (text for name, texts in API["callables"].items() if name.endswith("__init__") for text in texts):
        argument, _, default = without_environment(text).partition("=")
        if default:
            defaults.setdefault(argument, set()).add(default)
    found = {
        f"{name}.{argument}"
        for module in (te, te.parallel, styles)
        for name in module.__all__
        if inspect.isclass(kind := getattr(module, name)) and f"{name}.__init__" not in SIGNATURES
        for argument, _, default in (text.partition("=") for text in parameters(kind.__init__))
        if default and default not in defaults.get(argument, {default})
    }
    assert found == {"Generator.page_size"}  # its cache is always in pages


# --- arguments ---------------------------------------------------------------------------------------

BF16 = torch.bfloat16
X = torch.zeros(4, 2, 32, dtype=BF16)
Q = torch.zeros(4, 2, 2, 16, dtype=BF16)
CALLS: dict[str, Callable[..., Any]] = {
    "DelayedScaling": te.DelayedScaling,
    "Linear.__init__": lambda **more: te.Linear(32, 32, **more),
    "Linear.forward": lambda **more: te.Linear(32, 32, params_dtype=BF16)(X, **more),
    "LayerNorm.__init__": lambda **more: te.LayerNorm(32, **more),
    "RMSNorm.__init__": lambda **more: te.RMSNorm(32, **more),
    "LayerNormLinear.__init__": lambda **more: te.LayerNormLinear(32, 32, **more),
    "LayerNormLinear.forward": lambda **more: te.LayerNormLinear(32, 32, params_dtype=BF16)(X, **more),
    "LayerNormMLP.__init__": lambda **more: te.LayerNormMLP(32, 32, **more),
    "LayerNormMLP.forward": lambda **more: te.LayerNormMLP(32, 32, params_dtype=BF16)(X, **more),
    "DotProductAttention.__init__": lambda **more: te.DotProductAttention(2, 16, **more),
    "DotProductAttention.forward": lambda **more: te.DotProductAttention(2, 16)(Q, Q, Q, **more),
    "MultiheadAttention.__init__": lambda **more: te.MultiheadAttention(32, 2, **more),
    "MultiheadAttention.forward": lambda **more: te.MultiheadAttention(32, 2, params_dtype=BF16)(X, **more),
    "TransformerLayer.__init__": lambda **more: te.TransformerLayer(32, 32, 2, **more),
    "TransformerLayer.forward": lambda **more: te.TransformerLayer(32, 32, 2, params_dtype=BF16)(X, **more),
    "ops.Linear.__init__": lambda **more: te.ops.Linear(32, 32, **more),
    "ops.BasicLinear.__init__": lambda **more: te.ops.BasicLinear(32, 32, **more),
    "ops.Bias.__init__": lambda **more: te.ops.Bias(32, **more),
    "ops.GELU.__init__": te.ops.GELU,
    "ops.SwiGLU.__init__": te.ops.SwiGLU,
    "ops.Dropout.__init__": lambda **more: te.ops.Dropout(0.5, **more),
    "ops.ConstantScale.__init__": lambda **more: te.ops.ConstantScale(0.5, **more),
    "ops.AddExtraInput.__init__": te.ops.AddExtraInput,
    "ops.MakeExtraOutput.__init__": te.ops.MakeExtraOutput,
    "ops.Sequential.forward": lambda **more: te.ops.Sequential()(X, **more),
}
# Arguments that do something here, or are hints that mean nothing here; every other one has to be refused.
_OFFERED = """
    in_features out_features hidden_size ffn_hidden_size num_attention_heads kv_channels num_gqa_groups
    normalized_shape eps layernorm_epsilon normalization zero_centered_gamma bias return_bias params_dtype dtype device
    init_method output_layer_init_method get_rng_state_tracker rng_tracker_name parameters_split parallel_mode
    fuse_wgrad_accumulation return_layernorm_output input_layernorm output_layernorm activation attention_type
    apply_residual_connection_post_layernorm layer_type fuse_qkv_params qkv_weight_interleaved rotary_pos_interleaved
    qkv_format attn_input_format attn_mask_type self_attn_mask_type enc_dec_attn_mask_type attention_dropout
    hidden_dropout softmax_scale window_size enc_dec_window_size attention_backend activation_params
    qk_norm_type qk_norm_eps qk_norm_before_rope parallel_attention_mlp drop_path_rate delay_wgrad_compute
    inp hidden_states attention_mask encoder_output enc_dec_attn_mask
    softmax_type core_attention_bias_type core_attention_bias alibi_slopes cu_seqlens_q cu_seqlens_kv
    cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv
    return_max_logit qkv_layer kv_layer qkv_interleave_dim
    is_first_microbatch checkpoint_core_attention rotary_pos_emb inference_params query_layer key_layer value_layer
    margin fp8_format amax_history_len amax_compute_algo reduce_amax fp8_dpa
    accumulate_into_main_grad rng_state_tracker_function tensor_parallel_group size p scale input *extra_inputs
    glu_interleave_size save_original_input in_place
    name ub_name layer_number seq_length micro_batch_size
    checkpoint tp_group cp_group cp_global_ranks cp_stream cp_comm_type sequence_parallel set_parallel_mode
    tp_size"""
OFFERED = set(_OFFERED.split())
NOT_HERE = {
    *(("TransformerLayer.__init__", f"ub_{name}") for name in ("overlap_ag", "overlap_rs", "overlap_rs_dgrad")),
    *(("TransformerLayer.__init__", f"ub_{name}") for name in ("bulk_dgrad", "bulk_wgrad")),
}

NOT_HERE_NAMES = {name for _, name in NOT_HERE}


def refused() -> list[tuple[str, str, str]]:
    """(callable, argument, default) of every argument of Transformer Engine's that is not offered."""
    found = []
    for call in CALLS:
        for text in API["callables"][call]:
            name = text.partition("=")[0]
            if name != "*" and (name not in OFFERED or (call, name) in NOT_HERE):
                found.append((call, name, OURS.get(text, text).partition("=")[2]))
    return found


def other_values(default: str) -> list[Any]:
    """Values that ask for something, of the kinds that the default suggests."""
    return {
        "None": [
            True,
            2,
            np.float32(0.5),
            np.ones(2),
            "RMSNorm",
            (4, 0),
            torch.ones(2),
            torch.ones,
            {"limit": 7.0},
            object(),
        ],
        "False": [True, 1, "no", torch.ones(2)],
        "True": ["no", 2, torch.ones(2), None],
        "1": [2, 0, -1, None, torch.ones(2)],
        "0": [1, -1, {"forward": 2}],
        "0.0": [0.5, -1.0, "0.5", np.ones(2)],
        "1e-06": [1e-5, 0.0, "1e-6"],
        "-3": [-2, 3],
        "'auto'": ["fa", None, 1],
    }[default]


@pytest.mark.parametrize(("call", "name", "default"), refused())
def test_an_argument_that_is_not_offered_says_so(call: str, name: str, default: str) -> None:
    either = call == "TransformerLayer.__init__" and name in NOT_HERE_NAMES  # True and False mean "off"
    for value in other_values("True" if either else default):
        if (name, value) == ("num_splits", None):  # "off", too
            continue
        with pytest.raises((NotImplementedError, ValueError, TypeError), match=rf"\b{name}=") as error:
            CALLS[call](**{name: value})
        assert call.partition(".")[0] in str(error.value)
        assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        ("TransformerLayer.__init__", "ub_overlap_ag", False),
        ("DotProductAttention.forward", "softcap", 0.0),
        ("DotProductAttention.forward", "pad_between_seqs", False),
        ("DotProductAttention.forward", "num_splits", None),
        ("Linear.forward", "fp8_output", None),
        ("RMSNorm.__init__", "sequence_parallel", False),
        ("DotProductAttention.__init__", "cp_comm_type", "a2a"),
        ("DelayedScaling", "override_linear_precision", (False, False, False)),
    ],
)
def test_other_ways_to_say_off_are_taken(call: str, name: str, value: Any) -> None:
    CALLS[call](**{name: value})


def test_every_argument_has_a_rule() -> None:
    """Of the constructors and forwards; what is a tensor is looked at by the forward itself."""
    from reference.arguments import OFF, RULES
    from reference.nn.attentions.attention_lengths import NAMES

    elsewhere = {"parameters_split", "inp", "hidden_states", "attention_mask", "encoder_output", "enc_dec_attn_mask"}
    elsewhere |= {"input", "extra_inputs", "rotary_pos_emb", "query_layer", "key_layer", "value_layer", "use_fp8"}
    elsewhere |= {"inference_params", "qkv_layer", "kv_layer"}
    elsewhere |= {"core_attention_bias", "alibi_slopes", *NAMES[:4]}
    for call in CALLS:
        layer = call.removesuffix(".__init__")
        for name in inspect.signature(ours(call)).parameters if "." in call else ():
            known = any(key in table for table in (OFF, RULES) for key in (name, f"{layer}.{name}"))
            assert known or name in {"self", *elsewhere}, (call, name)


def test_use_fp8_leads_to_autocast() -> None:
    with pytest.raises(TypeError, match=r"TransformerLayer: use_fp8=True is not offered; autocast\(\) switches FP8 on"):
        te.TransformerLayer(32, 32, 2, use_fp8=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_fp4'"):
        te.TransformerLayer(32, 32, 2, use_fp4=True)
