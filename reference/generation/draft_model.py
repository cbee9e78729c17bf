"""`DraftModel`: a smaller model guesses the next tokens, which the large one judges in one step.

    generator = te.Generator(model, draft_tokens=4, draft=te.DraftModel(small, max_batch_size=8))

It takes its likeliest tokens. What it guesses changes no word of the text (`reference.generation.generator`), only how
many steps the large model needs. Source: Leviathan et al., "Fast inference from transformers via speculative decoding".
"""

from collections.abc import Sequence
from typing import Any

import torch

from reference.generation.generator import Generator


class DraftModel:
    """Drafts by a model of the same tokens, with a cache of its own, from which texts that go on are continued.

    Args:
        model, options: as `te.Generator` takes them. Texts that are too long for it get no draft.

    Attributes:
        generator: the `Generator` that runs it; `generator.forget()` follows on a change of its weights.
    """

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        self.generator = Generator(model, **{"page_size": 16, **options})

    def __call__(self, text: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow on a text."""
        return self.many([text], [count])[0]

    def many(self, texts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        """Up to counts[i] tokens that may follow on texts[i], of all at once."""
        generator, cache = self.generator, self.generator.cache
        found: list[list[int]] = [[] for _ in texts]
        room = min(cache.max_sequence_length, generator.pages.count * generator.pages.size)
        room -= generator.bos is not None
        try:
            names = {
                generator.add(text, min(count, room - len(text))): i
                for i, (text, count) in enumerate(zip(texts, counts, strict=True))
                if len(text) < room
            }
            while generator.busy:
                for token in generator.step():
                    found[names[token.name]].append(token.token)
        finally:  # after an error its requests wait or run, and nobody asks for them again
            for name in [*generator.running, *(one.name for one in generator.waiting)]:
                generator.cancel(name)
            generator._tokens.clear()
        return found
