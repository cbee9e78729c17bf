"""What a replay found, in words."""

from collections import Counter

from reference.inspect.recorded_step.file import Access, Op, Recording, Region, op_in_words
from reference.inspect.recorded_step.replay import Difference, Result

# Optimizers of torch's, and which of ours computes the same with bits that are defined.
_OURS = {"Adam": "FusedAdam", "AdamW": "FusedAdam", "SGD": "FusedSGD", "Adafactor": "te.optimizers.Adafactor"}
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::_scaled_mm")
_NAMED = 3  # names of ops


def is_gemm(op: Op) -> bool:
    """Whether an op multiplies matrices, attention aside."""
    return op.name.startswith("twin::gemm") or op.name in _PRODUCTS


def coverage(recording: Recording, result: Result) -> str:
    """How many ops and GEMMs of a step were judged, and which were not."""
    until = recording.ops if result.ended is None else recording.ops[: result.ended + 1]
    ops = [op for op in recording.ops if op.writes]  # the host reads numbers, too
    judged, gemms = sum(op.kind != "fed" for op in until), [op for op in ops if is_gemm(op)]
    good = sum(op.kind != "fed" and is_gemm(op) for op in until)
    text = f"{judged} of {len(ops)} ops judged"
    if gemms:
        text += f", all {good} GEMMs" if good == len(gemms) else f", {good} of {len(gemms)} GEMMs"
    rest = _not_judged(recording)
    if result.ended is not None and result.ended + 1 < len(recording.ops):
        rest.append(f"what came after op {result.ended}")
    return f"{text}; not judged: {_listed(rest)}" if rest else text


def _not_judged(recording: Recording) -> list[str]:
    """The ops that did not run again: the optimizer of torch's, then ops by their names."""
    fed = [op for op in recording.ops if op.kind == "fed" and op.writes]
    found = []
    classes = [name.rpartition(".")[2] for name in recording.about.get("optimizers", []) if name.startswith("torch.")]
    if classes and any(op.phase == "optimizer" for op in fed):
        ours = [_OURS[name] for name in classes if name in _OURS]
        found.append(f"torch's {' and '.join(classes)}" + (f" (use {' and '.join(ours)})" if ours else ""))
        fed = [op for op in fed if op.phase != "optimizer"]
    names = [name for name, _ in Counter(op.name for op in fed).most_common()]
    found += names[:_NAMED]
    if len(names) > _NAMED:
        count = len(names) - _NAMED
        found.append(f"{count} more of torch's ops" if count > 1 else names[_NAMED])
    return found


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def in_words(recording: Recording, found: Difference) -> str:
    """A difference as a sentence."""
    at = op_in_words(recording, found.op)
    if found.read:
        assert found.writer is not None
        since = op_in_words(recording, found.writer)
        left = "found" if _only_read(recording, found) else "left"
        text = f"{at} found other bits in {found.tensor} than {since} {left} there: its memory changed in between"
        what = "found {0.recorded}, left {0.replayed}"
    else:
        text = f"{at} computed other bits in {found.tensor}"
        what = "recorded {0.recorded}, replayed {0.replayed}"
    if found.word is None:
        return f"{text}; more than one word differs, and the recording has digests alone (record with ops='outputs')."
    words = "1 word differs" if found.words == 1 else f"{found.words:,} words differ, the first"
    said = what.format(found.word) if found.word.replayed else found.word.recorded
    return f"{text}; {words}, at {list(found.word.index)}: {said}."


def _only_read(recording: Recording, found: Difference) -> bool:
    """Whether the op before, which knew the tensor, had read it alone."""
    if found.writer is None or found.writer < 0:
        return False
    storages = [access.region.storage for access in recording.ops[found.writer].writes]
    return found.region.storage not in storages


def life(recording: Recording, region: Region) -> list[tuple[int, str, str, str]]:
    """What happened to a tensor: the op's number, what it did ("wrote", "read"), the op, and the digest, in words."""
    end = len(recording.ops)
    noted = [(-1, "is", access) for access in recording.start]
    for number, op in enumerate(recording.ops):
        noted += [(number, "read", access) for access in (*op.found, *op.reads)]
        noted += [(number, "wrote", access) for access in op.writes]
    noted += [(end, "is", access) for access in (*recording.end, *recording.found)]
    return [
        (number, how, op_in_words(recording, number), _digest(recording, access))
        for number, how, access in noted
        if access.region.storage == region.storage and access.region.overlaps(region)
    ]


def _digest(recording: Recording, access: Access) -> str:
    """The first digits of a digest, enough for eyes."""
    if access.digest is None:
        return "not known"
    return "".join(f"{part % 2**64:016X}"[-8:] for part in recording.digests[access.digest])
