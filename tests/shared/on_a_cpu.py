"""What a benchmark makes on "cuda" is made on the CPU: the sides that it times can be compared there."""

from typing import Any

from torch.overrides import TorchFunctionMode


class OnACpu(TorchFunctionMode):
    """As a context: `device="cuda"` of PyTorch's functions means the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        return function(*args, **given)
