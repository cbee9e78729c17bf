"""What ranks send: the bytes of a tensor."""

import pytest
import torch
from shared.bits import assert_same_bits

from reference.support.groups import bytes_of


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_bytes_are_the_memory_itself(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.arange(1, 16)[: torch.Size(shape).numel()].view(shape).to(dtype)
    found = bytes_of(x)
    assert found.dtype == torch.uint8
    assert found.shape == (x.numel() * x.element_size(),)
    assert_same_bits(found.view(dtype).view(shape), x)
    if x.numel():
        assert found.data_ptr() == x.data_ptr()
