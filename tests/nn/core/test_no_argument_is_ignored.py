"""Every argument of every layer and optimizer does something, or is refused.

The signatures say which arguments there are. Each is given another value, which has to change parameters, outputs,
gradients or the state, or to be refused in a sentence that names it. What legitimately changes none of these is listed
in `WITHOUT_EFFECT` with its reason; it has to be true of what is listed.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.argument_values import (
    ANY,
    BF16,
    LAYERS,
    OPTIMIZERS,
    OPTIONS_OTHERS,
    OPTIONS_WHERE,
    OTHERS,
    REFUSED,
    SOURCE,
    STATES,
    UNREAD,
    WHERE,
    WITHOUT_EFFECT,
    numbers,
)

import reference as te
from reference.arguments import OFF


def named(layer: str, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a constructor by the names that a layer has for them; those that it lacks are left out."""
    if layer.startswith("TransformerLayer"):
        given = dict(given)
        for name, own in (
            ("qkv_format", ["attn_input_format"]),
            ("attn_mask_type", ["self_attn_mask_type", "enc_dec_attn_mask_type"][: 1 if "," in layer else 2]),
        ):
            if name in given:
                given |= dict.fromkeys(own, given.pop(name))
    return {name: x for name, x in given.items() if name in inspect.signature(LAYERS[layer][0]).parameters}


def inputs(layer: str, also: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward, with those of `also` in their place."""
    given = {**LAYERS[layer][2], **also}
    packed = given.pop("packed", None)
    if packed is not None:
        for name, x in given.items():
            if isinstance(x, torch.Tensor) and x.dtype == BF16 and name != "rotary_pos_emb":
                given[name] = packed.view(12, *x.shape[2:]) * float(x.flatten()[0])
    return given


def static(layer: Any) -> list[Any]:
    """What a constructor leaves: parameters with what programs read of them."""
    found = []
    for name, p in layer.named_parameters():
        marks = {key: x for key, x in vars(p).items() if not isinstance(x, torch.Tensor)}
        found.append((name, p.dtype, p.device.type, p.requires_grad, str(marks), p.shape, bits(p)))
    return found


def bits(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x if isinstance(x, (int, float, str, bool, type(None))) else type(x).__name__
    x = x.detach().dequantize() if isinstance(x, te.Float8Tensor) else x.detach()
    return (x.dtype, x.shape, None if x.is_meta else x.reshape(-1).view(torch.uint8).numpy().tobytes())


def run(layer: Any, given: dict[str, Any], microbatches: bool) -> list[Any]:
    """Outputs, gradients, main gradients of a step; with `microbatches` outputs of two, whose weights differ."""
    for n, p in enumerate(layer.parameters()):
        p.data += numbers(50 + n, *p.shape, dtype=p.dtype) * 0.3
        p.main_grad = torch.zeros(p.shape)
    torch.manual_seed(5)
    given = {
        name: x.clone().requires_grad_() if isinstance(x, torch.Tensor) and x.dtype == BF16 else x
        for name, x in given.items()
    }
    if microbatches:
        found = []
        for again in (False, True):
            if again and given["is_first_microbatch"]:
                given["is_first_microbatch"] = False
            with te.autocast():
                outputs = layer(**given)
            found.append(bits(outputs if isinstance(outputs, torch.Tensor) else outputs[0]))
            for p in layer.parameters():
                p.data *= 2
        return found
    with te.autocast(enabled=isinstance(layer, te.ops.Quantize)):
        outputs = layer(**given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for n, out in enumerate(outputs):
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.backward(numbers(70 + n, *out.shape).to(out.dtype), retain_graph=True)
    leaves = [x for x in (*given.values(), *layer.parameters()) if isinstance(x, torch.Tensor) and x.requires_grad]
    grads = [x.grad for x in leaves if x.is_leaf]
    return [bits(x) for x in (*outputs, *grads, *(p.main_grad for p in layer.parameters()))]


def others(layer: str, name: str, default: Any) -> list[Any]:
    """Other values of an argument."""
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(default, bool):
        return [not default]
    off = OFF.get(f"{layer}.{name}", OFF.get(name))
    if off is not None:
        return [next(x for x in (True, 3) if x not in off)]
    assert name in ("is_first_microbatch", "pad_between_seqs", "sequence_parallel"), (
        f"{layer}: {name} has no other value"
    )
    return [True, False]


FIRST = "is_first_microbatch"
BASES: dict[Any, tuple[list[Any], list[Any]]] = {}


def where(layer: str, name: str, of_forward: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Further arguments of the constructor and of the forward, with which an argument acts."""
    own = f"forward.{name}" if of_forward else name
    return WHERE.get(f"{layer}.{own}", WHERE.get(own, WHERE.get(name, ({}, {}))))


def effects(layer: str, name: str, of_forward: bool, state: tuple[dict[str, Any], dict[str, Any]] | None) -> list[str]:
    """Of each other value of an argument: "refused: the sentence", "changed" or "ignored".

    `state`: further arguments of the constructor and of the forward; None are those with which it acts.
    """
    kind, given, _ = LAYERS[layer]
    own = f"forward.{name}" if of_forward else name
    make, also = where(layer, name, of_forward) if state is None else state
    key = (layer, str((state[0], [*state[1]])) if state is not None else own if make or also else "", name == FIRST)
    make, call = {**given, **named(layer, make)}, inputs(layer, also)
    if of_forward and name == FIRST:
        call = {**call, name: None}
    signature = inspect.signature(kind.forward if of_forward else kind)
    default = (call if of_forward else make).get(name, signature.parameters[name].default)
    if of_forward and default is None and name in inspect.signature(kind).parameters:
        default = make.get(name, inspect.signature(kind).parameters[name].default)

    def found(make: dict[str, Any], call: dict[str, Any]) -> tuple[list[Any], Callable[[], list[Any]]]:
        torch.manual_seed(1)
        taken = inspect.signature(kind).parameters
        dtype = "params_dtype" if "params_dtype" in taken and "dtype" not in make else "dtype"
        common = {key: x for key, x in ((dtype, BF16), ("device", "cpu")) if key in taken}
        made = kind(**{**common, **make})
        return static(made), lambda: run(made, dict(call), name == FIRST)

    if key not in BASES:
        before, go = found(make, call)
        BASES[key] = (before, go())
    results = []
    for value in others(layer, name, default):
        if not isinstance(value, torch.Tensor) and type(value) is type(default) and value == default:
            continue
        if isinstance(value, str) and value == "negative":
            value = (call[name] + 1) % 8 if layer == "Embedding" else -call.get(name, SOURCE)
        try:
            after, go = found(*((make, {**call, name: value}) if of_forward else ({**make, name: value}, call)))
            same = after == BASES[key][0] and go() == BASES[key][1]
        except (TypeError, ValueError, KeyError, NotImplementedError, RuntimeError) as error:
            results.append(f"refused: {error}")
            continue
        results.append("ignored" if same else "changed")
    return results


OPTIONS = [(kind, name) for kind, (one, _) in OPTIMIZERS.items() for name in inspect.signature(one).parameters]
ARGUMENTS = [
    (layer, name, of_forward)
    for layer, (kind, *_) in LAYERS.items()
    for of_forward, function in ((False, kind), (True, kind.forward))
    for name in inspect.signature(function).parameters
    if name not in ("self", "args", "kwargs") and (of_forward or "," not in layer)
]


def wrong(layer: str, name: str, found: list[str]) -> list[Any]:
    """What is ignored and not listed; and an argument whose every value is refused, although others are accepted."""
    keys = (name, f"{layer}.{name}", f"{layer.partition(',')[0]}.{name}")
    if any(key in WITHOUT_EFFECT for key in keys):
        return [(*keys, "acts, and is not for WITHOUT_EFFECT")] if "changed" in found else []
    refusal = re.compile("^refused: .*(accepted|not offered|needs|must|takes).*[.]")
    results = [(layer, name, one) for one in found if one != "changed" and not refusal.match(one)]
    off = any(key in OFF or key in REFUSED for key in keys)
    return results if off or "changed" in found else [*results, (layer, name, "is always refused", found)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("layer", LAYERS)
def test_arguments_of_a_layer(layer: str) -> None:
    found = {(name, forward): effects(layer, name, forward, None) for one, name, forward in ARGUMENTS if one == layer}
    results = [wrong(layer, name, one) for (name, _), one in found.items()]
    assert not [one for found in results for one in found]


def unread(layer: str, name: str, state: dict[str, Any]) -> bool:
    """Whether a layer with these arguments is documented not to read an argument."""
    kind, given, _ = LAYERS[layer]
    defaults = {key: one.default for key, one in inspect.signature(kind).parameters.items()}
    full = {**defaults, **given, **state}
    full["attn_mask_type"] = full.get("self_attn_mask_type", full.get("attn_mask_type"))
    keys = (name, f"{layer.partition(',')[0]}.{name}")
    offs = [off for key, (listed, _) in UNREAD.items() if key in keys for off in listed]
    return any(
        all((full.get(key) is not None) if value is ANY else full.get(key, ANY) == value for key, value in off.items())
        for off in offs
    )


SWITCHED = [
    pytest.param(layer, n, marks=[pytest.mark.slow] if n > (3 if "Transformer" not in layer else 0) else [])
    for layer in LAYERS
    for n in range(1 + len(STATES.get(layer, ())))
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("layer", "n"), SWITCHED)
def test_settings_of_what_is_switched_off(layer: str, n: int) -> None:
    """State 0 is the layer's base, of which the test above has what acts in it."""
    make, also = STATES[layer][n - 1] if n else ({}, {})
    faults = []
    for one, name, of_forward in ARGUMENTS:
        own = {f"{layer}.{name}", f"{layer.partition(',')[0]}.{name}", name}
        if one != layer or own & WITHOUT_EFFECT.keys() or (not n and where(layer, name, of_forward) == ({}, {})):
            continue
        found = effects(layer, name, of_forward, (make, also))
        if unread(layer, name, make | also):
            faults += [(name, one, "acts, and is not for UNREAD") for one in found if one == "changed"]
        else:
            faults += [(name, one) for one in found if one == "ignored"]
    assert not faults


def test_the_lists_of_what_is_not_read_name_arguments() -> None:
    names = {name for _, name, _ in ARGUMENTS} | {f"{layer.partition(',')[0]}.{name}" for layer, name, _ in ARGUMENTS}
    names |= {f"{kind}.{name}" for kind, name in OPTIONS}
    assert set(UNREAD) <= names


OFF_OPTIONS = [
    (kind, name, off)
    for kind, name in OPTIONS
    for off in ({}, {"weight_decay": 0.0}, {"momentum": 0.0}, {"master_weights": True})
    if set(off) <= set(inspect.signature(OPTIMIZERS[kind][0]).parameters)
]


@pytest.mark.filterwarnings("ignore:.*set_grad_none")
@pytest.mark.parametrize(("kind", "name", "off"), OFF_OPTIONS)
def test_settings_of_an_optimizer_that_are_switched_off(kind: str, name: str, off: dict[str, Any]) -> None:
    one, given = OPTIMIZERS[kind]
    given = {**given, **off}
    defaults = {key: p.default for key, p in inspect.signature(one).parameters.items()}
    default = {**defaults, **given}[name]
    listed = UNREAD.get(f"{kind}.{name}", ([], ""))[0]
    is_unread = any(all({**defaults, **given}[key] == x for key, x in one.items()) for one in listed)
    before, sentences = trained(one, dict(given), {}), []
    for value in OPTIONS_OTHERS.get(f"{kind}.{name}", OPTIONS_OTHERS.get(name, [not default])):
        if isinstance(value, type(default)) and value == default:
            continue
        try:
            after = trained(one, {**given, name: value}, {})
        except (TypeError, ValueError, NotImplementedError) as error:
            sentences.append(str(error))
            continue
        ignored = after == before
        assert ignored == (is_unread or f"{kind}.{name}" in WITHOUT_EFFECT), (value, ignored)
    assert all(name in one for one in sentences)


def test_the_list_of_what_has_no_effect_names_arguments() -> None:
    names = {name for _, name, _ in ARGUMENTS} | {f"{layer}.{name}" for layer, name, _ in ARGUMENTS}
    names |= {f"{kind}.{name}" for kind, name in OPTIONS}
    assert set(WITHOUT_EFFECT) <= names


def trained(kind: Any, given: dict[str, Any], group: dict[str, Any]) -> list[Any]:
    """Parameters and state after three steps, and what `zero_grad` leaves."""
    params = [torch.nn.Parameter(numbers(n, 4, 8, dtype=dtype)) for n, dtype in enumerate((BF16, torch.float32))]
    for n, p in enumerate(params):
        p.decoupled_grad = numbers(20 + n, 4, 8, dtype=p.dtype)
    optimizer = kind([{"params": given.pop("params", params), **group}], **given)
    for step in range(3):
        for n, p in enumerate(params):
            p.grad = numbers(10 * step + n, 4, 8, dtype=p.dtype)
        optimizer.step()
    found = [bits(x) for p in params for x in (p, *optimizer.state[p].values())]
    optimizer.zero_grad()
    return [*found, *(p.grad is None for p in params), type(optimizer.param_groups[0]["lr"])]


@pytest.mark.filterwarnings("ignore:.*set_grad_none")
@pytest.mark.parametrize("of_group", [False, True], ids=["argument", "group"])
@pytest.mark.parametrize(("kind", "name"), OPTIONS)
def test_an_argument_of_an_optimizer(kind: str, name: str, of_group: bool) -> None:
    """Of a constructor, and in a dict that defines a group, whose values go first."""
    one, given = OPTIMIZERS[kind]
    given = {**given, **OPTIONS_WHERE.get(name, {})}
    default = given.get(name, inspect.signature(one).parameters[name].default)
    values = OPTIONS_OTHERS.get(f"{kind}.{name}", OPTIONS_OTHERS.get(name, [not default]))
    before, found = trained(one, dict(given), {}), []
    for value in values:
        own = ({}, {name: value}) if of_group else ({name: value}, {})
        try:
            after = trained(one, {**given, **own[0]}, own[1])
        except (TypeError, ValueError, NotImplementedError) as error:
            found.append(f"refused: {error}")
            continue
        found.append("ignored" if after == before else "changed")
    if of_group and all(re.search(f"refused: {kind}: {name}=.* in group 0", x) for x in found):
        return  # all groups have it in common
    assert not wrong(kind, name, found)


@pytest.mark.parametrize("name", ["maximize", "amsgrad", "decoupled_weight_decay"])
def test_what_torchs_groups_ask_for_is_refused(name: str) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    for kind in (te.optimizers.FusedAdam, te.optimizers.FusedSGD)[: 2 if name == "maximize" else 1]:
        own = name == "decoupled_weight_decay"
        kind([{"params": [p], name: own}], lr=0.1)
        with pytest.raises(ValueError, match=f"{kind.__name__}: {name}={not own} in group 0; {own} is accepted"):
            kind([{"params": [p], name: not own}], lr=0.1)
