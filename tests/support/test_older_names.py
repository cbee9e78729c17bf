"""reference.support.older_names: a module by the name that it had before is the same module."""

import importlib
import pickle
import pkgutil
from pathlib import Path

import pytest

import reference as te
from optimized import measure
from reference.support import older_names


def below(name: str) -> list[str]:
    """The modules in a package, by their last names; none of a module."""
    path = getattr(importlib.import_module(name), "__path__", ())
    return [one.name for one in pkgutil.iter_modules(path)]


@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_every_older_name_is_the_module_and_so_is_what_is_below_it(side: str) -> None:
    names = {old: new for old, new in older_names.NAMES.items() if old.partition(".")[0] == side}
    assert names
    for old, new in names.items():
        for end in ("", *(f".{one}" for one in below(new))):
            module = importlib.import_module(f"{new}{end}")
            packages = [importlib.import_module(name) for name in (new, old.rpartition(".")[0])]
            attributes = [dict(vars(package)) for package in packages]
            assert importlib.import_module(f"{old}{end}") is module, old
            for package, before in zip(packages, attributes, strict=True):
                assert all(vars(package)[one] is x for one, x in before.items() if one != "__spec__"), old
            assert module.__name__ == module.__spec__.name == f"{new}{end}"


def test_no_older_name_hides_a_file() -> None:
    for old in older_names.NAMES:
        path: Path = measure.ROOT / old.replace(".", "/")
        assert not path.is_dir(), old
        assert not path.with_suffix(".py").exists(), old


def test_a_pickle_of_before_has_the_classes_of_today() -> None:
    text = pickle.dumps(te.Linear, protocol=0)
    assert b"creference.nn.layers.linear\nLinear" in text
    assert pickle.loads(text.replace(b"reference.nn.layers.linear", b"reference.nn.linear")) is te.Linear


@pytest.mark.parametrize("name", ["reference.nn.linear.nowhere", "reference.nn.nowhere", "optimized.launch.nowhere"])
def test_what_was_never_there_is_missing(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
        importlib.import_module(name)
