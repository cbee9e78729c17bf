"""A packed FP8 state whose rows follow the checkpoint that torch.distributed.checkpoint loads.

That loader fills the tensors of a state dict and refuses one of another size than the checkpoint's. The rows of a
packed state are its amax history, whose length a recipe chooses, so a fresh model has others than a trained one.
"""

import sys
from typing import Any

import torch

_PLANNER = ("torch.distributed.checkpoint.default_planner", "create_default_local_load_plan")


class PackedState(torch.Tensor):
    """fp32 `[1 + amax_history_len, columns]`; copies and pickles are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(packed: torch.Tensor) -> torch.Tensor:
        """The same memory; another kind of tensor, such as a FakeTensor, as it is."""
        return packed.as_subclass(PackedState) if type(packed) is torch.Tensor else packed

    def size(self, *dim: Any) -> Any:  # type: ignore[override]
        """The size; asked by the loader's plan, this tensor first takes the size of its entry in the checkpoint."""
        frame = sys._getframe(1)
        if not dim and (frame.f_globals.get("__name__"), frame.f_code.co_name) == _PLANNER:
            saved = getattr(frame.f_locals.get("md"), "size", None)
            if saved is not None and len(saved) == 2 and saved[0] >= 2 and saved[1] == self.shape[1]:
                self.resize_(saved)  # the loader writes every element, or raises
        return super().size(*dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain tensor."""
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain tensor, so that `torch.load(weights_only=True)` reads it."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)
