"""A pickle as data: read without importing or calling anything, and written without having what it names.

A pickle is a program for a machine with a stack. Here a name of another module stays a name (`Global`), and a call
stays a record of what would be called with what (`Call`). So a hostile pickle is a tree like any other, whose names are
refused.
"""

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, NamedTuple

__all__ = ["Call", "Global", "Persistent", "Refused", "dump", "load"]


class Refused(ValueError):
    """What a pickle holds is not accepted; the text goes on after the pickle's name."""


class Global(NamedTuple):
    """The name of a function or class."""

    module: str
    name: str


@dataclass
class Call:
    """`of(*args)`; with a state, an object of class `of` whose attributes are set to it."""

    of: Global
    args: tuple[Any, ...]
    state: Any = None


class Persistent(NamedTuple):
    """What a pickle refers to by a number; in torch's files a storage."""

    id: Any


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_INTEGERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
_STRINGS = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_VALUES = _INTEGERS | _STRINGS | {"BINFLOAT", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_DICTIONARY = Global("collections", "OrderedDict")


class _Machine:
    """The stack, its parts below marks, and what was memoized."""

    def __init__(self, accepted: Callable[[Global], bool]) -> None:
        self.accepted = accepted
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def take_marked(self) -> list[Any]:
        marked, self.stack = self.stack, self.below.pop()
        return marked

    def top(self, cls: type) -> Any:
        if not isinstance(self.stack[-1], cls):
            raise TypeError
        return self.stack[-1]

    def named(self, module: Any, name: Any) -> Global:
        found = Global(module, name)
        if not isinstance(module, str) or not isinstance(name, str) or not self.accepted(found):
            raise Refused(f"is a pickle that names {f'{module}.{name}'[:100]!r}, which was not executed")
        return found

    def called(self) -> Any:
        args, of = self.stack.pop(), self.stack.pop()
        if not isinstance(of, Global) or not isinstance(args, tuple):
            raise TypeError
        return {} if (of, args) == (_DICTIONARY, ()) else Call(of, args)

    def run(self, op: str, arg: Any) -> None:
        """One instruction."""
        stack = self.stack
        if op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _VALUES:
            stack.append(arg)
        elif op == "MARK":
            self.below.append(stack)
            self.stack = []
        elif op in ("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"):
            stack.append({"EMPTY_TUPLE": (), "EMPTY_LIST": [], "EMPTY_DICT": {}}[op])
        elif op in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack[-int(op[-1]) :] = [tuple(stack[i] for i in range(-int(op[-1]), 0))]
        elif op == "TUPLE":
            items = tuple(self.take_marked())
            self.stack.append(items)
        elif op in ("APPEND", "APPENDS"):
            found = [stack.pop()] if op == "APPEND" else self.take_marked()
            self.top(list).extend(found)
        elif op in ("SETITEM", "SETITEMS"):
            found = [stack.pop() for _ in range(2)][::-1] if op == "SETITEM" else self.take_marked()
            self.top(dict).update(zip(found[::2], found[1::2], strict=True))
        elif op in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[len(self.memo) if op == "MEMOIZE" else arg] = stack[-1]
        elif op in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[arg])
        elif op == "GLOBAL":
            stack.append(self.named(*arg.split(" ", 1)))
        elif op == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(self.named(module, name))
        elif op in ("REDUCE", "NEWOBJ"):
            stack.append(self.called())
        elif op == "BUILD":
            state = stack.pop()
            self.top(Call).state = state
        elif op == "BINPERSID":
            stack.append(Persistent(stack.pop()))
        elif op not in ("PROTO", "FRAME", "STOP"):
            raise Refused(f"is a pickle with the instruction {op}, which was not executed")


def load(data: bytes | BinaryIO, accepted: Callable[[Global], bool]) -> Any:
    """The tree of one pickle: constants, lists, tuples, dictionaries, `Global`, `Call` and `Persistent`.

    Args:
        data: the pickle, or a stream, which is read up to the pickle's end.
        accepted: whether a name may occur.

    Raises:
        Refused: a name that is not accepted, an instruction that data does not need, or no whole pickle.
    """
    machine = _Machine(accepted)
    try:
        for instruction, arg, _ in pickletools.genops(data):
            machine.run(instruction.name, arg)
        (found,) = machine.stack
    except Refused:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise Refused("is no whole pickle") from None
    return found


# --- writing ---------------------------------------------------------------------------------------------


def dump(tree: Any) -> bytes:
    """The pickle of a tree; objects in it, such as tensors, are written as their `__reduce_ex__` says."""
    out = BytesIO()
    out.write(b"\x80\x03")
    _write(tree, out.write)
    out.write(b".")
    return out.getvalue()


def _write(value: Any, put: Callable[[bytes], Any]) -> None:
    if value is None or value is True or value is False:
        put({None: b"N", True: b"\x88", False: b"\x89"}[value])
    elif type(value) is int:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        put(b"\x8a" + bytes([len(data)]) + data)
    elif type(value) is float:
        put(b"G" + struct.pack(">d", value))
    elif type(value) in (str, bytes):
        data = value.encode() if isinstance(value, str) else value
        put((b"X" if isinstance(value, str) else b"B") + struct.pack("<I", len(data)) + data)
    elif type(value) in (tuple, list):
        put(b"(" if isinstance(value, tuple) else b"](")
        for item in value:
            _write(item, put)
        put(b"t" if isinstance(value, tuple) else b"e")
    elif type(value) is dict:
        put(b"}(")
        for item in (part for pair in value.items() for part in pair):
            _write(item, put)
        put(b"u")
    elif isinstance(value, Global):
        put(f"c{value.module}\n{value.name}\n".encode())
    elif isinstance(value, Call):
        _write(value.of, put)
        _write(value.args, put)
        put(b"R" if value.state is None else b"\x81")
        if value.state is not None:
            _write(value.state, put)
            put(b"b")
    else:
        function, args = value.__reduce_ex__(2)[:2]
        _write(Call(Global(function.__module__, function.__qualname__), tuple(args)), put)
