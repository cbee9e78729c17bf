"""Copies between the host and a GPU for which nobody waits.

A copy from memory that is not pinned waits for all that the GPU still has to do. PyTorch keeps pinned memory for the
next copy, and gives a block to nobody before the copy that reads it is done.
"""

import torch


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on a device; itself where that is the CPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def fill(target: torch.Tensor, x: torch.Tensor) -> None:
    """Copy a tensor of the CPU to where `target` lies; x, which is not pinned, may be changed at once."""
    target.copy_(x.pin_memory() if target.is_cuda else x, non_blocking=True)


class Fetched:
    """Copies of tensors on the host, of what they hold when all is done that was launched before.

    Args:
        tensors: of one device.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._copies = [x.detach().to("cpu", non_blocking=True, copy=True) for x in tensors]
        self._done = None
        if tensors[0].is_cuda:
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[torch.Tensor]:
        """The copies, when they are there."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies
