"""Checks of `FusedAdam`'s hyperparameters, and its saved state.

Nothing here changes an optimizer. Errors name the group, the parameter or the entry. A DTensor (FSDP2's `fully_shard`,
`distribute_tensor`) is replaced by its local shard: Adam works element by element, so a shard's numbers are those of
the whole tensor.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from reference.arguments import is_real
from reference.numbers import formats
from reference.ops.optimizers import adam_states
from reference.ops.optimizers.adam_states import RANGES
from reference.optimizers.adam_layout import MASTER, MOMENTS, Layout, State, needs_master, scale_name, write
from reference.optimizers.parameters import described, flag, placement, real, saved_parts
from reference.support.dtensor import like, placed, shard

# Keys that torch.optim.Adam and AdamW save in a group, but FusedAdam does not; the first two change numbers.
TORCH_KEYS = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")


class Numbers(NamedTuple):
    """The hyperparameters of a group, and its number of steps."""

    lr: Any  # a float; captured, a tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool
    step: Any  # an int; captured, a tensor or None


def captured_numbers_of(group: dict[str, Any], where: str = "") -> Numbers:
    """The numbers of a group whose `lr` and `step` lie on the device, checked without looking at those two."""
    found = numbers_of({**group, "lr": 0.0, "step": 0}, where)
    given = {"lr": (group.get("lr"), torch.float32), "step": (group.get("step"), torch.int32)}
    for name, (x, dtype) in given.items():
        fits = isinstance(x, torch.Tensor) and x.dtype == dtype and x.numel() == 1
        if not fits and not (name == "step" and x is None):
            shown = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
            raise TypeError(
                f"FusedAdam: {name}={shown}{where}; with capturable=True a tensor of one number in {dtype} is accepted."
            )
    return found._replace(lr=given["lr"][0], step=given["step"][0])


def numbers_of(group: dict[str, Any], where: str = "") -> Numbers:
    """The numbers of a group, checked; `where` follows the argument's name in errors."""
    for name in ("lr", "betas", "eps", "weight_decay", "bias_correction"):
        if name not in group:
            raise ValueError(
                f"FusedAdam: {name!r} is missing{where}; groups of FusedAdam, torch.optim.Adam and AdamW are accepted."
            )
    lr, eps, decay = (real("FusedAdam", name, group[name], where) for name in ("lr", "eps", "weight_decay"))
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(map(is_real, betas)):
        raise TypeError(f"FusedAdam: betas={betas!r}{where}; two numbers, 0 <= beta < 1, are accepted.")
    if not all(beta >= 0 and np.float32(beta) < 1 for beta in betas):
        raise ValueError(f"FusedAdam: betas={betas!r}{where}; two numbers, 0 <= beta < 1 in fp32, are accepted.")
    correct = flag("FusedAdam", "bias_correction", group["bias_correction"], where)
    return Numbers(lr, (float(betas[0]), float(betas[1])), eps, decay, correct, whole(group.get("step", 0), where))


def whole(value: Any, where: str) -> int:
    """A number of steps as an int; a tensor of one element is accepted."""
    read = value
    if isinstance(read, torch.Tensor) and read.numel() == 1 and not read.is_meta and read.dtype != torch.bool:
        read = read.item()
    if not is_real(read) or not 0 <= read < float("inf") or read != int(read):
        raise ValueError(f"FusedAdam: step={value!r}{where}; a whole number >= 0 is accepted.")
    return int(read)


# --- saved state -----------------------------------------------------------------------------------------


