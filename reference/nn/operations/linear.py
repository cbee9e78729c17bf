"""`BasicLinear` and `Linear`: `te.Linear` with the arguments and first weights of Transformer Engine's operations."""

import math
from collections.abc import Callable
from typing import Any

import torch

from reference.arguments import check_arguments
from reference.checkpoints import transformer_engine_state
from reference.nn.core.checks import check_tensor
from reference.nn.layers import linear
from reference.nn.operations.basic import in_dtype
from reference.numbers import philox
from reference.support.dtensor import distributed


@torch.no_grad()
def _uniform(weight: torch.Tensor) -> None:
    """Uniform in ±1/√in, the same numbers on every device."""
    bound = 1 / math.sqrt(weight.shape[1])
    values = philox.uniform(weight.shape, -bound, bound).to(weight.dtype).to(weight.device)
    weight.copy_(distributed(values, weight))


class _Linear(linear.Linear):
    """What both linears share."""

    def _make(self, bias: bool, given: dict[str, Any]) -> None:
        check_arguments(f"ops.{type(self).__name__}", given)
        super().__init__(
            given["in_features"],
            given["out_features"],
            bias=bias,
            device=given["device"],
            params_dtype=given["dtype"],
            init_method=_uniform,
            get_rng_state_tracker=given["rng_state_tracker_function"],
            fuse_wgrad_accumulation=given["accumulate_into_main_grad"],
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """`[..., in_features]` → `[..., out_features]`, in the dtype of the weight (or torch.autocast's)."""
        check_tensor(f"ops.{type(self).__name__}", "input", input)
        weight: Any = self.weight
        return super().forward(in_dtype(input, weight.dtype))  # type: ignore[return-value]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if transformer_engine_state.is_writing():
            raise NotImplementedError(
                f"transformer_engine_state_dict: model has {prefix.rstrip('.') or 'the module'!r}, a te.ops."
                f"{type(self).__name__}, whose names are others in Transformer Engine; te.Linear is accepted."
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)


class BasicLinear(_Linear):
    """x·wᵀ; parameter `weight` `[out, in]`. Arguments: `Linear`.

    Args:
        userbuffers_options: only None is offered.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        self._make(False, locals())


class Linear(_Linear):
    """x·wᵀ + b; parameters `weight` `[out, in]` and `bias` `[out]`.

    Args:
        in_features, out_features: sizes; in FP8 both must be multiples of 16.
        bias: learn a bias, which starts as zeros.
        device: None is the package's own. dtype: None is torch's default dtype.
        tensor_parallel_mode, tensor_parallel_group, sequence_parallel: only one rank is offered.
        rng_state_tracker_function: the weight is drawn inside `function().fork()`.
        accumulate_into_main_grad: as `te.Linear`'s `fuse_wgrad_accumulation`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        self._make(bias, locals())
