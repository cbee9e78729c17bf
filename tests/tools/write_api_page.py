"""Writes docs/transformer_engine_api.md: every public name and argument of Transformer Engine, offered or refused.

    PYTHONPATH=. python tests/tools/write_api_page.py

It reads transformer_engine_api.json (what Transformer Engine has), `reference.support.not_offered` (which names are
absent, and why) and `reference.arguments` (what each argument accepts). test_api_page.py compares the page with them.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference as te
from reference.arguments import OFF, RULES
from reference.support import not_offered

ROOT = Path(__file__).resolve().parents[2]
API = json.loads((ROOT / "tests/transformer_engine_api.json").read_text("utf-8"))
PAGE = ROOT / "docs/transformer_engine_api.md"
PACKAGES = {
    "te": te,
    "recipe": te.recipe,
    "optimizers": te.optimizers,
    "ops": te.ops,
    "quantization": te.quantization,
}
RECIPES = {  # check their own
    "DelayedScaling.scaling_factor_compute_algo": "only `None`",
    "DelayedScaling.fp8_dpa": "True and False (attention's forward; its backward stays in 16 bits)",
    "DelayedScaling.fp8_mha": "only `False`",
    "DelayedScaling.backward_override": "None, 'high_precision' and 'dequantized' (FP8 in forward alone)",
    "DelayedScaling.fp8_format": "`Format.HYBRID` and `Format.E4M3`",
    "DelayedScaling.amax_compute_algo": "'max' and 'most_recent'",
}
TITLES = {name: "`te`" if name == "te" else f"`te.{name}`" for name in PACKAGES}
TITLES["quantization"] += ", or `te.fp8`"
INTRO = f"""# Transformer Engine's API

Here is every public name and argument of Transformer Engine {API["version"]}'s PyTorch API, and what Twin Engine does
with it. Names, their order and their defaults are the same. What is not offered raises an error that names it and says
what is accepted; nothing is ignored in silence. `te` is `twin_engine`, or on a CPU `twin_engine.reference`.

`te.install_as_transformer_engine()` lets unmodified programs run: after it `import transformer_engine.pytorch` gives
Twin Engine ([reference/te/stand_in.py](../reference/te/stand_in.py)).

A script writes this page (`tests/tools/write_api_page.py`), and a test keeps it true.
"""


def code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def names() -> Iterator[str]:
    """What each package offers, and why it does not offer the rest."""
    yield "## Names"
    for package, module in PACKAGES.items():
        every = API["names"][package] + (API["submodules"] if package == "te" else [])
        offered = [name for name in sorted(set(every)) if hasattr(module, name)]
        yield f"\n### {TITLES[package]}\n"
        yield f"Offered: {code(offered) if offered else 'nothing'}.\n"
        yield "| not offered | why |\n| --- | --- |"
        for reason, absent in not_offered.NAMES[package].items():
            yield f"| {code(sorted(absent.split()))} | {reason} |"


def owner_of(name: str) -> Any:
    """The class of that name."""
    return next(vars(module)[name] for module in PACKAGES.values() if name in vars(module))


def absent_methods(name: str) -> dict[str, list[str]]:
    """Reason → methods of Transformer Engine's class `name` that ours has not."""
    kind = owner_of(name)
    rows: dict[str, list[str]] = {}
    for method in API["methods"][name]:
        if hasattr(kind, method):
            continue
        if name == "FP8GlobalStateManager":
            rows.setdefault(not_offered.STATE, []).append(method)
            continue
        tables = [not_offered.METHODS.get(base.__name__, {}) for base in kind.__mro__]
        reason = next(why for table in tables for why, names in table.items() if method in names.split())
        rows.setdefault(reason, []).append(method)
    return rows


def methods() -> Iterator[str]:
    """What each class has of the methods that Transformer Engine's defines."""
    yield "\n## Methods\n"
    yield "Methods and properties that a class of Transformer Engine's defines itself. One that is not offered raises"
    yield "an AttributeError with this reason; a layer's raises PyTorch's own, which names it.\n"
    yield "| class | offered | not offered |\n| --- | --- | --- |"
    for name, every in API["methods"].items():
        absent = absent_methods(name)
        gone = {method for methods in absent.values() for method in methods}
        reasons = "; ".join(f"{code(which)}: {why}" for why, which in absent.items())
        yield f"| `{name}` | {code([method for method in every if method not in gone])} | {reasons} |"


def accepted(callable_name: str, argument: str) -> str:
    """What an argument accepts, in words."""
    layer = callable_name.removesuffix(".__init__")
    values = OFF.get(f"{layer}.{argument}", OFF.get(argument))
    if f"{layer}.{argument}" in RECIPES:
        return RECIPES[f"{layer}.{argument}"]
    if values is not None:
        return "only " + " and ".join(f"`{value}`" for value in values)
    rule = RULES.get(f"{layer}.{argument}", RULES.get(argument))
    return "offered" if rule is None else re.sub(r" (is|are) accepted", "", rule.accepted)


def arguments() -> Iterator[str]:
    """A table for each callable; arguments without a row are offered."""
    yield "\n## Arguments\n"
    yield "Tensors are checked by the call itself. `only` marks what is not offered: other values raise."
    yield "\nA recipe's fields may be set. What is set is checked, and counts from the next `te.autocast` on."
    yield "A layer that gets a `te.Float8Tensor` as its input reads it, and casts what it read by its own recipe;"
    yield "Transformer Engine's layers take the codes as they are."
    for name, parameters in API["callables"].items():
        yield f"\n### `{name.removesuffix('.__init__')}`\n"
        rows: dict[str, list[str]] = {}
        for text in parameters:
            argument = text.partition("=")[0]
            if argument != "*":
                rows.setdefault(accepted(name, argument), []).append(argument.lstrip("*"))
        if not rows:
            yield "It has no arguments."
            continue
        yield "| arguments | accepted |\n| --- | --- |"
        for what, which in sorted(rows.items(), key=lambda row: row[0].startswith("only ")):
            yield f"| {code(which)} | {what} |"


def attributes() -> Iterator[str]:
    """The attributes that constructors of Transformer Engine's layers set; test_identity.py asks for each."""
    yield "\n## Attributes\n"
    yield "Public attributes that Transformer Engine's constructors set. One that means nothing here raises a"
    yield "NotImplementedError with a sentence, which `getattr` with a default does not swallow.\n"
    yield "| class | attributes |\n| --- | --- |"
    for name, every in API["attributes"].items():
        yield f"| `{name}` | {code(every)} |"


def page() -> str:
    """The page's text."""
    return "\n".join([INTRO, *names(), *methods(), *attributes(), *arguments()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
