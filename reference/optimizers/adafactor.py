"""`Adafactor`: PyTorch's, with sums in a written order and state in fp32."""

import copy
import decimal
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from reference.arguments import is_real
from reference.numbers import formats
from reference.ops.library import twin
from reference.optimizers.parameters import (
    PLAIN,
    check_device,
    check_memory,
    check_parameter,
    check_part,
    described,
    flag,
    named,
    real,
    saved_parts,
    unwrapped,
)
from reference.support.dtensor import distributed, full, is_dtensor, shard

WHO = "Adafactor"
NAMES = ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize")
State = dict[str, torch.Tensor]


class Numbers(NamedTuple):
    """The hyperparameters of a group."""

    lr: float
    beta2_decay: float
    eps: tuple[float | None, float]
    d: float
    weight_decay: float
    foreach: bool | None
    maximize: bool


def numbers_of(group: dict[str, Any], where: str = "") -> Numbers:
    """The numbers of a group, checked; `where` follows the argument's name in errors."""
    missing = [name for name in NAMES if name not in group]
    if missing:
        raise ValueError(f"{WHO}: {missing[0]!r} is missing{where}; groups of Adafactor are accepted.")
    lr, d, weight_decay = (real(WHO, name, group[name], where) for name in ("lr", "d", "weight_decay"))
    if d < 1:
        raise ValueError(f"{WHO}: d={group['d']!r}{where}; a number >= 1 is accepted.")
    decay = group["beta2_decay"]
    if not is_real(decay) or not -math.inf < decay <= 0:
        raise ValueError(f"{WHO}: beta2_decay={decay!r}{where}; a number <= 0 is accepted.")
    eps = group["eps"]
    if not isinstance(eps, (tuple, list)) or len(eps) != 2:
        raise TypeError(f"{WHO}: eps={eps!r}{where}; a pair of numbers >= 0 is accepted, or None first.")
    first = None if eps[0] is None else real(WHO, "eps[0]", eps[0], where)
    second = real(WHO, "eps[1]", eps[1], where)
    foreach = group["foreach"]
    if foreach is not None:
        foreach = flag(WHO, "foreach", foreach, where)
    maximize = flag(WHO, "maximize", group["maximize"], where)
    return Numbers(lr, float(decay), (first, second), d, weight_decay, foreach, maximize)


def power(step: int, exponent: float) -> float:
    """step^exponent to 40 digits, then rounded to float64: the C library's `pow` differs from machine to machine."""
    with decimal.localcontext() as context:
        context.prec = 40
        return float(decimal.Decimal(step) ** decimal.Decimal(exponent))


class Adafactor(torch.optim.Optimizer):
    """Adafactor with PyTorch's arguments and defaults; the arithmetic is `twin::adafactor`'s.

    The state of a parameter is its count of steps, `step`, an fp32 tensor on the CPU as in PyTorch, and `row_var` and
    `col_var`, or of a vector `variance`; these are fp32, for parameters in 16 bits, too. A step checks everything
    before it changes anything. Of a DTensor (FSDP2's `fully_shard`) every rank gathers a parameter and its gradient,
    makes the whole step and keeps its shard; the state is whole on every rank.

    Args:
        params: parameters in fp32, bf16 or fp16, or dicts that define groups of them.
        lr, beta2_decay, eps, d, weight_decay: Adafactor's; None as the first of eps is the dtype's.
        foreach: PyTorch's choice of a loop; each value gives the same launches.
        maximize: step up.

    Source: `torch.optim.Adafactor`. There a group of several dtypes takes the first parameter's eps for all; here each
    parameter has its own.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        given = locals()
        super().__init__(params, numbers_of({name: given[name] for name in NAMES})._asdict())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; also refuses numbers that a step would refuse."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"{WHO}: param_group={param_group!r}; a dict with 'params' is accepted.")
        found = numbers_of({**self.defaults, **param_group}, f" in group {len(self.param_groups)}")
        super().add_param_group({**param_group, **found._asdict()})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        made, work = self._checked()
        self.state.update(made)
        for numbers, p, grad in work:
            state = self.state[p]
            state["step"] += 1
            step = int(state["step"].item())
            eps1 = torch.finfo(p.dtype).eps if numbers.eps[0] is None else numbers.eps[0]
            whole, whole_grad = (full(x) for x in (p.detach(), grad))
            twin.adafactor(
                whole_grad.contiguous(),
                whole,
                state["row_var"] if p.dim() > 1 else state["variance"],
                state["col_var"] if p.dim() > 1 else None,
                min(numbers.lr, 1 / math.sqrt(step)),
                power(step, numbers.beta2_decay),
                1 - numbers.lr * numbers.weight_decay,
                eps1,
                eps1 * eps1,
                numbers.eps[1],
                numbers.d,
                numbers.maximize,
            )
            if is_dtensor(p):
                shard(p.detach()).copy_(shard(distributed(whole, p)))
        return loss

    def _checked(self) -> tuple[dict[torch.Tensor, State], list[tuple[Numbers, torch.Tensor, torch.Tensor]]]:
        """The state to create, and the parameters to step with their numbers and gradients; changes nothing."""
        made: dict[torch.Tensor, State] = {}
        work = []
        spans: list[tuple[int, int, tuple[int, int]]] = []
        for g, group in enumerate(self.param_groups):
            numbers = numbers_of(group, f" in group {g}")
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                local, local_grad = p, p.grad
                if type(p) not in PLAIN or type(p.grad) not in PLAIN:
                    local, local_grad = unwrapped(WHO, (g, i), p, p.grad)
                check_parameter(WHO, (g, i), local, local_grad, False, "a weight in fp32 or 16 bits is")
                check_device(WHO, "adafactor", "parameter", p.device)
                state = self.state.get(p)
                if not state:
                    state = made[p] = _made(p)
                for name, shape in _shapes(p).items():
                    device = torch.device("cpu") if name == "step" else p.device
                    check_part(WHO, (g, i), name, state.get(name), torch.float32, shape, device)
                work.append((numbers, p, p.grad))
                spans.append((local.data_ptr(), local.data_ptr() + local.nbytes, (g, i)))
        check_memory(WHO, spans, named)
        return made, work

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of an Adafactor, PyTorch's too, whose state is widened to fp32; it is checked first."""
        state, groups = read(state_dict, self.param_groups)
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})


