"""FP8 state: the scales and amax histories of every module, and when they are updated.

State consists of plain fp32 tensors that belong to a module but are not its buffers: `.to(torch.float16)` must not
round a scale, and DistributedDataParallel must not broadcast one. The registry holds weak references to modules and
looks their tensors up when it updates, so `.to()` and `copy.deepcopy` leave nothing stale. Where ranks reduce amaxes, a
module that is gone keeps its place (`Gone`).
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reference.recipes.base import Recipe
from reference.recipes.delayed_scaling import reduce_amaxes
from reference.recipes.roles import BACKWARD_TENSORS, FORWARD_TENSORS
from reference.state.target_device import probe_target
from reference.state.threads import Thread, here
from reference.support import groups

KEYS = ("scaling_fwd", "scaling_bwd")


class FP8TensorMeta:
    """Scales of one module in one direction.

    Attributes:
        scale: fp32 `[n]`, what a value is multiplied by before it is rounded to FP8; starts at 1.
        amax_history: fp32 `[amax_history_len, n]`; row 0 collects the amaxes of the current step.
        scaled_max: 2^-margin · fp8_max of the setting that the scales are for; None where nobody has said.

    The n columns are those of `reference.recipes.roles`. output and grad_input are never cast to FP8, and keep scale 1
    and amax 0.
    """

    scaled_max: float | None = None  # of the class, for those that were pickled without one

    def __init__(self, scale: torch.Tensor, amax_history: Any, scaled_max: float | None = None) -> None:
        self.scale = scale
        self.amax_history = amax_history
        self.scaled_max = scaled_max

    @staticmethod
    def fresh(columns: int, history_len: int, device: torch.device) -> "FP8TensorMeta":
        """Scale 1 and an empty history."""
        with torch.inference_mode(False):  # tensors of inference mode cannot be updated outside of it
            return FP8TensorMeta(
                torch.ones(columns, dtype=torch.float32, device=device),
                torch.zeros(history_len, columns, dtype=torch.float32, device=device),
            )

    @torch.no_grad()
    def scale_for(self, scaled_max: float) -> torch.Tensor:
        """The scales for another setting: those that the last updates would have computed under it.

        `scale · scaled_max / self.scaled_max`. The factor is a power of two, so it is exact (the largest finite number
        where it overflows). A scale of 1 whose history holds no usable amax below row 0 was never computed and stays;
        so does one that was computed as exactly 1, if a history of one row, which an update empties, does not tell.
        """
        if self.scaled_max is None:
            return self.scale
        scale = self.scale * (scaled_max / self.scaled_max)
        scale.clamp_(max=torch.finfo(torch.float32).max)
        if self.amax_history is None:
            return scale
        past = self.amax_history[1:]
        fresh = (self.scale == 1) & ~((past > 0) & past.isfinite()).any(dim=0)
        return torch.where(fresh, self.scale, scale)

    @torch.no_grad()
    def fit(self, scaled_max: float) -> bool:
        """Bring the scales to a setting, in the same memory, and say whether they were for another.

        Where nobody has said what they are for, they are taken to be for this one.
        """
        if self.scaled_max == scaled_max:
            return False
        known = self.scaled_max is not None
        if known and not self.scale.is_meta:
            self.scale.copy_(self.scale_for(scaled_max))
        self.scaled_max = scaled_max
        return known

    def resize(self, history_len: int) -> None:
        """Keep the first `history_len` rows, or add rows of zeros (Transformer Engine's rule)."""
        rows, columns = self.amax_history.shape
        with torch.inference_mode(False):
            if history_len < rows:
                self.amax_history = self.amax_history[:history_len].clone()
            elif history_len > rows:
                more = self.amax_history.new_zeros(history_len - rows, columns)
                self.amax_history = torch.cat([self.amax_history, more])

    def to(self, device: torch.device) -> None:
        """Move to a device. State from the meta device has no numbers and becomes fresh."""
        if self.scale.device == device:
            return
        if self.scale.is_meta:
            fresh = FP8TensorMeta.fresh(self.scale.shape[0], self.amax_history.shape[0], device)
            self.scale, self.amax_history, self.scaled_max = fresh.scale, fresh.amax_history, None
        else:
            with torch.inference_mode(False):
                self.scale, self.amax_history = self.scale.to(device), self.amax_history.to(device)

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow `nn.Module._apply`'s function to its device or into shared memory; dtypes stay fp32."""
        like = probe_target(fn, self.scale.device)
        self.to(like.device)
        if like.device.type == "cpu" and like.is_shared():
            self.scale.share_memory_()
            self.amax_history.share_memory_()

    @torch.no_grad()
    def take(self, other: "FP8TensorMeta") -> None:
        """Copy another's values into this memory, which CUDA graphs read; take its tensors if they do not fit."""
        pairs = ((self.scale, other.scale), (self.amax_history, other.amax_history))
        self.scaled_max = other.scaled_max
        if any(to.shape != x.shape or to.device != x.device for to, x in pairs):
            self.scale, self.amax_history = other.scale, other.amax_history
            return
        for to, x in pairs:
            to.copy_(x)

    @torch.no_grad()
    def reset(self) -> None:
        """Scale 1 and an empty history again, in the same memory."""
        self.scale.fill_(1)
        self.amax_history.zero_()
        self.scaled_max = None

    def __repr__(self) -> str:
        return f"FP8TensorMeta(scale={self.scale}, amax_history={list(self.amax_history.shape)})"


def columns_of(gemms: int) -> dict[str, int]:
    """The number of columns of `scaling_fwd` and `scaling_bwd` for that many GEMMs."""
    return {key: gemms * len(names) for key, names in zip(KEYS, (FORWARD_TENSORS, BACKWARD_TENSORS), strict=True)}


@torch.no_grad()
def regrouped(state: dict[str, Any], gemms: int) -> dict[str, Any]:
    """The state of a linear layer whose weight has one scale, as that of one whose weight has `gemms`, or the reverse.

    Each part gets the scale and the history of the whole. The whole gets the largest amaxes, and the smallest scale.
    """
    forward, backward = (state[key] for key in KEYS)
    count = forward.scale.numel() // len(FORWARD_TENSORS)
    if count == gemms:
        return state
    found = {
        key: FP8TensorMeta.fresh(columns, forward.amax_history.shape[0], forward.scale.device)
        for key, columns in columns_of(gemms).items()
    }
    one = found[KEYS[0]]
    one.scale[:1], one.amax_history[:, :1] = forward.scale[:1], forward.amax_history[:, :1]
    one.scale[1::3] = forward.scale[1::3].amin()
    one.amax_history[:, 1::3] = forward.amax_history[:, 1::3].amax(1, keepdim=True)
    grads = found[KEYS[1]]
    grads.scale[:1], grads.amax_history[:, :1] = backward.scale[:1], backward.amax_history[:, :1]
    return {**state, **found}


class Membership(NamedTuple):
    """The recipe, the process group and the thread of a module's last run in FP8."""

    recipe: Recipe
    group: Any
    thread: Thread


class Updated(NamedTuple):
    """What the registry knows of a module from its last update: its membership, its state, groups that share it."""

    membership: Membership
    fp8_meta: dict[str, Any]
    shared_by: tuple[str | None, str | None]  # names of the groups that share its weights, and its tokens


class Gone:
    """The place of a module that was updated and is gone, where a process group's ranks reduce amaxes together.

    Garbage is collected at other times on other ranks, and all of them must reduce as many amaxes. So a module keeps
    its place once all of them have reduced its own, as in Transformer Engine, whose buffers keep the tensors too. Its
    amaxes are then 0, which change no maximum and no scale (`twin::scale_update`).
    """

    def __init__(self, last: Updated, world: Any) -> None:
        self._membership, (self.tp_name, self.cp_name) = last.membership, last.shared_by
        self._sizes = {key: (len(last.fp8_meta[key].scale), last.fp8_meta[key].scale.device) for key in KEYS}
        self._world = weakref.ref(world)

    @functools.cached_property
    def fp8_meta(self) -> dict[str, FP8TensorMeta]:
        """A history of one row of zeros, made at the first update: garbage is no time to allocate."""
        return {key: FP8TensorMeta.fresh(columns, 1, device) for key, (columns, device) in self._sizes.items()}

    def counts(self) -> bool:
        """Whether its groups are still there, and the processes the same."""
        ours = [self._membership.group, self.tp_name, self.cp_name]
        return groups.are_open(ours) and self._world() is dist.group.WORLD


# A dictionary, because ranks must agree on the order, which is that of construction. A module's membership is an
# attribute of the module because a compiler can trace that, but no write to this registry.
_MODULES: "dict[weakref.ref[Any], Updated | Gone | None]" = {}


def register(module: Any) -> None:
    """Add a module when it is constructed or copied; it is updated from its first FP8 forward on."""
    _MODULES[weakref.ref(module, _collected)] = None
    module._membership = None


def _collected(reference: "weakref.ref[Any]") -> None:
    """Forget a module that is gone; of several ranks keep its place."""
    last, world = _MODULES.get(reference), dist.group.WORLD if dist.is_available() else None
    if isinstance(last, Updated) and world is not None and world.size() > 1:
        _MODULES[reference] = Gone(last, world)
    else:
        _MODULES.pop(reference, None)


def registered(identity: int) -> Any:
    """The registered module whose `id` is `identity`."""
    return next(module for reference in list(_MODULES) if id(module := reference()) == identity)


def join(module: Any, recipe: Recipe, group: Any) -> None:
    """Record what `module` runs under. Its next update follows that recipe, at the end of this thread's autocast."""
    thread = here()
    # `Module.__setattr__` is slow; a compiler would guard the attribute if it were read.
    known = None if torch.compiler.is_compiling() else module._membership
    if known is None or known.recipe is not recipe or known.group is not group or known.thread is not thread:
        if known is not None and known.thread is not thread and known.thread.autocasts and torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(module).__name__}: runs in FP8 in this thread while {known.thread.name}, in which it ran last, "
                f"has an autocast open; one thread at a time may train a module."
            )
        module._membership = Membership(recipe, group, thread)


