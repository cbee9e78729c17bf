"""Operations without products: shapes, sums, scales, bias, dropout, norms."""

from collections.abc import Iterable
from typing import Any

import torch

from reference.arguments import check_arguments, is_int
from reference.nn.core.checks import activation_dtype, check_input, check_tensor
from reference.nn.core.dropout import Generator, bias_dropout_add
from reference.nn.core.parameters import DeviceDefault, parameter_dtype
from reference.nn.layers import layernorm
from reference.ops.norms.norm import MAX_HIDDEN
from reference.recipes.quantized import as_dtype


def in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in the dtype of an operation's parameter, which its result has, too; x itself under torch.autocast."""
    side = x.device.type
    if x.dtype == dtype or (side != "meta" and torch.is_autocast_enabled(side)):
        return x
    return x.to(dtype)


class Identity(torch.nn.Module):
    """x itself."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


class Reshape(torch.nn.Module):
    """x in another shape, as `torch.reshape`.

    Args:
        shape: ints, one of which may be -1.
    """

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        found = tuple(shape) if isinstance(shape, Iterable) else (None,)
        if not all(map(is_int, found)):
            raise TypeError(f"ops.Reshape: shape={shape!r}; ints are accepted.")
        self.shape = found

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.reshape(self.shape)

    def extra_repr(self) -> str:
        return f"{self.shape}"


class ConstantScale(torch.nn.Module):
    """x times a number."""

    def __init__(self, scale: float) -> None:
        check_arguments("ops.ConstantScale", locals())
        super().__init__()
        self.scale = float(scale)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_tensor("ops.ConstantScale", "input", input)
        return input * self.scale

    def extra_repr(self) -> str:
        return f"{self.scale}"


class _AddInPlace(torch.autograd.Function):
    """extra + x in the memory of extra, a leaf or not; the gradient passes to both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        return extra.detach().add_(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, grad


class AddExtraInput(torch.nn.Module):
    """x plus another input, of x's shape and dtype.

    Args:
        in_place: the sum is written to the other input, and the result shares its memory. A backward that still needs
            what was there raises an error.
    """

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        check_arguments("ops.AddExtraInput", locals())
        super().__init__()
        self.in_place = in_place

    def forward(self, input: torch.Tensor, extra_input: torch.Tensor) -> torch.Tensor:
        for name, x in (("input", input), ("extra_input", extra_input)):
            check_tensor("ops.AddExtraInput", name, x)
        if (extra_input.shape, extra_input.dtype) != (input.shape, input.dtype):
            raise ValueError(
                f"ops.AddExtraInput: extra_input is {extra_input.dtype} {list(extra_input.shape)}; that of the input, "
                f"{input.dtype} {list(input.shape)}, is accepted."
            )
        if self.in_place:
            return _AddInPlace.apply(input, extra_input)  # type: ignore[no-any-return, no-untyped-call]
        return extra_input + input


class MakeExtraOutput(torch.nn.Module):
    """x, and x as an extra output.

    Args:
        in_place: accepted without effect: Transformer Engine adds the gradients in the memory of the extra output's,
            autograd where it likes. The sum is the same.
    """

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        check_arguments("ops.MakeExtraOutput", locals())
        super().__init__()
        self.in_place = in_place

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return input, input


class Bias(DeviceDefault, torch.nn.Module):
    """x plus a learned vector, which starts as zeros.

    Args:
        size: of x's last dimension.
        device: None is the package's own. dtype: None is torch's default dtype.
        tensor_parallel, tensor_parallel_group: only one rank is offered.
    """

    one_rank_has_all_tokens = True  # `te.parallel.share_tokens` refuses it

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        check_arguments("ops.Bias", locals())
        super().__init__()
        dtype = parameter_dtype("ops.Bias", dtype)
        self.bias = torch.nn.Parameter(torch.empty(int(size), dtype=dtype, device=self.resolve_device(device)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zeros."""
        self.bias.zero_()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_input(self, input, self.bias.shape[0], "input")
        dtype = activation_dtype(in_dtype(input, torch.promote_types(input.dtype, self.bias.dtype)))
        return bias_dropout_add(as_dtype(input, dtype), as_dtype(self.bias, dtype), None, 0.0, None)

    def extra_repr(self) -> str:
        return f"{self.bias.shape[0]}"


class Dropout(DeviceDefault, torch.nn.Module):
    """In training, zeros in place of elements with probability p; the others are scaled
    (`reference.ops.random.dropout`)."""

    one_rank_has_all_tokens = True  # `te.parallel.share_tokens` refuses it

    def __init__(self, p: float) -> None:
        check_arguments("ops.Dropout", locals())
        super().__init__()
        self.p = float(p)
        self.generator = Generator(self.resolve_device(None))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_tensor("ops.Dropout", "input", input)
        if not self.training or self.p == 0:
            return input
        self.generator.draw(input.device)
        return bias_dropout_add(as_dtype(input, activation_dtype(input)), None, None, self.p, self.generator)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class LayerNorm(layernorm.LayerNorm):
    """`te.LayerNorm` with the arguments of Transformer Engine's operation."""

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__(**_norm_arguments(locals()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm of x, in the dtype of the weight (or torch.autocast's)."""
        check_tensor("ops.LayerNorm", "input", input)
        return super().forward(in_dtype(input, self.weight.dtype))


class RMSNorm(layernorm.RMSNorm):
    """`te.RMSNorm` with the arguments of Transformer Engine's operation."""

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int = 0,
    ) -> None:
        super().__init__(**_norm_arguments(locals()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm of x, in the dtype of the weight (or torch.autocast's)."""
        check_tensor("ops.RMSNorm", "input", input)
        return super().forward(in_dtype(input, self.weight.dtype))


class L2Normalization(layernorm.L2Normalization):
    """x / sqrt(Σx² + eps) over the last dimension, of any size: `reference.nn.layers.layernorm.L2Normalization`.

    Args:
        eps: added to the sum of squares.
        seq_length, micro_batch_size: accepted as in Transformer Engine, without effect.
    """

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        check_arguments("ops.L2Normalization", locals())
        super().__init__(1, eps)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_tensor("ops.L2Normalization", "input", input)
        if input.dim() == 0 or not 1 <= input.shape[-1] <= MAX_HIDDEN:
            raise ValueError(
                f"ops.L2Normalization: input has shape {list(input.shape)}; [..., from 1 to {MAX_HIDDEN}] is accepted."
            )
        if self.hidden_size != input.shape[-1]:
            self.hidden_size = input.shape[-1]
            self._put(input.device)
        return super().forward(input)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


def _norm_arguments(given: dict[str, Any]) -> dict[str, Any]:
    shape = given["normalized_shape"]
    listed = isinstance(shape, Iterable) and not isinstance(shape, str)
    given = {key: value for key, value in given.items() if key not in ("self", "__class__")}
    return {**given, "normalized_shape": tuple(shape) if listed else shape}
