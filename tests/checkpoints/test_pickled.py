"""Pickles as data: every tree comes back, Python reads what was written, and nothing is executed."""

import contextlib
import io
import os
import pickle
import pickletools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.checkpoints import pickled
from reference.checkpoints.pickled import Call, Global, Refused


def nothing(name: Global) -> bool:
    return False


def everything(name: Global) -> bool:
    return True


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@settings(max_examples=40, deadline=None)
@given(TREES, st.integers(3, pickle.HIGHEST_PROTOCOL))  # bytes are a call in protocol 2
def test_data_is_read_as_python_reads_it(tree: Any, protocol: int) -> None:
    assert pickled.load(pickle.dumps(tree, protocol), nothing) == tree


@given(TREES)
def test_what_is_written_python_reads_and_so_do_we(tree: Any) -> None:
    data = pickled.dump(tree)
    assert pickle.loads(data) == tree
    assert pickled.load(data, nothing) == tree


def test_calls_and_objects_are_records() -> None:
    data = pickle.dumps([OrderedDict(), OrderedDict(a=1), Path("x"), Refused, os.system], 4)
    found = pickled.load(data, everything)
    assert found[:2] == [{}, {"a": 1}]
    assert (found[2].args, found[3], found[4]) == (
        ("x",),
        Global("reference.checkpoints.pickled", "Refused"),
        Global("posix", "system"),
    )
    error = Call(Global("builtins", "ValueError"), ("a",), {"note": 1})
    made = pickle.loads(pickled.dump(error))
    assert (type(made), made.args, made.note) == (ValueError, ("a",), 1)
    assert pickled.load(pickled.dump(error), everything) == error
    tensor = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(pickle.loads(pickled.dump(tensor)), tensor)


def test_pickles_follow_one_another_in_a_stream() -> None:
    stream = io.BytesIO(pickle.dumps(1) + pickle.dumps("two") + b"rest")
    assert (pickled.load(stream, nothing), pickled.load(stream, nothing), stream.read()) == (1, "two", b"rest")


class Executed(Exception):
    """A pickle was executed."""


def execute(*args: Any) -> None:
    raise Executed


class Reduced:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


HOSTILE = {
    "a function": pickle.dumps(Reduced(execute, ())),
    "os.system": pickle.dumps(Reduced(os.system, ("exit 1",))),
    "protocol 0": pickle.dumps(Reduced(os.system, ("exit 1",)), 0),
    "in a dictionary": pickle.dumps({"scale_fwd": [Reduced(eval, ("execute()",))]}),
    "as a key": b"}(cos\nsystem\nI1\nu.",
    "setstate": pickle.dumps(Reduced(Executed, (), {"a": 1})),
    "getattr of what is accepted": b"c__builtin__\ngetattr\n(ctorch\nload\nX\x05\x00\x00\x00a.b.ctR.",
    "an instance": b"(X\x04\x00\x00\x00exit" + b"ios\nsystem\n.",
    "an object": b"(cos\nsystem\nX\x04\x00\x00\x00exito.",
    "a number of the registry": b"\x80\x02\x82\x01.",
    "a persistent name": b"Psystem\n.",
    "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x0bload.system\x93.",
    "a name that is no text": b"\x80\x04K\x01K\x02\x93.",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pickle_is_refused_and_not_executed(data: bytes) -> None:
    with pytest.raises(Refused, match=r"^is a pickle (that names '.+'|with the instruction [A-Z0-9]+), which was not"):
        pickled.load(data, lambda name: name == Global("torch", "load"))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"not a pickle", b".", b"N", b"NN.", b"a.", b"(.", b"t.", b"\x85.", b"0.", b"h\x05.", b"K\x01K\x02a.",
        b"]K\x01K\x02s.", b"}K\x01u.", b"}]K\x01s.", b"K\x01)R.", b"ctorch\nload\nK\x01R.", b"K\x01}b.", b"ctorch\n.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", b"\x80\x09\x8b\xff\xff\xff\x7f.", b"I" + b"9" * 5000 + b"\n.",
    ],
)  # fmt: skip
def test_what_is_no_whole_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(Refused, match=r"^is no whole pickle|^is a pickle with the instruction [A-Z]+, which was not"):
        pickled.load(data, everything)


@given(st.binary(max_size=200))
def test_any_bytes_are_data_or_refused(data: bytes) -> None:
    with contextlib.suppress(Refused):
        pickled.load(data, everything)


@given(st.data())
def test_a_changed_pickle_is_data_or_refused(draw: Any) -> None:
    data = bytearray(pickle.dumps({"scale_fwd": torch.ones(3), "noted": {"a": [1, 2.5, "x"]}}))
    for _ in range(draw.draw(st.integers(1, 3))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(Refused):
        pickled.load(bytes(data), everything)


def test_every_instruction_that_torch_and_python_write_is_known() -> None:
    """What pickles of dataclasses, tensors and enumerations hold, at every protocol."""
    value = {"t": torch.ones(2), "list": [1, 2], "one": [0], "long": 1 << 70, "tuple": (1, 2, 3, 4), "f": 0.5}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(value, protocol)
        assert {op.name for op, _, _ in pickletools.genops(data)} >= {"REDUCE", "SETITEMS"}
        assert isinstance(pickled.load(data, everything), dict)
