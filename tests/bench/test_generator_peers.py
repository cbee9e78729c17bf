"""`twin bench generator`: Hugging Face's part, small and on the CPU."""

from unittest import mock

import pytest
import torch
from shared.generator_sizes import CASE, SMALL

from optimized.bench.models import generator
from optimized.bench.models import generator_contestants as contestants


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")  # of the libraries
@torch.no_grad()
def test_hugging_faces_model_goes_on_from_a_filled_cache() -> None:
    pytest.importorskip("transformers")
    model = contestants.their_model(CASE, 1, 64, "cpu")
    entrant = contestants.HuggingFace(model, CASE, 2, 112, backend="eager")
    assert int(entrant.cache.get_seq_length()) == 112 - contestants.LEFT + 3
    entrant.block(2)
    assert int(entrant.cache.get_seq_length()) == 112 - contestants.LEFT + 5
    now = generator._Run(1e9)
    small = mock.patch.multiple(generator, **{**SMALL, "THEIR_PAIRS": ((2, 112),)})
    with small, mock.patch.object(torch.cuda, "synchronize"):
        (row,) = generator.theirs(now, CASE, 64, 1, "cpu", backend="eager")
    assert (row["name"], row["batch"], row["context"]) == (generator.THEIRS, 2, 112)
    assert not now.missing
