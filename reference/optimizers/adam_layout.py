"""How `FusedAdam` keeps a parameter's moments and master: names, dtypes and scales, and reading and writing them.

`exp_avg` and `exp_avg_sq` are fp32, bf16, fp16 or uint8 (E4M3), `master_param` fp32, fp16, or int16 remainders of a
bf16 parameter. fp16 and uint8 have a scale, `<name>_scale`, fp32 `[1]`. The formulas are those of
`reference.ops.optimizers.adam_states`.
"""

from typing import NamedTuple

import torch

from reference.float8.kept_tensor import KeptTensor
from reference.ops.optimizers import adam_states
from reference.ops.optimizers.adam_states import RANGES
from reference.optimizers.parameters import Where, check_part
from reference.support.dtensor import is_dtensor, like, shard
from reference.support.notice import say_once

WHO = "FusedAdam"
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
State = dict[str, torch.Tensor]
_NAMES = {
    "exp_avg_dtype": (torch.float32, torch.bfloat16, torch.float16, torch.uint8),
    "exp_avg_sq_dtype": (torch.float32, torch.bfloat16, torch.float16, torch.uint8),
    "master_weight_dtype": (torch.float32, torch.float16),
}


def scale_name(name: str) -> str:
    """The name of a part's scale."""
    return f"{name}_scale"


class Layout(NamedTuple):
    """What an optimizer's parts are kept in."""

    master_weights: bool
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    master: torch.dtype
    remainders: bool
    capturable: bool

    def parts(self, local: torch.Tensor) -> dict[str, torch.dtype]:
        """The parts of a parameter's state, with their dtypes."""
        found = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if needs_master(local, self.master_weights):
            found[MASTER] = self.master_of(local)
        return found

    def master_of(self, local: torch.Tensor) -> torch.dtype:
        """The dtype of a parameter's master."""
        if not self.remainders:
            return self.master
        halved = local.dtype == torch.bfloat16 and not isinstance(local, KeptTensor)
        return torch.int16 if halved else self.master

    @property
    def scaled(self) -> bool:
        """Whether some part has a scale."""
        return not RANGES.keys().isdisjoint((self.exp_avg, self.exp_avg_sq, self.master))

    @property
    def plain(self) -> bool:
        """Whether every part is fp32."""
        return self.exp_avg == self.exp_avg_sq == self.master == torch.float32 and not self.remainders


def needs_master(local: torch.Tensor, master_weights: bool) -> bool:
    """Whether a parameter's step works on a copy in more bits."""
    return isinstance(local, KeptTensor) or (master_weights and local.dtype != torch.float32)


def check_layout(layout: Layout) -> None:
    """Refuse dtypes that are not offered, and what cannot be captured."""
    given = zip(_NAMES.items(), (layout.exp_avg, layout.exp_avg_sq, layout.master), strict=True)
    for (name, accepted), dtype in given:
        if dtype not in accepted:
            names = " and ".join(str(one).removeprefix("torch.") for one in accepted)
            raise NotImplementedError(f"{WHO}: {name}={dtype!r} is not offered; {names} are accepted.")
    if not layout.capturable:
        return
    if layout.exp_avg != layout.exp_avg_sq or layout.exp_avg not in (torch.float32, torch.bfloat16):
        raise NotImplementedError(
            f"{WHO}: capturable=True with exp_avg_dtype={layout.exp_avg}, exp_avg_sq_dtype={layout.exp_avg_sq} is not "
            f"offered; both float32 or both bfloat16 are accepted."
        )
    if layout.master_weights and (layout.remainders or layout.master != torch.float32):
        kept = "store_param_remainders=True" if layout.remainders else f"master_weight_dtype={layout.master}"
        raise NotImplementedError(
            f"{WHO}: capturable=True with {kept} is not offered; masters in float32 are accepted."
        )


# --- one part --------------------------------------------------------------------------------------------


def made(layout: Layout, p: torch.Tensor, local: torch.Tensor, only: str | None = None) -> State:
    """The parts of a parameter before its first step; `only` that one, of a parameter that has made steps."""
    state: State = {}
    for name, dtype in layout.parts(local).items():
        if only not in (None, name):
            continue
        if dtype in RANGES:
            if is_dtensor(p):
                raise NotImplementedError(
                    f"{WHO}: {name} in {dtype} of a DTensor is not offered (each shard would have a scale of its own); "
                    f"float32 and bfloat16 are accepted."
                )
            state[scale_name(name)] = torch.ones(1, dtype=torch.float32, device=local.device)
        if name == MASTER and dtype == torch.float32:
            state[name] = like(p, _start(local, only is None))
        else:
            state[name] = like(p, torch.zeros(local.shape, dtype=dtype, device=local.device))
            if name == MASTER and dtype == torch.float16:
                write(state, name, _start(local, only is None))
    return state


def numbers(state: State, name: str) -> torch.Tensor:
    """A part's numbers in fp32, a DTensor's local ones; the part itself if it is in fp32 or holds remainders."""
    part = shard(state[name])
    return part if part.dtype in (torch.float32, torch.int16) else adam_states.read(part, state.get(scale_name(name)))


def write(state: State, name: str, values: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    """Write fp32 numbers (remainders: int16) into a part; its scale becomes `scale`, or follows from them."""
    part = shard(state[name])
    if part.dtype in RANGES:
        scale = adam_states.scale_of(values, part.dtype) if scale is None else scale
        state[scale_name(name)].copy_(scale)
        values = adam_states.codes(values, scale, part.dtype)
    part.copy_(values)


def checked(
    layout: Layout, where: Where, state: State, local: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The moments and the master of a local shard, checked."""
    shape, device, master = local.shape, local.device, state.get(MASTER)
    first = check_part(WHO, where, "exp_avg", state.get("exp_avg"), layout.exp_avg, shape, device)
    second = check_part(WHO, where, "exp_avg_sq", state.get("exp_avg_sq"), layout.exp_avg_sq, shape, device)
    if master is not None:
        master = check_part(WHO, where, MASTER, master, layout.master_of(local), shape, device)
    return first, second, master


def checked_scales(layout: Layout, where: Where, state: State, local: torch.Tensor) -> list[torch.Tensor | None]:
    """The scales of the master and of both moments of a local shard, checked; None for what has none."""
    found: list[torch.Tensor | None] = []
    moments = zip(MOMENTS, (layout.exp_avg, layout.exp_avg_sq), strict=True)
    for name, dtype in ((MASTER, layout.master_of(local)), *moments):
        own, scale = scale_name(name), None
        if dtype in RANGES and name in state:
            scale = check_part(WHO, where, own, state.get(own), torch.float32, torch.Size([1]), local.device)
        found.append(scale)
    return found


def _start(local: torch.Tensor, first: bool) -> torch.Tensor:
    """A parameter's numbers in fp32, or before its `first` step what a weight in FP8 was drawn as."""
    if not isinstance(local, KeptTensor):
        return local.detach().float()
    drawn = _drawn(local) if first else None
    return local.dequantize(dtype=torch.float32) if drawn is None else drawn


def _drawn(p: KeptTensor) -> torch.Tensor | None:
    """A weight's initial values in fp32, if they were preserved and the FP8 weight is still their cast."""
    drawn = getattr(p, "get_high_precision_init_val", lambda: None)()
    if drawn is None:
        return None
    if p.is_cast_of(drawn):
        return drawn.to(p.device, torch.float32, copy=True)
    say_once(
        "not as drawn",
        "FusedAdam: a weight in FP8 was written after it was drawn: its master starts as the weight reads",
    )
    return None
