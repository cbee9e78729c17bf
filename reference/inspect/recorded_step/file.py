"""The file of a recorded step: safetensors, in which `program` is a JSON text (UTF-8) and everything else a tensor.

    metadata    twin_engine = "recorded step", version, and the checksums of `reference.checkpoints.checked_safetensors`
    program     ops, in the order in which they ran; storages; names; the model's structure; recipes; provenance
    digests     int64 [n, 2]: the digests (`reference.inspect.recorded_step.digest`) that `program` refers to by number
    random/...  torch's generators and the layers' dropout states, as the step began (`reference.random.get_state`)
    model/...   whole tensors that the step read, by their names in the model
    op/...      other whole tensors: op/<op's number>/read/<number>, op/<op's number>/write/<number>

A tensor of an op is a `Region` of a storage, so views need no ops. An op reads what earlier ops wrote; what no recorded
op wrote, a weight for instance, or a result of torch's, is in the file ("fed"). Of what an op that is not run again
reads the file has a digest alone ("found"), to be compared with the digest that was left there.

Versions 1 (without checksums) and 2 (without `found`) are read, too.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reference.checkpoints import checked_safetensors
from reference.inspect.recorded_step.digest import digest, locate
from reference.inspect.recorded_step.ops import DTYPES, EXACT, SAFE, check_arguments, dtype_name, is_defined, mutated
from reference.support import files

FORMAT, VERSION = "recorded step", "3"


class Region(NamedTuple):
    """A strided part of a storage; offset and strides in elements."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def words(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.words * DTYPES[self.dtype].itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """torch's dtype."""
        return DTYPES[self.dtype]

    def begin(self) -> int:
        """The first byte of the storage in it."""
        return self.offset * self.torch_dtype.itemsize

    def end(self) -> int:
        """The first byte of the storage behind it."""
        if not self.words:
            return 0
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.torch_dtype.itemsize

    def overlaps(self, other: "Region") -> bool:
        """Whether they may have a byte of their storage in common."""
        return self.begin() < other.end() and other.begin() < self.end()

    def place(self) -> "Region":
        """Without the shape, where the elements are side by side: a digest does not depend on it."""
        dense = torch.empty(self.shape, dtype=torch.uint8, device="meta").stride()
        if all(n == 1 or a == b for n, a, b in zip(self.shape, self.stride, dense, strict=True)):
            return self._replace(shape=(self.words,), stride=(1,))
        return self

    def is_whole(self, nbytes: int) -> bool:
        """Whether it covers a storage of that many bytes."""
        return self.offset == 0 and self.nbytes == nbytes == self.end()


class Access(NamedTuple):
    """A tensor that an op read or wrote.

    Attributes:
        digest: the number of its digest; None where its content is undefined, or is not known at that time.
        whole: the name of the whole tensor in the file, or None.
    """

    region: Region
    digest: int | None
    whole: str | None = None

    @staticmethod
    def of(entry: Any) -> "Access":
        """From JSON."""
        (storage, offset, shape, stride, dtype), number, whole = entry
        region = Region(int(storage), int(offset), tuple(map(int, shape)), tuple(map(int, stride)), str(dtype))
        return Access(region, None if number is None else int(number), None if whole is None else str(whole))


@dataclass
class Op:
    """One op of a step.

    Attributes:
        kind: "twin" (its definition runs again), "torch" (torch's op runs again) or "fed" (it does not).
        name: as in torch.ops, such as "twin::cast".
        at: the path of its module in the model; "" where that is not known.
        phase: "forward" or "backward"; "optimizer" in an optimizer's step; "" outside of both.
        args, kwargs: plain values; {"read": i} is the i-th of `reads`, {"dtype": ...} a dtype. None where it is "fed".
        reads, writes: its tensors. Writes are the results, then the arguments that it changes. Where it is "fed",
            `reads` are those whose content replay has.
        found: memory that it read and whose content replay does not have: digests alone.
    """

    kind: str
    name: str
    at: str = ""
    phase: str = ""
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    found: list[Access] = field(default_factory=list)


