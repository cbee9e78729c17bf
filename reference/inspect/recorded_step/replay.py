"""A recorded step again, op by op on a CPU, and the first number that differs.

Replay has the step's storages as bytes. For each op it takes the tensors that the op read out of them, compares their
digests with the recorded ones, runs the op's definition, and compares what the op wrote:

    the digest of an input differs     its content changed between the op that wrote it and this one: a memory fault
    the digest of an output differs    this op computed other bits

Where the recording says what the other device had (a whole tensor, or a digest from which the one wrong word follows),
replay goes on with that, so what follows is judged by itself. Where it does not, replay ends.

NaNs of 16 and 32 bits are equal, whatever their bits.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from reference.inspect.recorded_step.digest import _INTEGERS, digest, locate, with_one_nan, with_word
from reference.inspect.recorded_step.file import Access, Op, Recording, Region
from reference.inspect.recorded_step.ops import RESULTS, argument_name, decoded, mutated, overload, tensors_of

Observer = Callable[[int, Op, list[torch.Tensor], list[torch.Tensor]], None]


@dataclass(frozen=True)
class Word:
    """The first number in which two tensors differ; `recorded` is the other device's, `replayed` this CPU's."""

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
        read: whether the op read it.
        writer: number of the op that wrote it before; -1 for the start of the step. None where it is an output.
        word: the first number; None where the recording does not say.
        words: how many differ; None where the recording does not say.
    """

    op: int
    tensor: str
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
        differences: in their order.
        ended: the number of the op at which replay could not go on, or None.
    """

    ops: int = 0
    words: int = 0
    fed: int = 0
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
        self._last: dict[Region, tuple[int, int]] = {}  # the last digest that was noted, and the number of its op
        self._until: dict[int, int] = {}
        for number, op in enumerate(recording.ops):
            self._until |= {access.region.storage: number for access in (*op.reads, *op.writes)}
        self._until |= {access.region.storage: len(recording.ops) for access in recording.end}

    def run(self, observe: Observer | None = None) -> Result:
        """Run every op; `observe` gets each twin op's number, the op, what it read, and what it wrote.

        Raises:
            Refused: an op refuses its recorded arguments, or this machine's memory does not suffice.
        """
        recording, result = self.recording, self.result
        for access in recording.start:
            self._note(access, -1)
        with torch.no_grad():
            for number, op in enumerate(recording.ops):
                try:
                    goes_on = self._step(number, op, observe)
                except RuntimeError as error:  # torch's: no memory, or a file that describes impossible tensors
                    reason = str(error).split("\n")[0].rstrip(".")
                    raise Refused(f"{op_in_words(recording, number)} cannot run here ({reason}).") from error
                if not goes_on:
                    result.ended = number
                    return result
                for storage in [one for one in self._bytes if self._until.get(one, -1) <= number]:
                    del self._bytes[storage]
            for access in recording.end:
                if self._input(len(recording.ops), access, self._name(access)) is None:
                    result.ended = len(recording.ops)
                    break
        return result

    def _step(self, number: int, op: Op, observe: Observer | None) -> bool:
        """Run an op; return whether replay can go on."""
        if op.kind == "fed":
            self.result.fed += 1
            for access in op.writes:
                self._note(access, number)
            return True
        read = []
        for i, access in enumerate(op.reads):
            x = self._input(number, access, read_name(op, i))
            if x is None:
                return False
            read.append(x)
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
            if not self._compare(number, access, x, written_name(op, i), None):
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
        self._writers[access.region.storage] = number
        if access.digest is not None:
            self._last[access.region.place()] = (access.digest, number)

    def _input(self, number: int, access: Access, what: str) -> torch.Tensor | None:
        """What an op reads, as the other device read it; None if that is not known."""
        region = access.region
        x = self._view(region)
        if access.digest is None:
            return x
        writer = self._writers.get(region.storage, -1)
        if access.whole is None:
            return x if self._compare(number, access, x, what, writer) else None
        _put(x, self.recording.tensors[access.whole])
        digested, by = self._last.get(region.place(), (access.digest, -2))
        self._last[region.place()] = (access.digest, number)
        if by == writer and self.recording.digests[digested] != self.recording.digests[access.digest]:
            before = locate(x, self.recording.digests[digested])
            other = None if before is None else with_word(x, before)
            self._differs(number, what, writer, None if other is None else (x, other))
        return x

    def _compare(self, number: int, access: Access, x: torch.Tensor, what: str, writer: int | None) -> bool:
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
        self._differs(number, what, writer, None if other is None else (other, x))
        if other is not None:
            _put(x, other)
        return other is not None

    def _differs(
        self, number: int, what: str, writer: int | None, pair: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        """Note a difference; `pair` is the recorded tensor and the replayed one, if both are known."""
        word, words = (None, None) if pair is None else _first(*pair)
        self.result.differences.append(Difference(number, what, writer is not None, writer, word, words))

    def _name(self, access: Access) -> str:
        found = self.recording.names.get((access.region.storage, access.region.offset))
        return "a tensor" if found is None else found


def _put(x: torch.Tensor, values: torch.Tensor) -> None:
    """Copy into a tensor that may be expanded, as a sum's gradient is: there all values of such a dimension agree."""
    once = [slice(0, 1) if step == 0 else slice(None) for step in x.stride()]
    x[tuple(once)].copy_(values[tuple(once)])


def _first(recorded: torch.Tensor, replayed: torch.Tensor) -> tuple[Word, int]:
    """The first number that differs, and how many do."""
    differ = with_one_nan(recorded.contiguous()) != with_one_nan(replayed.contiguous())
    at = tuple(int(i) for i in differ.nonzero()[0])
    return Word(at, _shown(recorded[at]), _shown(replayed[at])), int(differ.sum())


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


def replay(recording: Recording, observe: Observer | None = None) -> Result:
    """Run a recorded step again; see `Replay.run`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))
        return Replay(recording).run(observe)


# --- in words ----------------------------------------------------------------------------------------


def op_in_words(recording: Recording, number: int) -> str:
    """Which op of the step a number is."""
    if number < 0:
        return "the start of the step"
    if number >= len(recording.ops):
        return "the end of the step"
    op = recording.ops[number]
    where = ", ".join(part for part in (op.at, op.phase) if part)
    return f"op {number}, {op.name}" + (f" ({where})" if where else "")


def in_words(recording: Recording, found: Difference) -> str:
    """A difference as a sentence."""
    at = op_in_words(recording, found.op)
    if found.read:
        assert found.writer is not None
        since = op_in_words(recording, found.writer)
        text = f"{at} found other bits in {found.tensor} than {since} left there: its memory changed in between"
        what = "found {0.recorded}, left {0.replayed}"
    else:
        text = f"{at} computed other bits in {found.tensor}"
        what = "recorded {0.recorded}, replayed {0.replayed}"
    if found.word is None:
        return f"{text}; more than one word differs, and the recording has digests alone (record with ops='outputs')."
    words = "1 word differs" if found.words == 1 else f"{found.words:,} words differ, the first"
    return f"{text}; {words}, at {list(found.word.index)}: {what.format(found.word)}."