def read(
    state_dict: dict[str, Any], groups: list[dict[str, Any]], layout: Layout, adam_w_mode: bool
) -> tuple[dict[torch.Tensor, State], list[dict[str, Any]]]:
    """State and groups for the parameters of `groups`, from the state dict of FusedAdam, torch.optim.Adam or AdamW.

    torch's optimizers count steps by parameter; they become the group's. Their moments are kept as `layout` says, and
    the next step makes masters from the parameters. Nothing is shared with `state_dict`.
    """
    saved, entries = saved_parts("FusedAdam", state_dict, groups)
    known = {number for one in saved for number in one["params"]}
    extra = [number for number in entries if number not in known]
    if extra:
        raise ValueError(f"FusedAdam: state_dict['state'][{extra[0]!r}] belongs to no group; entries of groups are.")
    state: dict[torch.Tensor, State] = {}
    read_groups = []
    for i, (one, group) in enumerate(zip(saved, groups, strict=True)):
        where = f" in state_dict['param_groups'][{i}]"
        of_torch = "amsgrad" in one
        new = copy.deepcopy({name: value for name, value in one.items() if name != "params"})
        if of_torch:
            _translate(new, [entries.get(number) for number in one["params"]], adam_w_mode, where)
        if layout.capturable and isinstance(new.get("lr"), torch.Tensor) and new["lr"].numel() == 1:
            new["lr"] = new["lr"].item()
        found = numbers_of(new, where)
        for name in TORCH_KEYS:
            new.pop(name, None)
        new.update({name: value for name, value in found._asdict().items() if name in new})
        if "param_names" in group:
            new.setdefault("param_names", group["param_names"])
        read_groups.append({**new, "params": group["params"]})
        for number, p in zip(one["params"], group["params"], strict=True):
            if entries.get(number):
                what = f"state_dict['state'][{number!r}]"
                entry = dict(entries[number])
                if not of_torch and "step" in entry and whole(entry.pop("step"), f" of {what}") != found.step:
                    raise ValueError(f"FusedAdam: step={entries[number]['step']!r} of {what}; {found.step}{where}.")
                state[p] = _entry(what, entry, p, layout, of_torch)
    return state, read_groups


def fits_torch(layout: Layout, groups: list[dict[str, Any]]) -> bool:
    """Whether `torch.optim.AdamW` goes on with the same numbers: it has moments in a parameter's dtype, no masters."""
    return all(
        group["bias_correction"]
        and not needs_master(p, layout.master_weights)
        and (p.dtype == torch.float32 or p.dtype == layout.exp_avg == layout.exp_avg_sq == torch.bfloat16)
        for group in groups
        for p in map(shard, group["params"])
    )


def add_torchs(state_dict: dict[str, Any], adam_w_mode: bool, capturable: bool) -> None:
    """Add to a state dict of FusedAdam what torch's Adam and AdamW read in addition."""
    for group in state_dict["param_groups"]:
        group.update(decoupled_weight_decay=adam_w_mode, capturable=capturable)
        for number in group["params"]:
            if entry := state_dict["state"].get(number):
                step = group.get("step", 0)  # captured, a tensor of one number
                on = step.device if isinstance(step, torch.Tensor) else "cpu"
                step = torch.as_tensor(step, device=on, dtype=torch.float32).reshape(())
                state_dict["state"][number] = {"step": step, **entry}


def _translate(group: dict[str, Any], entries: Sequence[dict[str, Any] | None], adam_w_mode: bool, where: str) -> None:
    """Turn a group of torch.optim.Adam or AdamW into one of FusedAdam."""
    for name in TORCH_KEYS[:2]:
        if group.get(name):
            raise NotImplementedError(f"FusedAdam: {name}={group[name]!r}{where} is not offered; False is accepted.")
    decoupled = group.get("decoupled_weight_decay", adam_w_mode)
    if decoupled != adam_w_mode and group.get("weight_decay"):
        raise ValueError(f"FusedAdam: decoupled_weight_decay={decoupled!r}{where} needs adam_w_mode={bool(decoupled)}.")
    steps = {whole(entry["step"], where) for entry in entries if entry and "step" in entry}
    if len(steps) > 1:
        raise ValueError(f"FusedAdam: step={sorted(steps)} for the parameters{where}; one step per group is accepted.")
    for name in TORCH_KEYS:
        group.pop(name, None)
    group["bias_correction"] = True
    if steps:
        group["step"] = steps.pop()


