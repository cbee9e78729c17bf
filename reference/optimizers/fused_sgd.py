"""`FusedSGD`: SGD in one op for all parameters."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import required

from reference.arguments import check_arguments
from reference.nn.core.attributes import OfSGD
from reference.numbers import formats
from reference.ops.library import twin
from reference.optimizers.parameters import (
    PLAIN,
    check_common,
    check_device,
    check_memory,
    check_parameter,
    check_part,
    checked_grad_none,
    described,
    flag,
    named,
    placement,
    real,
    saved_parts,
    to_none,
    unwrapped,
    without_compiler,
)
from reference.support import not_offered
from reference.support.dtensor import like, placed, shard

WHO = "FusedSGD"
NUMBERS = ("lr", "momentum", "dampening", "weight_decay")
# Keys that torch.optim.SGD saves in a group, but FusedSGD does not; the first changes numbers.
TORCH_KEYS = ("maximize", "foreach", "differentiable", "fused")
Lists = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


class Numbers(NamedTuple):
    """The hyperparameters of a group."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


def numbers_of(group: dict[str, Any], where: str = "") -> Numbers:
    """The numbers of a group, checked; `where` follows the argument's name in errors."""
    missing = [name for name in (*NUMBERS, "nesterov") if name not in group]
    if missing:
        raise ValueError(f"{WHO}: {missing[0]!r} is missing{where}; groups of FusedSGD and torch.optim.SGD are.")
    if group["lr"] is required:
        raise TypeError(f"{WHO}: lr is missing{where}; a number >= 0 is accepted.")
    lr, momentum, dampening, decay = (real(WHO, name, group[name], where) for name in NUMBERS)
    nesterov = flag(WHO, "nesterov", group["nesterov"], where)
    if nesterov and (not momentum or dampening):
        raise ValueError(
            f"{WHO}: nesterov=True with momentum={momentum!r}, dampening={dampening!r}{where}; a momentum above 0 "
            f"without dampening is accepted."
        )
    return Numbers(lr, momentum, dampening, decay, nesterov)


@not_offered.without_methods
class FusedSGD(OfSGD, torch.optim.Optimizer):
    """SGD with Transformer Engine's arguments and defaults; the arithmetic is `twin::sgd`'s.

    The state of a parameter is `momentum_buffer`, of the parameter's dtype, which exists from its first step with a
    momentum on and starts as that step's gradient, as in `torch.optim.SGD`. (In Transformer Engine the last parameter
    of a group decides for all whether it is their first step, and bf16 parameters are left out without a word.)

    In 16 bits a step is computed in fp32, and the parameter and the buffer are rounded once; `torch.optim.SGD` rounds
    the buffer between operations and steps with the rounded one; on a CPU it rounds lr, too. So last bits differ.

    A step checks everything before it changes anything. Parameters are fp32, bf16 or fp16; a DTensor's rank changes its
    own shard.

    Args:
        params: parameters, or dicts that define groups of them.
        lr, momentum, dampening, weight_decay, nesterov: SGD's.
        wd_after_momentum: add the weight decay after the momentum, not before, in groups that have both. dampening,
            too, needs a momentum. Both may be set later.
        materialize_master_grads: True. (False concerns apex's master gradients, which do not exist here.)
        set_grad_none: deprecated; what `zero_grad` does without an argument.

    Source: Transformer Engine's `pytorch/optimizers/fused_sgd.py`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        given = locals()
        check_arguments(WHO, {"materialize_master_grads": materialize_master_grads})
        self.set_grad_none = checked_grad_none(WHO, set_grad_none)
        self.wd_after_momentum = flag(WHO, "wd_after_momentum", wd_after_momentum)
        defaults = {name: given[name] for name in (*NUMBERS, "nesterov")}
        if lr is not required:
            defaults = numbers_of(defaults)._asdict()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; also refuses numbers that a step would refuse."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"{WHO}: param_group={param_group!r}; a dict with 'params' is accepted.")
        where = f" in group {len(self.param_groups)}"
        common = {"wd_after_momentum": self.wd_after_momentum, "set_grad_none": self.set_grad_none}
        check_common(WHO, param_group, where, {**common, "materialize_master_grads": True, "maximize": False})
        found = numbers_of({**self.defaults, **param_group}, where)
        without_compiler(super().add_param_group)({**param_group, **found._asdict()})

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or a pickle, with the modes, which torch's method omits."""
        modes = {"wd_after_momentum": self.wd_after_momentum, "set_grad_none": self.set_grad_none}
        return {**super().__getstate__(), **modes}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As torch's; None, Transformer Engine's default, is True."""
        without_compiler(super().zero_grad)(to_none(WHO, set_to_none, self.set_grad_none))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        made, work = self._checked()
        for p, buffer in made.items():
            self.state[p]["momentum_buffer"] = buffer
        for numbers, calls in work:
            for (*_, first), lists in calls.items():
                twin.sgd(*lists, *numbers, first, self.wd_after_momentum)
        return loss

    def _checked(self) -> tuple[dict[torch.Tensor, torch.Tensor], list[tuple[Numbers, dict[Any, Lists]]]]:
        """The buffers to create, and for each group its numbers and the op's calls; changes nothing."""
        made: dict[torch.Tensor, torch.Tensor] = {}
        work = []
        spans: list[tuple[int, int, tuple[int, int]]] = []
        for g, group in enumerate(self.param_groups):
            numbers = numbers_of(group, f" in group {g}")
            # A call of the op accepts tensors of one device and kind, all in their first step or none.
            calls: dict[Any, Lists] = {}
            for i, p in enumerate(group["params"]):
                local, grad = p, p.grad
                if grad is None:
                    continue
                if type(p) not in PLAIN or type(grad) not in PLAIN:
                    local, grad = unwrapped(WHO, (g, i), p, grad)
                check_parameter(WHO, (g, i), local, grad, False, "a weight in fp32 or 16 bits is")
                check_device(WHO, "sgd", "parameter", local.device)
                buffer = self.state[p].get("momentum_buffer") if p in self.state else None
                first = buffer is None
                if numbers.momentum and first:
                    buffer = made[p] = like(p, torch.empty_like(local, memory_format=torch.contiguous_format))
                lists = calls.setdefault((local.device, grad.dtype, local.dtype, first), ([], [], []))
                lists[0].append(grad.contiguous())
                lists[1].append(local.detach())
                if numbers.momentum:
                    part = (local.dtype, local.shape, local.device)
                    lists[2].append(check_part(WHO, (g, i), "momentum_buffer", buffer, *part))
                start = local.data_ptr()
                spans.append((start, start + local.nbytes, (g, i)))
            work.append((numbers, calls))
        check_memory(WHO, spans, named)
        return made, work

    # --- checkpoints -------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of a FusedSGD or of torch.optim.SGD; everything is checked first."""
        state_dict = checked(state_dict, self.param_groups)
        super().load_state_dict(state_dict)


