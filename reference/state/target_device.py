"""The device to which `module.to(...)` moves what is neither parameter nor buffer: random states, scales, constants.

`nn.Module._apply` has a function and no device, so a byte goes through the function first.
"""

from collections.abc import Callable

import torch


def probe_target(fn: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> torch.Tensor:
    """A byte of `device` after `fn`, the function that `nn.Module._apply` calls for every tensor.

    A loader that replaces parameters one by one leaves such state on the meta device. PyTorch refuses to copy from
    there; state is made anew on the device to which `fn` takes the parameters.
    """
    try:
        return fn(torch.empty(1, dtype=torch.uint8, device=device))
    except NotImplementedError:
        if device.type != "meta":
            raise
        return fn(torch.empty(1, dtype=torch.uint8, device="cpu"))
