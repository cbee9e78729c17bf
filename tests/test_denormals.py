"""Subnormal numbers: alive here, and their absence noticed."""

import pytest
import torch

from reference import denormals


def test_they_are_alive_here():
    assert denormals.denormals_are_alive()
    denormals.check_denormals()


def test_flushing_is_noticed_and_the_sentence_names_the_remedy():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        assert not denormals.denormals_are_alive()
        with pytest.raises(RuntimeError, match=r"flushed to zero.*call torch\.set_flush_denormal\(False\)"):
            denormals.check_denormals()
    finally:
        torch.set_flush_denormal(False)
    denormals.check_denormals()
