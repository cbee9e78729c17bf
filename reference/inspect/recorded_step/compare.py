"""Two recordings of a step side by side: the first op and word in which they differ, and what feeds it.

Ops are taken in their order. The first that differs is one of four:

    another op         the runs' programs part
    other inputs       it reads other tensors than in the other run, or memory has changed, or the step began apart
    computed           its inputs are the same and its results are not

A recording with ops="outputs" has the words; with digests alone a single wrong word is still named.
"""

from collections.abc import Iterator
from typing import NamedTuple

from reference.inspect.parting import Comparison
from reference.inspect.recorded_step.digest import changed_word, number_of
from reference.inspect.recorded_step.file import Access, Op, Recording, op_in_words
from reference.inspect.recorded_step.replay import called, first_word, read_name, written_name

_SHOWN = 6  # tensors that feed an op


class _Side(NamedTuple):
    """A recording, what it is called, and which op wrote each storage last."""

    recording: Recording
    name: str
    writers: dict[int, int]

    def digest(self, access: Access) -> tuple[int, int] | None:
        return None if access.digest is None else self.recording.digests[access.digest]

    def source(self, access: Access) -> int:
        return self.writers.get(access.region.storage, -1)


Pair = tuple[Access, Access]


def compare(one: Recording, other: Recording, names: tuple[str, str]) -> Comparison:
    """Compare two recorded steps; `names` are what they are called."""
    a, b = _Side(one, names[0], {}), _Side(other, names[1], {})
    apart = _start(a, b)
    if apart is not None:
        return apart
    for number, (op, its) in enumerate(zip(one.ops, other.ops, strict=False)):
        found = _op(a, b, number, op, its)
        if found is not None:
            return found
        for side, ran in ((a, op), (b, its)):
            side.writers.update({access.region.storage: number for access in ran.writes})
    count = min(len(one.ops), len(other.ops))
    if len(one.ops) != len(other.ops):
        longer = max((a, b), key=lambda side: len(side.recording.ops))
        said = (
            f"Different bits: {longer.name} goes on with {op_in_words(longer.recording, count)}, where the other ends."
        )
        return Comparison(False, (said, _before(count, count)), op=count, who=names)
    for x, y in zip((*one.end, *one.found), (*other.end, *other.found), strict=False):
        if _differ(a, b, (x, y)):
            return _said(a, b, count, (x, y), "memory changed before the end of the step", _called(a, None, x))
    words = sum(access.region.words for op in one.ops for access in op.writes)
    return Comparison(True, (f"The same bits: {count} ops, {words:,} words of results, in {names[0]} and {names[1]}.",))


def _start(a: _Side, b: _Side) -> Comparison | None:
    """What had other bits when the step began."""
    named = {b.recording.names.get(access.region[:2]): access for access in b.recording.start}
    differs = []
    for access in a.recording.start:
        name = a.recording.names.get(access.region[:2])
        if name in named and _differ(a, b, (access, named[name])):
            differs.append((access, named[name]))
    if not differs:
        return None
    more = f", and {len(differs) - 1} more tensors" if len(differs) > 1 else ""
    what = _called(a, None, differs[0][0])
    return _said(a, b, -1, differs[0], f"the steps began with other bits in {what}{more}", what)


