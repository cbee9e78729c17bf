"""The programs of docs/inference.md and docs/serving.md run as they stand."""

import re
from typing import Any

from optimized import measure


def programs(page: str) -> list[str]:
    text = (measure.ROOT / "docs" / f"{page}.md").read_text("utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_a_server_gives_the_words_of_the_generator(capsys: Any) -> None:
    names: dict[str, Any] = {}
    for program in (*programs("inference"), *programs("serving")):
        exec(program, names)  # the pages' own text
    assert capsys.readouterr().out  # what they have written
    te, model = names["te"], names["model"]
    prompts, sampling = [[1, 2, 3], [4], [1, 2, 3]], te.Sampling(0.9, seed=5)
    expected = te.Generator(model, max_sequence_length=64).generate(prompts, 6, sampling)
    engine = names["Engine"](te.Generator(model, max_batch_size=2, max_sequence_length=64))
    answers = [engine.submit(prompt, max_new_tokens=6, sampling=sampling) for prompt in prompts]
    refused = engine.submit([], max_new_tokens=6)
    for answer, one in zip(answers, expected, strict=True):
        words = [answer.get(timeout=60) for _ in one.tokens]
        assert ([word.token for word in words], words[-1].ended) == (one.tokens, "length")
    assert "prompt is empty" in str(refused.get(timeout=60))