def _entry(what: str, entry: dict[str, Any], p: torch.Tensor, layout: Layout, of_torch: bool) -> State:
    local = shard(p)
    if local.is_meta:
        raise ValueError(f"FusedAdam: the parameter of {what} is on meta; one with numbers (to_empty) is accepted.")
    with_master = needs_master(local, layout.master_weights) and not of_torch
    parts = {name: dtype for name, dtype in layout.parts(local).items() if name in MOMENTS or with_master}
    wanted = (*parts, "step") if of_torch else tuple(parts)
    # Transformer Engine saves a master of an fp32 parameter, too, but never changes it. What has no scale here is
    # complete without the one that it was saved with.
    spare = (MASTER,) if local.dtype == torch.float32 and not of_torch else ()
    known = (*wanted, *spare, *(() if of_torch else map(scale_name, parts)))
    absent = [name for name in wanted if name not in entry]
    other = [name for name in entry if name not in known]
    if absent or other:
        found = f"no {absent[0]!r}" if absent else repr(other[0])
        raise ValueError(
            f"FusedAdam: {what} has {found}; {', '.join(wanted)} are accepted with "
            f"master_weights={layout.master_weights}."
        )
    for name in (*MOMENTS, MASTER):
        if name in entry:
            _check_saved(f"{what}[{name!r}]", name, entry[name], p, local, parts.get(name) == torch.int16)
    if spare and MASTER in entry and not torch.equal(shard(entry[MASTER]).to(local.device), local):
        raise ValueError(
            f"FusedAdam: {what}['master_param'] differs from its parameter, which is in fp32 and its own master; "
            f"a state without it is accepted."
        )
    made: State = {}
    for name, dtype in parts.items():
        made[name] = like(p, torch.empty(local.shape, dtype=dtype, device=local.device))
        values, scale = shard(entry[name]).to(local.device), None
        if dtype in RANGES:
            made[scale_name(name)] = torch.empty(1, dtype=torch.float32, device=local.device)
            values = values.float()
            scale = _saved_scale(what, name, dtype, values, entry.get(scale_name(name)))
        write(made, name, values, scale)
    return made


def _saved_scale(what: str, name: str, dtype: torch.dtype, values: torch.Tensor, scale: Any) -> torch.Tensor | None:
    """The scale that was saved with a part's numbers, of which it gives the codes; None if there is none."""
    if scale is None:
        return None
    what = f"{what}[{scale_name(name)!r}]"
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32 or scale.shape != (1,) or scale.is_meta:
        found = f"{scale.dtype} {list(scale.shape)}" if isinstance(scale, torch.Tensor) else described(scale)
        raise TypeError(f"FusedAdam: {what} is {found}; float32 [1] is accepted.")
    scale = scale.to(values.device)
    read = adam_states.read(adam_states.codes(values, scale, dtype), scale)
    if not (bool(scale > 0) and torch.equal(read, values)):
        raise ValueError(f"FusedAdam: {what}={scale.item()} is not the scale of the numbers saved with it.")
    return scale


def _check_saved(what: str, name: str, x: Any, p: Any, local: torch.Tensor, remainders: bool) -> None:
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_meta:
        found = "on meta" if isinstance(x, torch.Tensor) and x.is_meta else described(x)
        raise TypeError(f"FusedAdam: {what} is {found}; a dense tensor with numbers is accepted.")
    if placed(x) != placed(p):
        raise TypeError(
            f"FusedAdam: {what} is {placement(x)}, its parameter {placement(p)}; the same placements are accepted."
        )
    master = (torch.int16 if remainders else torch.float32,)
    dtypes = master if name == MASTER else formats.WIDE_DTYPES
    part = shard(x)
    if x.dtype not in dtypes or x.shape != p.shape or part.shape != local.shape:
        accepted = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"FusedAdam: {what} is {x.dtype} {list(x.shape)}; {accepted} {list(p.shape)} is accepted.")
    if not bool(part.isfinite().all()):
        raise ValueError(f"FusedAdam: {what} holds NaN or infinity; finite numbers are accepted.")
    if name == "exp_avg_sq" and not bool((part >= 0).all()):
        raise ValueError(f"FusedAdam: {what} holds negative numbers; squares are accepted.")
