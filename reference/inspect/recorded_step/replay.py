"""A recorded step again, op by op on a CPU, and the first number that differs.

Replay has the step's storages as bytes. For each op it takes the tensors that the op read out of them, compares their
digests with the recorded ones, runs the op's definition, and compares what the op wrote:

    the digest of an input differs     its content changed between the op that wrote it and this one: a memory fault
    the digest of an output differs    this op computed other bits

An op that does not run again is judged by its inputs alone: their digests are compared with those that were left there.

Where the recording says what the other device had (a whole tensor, or a digest from which the one wrong word follows),
replay goes on with that, so what follows is judged by itself. Where it does not, replay ends.

NaNs of 16 and 32 bits are equal, whatever their bits.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from reference.inspect.recorded_step.digest import (
    _INTEGERS,
    changed_word,
    digest,
    locate,
    number_of,
    with_one_nan,
    with_word,
)
from reference.inspect.recorded_step.file import Access, Op, Recording, Region, op_in_words
from reference.inspect.recorded_step.ops import RESULTS, argument_name, decoded, mutated, overload, tensors_of
from reference.inspect.recorded_step.places import Places

Observer = Callable[[int, Op, list[torch.Tensor], list[torch.Tensor]], None]


@dataclass(frozen=True)
class Word:
    """The first number in which two tensors differ; `recorded` is the other device's, `replayed` this CPU's.

    Where digests alone are known of both, `recorded` is the change, and `replayed` is "".
    """

    index: tuple[int, ...]
    recorded: str
    replayed: str


@dataclass(frozen=True)
class Difference:
    """A tensor that differs.

    Attributes:
        op: number of the op that computed other bits, or read other bits than were written; the number of ops for the
            end of the step.
        tensor: what it is, in words.
        region: where it is.
        read: whether the op read it.
        writer: number of the op that wrote it before; -1 for the start of the step. None where it is an output.
        word: the first number; None where the recording does not say.
        words: how many differ; None where the recording does not say.
    """

    op: int
    tensor: str
    region: Region
    read: bool
    writer: int | None
    word: Word | None
    words: int | None


@dataclass
class Result:
    """What a replay found.

    Attributes:
        ops, words: how many ops ran again, and how many numbers of their results were compared.
        fed: ops of torch's that were not run again.
        looks: how many tensors that an op read were compared with what had been left there.
        differences: in their order.
        ended: the number of the op at which replay could not go on, or None.
    """

    ops: int = 0
    words: int = 0
    fed: int = 0
    looks: int = 0
    differences: list[Difference] = field(default_factory=list)
    ended: int | None = None

    @property
    def equal(self) -> bool:
        """The same bits everywhere."""
        return not self.differences


class Refused(ValueError):
    """An op cannot run with what was recorded; the text says which."""


class Replay:
    """The storages of a step, and who wrote them last."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.result = recording, Result()
        self._bytes: dict[int, torch.Tensor] = {}
        self._writers: dict[int, int] = {}
        # Of each storage: the last digests that were noted, and the numbers of their ops.
        self._last: defaultdict[int, Places[tuple[int, int]]] = defaultdict(Places)
        self._until: dict[int, int] = {}
        for number, op in enumerate(recording.ops):
            self._until |= {access.region.storage: number for access in (*op.reads, *op.writes)}
        # What is compared by its digest alone needs no bytes.
        self._until |= {access.region.storage: len(recording.ops) for access in recording.end}

    def run(self, observe: Observer | None = None) -> Result:
        """Run every op; `observe` gets each twin op's number, the op, what it read, and what it wrote.

        Raises:
            Refused: an op refuses its recorded arguments, or this machine's memory does not suffice.
        """
        recording, result = self.recording, self.result
        for access in recording.start:
            if access.digest is not None:
                self._last[access.region.storage].saw(access.region, (access.digest, -1))
        with torch.no_grad():
            for number, op in enumerate(recording.ops):
                try:
                    goes_on = self._step(number, op, observe)
                except RuntimeError as error:  # torch's: no memory, or a file that describes impossible tensors
                    reason = str(error).split("\n")[0].rstrip(".")
                    where = op_in_words(recording, number)
                    raise Refused(f"{where} cannot run here ({reason}).") from error
                if not goes_on:
                    result.ended = number
                    return result
                for storage in [one for one in self._bytes if self._until.get(one, -1) <= number]:
                    del self._bytes[storage]
            for access in recording.end:
                if (
                    self._input(len(recording.ops), access, partial(called, recording, access, None, read_name, 0))
                    is None
                ):
                    result.ended = len(recording.ops)
                    break
            for access in recording.found:
                self._look(len(recording.ops), access)
        return result

    def _step(self, number: int, op: Op, observe: Observer | None) -> bool:
        """Run an op; return whether replay can go on."""
        recording = self.recording
        for access in op.found:
            self._look(number, access)
        read = []
        for i, access in enumerate(op.reads):
            x = self._input(number, access, partial(called, recording, access, op, read_name, i))
            if x is None:
                return False
            read.append(x)
        if op.kind == "fed":
            self.result.fed += 1
            for access in op.writes:
                self._note(access, number)
            return True
        before = [x.clone() for x in read] if observe is not None else []
        results = tensors_of(_call(op, read))
        self.result.ops += 1
        new, kept = len(result_names(op)), {}
        for i, access in enumerate(op.writes):
            x = self._view(access.region)
            if i < new:
                if i >= len(results) or (results[i].shape, results[i].dtype) != (x.shape, x.dtype):
                    raise Refused(f"the op {op.name} has other results than those that were recorded.")
                x.copy_(results[i])
            if observe is not None:
                kept[i] = x.clone()
            if access.digest is None:
                continue
            self.result.words += access.region.words
            self._note(access, number)
            if not self._compare(number, access, x, partial(called, recording, access, op, written_name, i), None):
                return False
        if observe is not None and op.kind == "twin":
            observe(number, op, before, list(kept.values()))
        return True

    # --- tensors -----------------------------------------------------------------------------------------

    def _view(self, region: Region) -> torch.Tensor:
        storage = self._bytes.get(region.storage)
        if storage is None:
            storage = torch.zeros(self.recording.storages[region.storage], dtype=torch.uint8, device="cpu")
            self._bytes[region.storage] = storage
        room = region.torch_dtype.itemsize
        typed = storage[: storage.numel() // room * room].view(region.torch_dtype)
        return typed.as_strided(region.shape, region.stride, region.offset)

    def _note(self, access: Access, number: int) -> None:
        """Remember that an op wrote a region."""
        storage = access.region.storage
        self._writers[storage] = number
        self._last[storage].wrote(access.region, None if access.digest is None else (access.digest, number))

    def _input(self, number: int, access: Access, what: Callable[[], str]) -> torch.Tensor | None:
        """What an op reads, as the other device read it; None if that is not known."""
        region = access.region
        x = self._view(region)
        if access.digest is None:
            return x
        writer = self._writers.get(region.storage, -1)
        if access.whole is None:
            self.result.looks += 1
            return x if self._compare(number, access, x, what, writer) else None
        _put(x, self.recording.tensors[access.whole])
        last = self._last[region.storage].get(region)
        self._last[region.storage].saw(region, (access.digest, number))
        if last is not None:
            self.result.looks += 1
            left = self.recording.digests[last[0]]
            if left != self.recording.digests[access.digest]:
                before = locate(x, left)
                other = None if before is None else with_word(x, before)
                self._differs(number, access, what, last[1], None if other is None else first_word(x, other))
        return x

    def _look(self, number: int, access: Access) -> None:
        """Compare what an op found with what was left there, by their digests alone."""
        region, digests = access.region, self.recording.digests
        if access.digest is None:
            return
        last = self._last[region.storage].get(region)
        self._last[region.storage].saw(region, (access.digest, number))
        if last is None:
            return
        self.result.looks += 1
        if digests[last[0]] != digests[access.digest]:
            what = partial(called, self.recording, access, None, read_name, 0)
            self._differs(number, access, what, last[1], _changed(region, digests[last[0]], digests[access.digest]))

    def _compare(
        self, number: int, access: Access, x: torch.Tensor, what: Callable[[], str], writer: int | None
    ) -> bool:
        """Compare with the recording and note a difference; return whether `x` is now what was recorded."""
        assert access.digest is not None
        wanted = self.recording.digests[access.digest]
        if tuple(digest(x).tolist()) == wanted:
            return True
        other = None
        if writer is None and access.whole is not None:
            other = self.recording.tensors[access.whole]
        else:
            word = locate(x, wanted)
            other = None if word is None else with_word(x, word)
        self._differs(number, access, what, writer, None if other is None else first_word(other, x))
        if other is not None:
            _put(x, other)
        return other is not None

    def _differs(
        self, number: int, access: Access, what: Callable[[], str], writer: int | None, first: tuple[Word, int] | None
    ) -> None:
        """Note a difference; `first` is the first number and how many differ, if they are known."""
        word, words = (None, None) if first is None else first
        one = Difference(number, what(), access.region, writer is not None, writer, word, words)
        self.result.differences.append(one)


def _put(x: torch.Tensor, values: torch.Tensor) -> None:
    """Copy into a tensor that may be expanded, as a sum's gradient is: there all values of such a dimension agree."""
    once = [slice(0, 1) if step == 0 else slice(None) for step in x.stride()]
    x[tuple(once)].copy_(values[tuple(once)])


def first_word(recorded: torch.Tensor, replayed: torch.Tensor) -> tuple[Word, int]:
    """The first number that differs, and how many do."""
    differ = with_one_nan(recorded.contiguous()) != with_one_nan(replayed.contiguous())
    at = tuple(int(i) for i in differ.nonzero()[0])
    return Word(at, _shown(recorded[at]), _shown(replayed[at])), int(differ.sum())


def _plain(region: Region) -> str:
    """What a tensor without a name is."""
    return f"a tensor {list(region.shape)} in {region.dtype}"


def _changed(region: Region, left: tuple[int, int], found: tuple[int, int]) -> tuple[Word, int] | None:
    """The one number of a region that has changed, by two digests; None if more have."""
    word = changed_word(-(-region.nbytes // 4), left, found)
    if word is None:
        return None
    index, said = number_of(region.dtype, region.shape, *word)
    return Word(index, said, ""), 1


def _shown(x: torch.Tensor) -> str:
    """A number's bits and value."""
    size = x.element_size()
    bits = int(x.reshape(1).contiguous().view(_INTEGERS[size])) % (1 << 8 * size)
    value = x.item() if not x.is_floating_point() else f"{x.double().item():.9g}"
    return f"{bits:0{2 * size}X} ({value})"


# --- ops ---------------------------------------------------------------------------------------------


def _call(op: Op, read: list[torch.Tensor]) -> Any:
    """Run an op with its recorded arguments."""
    kwargs = {name: decoded(x, read) for name, x in op.kwargs.items()}
    try:
        return overload(op.name)(*decoded(op.args, read), **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise Refused(f"the op {op.name} refuses the recorded arguments ({reason.rstrip('.')}).") from error


def result_names(op: Op) -> list[str]:
    """What an op's results are called; "out" where it is not in `RESULTS`."""
    count = len(op.writes) - len(mutated(op.name, op.args, op.kwargs))
    known = RESULTS.get(op.name.removeprefix("twin::"), ("out",))
    return [known[i] if i < len(known) else f"result {i}" for i in range(count)]


def written_name(op: Op, i: int) -> str:
    """What the i-th tensor that an op wrote is called."""
    names = result_names(op)
    if i < len(names):
        return f"its result {names[i]}"
    return read_name(op, mutated(op.name, op.args, op.kwargs)[i - len(names)])


def read_name(op: Op, read: int) -> str:
    """What the tensor of that number among an op's reads is called."""
    return f"its argument {argument_name(op.name, op.args, op.kwargs, read)}"


def called(recording: Recording, access: Access, op: Op | None, name: Callable[[Op, int], str], i: int) -> str:
    """What a tensor is: its name in the model, if it has one, and what it is to an op that runs again."""
    known = name_of(recording, access)
    if op is None or op.kind == "fed":
        return known or _plain(access.region)
    return name(op, i) if known is None else f"{known} ({name(op, i)})"


def name_of(recording: Recording, access: Access) -> str | None:
    """The name in the model of a tensor, or None."""
    return recording.names.get((access.region.storage, access.region.offset))


def replay(recording: Recording, observe: Observer | None = None) -> Result:
    """Run a recorded step again; see `Replay.run`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))
        return Replay(recording).run(observe)