@dataclass
class Recording:
    """A recorded step.

    Attributes:
        ops: in the order in which they ran.
        start: named tensors as the step began; their content is known where an op reads it.
        end: named tensors, gradients among them, as the step ended.
        found: those of them whose content replay does not have.
        storages: bytes of each.
        names: what a region is in the model: `[storage, offset]` → name.
        about: the model's structure, recipes and provenance.
        digests, tensors: what the program refers to.
        checked: whether every byte of the file was checked; version 1 of the format has no checksums.
    """

    ops: list[Op] = field(default_factory=list)
    start: list[Access] = field(default_factory=list)
    end: list[Access] = field(default_factory=list)
    found: list[Access] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    names: dict[tuple[int, int], str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    digests: list[tuple[int, int]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    checked: bool = True

    def accesses(self) -> Iterator[Access]:
        """Every one."""
        yield from self.start
        for op in self.ops:
            yield from op.reads
            yield from op.writes
            yield from op.found
        yield from self.end
        yield from self.found

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all (`reference.support.files`)."""
        program = {
            "ops": [asdict(op) for op in self.ops],
            **{name: getattr(self, name) for name in ("start", "end", "found", "storages", "about")},
            "names": [[*where, name] for where, name in self.names.items()],
        }
        text = json.dumps(program, separators=(",", ":")).encode()
        digests = torch.tensor(self.digests, dtype=torch.int64, device="cpu").reshape(-1, 2)
        code = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        tensors = {"program": code, "digests": digests, **self.tensors}
        metadata = {"twin_engine": FORMAT, "version": VERSION, "sha256": hashlib.sha256(text).hexdigest()}
        checked_safetensors.write(path, tensors, metadata, safe_name)


def safe_name(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype."""
    return SAFE[dtype_name(dtype)]


def read(path: str | Path) -> Recording:
    """The recording in a file.

    Raises:
        FileNotFoundError: there is no such file.
        reference.support.files.Damaged: it is no recording, of another version, or damaged. One sentence says which.
    """
    tensors, metadata, checked = checked_safetensors.read(Path(path), FORMAT, VERSION, "te.record")
    for name in ("program", "digests"):
        if name not in tensors:
            raise files.Damaged(f"{path} is damaged: it has no {name!r}.")
    text = tensors.pop("program").numpy().tobytes()
    if hashlib.sha256(text).hexdigest() != metadata.get("sha256"):
        raise files.Damaged(f"{path} is damaged: its program is not the one that was written.")
    try:
        found = _parsed(json.loads(text), tensors.pop("digests"), tensors)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise files.Damaged(f"{path} is damaged: {_reason(error)}.") from error
    found.checked = checked
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    return str(error).rstrip(".")


def _parsed(program: Any, digests: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Recording:
    """The recording, in which every reference has been followed."""
    ops = [
        Op(**{**entry, **{name: _each(entry[name]) for name in ("reads", "writes", "found") if name in entry}})
        for entry in program["ops"]
    ]
    made = Recording(
        ops,
        _each(program["start"]),
        _each(program["end"]),
        _each(program.get("found", [])),
        [int(n) for n in program["storages"]],
        {(int(storage), int(offset)): str(name) for storage, offset, name in program["names"]},
        dict(program["about"]),
        [(int(one), int(two)) for one, two in digests.tolist()],
        tensors,
    )
    for op in ops:
        _check_op(op)
    for access in made.accesses():
        _check(access, made)
    for name in ("date", "gpu", "torch"):
        made.about["provenance"][name]
    return made


def _check_op(op: Op) -> None:
    """Refuse an op that cannot run again, and arguments and results that do not fit it."""
    known = {"twin": is_defined(op.name.removeprefix("twin::")), "torch": op.name in EXACT, "fed": True}
    if not known.get(op.kind, False):
        raise ValueError(f"it has the op {op.name!r} of the kind {op.kind!r}, which this version does not know")
    if op.kind == "fed":
        return
    check_arguments(op.name, [*op.args, *op.kwargs.values()], len(op.reads))
    if len(mutated(op.name, op.args, op.kwargs)) > len(op.writes):
        raise ValueError(f"{op.name} changes more tensors than are noted")


def _each(entries: Any) -> list[Access]:
    return [Access.of(entry) for entry in entries]


def _check(access: Access, made: Recording) -> None:
    """Refuse a region outside of its storage, an unknown digest, and a whole tensor that is not there or not whole."""
    region, number, whole = access
    if region.dtype not in DTYPES or len(region.shape) != len(region.stride):
        raise ValueError(f"a tensor is {region.dtype} {list(region.shape)} with strides {list(region.stride)}")
    if min((*region.shape, *region.stride, region.offset, region.storage), default=0) < 0:
        raise ValueError(f"a tensor is {list(region.shape)} at {region.offset} with strides {list(region.stride)}")
    if region.storage >= len(made.storages):
        raise ValueError(f"there is no storage {region.storage}")
    if region.end() > made.storages[region.storage]:
        raise ValueError(
            f"a tensor of storage {region.storage} reaches beyond its {made.storages[region.storage]} bytes"
        )
    if number is not None and not 0 <= number < len(made.digests):
        raise ValueError(f"it has no digest of number {number}")
    if whole is None:
        return
    x = made.tensors[whole]
    if x.dtype != region.torch_dtype or tuple(x.shape) != region.shape:
        raise ValueError(
            f"{whole!r} is {dtype_name(x.dtype)} {list(x.shape)}, and {region.dtype} {list(region.shape)} was meant"
        )
    if number is not None and tuple(digest(x).tolist()) != made.digests[number]:
        word = locate(x, made.digests[number])
        where = "" if word is None else f", which says {word.word % 2**32:08X} of its 32-bit word {word.position}"
        raise ValueError(f"{whole!r} does not have the digest that was recorded for it{where}")


def op_in_words(recording: Recording, number: int) -> str:
    """Which op of the step a number is."""
    if number < 0:
        return "the start of the step"
    if number >= len(recording.ops):
        return "the end of the step"
    op = recording.ops[number]
    where = ", ".join(part for part in (op.at, op.phase) if part)
    return f"op {number}, {op.name}" + (f" ({where})" if where else "")
