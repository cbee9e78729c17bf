"""A text that is the same with every Python: the products of small numbers, a line each."""

import numpy as np

from optimized.training.corpus import Corpus

TEXT = b"".join(b"%d * %d = %d\n" % (a, b, a * b) for a in range(100) for b in range(100))


def corpus() -> Corpus:
    """The text as a corpus of one file."""
    return Corpus(np.frombuffer(TEXT, np.uint8), 1)
