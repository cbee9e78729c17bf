"""`FusedAdam`: Adam in one op for all parameters, with masters for those in 16 bits or FP8."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from reference.arguments import check_arguments
from reference.float8.float8_shard import rows_of
from reference.float8.kept_tensor import KeptTensor
from reference.float8.quantized_tensor import write
from reference.nn.core.attributes import OfAdam
from reference.ops.library import twin
from reference.ops.optimizers.adam import correction
from reference.optimizers import adam_layout, adam_state
from reference.optimizers.adam_calls import Work
from reference.optimizers.adam_layout import MASTER, MOMENTS, Layout, State, check_layout, needs_master
from reference.optimizers.adam_state import Numbers, captured_numbers_of, numbers_of
from reference.optimizers.parameters import (
    PLAIN,
    check_common,
    check_device,
    check_memory,
    check_parameter,
    check_part,
    checked_grad_none,
    flag,
    named,
    span,
    to_none,
    unwrapped,
    without_compiler,
)
from reference.support.dtensor import like, shard

__all__ = ["FusedAdam"]

WHO = "FusedAdam"
NUMBERS = ("lr", "bias_correction", "betas", "eps", "weight_decay")


class FusedAdam(OfAdam, torch.optim.Optimizer):
    """Adam and AdamW with Transformer Engine's arguments and defaults; the arithmetic is `twin::adam`'s.

    The state of a parameter is `exp_avg`, `exp_avg_sq` and, with master weights, `master_param`
    (`reference.optimizers.adam_layout`; docs/optimizers.md). A parameter in fp32 is its own master. A weight kept in
    FP8 (`quantized_model_init`) needs a master. The master starts from the weight's initial values, if those were
    preserved and the weight is still their cast; after each step it is written to the weight by the cast of
    `reference.float8.kept_tensor`: a scale that depends on what is cast is that of the fp32 master. A DTensor's state
    consists of DTensors like it, and each rank changes its own shard.

    A group counts its steps in `step`, an int; with `capturable` an int32 tensor. A step checks everything before it
    changes anything: a refused step leaves every tensor and every count as it was.

    Args:
        params: parameters, or dicts that define groups of them.
        lr, betas, eps, weight_decay: Adam's; Python numbers. With `capturable` lr may be an fp32 tensor of one number,
            and becomes one.
        amsgrad: False.
        bias_correction: divide the moments by 1 − beta^step.
        adam_w_mode: decouple weight decay from the gradient, in groups that have some.
        capturable: keep the learning rate and the count of steps on the device, so that a CUDA graph of a step can be
            replayed, and take a scaler's scale and overflow there, too. Moments are fp32 or bf16 then, masters fp32.
        master_weights: keep a copy in more bits of each parameter that is not in fp32.
        master_weight_dtype: fp32, or scaled fp16; without master_weights, of weights kept in FP8 alone.
        exp_avg_dtype, exp_avg_sq_dtype: fp32, bf16, scaled fp16, or uint8: scaled E4M3.
        use_decoupled_grad: read `decoupled_grad` of a parameter, which may have another dtype, in place of `grad`.
        store_param_remainders: keep of the master of a bf16 parameter the 16 bits only that the parameter lacks.
        set_grad_none: deprecated; what `zero_grad` does without an argument.

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
        check_arguments(WHO, {"amsgrad": amsgrad})
        self.adam_w_mode = flag(WHO, "adam_w_mode", adam_w_mode)
        self.master_weights = flag(WHO, "master_weights", master_weights)
        self.capturable = flag(WHO, "capturable", capturable)
        self.use_decoupled_grad = flag(WHO, "use_decoupled_grad", use_decoupled_grad)
        remainders = flag(WHO, "store_param_remainders", store_param_remainders)
        if remainders and not (self.master_weights and master_weight_dtype == torch.float32):
            raise ValueError(
                f"{WHO}: store_param_remainders=True with master_weights={master_weights}, master_weight_dtype="
                f"{master_weight_dtype}; master_weights=True and float32 are accepted."
            )
        kept = (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype)
        self.layout = Layout(self.master_weights, *kept, remainders, self.capturable)
        check_layout(self.layout)
        self.set_grad_none = checked_grad_none(WHO, set_grad_none)
        defaults = self._numbers_of({name: given[name] for name in NUMBERS}, "")._asdict()
        super().__init__(params, {name: defaults[name] for name in NUMBERS})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; also refuses numbers that a step would refuse, and a parameter that is listed twice."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"{WHO}: param_group={param_group!r}; a dict with 'params' is accepted.")
        where = f" in group {len(self.param_groups)}"
        check_common(WHO, param_group, where, self._common())
        found = self._numbers_of({**self.defaults, **param_group}, where)._asdict()
        params = param_group["params"]
        if not isinstance(params, (torch.Tensor, set)):
            param_group["params"] = params = list(params)
            seen = [id(one[1]) if isinstance(one, tuple) else id(one) for one in params]
            if len(set(seen)) < len(seen):
                twice = next(i for i, one in enumerate(seen) if one in seen[:i])
                raise ValueError(f"{WHO}: parameter {twice}{where} is listed twice; each one once is accepted.")
        without_compiler(super().add_param_group)(param_group)
        param_group.update({name: value for name, value in found.items() if name in param_group})
        self._to_device(param_group)

    def _common(self) -> dict[str, Any]:
        """What all groups have in common, by the names of arguments here and of `torch.optim.Adam`."""
        masters, first, second, master, remainders, capturable = self.layout
        names: dict[str, Any] = {
            "adam_w_mode": self.adam_w_mode,
            "decoupled_weight_decay": self.adam_w_mode,
            "capturable": capturable,
        }
        names |= {"master_weights": masters, "master_weight_dtype": master, "store_param_remainders": remainders}
        names |= {"exp_avg_dtype": first, "exp_avg_sq_dtype": second, "use_decoupled_grad": self.use_decoupled_grad}
        return {**names, "set_grad_none": self.set_grad_none, "amsgrad": False, "maximize": False}

    def _numbers_of(self, group: dict[str, Any], where: str) -> Numbers:
        """The numbers of a group that is added; its rate may lie on a device, if it is to."""
        if self.capturable and isinstance(group["lr"], torch.Tensor):
            return captured_numbers_of({**group, "step": None}, where)
        return numbers_of(group, where)

    def _to_device(self, group: dict[str, Any]) -> None:
        """With `capturable`, put a group's rate and count of steps on its parameters' device."""
        if self.capturable:
            device = group["params"][0].device if group["params"] else torch.device("cpu")
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
            if "step" in group:
                group["step"] = torch.as_tensor(group["step"], dtype=torch.int32, device=device).reshape(1)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or a pickle, with the modes, which torch's method omits."""
        modes = ("adam_w_mode", "master_weights", "capturable", "use_decoupled_grad", "layout", "set_grad_none")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in modes}}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` leaves unscaling, and skipping a step, to the step itself."""
        return self.capturable

    # --- state -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool | None = None) -> None:
        """Create a parameter's state now instead of at its first step.

        `store_param_remainders`: as the optimizer was made, which None stands for.
        """
        local = rows_of(param)
        own = self.layout.parts(local).get(MASTER) == torch.int16
        if store_param_remainders not in (None, own):
            raise ValueError(
                f"{WHO}: store_param_remainders={store_param_remainders!r} for a parameter in {local.dtype}; {own}, as "
                f"the optimizer was made, is accepted."
            )
        self.state[param] = adam_layout.made(self.layout, param, local)

    @torch.no_grad()
    def get_unscaled_state(self, param: torch.Tensor, state_name: str, skip_unscale: bool = False) -> torch.Tensor:
        """`exp_avg`, `exp_avg_sq` or `master_param` of a parameter in fp32; a DTensor's local shard.

        Remainders are int16. `skip_unscale` leaves bf16 as it is.
        """
        state = self.state.get(param) or {}
        _check_name(state_name, state)
        part = shard(state[state_name])
        return part if skip_unscale and part.dtype == torch.bfloat16 else adam_layout.numbers(state, state_name)

    @torch.no_grad()
    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Write fp32 numbers (remainders: int16) into a part of a parameter's state, which is created if missing."""
        local = rows_of(param)
        state = self.state.get(param) or adam_layout.made(self.layout, param, local)
        _check_name(state_name, state)
        dtype = torch.int16 if state[state_name].dtype == torch.int16 else torch.float32
        check_part(WHO, "set_scaled_state", "unscaled_state", unscaled_state, dtype, local.shape, local.device)
        adam_layout.write(state, state_name, unscaled_state)
        self.state[param] = state

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As torch's, of the gradients that a step reads; None, Transformer Engine's default, is True."""
        drop = to_none(WHO, set_to_none, self.set_grad_none)
        if not self.use_decoupled_grad:
            without_compiler(super().zero_grad)(drop)
            return
        for group in self.param_groups:
            for p in group["params"]:
                if drop:
                    p.decoupled_grad = None
                elif getattr(p, "decoupled_grad", None) is not None:
                    p.decoupled_grad.zero_()

    # --- a step ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        """One step of every parameter that has a gradient.

        With `capturable`, `grad_scaler` (or the attributes `grad_scale` and `found_inf`, which torch's scaler sets)
        unscales the gradients, or skips the step.
        """
        if grad_scaler is not None and (not self.capturable or self.use_decoupled_grad):
            raise NotImplementedError(
                f"{WHO}: grad_scaler={grad_scaler!r} is not offered; None is accepted (a scaler's own step() "
                f"unscales the gradients and skips the step), or capturable=True without use_decoupled_grad."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        made, work = self._checked()
        scale, found_inf = self._scaling(grad_scaler)
        self.state.update(made)
        for one in work:
            if self.capturable:
                self._captured(one, scale, found_inf)
            else:
                self._counted(one)
            write(one.cast)
            for local, values in one.copy:
                local.copy_(values)
        return loss

    def _counted(self, work: Work) -> None:
        """A step of a group whose numbers lie on the host."""
        numbers = work.numbers
        work.group["step"] = step = numbers.step + 1
        divisors = [correction(beta, step) if numbers.bias_correction else 1.0 for beta in numbers.betas]
        scalars = (numbers.lr, *numbers.betas, numbers.eps, numbers.weight_decay, *divisors, self.adam_w_mode)
        for lists in work.calls.values():
            if self.layout.plain:
                twin.adam(*lists.unscaled, *scalars)
            else:
                twin.adam_states(*lists, *scalars)

    def _captured(self, work: Work, scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """A step of a group whose numbers lie on the device."""
        numbers, device = work.numbers, work.numbers.lr.device
        if numbers.step is None:
            work.group["step"] = torch.zeros(1, dtype=torch.int32, device=device)
        given = [x if x is None else x.to(device, torch.float32) for x in (scale, found_inf)]
        control = twin.adam_control(work.group["step"], numbers.lr, *given, *numbers.betas, numbers.bias_correction)
        rest = (*numbers.betas, numbers.eps, numbers.weight_decay, self.adam_w_mode, scale is not None)
        for lists in work.calls.values():
            twin.adam_capturable(*lists.unscaled, control, *rest)
        if scale is not None:
            for grad, dense in work.unscaled:
                grad.copy_(dense)

    def _scaling(self, grad_scaler: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The scale of the gradients, and a number that is 0 if all are finite; None where there is none."""
        if grad_scaler is None:
            return getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        seen = grad_scaler._per_optimizer_states[id(self)]
        unscaled = seen["stage"].name == "UNSCALED"
        if not unscaled:
            grad_scaler._check_inf_per_device(self)
        found = list(seen["found_inf_per_device"].values())
        scale = None if unscaled else grad_scaler._get_scale_async()
        return scale, sum(x.to(found[0].device) for x in found[1:]) + found[0] if found else None

    def _checked(self) -> tuple[dict[torch.Tensor, State], list[Work]]:
        """The state to create, and for each group its numbers, the op's calls and the casts; changes nothing."""
        made: dict[torch.Tensor, State] = {}
        work = []
        spans: list[tuple[int, int, tuple[int, int]]] = []
        gradients: list[tuple[int, int, tuple[int, int]]] = []
        layout, scaled, instead = self.layout, self.layout.scaled, "master_weights=True is"
        masters, captured, decoupled = self.master_weights, self.capturable, self.use_decoupled_grad
        for g, group in enumerate(self.param_groups):
            numbers = (captured_numbers_of if captured else numbers_of)(group, f" in group {g}")
            # A call of the op accepts tensors of one device and kind.
            one = Work(group, numbers, {}, [], [], [])
            add, checked = one.add, adam_layout.checked
            for i, p in enumerate(group["params"]):
                local, grad = p, getattr(p, "decoupled_grad", None) if decoupled else p.grad
                if grad is None:
                    continue
                where = (g, i)
                if type(p) not in PLAIN or type(grad) not in PLAIN:
                    local, grad = unwrapped(WHO, where, p, grad)
                check_parameter(WHO, where, local, grad, masters, instead, decoupled)
                if captured:
                    self._check_captured(where, local, numbers.lr)
                state = self.state.get(p)
                if not state:
                    state = made[p] = adam_layout.made(layout, p, local)
                elif MASTER not in state and needs_master(local, masters):
                    state = made[p] = {**state, **adam_layout.made(layout, p, local, MASTER)}
                first, second, master = checked(layout, where, state, local)
                scales = adam_layout.checked_scales(layout, where, state, local) if scaled else None
                fp8 = isinstance(local, KeptTensor)
                add(local, grad, fp8, first, second, master, scales)
                memory = local.codes if fp8 else local  # type: ignore[attr-defined]
                start = memory.data_ptr()
                spans.append((start, start + memory.nbytes, where))
                if captured:
                    gradients.append((*span(grad), where))
            for device in {key[0] for key in one.calls}:
                check_device(WHO, "adam", "parameter", device)
            work.append(one)
        check_memory(WHO, spans, named)
        check_memory(WHO, gradients, lambda where: f"the gradient of {named(where)}")  # a scaled step writes them
        return made, work

    def _check_captured(self, where: tuple[int, int], local: torch.Tensor, rate: torch.Tensor) -> None:
        if isinstance(local, KeptTensor):
            raise NotImplementedError(
                f"{WHO}: {named(where)} is kept in FP8; with capturable=True one in fp32 or 16 bits is accepted."
            )
        if local.device != rate.device:
            raise ValueError(
                f"{WHO}: {named(where)} is on {local.device}, its group's lr on {rate.device}; one is accepted."
            )

    # --- checkpoints -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As Transformer Engine's: moments and masters in fp32, whatever they are kept in, and remainders in int16.

        What is scaled has its scale with it, `<name>_scale`, so that loading gives the same codes. Where
        `torch.optim.AdamW` (without `adam_w_mode`, `Adam`) goes on with the same numbers, it has what that needs: each
        entry its `step`.
        """
        found: dict[str, Any] = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        if not self.layout.plain:
            for number, p in zip(numbers, params, strict=True):
                if state := found["state"].get(number):
                    names = [name for name in (*MOMENTS, MASTER) if name in state]
                    wide = {name: like(p, adam_layout.numbers(state, name)) for name in names}
                    found["state"][number] = {**state, **wide}
        if adam_state.fits_torch(self.layout, self.param_groups):
            adam_state.add_torchs(found, self.adam_w_mode, self.capturable)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of a FusedAdam, torch.optim.Adam or AdamW (`reference.optimizers.adam_state.read`).

        torch's own method would round the state to the parameters' dtypes, and checks too little.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, dict) else state_dict
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        with torch.no_grad():
            state, groups = adam_state.read(state_dict, self.param_groups, self.layout, self.adam_w_mode)
        for group in groups:
            self._to_device(group)
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _check_name(name: str, state: State) -> None:
    names = [one for one in (*MOMENTS, MASTER) if one in state]
    if name not in names:
        accepted = f"{', '.join(names)} are" if names else "a parameter that has made a step is"
        raise ValueError(f"{WHO}: state_name={name!r}; {accepted} accepted.")