_waiting: set[int] = set()  # numbers of threads whose scales are updated at the end of a step


@contextlib.contextmanager
def once_a_step() -> Iterator[None]:
    """Inside, this thread's scales stay as they are, and histories collect; both directions are updated at the end.

    After an error nothing is updated.
    """
    number = here().number
    if number in _waiting:
        raise RuntimeError("a step of several microbatches is open in this thread; one at a time is accepted.")
    _waiting.add(number)
    try:
        yield
    except BaseException:
        _waiting.discard(number)
        raise
    _waiting.discard(number)
    for forward in (True, False):
        update(forward, number)


@torch.no_grad()
def update(forward: bool, thread: int) -> None:
    """Turn one direction's amaxes into the next scales, for every module that last ran in the thread of that number.

    It calls `Recipe.update` once for each recipe, process group and device. Inside of `once_a_step` nothing is done.
    """
    if thread in _waiting:
        return
    key = KEYS[0] if forward else KEYS[1]
    buckets: list[tuple[Recipe, Any, torch.device, list[FP8TensorMeta]]] = []
    shared: dict[tuple[str, torch.device], list[torch.Tensor]] = {}
    alone = not (dist.is_available() and dist.is_initialized())
    for reference in list(_MODULES):  # of keys alone: no object is made, so no garbage is collected meanwhile
        module: Any = reference()
        gone = module is None
        if gone:
            module = _MODULES.get(reference)
            if not isinstance(module, Gone):
                continue
        if module._membership is None or module._membership.thread.number != thread:
            continue
        recipe, group, _ = module._membership
        if recipe.history_rows is None:
            continue
        if gone and not module.counts():
            _MODULES.pop(reference, None)
            continue
        shared_by = (getattr(module, "tp_name", None), getattr(module, "cp_name", None))
        if not (gone or alone):
            _MODULES[reference] = Updated(module._membership, module.fp8_meta, shared_by)
        meta: FP8TensorMeta = module.fp8_meta[key]
        device = meta.scale.device
        # Ranks that share tensors have one scale, whatever the recipe says of other groups.
        for name in filter(None, shared_by):
            shared.setdefault((name, device), []).append(meta.amax_history)
        for one, its_group, its_device, metas in reversed(buckets):
            if its_group is group and its_device == device and (one is recipe or one == recipe):
                metas.append(meta)
                break
        else:
            buckets.append((recipe, group, device, [meta]))
    for (name, _), histories in shared.items():
        reduce_amaxes(histories, groups.group_of(name))
    for recipe, group, _, metas in buckets:
        recipe.update(forward, metas, group)
