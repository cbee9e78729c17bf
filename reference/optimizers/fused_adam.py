"""`FusedAdam`: Adam in one op for all parameters, with fp32 master weights for those in 16 bits or FP8."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from reference.arguments import check_arguments
from reference.dtensor import like, shard
from reference.nn.float8_tensor import FP8, Float8Tensor, write
from reference.notice import say_once
from reference.ops.adam import correction
from reference.ops.library import twin
from reference.optimizers import adam_state
from reference.optimizers.adam_state import MOMENTS, State, needs_master, numbers_of
from reference.optimizers.parameters import (
    PLAIN,
    check_device,
    check_memory,
    check_parameter,
    check_part,
    flag,
    named,
    unwrapped,
)

__all__ = ["FusedAdam"]

Lists = tuple[list[torch.Tensor], ...]


class FusedAdam(torch.optim.Optimizer):
    """Adam and AdamW with Transformer Engine's arguments and defaults; the arithmetic is `twin::adam`'s.

    The state of a parameter is `exp_avg`, `exp_avg_sq` and, with master weights, `master_param`, all fp32. A parameter
    in fp32 is its own master. A weight kept in FP8 (`quantized_model_init`) needs a master. The master starts from the
    weight's initial values, if those were preserved and the weight is still their cast; after each step it is written
    to the weight by the cast of `reference.nn.float8_tensor`. A DTensor's state consists of DTensors like it, and each
    rank changes its own shard.

    A group counts its steps in `step`, an int. A step checks everything before it changes anything: a refused step
    leaves every tensor and every count as it was.

    Args:
        params: parameters, or dicts that define groups of them.
        lr, betas, eps, weight_decay: Adam's; Python numbers.
        bias_correction: divide the moments by 1 − beta^step.
        adam_w_mode: decouple weight decay from the gradient.
        master_weights: keep an fp32 copy of each parameter that is not in fp32.
        amsgrad, capturable, use_decoupled_grad, store_param_remainders, set_grad_none, and other dtypes of the state:
            only "off" is offered.

    Source: Transformer Engine's `pytorch/optimizers/fused_adam.py`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        given = locals()
        names = ("lr", "bias_correction", "betas", "eps", "weight_decay")
        check_arguments("FusedAdam", {name: value for name, value in given.items() if name not in names})
        self.adam_w_mode = flag("FusedAdam", "adam_w_mode", adam_w_mode)
        self.master_weights = flag("FusedAdam", "master_weights", master_weights)
        defaults = numbers_of({name: given[name] for name in names})._asdict()
        super().__init__(params, {name: defaults[name] for name in names})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; also refuses numbers that a step would refuse, and a parameter that is listed twice."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"FusedAdam: param_group={param_group!r}; a dict with 'params' is accepted.")
        where = f" in group {len(self.param_groups)}"
        found = numbers_of({**self.defaults, **param_group}, where)._asdict()
        params = param_group["params"]
        if not isinstance(params, (torch.Tensor, set)):
            param_group["params"] = params = list(params)
            seen = [id(one[1]) if isinstance(one, tuple) else id(one) for one in params]
            if len(set(seen)) < len(seen):
                twice = next(i for i, one in enumerate(seen) if one in seen[:i])
                raise ValueError(f"FusedAdam: parameter {twice}{where} is listed twice; each one once is accepted.")
        super().add_param_group(param_group)
        param_group.update({name: value for name, value in found.items() if name in param_group})

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or a pickle, with the two modes, which torch's method omits."""
        modes = {"adam_w_mode": self.adam_w_mode, "master_weights": self.master_weights}
        return {**super().__getstate__(), **modes}

    # --- state -------------------------------------------------------------------------------------------

    def _fresh(self, p: torch.Tensor, local: torch.Tensor) -> State:
        """Moments and master weight before the first step."""
        made = {name: like(p, torch.zeros(local.shape, dtype=torch.float32, device=local.device)) for name in MOMENTS}
        if needs_master(local, self.master_weights):
            drawn = _drawn(local) if isinstance(local, Float8Tensor) else None
            made["master_param"] = like(p, _master(local) if drawn is None else drawn)
        return made

    @torch.no_grad()
    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        """Create a parameter's state now instead of at its first step."""
        if store_param_remainders:
            raise NotImplementedError("FusedAdam: store_param_remainders=True is not offered; False is accepted.")
        self.state[param] = self._fresh(param, shard(param))

    @torch.no_grad()
    def get_unscaled_state(self, param: torch.Tensor, state_name: str, skip_unscale: bool = False) -> torch.Tensor:
        """`exp_avg`, `exp_avg_sq` or `master_param` of a parameter, fp32; a DTensor's local shard."""
        state = self.state.get(param) or {}
        _check_name(state_name, state)
        return shard(state[state_name])

    @torch.no_grad()
    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Write fp32 numbers into a part of a parameter's state, which is created if it is missing."""
        local = shard(param)
        state = self.state.get(param) or self._fresh(param, local)
        _check_name(state_name, state)
        check_part(
            "FusedAdam",
            "set_scaled_state",
            "unscaled_state",
            unscaled_state,
            torch.float32,
            local.shape,
            local.device,
        )
        shard(state[state_name]).copy_(unscaled_state)
        self.state[param] = state

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As torch's; None, Transformer Engine's default, is True."""
        super().zero_grad(set_to_none is None or set_to_none)

    # --- a step ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        if grad_scaler is not None:
            raise NotImplementedError(
                f"FusedAdam: grad_scaler={grad_scaler!r} is not offered; None is accepted (a scaler's own step() "
                f"unscales the gradients and skips the step)."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        made, work = self._checked()
        self.state.update(made)
        for group, numbers, calls, cast in work:
            group["step"] = step = numbers.step + 1
            divisors = [correction(beta, step) if numbers.bias_correction else 1.0 for beta in numbers.betas]
            scalars = (numbers.lr, *numbers.betas, numbers.eps, numbers.weight_decay, *divisors, self.adam_w_mode)
            for lists in calls.values():
                twin.adam(*lists, *scalars)
            write(cast)
        return loss

    def _checked(self) -> tuple[dict[torch.Tensor, State], list[Any]]:
        """The state to create, and for each group its numbers, the op's calls and the casts; changes nothing."""
        made: dict[torch.Tensor, State] = {}
        work = []
        spans: list[tuple[int, int, tuple[int, int]]] = []
        for g, group in enumerate(self.param_groups):
            numbers = numbers_of(group, f" in group {g}")
            # A call of the op accepts tensors of one device and kind.
            calls: dict[Any, Lists] = {}
            cast: list[tuple[torch.Tensor, torch.Tensor]] = []
            for i, p in enumerate(group["params"]):
                local, grad = p, p.grad
                if grad is None:
                    continue
                if type(p) not in PLAIN or type(grad) not in PLAIN:
                    local, grad = unwrapped("FusedAdam", (g, i), p, grad)
                check_parameter("FusedAdam", (g, i), local, grad, self.master_weights, "master_weights=True is")
                state = self.state.get(p)
                if not state:
                    state = made[p] = self._fresh(p, local)
                elif "master_param" not in state and needs_master(local, self.master_weights):
                    state = made[p] = {**state, "master_param": like(p, _master(local))}
                first, second, master = adam_state.checked_state((g, i), state, local)
                fp8 = isinstance(local, Float8Tensor)
                rounded = master is not None and not fp8
                key = (local.device, grad.dtype, local.dtype, fp8, rounded)
                lists = calls.get(key)
                if lists is None:
                    lists = calls[key] = ([], [], [], [], [])
                lists[0].append(grad.contiguous())
                lists[1].append(local if master is None else master)
                lists[2].append(first)
                lists[3].append(second)
                if rounded:
                    lists[4].append(local)
                if fp8:
                    cast.append((local, lists[1][-1]))
                memory = local._data if fp8 else local
                start = memory.data_ptr()
                spans.append((start, start + memory.nbytes, (g, i)))
            for device in {key[0] for key in calls}:
                check_device("FusedAdam", "adam", "parameter", device)
            work.append((group, numbers, calls, cast))
        check_memory("FusedAdam", spans, named)
        return made, work

    # --- checkpoints -------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of a FusedAdam, torch.optim.Adam or AdamW (`reference.optimizers.adam_state.read`).

        torch's own method would round the state to the parameters' dtypes, and checks too little.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, dict) else state_dict
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        with torch.no_grad():
            state, groups = adam_state.read(state_dict, self.param_groups, self.master_weights, self.adam_w_mode)
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _check_name(name: str, state: State) -> None:
    if name not in state:
        accepted = f"{', '.join(state)} are" if state else "a parameter that has made a step is"
        raise ValueError(f"FusedAdam: state_name={name!r}; {accepted} accepted.")


def _master(p: torch.Tensor) -> torch.Tensor:
    """A parameter's numbers in fp32."""
    return p.dequantize(dtype=torch.float32) if isinstance(p, Float8Tensor) else p.detach().float()


def _drawn(p: Float8Tensor) -> torch.Tensor | None:
    """A weight's initial values in fp32, if they were preserved and the FP8 weight is still their cast."""
    drawn = getattr(p, "get_high_precision_init_val", lambda: None)()
    if drawn is None:
        return None
    codes, _ = twin.cast(drawn.to(p.device), 1 / p._scale_inv, None, 0, FP8)
    if torch.equal(codes.view(torch.uint8), p._data.view(torch.uint8)):
        return drawn.to(p.device, torch.float32, copy=True)
    say_once(
        "not as drawn",
        "FusedAdam: a weight in FP8 was written after it was drawn: its master starts as the weight reads",
    )
    return None
