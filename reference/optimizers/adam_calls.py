"""The op's calls of a step of `FusedAdam`: parameters by device and dtypes, and what is written after them."""

from typing import Any, NamedTuple

import torch

from reference.optimizers.adam_state import Numbers

List = list[torch.Tensor]


class Lists(NamedTuple):
    """The lists that `twin::adam_states` takes: `params` are parameters or masters, `rounded` copies of masters."""

    grads: List
    params: List
    exp_avgs: List
    exp_avg_sqs: List
    rounded: List
    param_scales: List
    exp_avg_scales: List
    exp_avg_sq_scales: List

    @property
    def unscaled(self) -> tuple[List, List, List, List, List]:
        """Those that the ops without scales take."""
        return self.grads, self.params, self.exp_avgs, self.exp_avg_sqs, self.rounded


class Work(NamedTuple):
    """A group's step. A call of the op accepts tensors of one device and kind."""

    group: dict[str, Any]
    numbers: Numbers
    calls: dict[Any, Lists]
    cast: list[tuple[torch.Tensor, torch.Tensor]]  # weights in FP8, and their new numbers in fp32
    copy: list[tuple[torch.Tensor, torch.Tensor]]  # the same of parameters that the op does not round
    unscaled: list[tuple[torch.Tensor, torch.Tensor]]  # gradients, of which the op has a copy

    def add(
        self,
        local: torch.Tensor,
        grad: torch.Tensor,
        fp8: bool,
        first: torch.Tensor,
        second: torch.Tensor,
        master: torch.Tensor | None,
        scales: list[torch.Tensor | None] | None,
    ) -> None:
        """Add a parameter; `fp8`: it is a weight that is kept in FP8."""
        dense = grad.contiguous()
        own, rounded = (local, None) if master is None else (master, local)
        if fp8 or dense.dtype is not local.dtype:
            dense, own, rounded = self._apart(local, dense, fp8, own, rounded, scales)
        if dense is not grad:
            self.unscaled.append((grad, dense))
        key = (local.device, dense.dtype, own.dtype, rounded is None, scales is None or scales[0] is None)
        lists = self.calls.get(key)
        if lists is None:
            lists = self.calls[key] = Lists(*([] for _ in Lists._fields))
        lists.grads.append(dense)
        lists.params.append(own)
        lists.exp_avgs.append(first)
        lists.exp_avg_sqs.append(second)
        if rounded is not None:
            lists.rounded.append(rounded)
        if scales is not None:
            rooms = (lists.param_scales, lists.exp_avg_scales, lists.exp_avg_sq_scales)
            for room, scale in zip(rooms, scales, strict=True):
                if scale is not None:
                    room.append(scale)

    def _apart(
        self,
        local: torch.Tensor,
        dense: torch.Tensor,
        fp8: bool,
        own: torch.Tensor,
        rounded: torch.Tensor | None,
        scales: list[torch.Tensor | None] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What the op is given of a parameter that it cannot write: its new numbers are cast or copied afterwards."""
        if not fp8 and (local.dtype == torch.float32 or own.dtype == torch.int16):
            return dense, own, rounded
        wide = own
        if scales is not None and scales[0] is not None:
            # Of a scaled master the new numbers are known in fp32 for a moment only: as a copy like the gradient.
            dense = dense.float()
            wide = rounded = torch.empty_like(dense)
        else:
            rounded = None
            if own is local:
                own, dense = local.float(), dense.float()
                wide = own
        (self.cast if fp8 else self.copy).append((local, wide))
        return dense, own, rounded
