"""`delay_wgrad_compute`: a layer's backward computes dx and db; `backward_dw` computes dw when the caller wants it.

So a pipeline can pass dx on first. The bits are those of a backward that does both: the same operands, kept until then.
Source: Transformer Engine's `WeightGradStore` and `TransformerEngineBaseModule.backward_dw`.
"""

from collections.abc import Callable
from typing import Any

import torch

from reference.state.weight_store import WeightStore


class DelayedGradients(torch.nn.Module):
    """The part of a layer that computes, in `backward_dw`, what its store has kept."""

    delay_wgrad_compute = False
    _store: WeightStore
    wgrad_accumulation_and_reduce_hooks: list[Callable[[], Any]]

    def delays(self, delay: bool) -> None:
        """Set the layer up; its parameters exist. Megatron's hooks leave those alone that get gradients later."""
        if not delay:
            return
        self.delay_wgrad_compute = True
        self.wgrad_accumulation_and_reduce_hooks = []
        for name in self.delayed_weights():
            for weight in self.parts_of(name):
                weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def delayed_weights(self) -> list[str]:
        """Names of the weights, as `ModuleContext.weight_grad` gets them."""
        return list(self.fp8_weights)  # type: ignore[arg-type]

    def parts_of(self, name: str) -> list[torch.nn.Parameter]:
        """The parameters that a weight consists of, by rows."""
        return [getattr(self, name)]

    def refuse_what_cannot_delay(self) -> None:
        """Refuse torch.compile, and weights that are no leaves, in a forward of a layer that delays."""
        for name in self.delayed_weights():
            if not all(part.is_leaf for part in self.parts_of(name)):
                raise NotImplementedError(
                    f"{type(self).__name__}: delay_wgrad_compute=True with a {name} that is computed from others "
                    f"(parametrized, or flattened by FSDP with use_orig_params=False) is not offered: its gradient "
                    f"would not reach them; a parameter is accepted."
                )
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{type(self).__name__}: delay_wgrad_compute=True under torch.compile is not offered; eager mode is "
                f"accepted."
            )

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` computes anything: whether `delay_wgrad_compute` is on."""
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]
    ) -> None:
        """Call a function without arguments at the end of each `backward_dw`; hooks on the weights do not run."""
        if not self.delay_wgrad_compute:
            raise RuntimeError(
                f"{type(self).__name__}: register_wgrad_accumulation_and_reduce_hooks with delay_wgrad_compute=False; "
                f"True is accepted."
            )
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the weights' gradients of the oldest backward without them, and add them to `.grad` or main_grad.

        Without `delay_wgrad_compute` it does nothing.

        Raises:
            RuntimeError: there is no such backward.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._store.delayed:
            raise RuntimeError(
                f"{type(self).__name__}: backward_dw without a backward whose weight gradients are still to be "
                f"computed; one call after each backward is accepted."
            )
        for name, compute in self._store.delayed.popleft()[1].items():
            dw, parts = compute(), self.parts_of(name)
            if dw is None:  # it was added to main_grad
                continue
            for part, rows in zip(parts, dw.split([len(one) for one in parts]), strict=True):
                if part.requires_grad:
                    rows = rows.to(part.dtype)
                    part.grad = rows.clone() if part.grad is None and len(parts) > 1 else _sum(part.grad, rows)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


def _sum(grad: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    """As autograd accumulates: in place."""
    return more if grad is None else grad.add_(more)