def checked(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A copy of a state dict, checked, with the keys that FusedSGD has and tensors of its own."""
    saved, entries = saved_parts(WHO, state_dict, groups)
    read = []
    for i, (one, group) in enumerate(zip(saved, groups, strict=True)):
        where = f" in state_dict['param_groups'][{i}]"
        if one.get("maximize"):
            raise NotImplementedError(f"{WHO}: maximize={one['maximize']!r}{where} is not offered; False is accepted.")
        numbers = numbers_of(one, where)._asdict()
        read.append({**{k: copy.deepcopy(v) for k, v in one.items() if k not in TORCH_KEYS}, **numbers})
        for key, p in zip(one["params"], group["params"], strict=True):
            _check_entry(f"state_dict['state'][{key!r}]", entries.get(key), p)
    own = {key: {name: x if x is None else x.clone() for name, x in entry.items()} for key, entry in entries.items()}
    return {**state_dict, "param_groups": read, "state": own}


def _check_entry(what: str, entry: Any, p: torch.Tensor) -> None:
    """Refuse a parameter's saved state that does not fit it."""
    if not entry:
        return
    if not isinstance(entry, dict) or entry.keys() - {"momentum_buffer"}:
        raise ValueError(f"{WHO}: {what} has {list(entry)}; 'momentum_buffer' is accepted.")
    x = entry["momentum_buffer"]
    if x is None:
        return
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_meta:
        raise TypeError(f"{WHO}: {what}['momentum_buffer'] is {described(x)}; a dense tensor with numbers is accepted.")
    if placed(x) != placed(p):
        raise TypeError(
            f"{WHO}: {what} is {placement(x)}, its parameter {placement(p)}; the same placements are accepted."
        )
    if x.dtype != p.dtype or x.shape != p.shape or x.dtype not in formats.WIDE_DTYPES:
        raise ValueError(
            f"{WHO}: {what}['momentum_buffer'] is {x.dtype} {list(x.shape)}; {p.dtype} {list(p.shape)} is accepted."
        )
    if not bool(shard(x).isfinite().all()):
        raise ValueError(f"{WHO}: {what}['momentum_buffer'] holds NaN or infinity; finite numbers are accepted.")