def _op(a: _Side, b: _Side, number: int, op: Op, its: Op) -> Comparison | None:
    """What differs in an op, or None."""
    where = op_in_words(a.recording, number)
    if (op.name, len(op.reads), len(op.writes)) != (its.name, len(its.reads), len(its.writes)):
        said = f"{a.name} runs {where}, and {b.name} {op_in_words(b.recording, number)}"
        lines = (f"Different bits: {said}; the programs part.", _before(number, len(a.recording.ops)))
        return Comparison(False, lines, op=number, who=(a.name, b.name))
    written = list(zip(op.writes, its.writes, strict=True))
    for i, pair in _reads(op, its):
        if not _differ(a, b, pair):
            continue
        what = _called(a, op, pair[0], i)
        sources = a.source(pair[0]), b.source(pair[1])
        if sources[0] != sources[1] or pair[0].region[1:] != pair[1].region[1:]:
            from_a, from_b = (_part(side, access) for side, access in zip((a, b), pair, strict=True))
            how = f"{where} reads other tensors as {what}: in {a.name} from {from_a}, in {b.name} from {from_b}"
            result = next((j for j, one in enumerate(written) if _differ(a, b, one)), None)
            if result is not None:  # its result says more than an input, which both runs have somewhere
                return _said(a, b, number, written[result], how, _called(a, op, written[result][0], result, True), op)
        elif sources[0] < 0:
            how = f"{where} read other bits in {what}, which is an input of the step"
        else:
            how = f"{where} found other bits in {what}, which {op_in_words(a.recording, sources[0])} had left the same"
        return _said(a, b, number, pair, how, what, op)
    for i, pair in enumerate(written):
        if _differ(a, b, pair):
            what = _called(a, op, pair[0], i, True)
            return _said(a, b, number, pair, f"{where} computed other bits in {what} from the same inputs", what, op)
    return None


def _part(side: _Side, access: Access) -> str:
    """Whose result a tensor is, and which part of it."""
    at = access.region.offset
    return op_in_words(side.recording, side.source(access)) + (f" (from its number {at} on)" if at else "")


def _reads(op: Op, its: Op) -> Iterator[tuple[int, Pair]]:
    yield from enumerate(zip(op.reads, its.reads, strict=True))
    if len(op.found) == len(its.found):
        yield from ((-1, pair) for pair in zip(op.found, its.found, strict=True))


def _differ(a: _Side, b: _Side, pair: Pair) -> bool:
    one, other = a.digest(pair[0]), b.digest(pair[1])
    return one is not None and other is not None and one != other


def _called(side: _Side, op: Op | None, access: Access, i: int = -1, written: bool = False) -> str:
    return called(side.recording, access, op if i >= 0 else None, written_name if written else read_name, i)


def _said(a: _Side, b: _Side, number: int, pair: Pair, how: str, what: str, op: Op | None = None) -> Comparison:
    index, word = _word(a, b, pair)
    lines = [f"Different bits: {how}.", f"{word[0].upper()}{word[1:]}."]
    if op is not None:
        fed = [
            f"{_called(a, op, access, i)}, from {op_in_words(a.recording, a.source(access))}"
            for i, access in ((*enumerate(op.reads), *((-1, one) for one in op.found)))
            if access.digest is not None
        ]
        more = f"; and {len(fed) - _SHOWN} more" if len(fed) > _SHOWN else ""
        lines.append(f"It reads {'; '.join(fed[:_SHOWN])}{more}." if fed else "It reads no tensor.")
    lines.append(_before(number, len(a.recording.ops)))
    return Comparison(False, tuple(lines), None, number, what, index, (a.name, b.name))


def _word(a: _Side, b: _Side, pair: Pair) -> tuple[tuple[int, ...] | None, str]:
    """The first number that differs, and in words."""
    region = pair[0].region
    whole = [None if x.whole is None else side.recording.tensors[x.whole] for side, x in zip((a, b), pair, strict=True)]
    if whole[0] is not None and whole[1] is not None and whole[0].shape == whole[1].shape:
        word, count = first_word(whole[0], whole[1])
        words = "1 word differs" if count == 1 else f"{count:,} words differ, the first"
        return word.index, f"{words}, at {list(word.index)}: {a.name} has {word.recorded}, {b.name} {word.replayed}"
    one, other = a.digest(pair[0]), b.digest(pair[1])
    assert one is not None
    assert other is not None
    found = changed_word(-(-region.nbytes // 4), one, other)
    if found is None:
        return None, "more than one word differs, and the files have digests alone (record with ops='outputs')"
    index, said = number_of(region.dtype, region.shape, *found)
    return index, f"1 word differs, at {list(index)}: from {a.name} to {b.name} {said}"


def _before(number: int, count: int) -> str:
    return f"The {number} ops before, of {count}, are the same." if number > 0 else "Nothing before it was compared."
