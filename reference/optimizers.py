"""`FusedAdam`: Adam in one op for all parameters, with fp32 master weights for those in 16 bits or FP8."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from reference.nn.float8_tensor import Float8Tensor, write
from reference.ops.adam import correction
from reference.ops.library import twin

__all__ = ["FusedAdam"]

# Transformer Engine's arguments that are not offered, at the value that means "off".
OFF: dict[str, Any] = {
    "amsgrad": False,
    "capturable": False,
    "master_weight_dtype": torch.float32,
    "exp_avg_dtype": torch.float32,
    "exp_avg_sq_dtype": torch.float32,
    "use_decoupled_grad": False,
    "store_param_remainders": False,
    "set_grad_none": None,
}


class FusedAdam(torch.optim.Optimizer):
    """Adam and AdamW with Transformer Engine's arguments and defaults; the arithmetic is `twin::adam`'s.

    The state of a parameter is `exp_avg`, `exp_avg_sq` and, with master weights, `master_param`: fp32, whatever the
    parameter is. A parameter in fp32 is its own master. One that is kept in FP8 (`quantized_model_init`) needs a
    master: it starts as what the weight was drawn as, where that was preserved, and is written to the weight by the
    cast of `reference.nn.float8_tensor` after each step.

    Args:
        params: parameters, or dicts that define groups of them.
        lr, betas, eps, weight_decay: Adam's.
        bias_correction: divide the moments by 1 − beta^step.
        adam_w_mode: weight decay apart from the gradient.
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
        for name, off in OFF.items():
            if given[name] != off:
                raise NotImplementedError(f"FusedAdam: {name}={given[name]!r} is not offered; {off!r} is accepted.")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"FusedAdam: {name}={value!r}; a number >= 0 is accepted.")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"FusedAdam: betas={betas!r}; two numbers, 0 <= beta < 1, are accepted.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        self.adam_w_mode, self.master_weights = adam_w_mode, master_weights
        super().__init__(params, defaults)

    def _state_of(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """Moments and master weight, made at the first step."""
        state: dict[str, torch.Tensor] = self.state[p]
        if not state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
            if isinstance(p, Float8Tensor):
                drawn = getattr(p, "get_high_precision_init_val", lambda: None)()
                master = p.dequantize(dtype=torch.float32) if drawn is None else drawn
                state["master_param"] = master.to(p.device, torch.float32, copy=True)
            elif self.master_weights and p.dtype != torch.float32:
                state["master_param"] = p.detach().float()
        return state

    def _check(self) -> None:
        """Refuse what a step does not take, before it changes anything."""
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if p.grad.is_sparse:
                raise TypeError("FusedAdam: a parameter's gradient is sparse; dense gradients are accepted.")
            if isinstance(p, Float8Tensor) and not self.master_weights:
                raise ValueError("FusedAdam: a parameter is kept in FP8; master_weights=True is accepted then.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            betas = group["betas"]
            divisors = [correction(beta, group["step"]) if group["bias_correction"] else 1.0 for beta in betas]
            scalars = (group["lr"], *betas, group["eps"], group["weight_decay"], *divisors, self.adam_w_mode)
            # One call of the op takes tensors of one device and kind.
            calls: dict[Any, tuple[list[torch.Tensor], ...]] = {}
            cast: list[tuple[Any, torch.Tensor]] = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self._state_of(p)
                master = state.get("master_param")
                fp8 = isinstance(p, Float8Tensor)
                rounded = master is not None and not fp8
                lists = calls.setdefault((p.device, p.grad.dtype, p.dtype, fp8, rounded), ([], [], [], [], []))
                changed = p.detach() if master is None else master
                for found, x in zip(lists, (p.grad, changed, state["exp_avg"], state["exp_avg_sq"]), strict=False):
                    found.append(x.contiguous() if x is p.grad else x)
                if rounded:
                    lists[4].append(p.detach())
                if fp8:
                    cast.append((p, changed))
            for lists in calls.values():
                twin.adam(*lists, *scalars)
            write(cast)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would round the state to the parameters' dtypes."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[p][name] = value.detach().to(p.device, torch.float32, copy=True)
