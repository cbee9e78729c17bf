"""A draft is tokens that may come next. The model judges all of them in one step; a wrong one changes no word."""

from collections.abc import Sequence


def prompt_lookup(text: Sequence[int], count: int, longest: int = 3) -> list[int]:
    """Up to `count` tokens that followed, the last time, on what the text ends with.

    The end's last `longest` tokens are looked for, then fewer, down to one. Source: Saxena, "Prompt lookup decoding".
    """
    text = list(text)
    for n in range(min(longest, len(text) - 1), 0, -1):
        end = text[-n:]
        for at in range(len(text) - n - 1, -1, -1):
            if text[at : at + n] == end:
                return text[at + n : at + n + count]
    return []