def _shapes(p: torch.Tensor) -> dict[str, torch.Size]:
    """The parts of a parameter's state, with their shapes."""
    if p.dim() < 2:
        return {"step": torch.Size(()), "variance": p.shape}
    row, col = torch.Size((*p.shape[:-1], 1)), torch.Size((*p.shape[:-2], 1, p.shape[-1]))
    return {"step": torch.Size(()), "row_var": row, "col_var": col}


def _made(p: torch.Tensor) -> State:
    """A parameter's state before its first step."""
    devices = {"step": torch.device("cpu")}
    return {
        name: torch.zeros(shape, dtype=torch.float32, device=devices.get(name, p.device))
        for name, shape in _shapes(p).items()
    }


def read(
    state_dict: dict[str, Any], groups: list[dict[str, Any]]
) -> tuple[dict[torch.Tensor, State], list[dict[str, Any]]]:
    """State and groups for the parameters of `groups`; nothing is shared with `state_dict`."""
    saved, entries = saved_parts(WHO, state_dict, groups)
    state: dict[torch.Tensor, State] = {}
    found_groups = []
    for i, (one, group) in enumerate(zip(saved, groups, strict=True)):
        numbers = numbers_of(one, f" in state_dict['param_groups'][{i}]")._asdict()
        rest = {name: copy.deepcopy(value) for name, value in one.items() if name != "params"}
        found_groups.append({**rest, **numbers, "params": group["params"]})
        for key, p in zip(one["params"], group["params"], strict=True):
            if entries.get(key):
                state[p] = _entry(f"state_dict['state'][{key!r}]", entries[key], p)
    return state, found_groups


def _entry(what: str, entry: Any, p: torch.Tensor) -> State:
    """A parameter's saved state, checked and widened."""
    shapes = _shapes(p)
    if not isinstance(entry, dict) or entry.keys() != shapes.keys():
        raise ValueError(f"{WHO}: {what} has {list(entry)}; {list(shapes)} are accepted.")
    made = _made(p)
    for name, shape in shapes.items():
        x = entry[name]
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_meta:
            raise TypeError(f"{WHO}: {what}[{name!r}] is {described(x)}; a dense tensor with numbers is accepted.")
        if x.shape != shape or x.dtype not in formats.WIDE_DTYPES:
            raise ValueError(
                f"{WHO}: {what}[{name!r}] is {x.dtype} {list(x.shape)}; float32, bfloat16 and float16 {list(shape)} "
                f"are accepted."
            )
        if not bool((x.isfinite() & (x >= 0)).all()):
            raise ValueError(f"{WHO}: {what}[{name!r}] holds what is no number >= 0.")
        made[name].copy_(x)
    return made
