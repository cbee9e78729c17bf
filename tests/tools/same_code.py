"""Shows, without a GPU, that kernels have the same machine code in two trees, configuration by configuration.

    PYTHONPATH=. python tests/tools/same_code.py --before main norm norm_backward    # some kernel files
    PYTHONPATH=. python tests/tools/same_code.py --before ../old --write             # all; note it in docs/results

Each tree lists its configurations and compiles them itself (`optimized.defaults`, and the benchmarks' kernels). The
lists are compared place by place, so that files and macros may be renamed; configurations that only the second one has
are left out.

First the sources are compared, with their includes in place, as the words that a compiler reads: where only comments,
blank space or the names and folders of files differ, nothing is compiled.

Then the PTX is compared: of equal PTX the same ptxas makes equal machine code. Left out are comments, constants that
nothing reads and, since ptxas does not look at them, the names of what is internal. Where PTX differs, and for the
first and the last configuration of each file in any case (with `--whole` for all), cubins are compared: code,
registers, constants, shared memory and arguments of each function.

NVRTC is not deterministic: of a few configurations it makes now one code, now another, from the same source. So what
differs is compiled a few times, and is equal if both sides have a code in common.

`--write` notes in docs/results/same_code.json the files of which all configurations are equal, with both hashes of
their sources. `measure.outdated` then takes a result of the older hash for one of the newer.
"""

import argparse
import datetime
import functools
import hashlib
import importlib
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_KEPT = (
    ".text.",
    ".nv.info",
    ".nv.constant",
    ".nv.shared.",
    ".nv.local.",
    ".rel.text",
    ".rela.text",
    ".rel.nv",
    ".rela.nv",
)
_NOBITS = 8
_ARGUMENTS = 0x0A  # the attribute that says where a function's arguments lie: a symbol, and a place
ATTEMPTS = 5
_MEMORY = "cubin and constants in memory"
_FORM = 4  # of what is kept in the cache: another number with every change of `plain_ptx` and `sections`
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_GLOBAL = re.compile(r"^\.(?:global|const) [^;=\[]*?([\w$]+)(?:\[\d*\])?(?: = [^;]*)?;$", re.MULTILINE)


def plain_ptx(text: str) -> tuple[str, bool]:
    """PTX without comments and unread constants, with internal names and labels numbered in their order.

    And whether it reads a constant that lies in memory.
    """
    text = re.sub(r"//[^\n]*", "", text)
    words: dict[str, int] = {}
    for word in re.findall(r"[\w$]+", text):
        words[word] = words.get(word, 0) + 1
    text = _GLOBAL.sub(lambda found: "" if words[found[1]] == 1 else found[0], text)
    names: dict[str, str] = {}
    text = re.sub(r"_Z\w+|\$L_\w+", lambda found: names.setdefault(found[0], f"name{len(names)}"), text)
    return re.sub(r"\s+", " ", text).strip(), _GLOBAL.search(text) is not None


_WORD = re.compile(
    r"""R"(?P<end>[^(\s]*)\(.*?\)(?P=end)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[A-Za-z_]\w*"""
    r"""|\.?\d(?:[eEpP][-+]|'?[\w.])*|<<=|>>=|\.\.\.|->\*?|::|\+\+|--|<<|>>|[-+*/%&|^=!<>]=|&&|\|\||\S""",
    re.DOTALL,
)


def words(texts: Mapping[str, str], code_of: Callable[[str], str]) -> str | None:
    """The words of a program (`compiler.program`), a line for each, and one for each line of the preprocessor.

    None where the places of words in their files are part of the code.
    """
    first, known = next(iter(texts)), {}

    def text_of(name: str) -> str:
        known[name] = len(known)
        return code_of(_INCLUDE.sub(included, texts[name]))

    def included(line: re.Match[str]) -> str:
        name = line[1]
        if name not in texts or name.startswith("cuda:"):
            return line[0]
        return f"#include {known[name]}" if name in known else f"#include\n{text_of(name)}\n#included"

    lines = text_of(first).replace("\\\n", " ").splitlines()
    if any(re.search(r"\b__(LINE|FILE|COUNTER)__\b", line) for line in lines):
        return None
    found: list[str] = []
    for line in lines:
        read = list(_WORD.finditer(line))
        if line.lstrip().startswith("#"):  # of a macro it matters whether there is a blank before a parenthesis
            parts = (" " * (a.end() < b.start()) + b[0] for a, b in itertools.pairwise(read))
            found.append(read[0][0] + "".join(parts))
        else:
            found += [word[0] for word in read]
    return "\n".join(found)


def sections(cubin: bytes, memory: bool) -> dict[str, str]:
    """What of a cubin decides how its functions run: digests of their sections, by name.

    `memory`: whether the code reads constants that lie in memory. Otherwise the table of their addresses is left out.
    """
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    rows = [struct.unpack_from("<IIQQQQIIQQ", cubin, headers + size * i) for i in range(count)]

    def text_at(table: int, at: int) -> str:
        start = rows[table][4] + at
        return cubin[start : cubin.index(b"\0", start)].decode()

    named = [(text_at(names_at, row[0]), row) for row in rows]
    symbols: list[
        tuple[str, bytes]
    ] = []  # names, and what variables hold: each source has constants that no code reads
    for name, row in named:
        if name == ".symtab":
            for at in range(row[4], row[4] + row[5], 24):
                title, _, _, place, offset, length = struct.unpack_from("<IBBHQQ", cubin, at)
                held = rows[place] if place < count else None
                data = b"" if held is None or held[1] == _NOBITS else cubin[held[4] + offset :][:length]
                variable = held is not None and named[place][0].startswith(".nv.global")
                symbols.append((text_at(row[6], title), data if variable else b""))
    found = {}
    for name, row in named:
        if not name.startswith(_KEPT) or (not memory and name.endswith(".nv.constant4")):
            continue
        _, kind, flags, _, at, length, _, info, align, entry = row
        content = b"" if kind == _NOBITS else cubin[at : at + length]
        if name == ".nv.info":  # attributes of functions: registers, frames, stacks
            content = b"".join(sorted(_attributes(content, symbols)))
        elif name.startswith(".nv.info."):  # attributes of one function: arguments, barriers, threads
            content = b"".join(_attributes(content, symbols, _ARGUMENTS))
        elif name.startswith(".rel"):
            content = b"".join(_relocations(content, entry, symbols))
        registers = info >> 24 if name.startswith(".text.") else 0
        about = f"{kind} {flags} {length if kind == _NOBITS else len(content)} {align} {registers}"
        found[name] = hashlib.sha256(about.encode() + content).hexdigest()
    return found


def _named(symbol: tuple[str, bytes]) -> bytes:
    """A symbol by its name, if it is not internal, and by what it holds."""
    return (b"" if symbol[0].startswith("_Z") else symbol[0].encode()) + symbol[1]


def _relocations(content: bytes, entry: int, symbols: Sequence[tuple[str, bytes]]) -> Iterable[bytes]:
    """The records of a relocation section, with symbols in place of their numbers."""
    for at in range(0, len(content), entry):
        offset, kind, symbol = struct.unpack_from("<QII", content, at)
        yield struct.pack("<QI", offset, kind) + _named(symbols[symbol]) + content[at + 16 : at + entry]


def _attributes(content: bytes, symbols: Sequence[tuple[str, bytes]], only: int | None = None) -> Iterable[bytes]:
    """The records of a section with attributes, with symbols in place of their numbers; or those of `only` one kind."""
    at = 0
    while at < len(content):
        form, attribute, size = struct.unpack_from("<BBH", content, at)
        end = at + 4 + (size if form == 4 else 0)
        record = content[at:end]
        if form == 4 and size == 8 and only in (None, attribute):
            record = record[:4] + _named(symbols[struct.unpack_from("<I", record, 4)[0]]) + record[8:]
        yield record
        at = end


# What follows runs in each tree, with its own `optimized`.


def _module(now: str, before: str) -> Any:
    """The module of the tree that is imported, by its name `before` where modules do not stand in rooms yet."""
    try:
        return importlib.import_module(now)
    except ModuleNotFoundError:
        return importlib.import_module(before)


def listed() -> list[tuple[str, dict[str, int | str]]]:
    """Every configuration of the tree that is imported, in its order."""
    from optimized import defaults

    ladder = _module("optimized.bench.layers.ladder", "optimized.bench.ladder")
    return [*defaults.configurations(), *ladder.CONFIGURATIONS]


def _made(kernel: str, defines: dict[str, int | str], kind: str, attempt: int = 0) -> dict[str, str]:
    """The digests of a configuration's PTX, or of its cubin's sections; each `attempt` compiles it anew."""
    files = _module("reference.support.files", "reference.files")
    compiler = _module("optimized.cuda.compiler", "optimized.compiler")

    about = [kind, kernel, compiler.source_hash(kernel), sorted(defines.items()), compiler.FLAGS]
    about += [compiler.nvrtc_build(), _FORM]
    about += [attempt] if attempt else []
    name = f"{kernel.replace('/', '-')}-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.json"
    kept = files.kept("same_code", name)
    if kept is not None:
        found: dict[str, str] = json.loads(kept)
        return found
    if kind != "ptx":
        if attempt:
            cubin = compiler._compile(kernel, defines, compiler.program(kernel))[0]
        else:
            cubin = compiler.build(kernel, defines, announced=False).cubin
        found = sections(cubin, kind == _MEMORY)
    else:
        flags, fetch = compiler.FLAGS, compiler._fetch
        compiler.FLAGS = ("--gpu-architecture=compute_90a", *(f for f in flags[1:] if "ptxas" not in f))
        compiler._fetch = lambda handle, what: fetch(handle, "PTX" if what == "CUBIN" else what)
        try:
            text = compiler._compile(kernel, defines, compiler.program(kernel))[0]
        finally:
            compiler.FLAGS, compiler._fetch = flags, fetch
        plain, memory = plain_ptx(text.rstrip(b"\0").decode())
        found = {"ptx": hashlib.sha256(plain.encode()).hexdigest(), "kind": _MEMORY if memory else "cubin"}
    files.keep("same_code", name, json.dumps(found).encode())
    return found


def work() -> None:
    """Answer the requests on stdin, one a line: "list", or a configuration and what of it."""
    compiler = _module("optimized.cuda.compiler", "optimized.compiler")
    compiler.source_hash = functools.cache(compiler.source_hash)
    print(json.dumps(str(compiler.KERNELS.parents[1])), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request == "list":
            configurations = listed()
            hashes = {kernel: compiler.source_hash(kernel) for kernel, _ in configurations}
            read = {kernel: words(compiler.program(kernel), compiler.code_of) for kernel in hashes}
            digests = {k: text and hashlib.sha256(text.encode()).hexdigest() for k, text in read.items()}
            answer: Any = {"listed": configurations, "hashes": hashes, "nvrtc": compiler.nvrtc_version()}
            answer["words"] = digests
        else:
            answer = _made(*request)
        print(json.dumps(answer), flush=True)


# The rest runs in the tree of this file.


class Tree:
    """A process that has imported the `optimized` of a folder."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--work"]
        self._process = subprocess.Popen(
            command, env=environment, cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        imported = self._answer()
        if Path(imported) != folder.resolve():
            raise SystemExit(f"{folder}: what is imported there is {imported}.")

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a tree does not compile; see above.")
        return json.loads(line)

    def ask(self, *requests: Any) -> list[Any]:
        """The answers to requests."""
        assert self._process.stdin is not None
        found = []
        for request in requests:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            found.append(self._answer())
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _given(configuration: Any) -> dict[str, Any]:
    return {name: value for name, value in dict(configuration[1]).items() if value != 0}


def paired(old: Sequence[Any], new: Sequence[Any], kernels: Sequence[str]) -> list[tuple[Any, Any]]:
    """Configurations of both trees, those of `kernels` or all: of each file in the order of its list.

    A file's new options are left out; a macro that is 0 and one that is not given are the same. Where a file has
    another name, the lists are read place by place.
    """
    if {kernel for kernel, _ in old} <= {kernel for kernel, _ in new}:
        names = [one for one in dict.fromkeys(kernel for kernel, _ in old) if not kernels or one in kernels]
        lists = [([one for one in old if one[0] == name], [one for one in new if one[0] == name]) for name in names]
    else:
        lists = [(list(old), list(new))]
    found: list[tuple[Any, Any]] = []
    for before, now in lists:
        here = [(one, _given(one)) for one in now]
        known = [one for given in map(_given, before) for one, its in here if its == given]
        now = known if len(known) == len(before) else now
        if len(before) != len(now):
            raise SystemExit(f"the trees list {len(before)} and {len(now)} configurations of {now[0][0]}.")
        found += zip(before, now, strict=True)
    return [pair for pair in found if not kernels or {pair[0][0], pair[1][0]} & set(kernels)]


def compare(trees: tuple[Tree, Tree], kernels: Sequence[str], *, whole: bool, jobs: int) -> dict[str, Any]:
    """Compare configurations of both trees.

    Returns:
        Of each kernel file of the first tree: its file in the second one, both hashes, how many configurations it has,
        of how many the sources and the PTX were equal, of how many cubins were compared, and which differ.
    """
    (old,), (new,) = (tree.ask("list") for tree in trees)
    chosen = paired(old["listed"], new["listed"], kernels)

    def made(what: Sequence[str], pairs: Sequence[Any]) -> list[tuple[dict[str, str], dict[str, str]]]:
        """Both sides of each pair, equal ones if one of a few attempts on each side gives them."""

        def side(which: int, of: Sequence[int], attempt: int) -> list[Any]:
            return trees[which].ask(*((*pairs[one][which], what[one], attempt) for one in of))

        found: list[Any] = [None] * len(pairs)
        seen: list[tuple[list[Any], list[Any]]] = [([], []) for _ in pairs]
        left: Sequence[int] = range(len(pairs))
        for attempt in range(ATTEMPTS):
            with ThreadPoolExecutor(jobs) as pool:
                sides = list(pool.map(lambda which: side(which, left, attempt), (0, 1)))  # noqa: B023
            for one, *both in zip(left, *sides, strict=True):
                for known, new in zip(seen[one], both, strict=True):
                    known.append(new)
                common = next((each for each in seen[one][0] if each in seen[one][1]), None)
                found[one] = tuple(both) if common is None else (common, common)
            left = [one for one in left if found[one][0] != found[one][1]]
        return found

    def same_words(pair: Any) -> bool:
        (before, macros), (now, macros_now) = pair
        read = old.get("words", {}).get(before)
        return read is not None and read == new["words"].get(now) and macros == macros_now

    unlike = [place for place, pair in enumerate(chosen) if not same_words(pair)]
    ptx = dict(zip(unlike, made(["ptx"] * len(unlike), [chosen[place] for place in unlike]), strict=True))
    equal_ptx = {place: before == now for place, (before, now) in ptx.items()}
    places: dict[str, list[int]] = {}
    for place, (before, _) in enumerate(chosen):
        places.setdefault(before[0], []).append(place)
    ends = {place for several in places.values() for place in (several[0], several[-1])}
    looked = [place for place in unlike if whole or not equal_ptx[place] or place in ends]
    kinds = [max(one["kind"] for one in ptx[place]) for place in looked]  # if only one reads memory, they differ
    cubins = dict(zip(looked, made(kinds, [chosen[place] for place in looked]), strict=True))
    found: dict[str, Any] = {}
    for kernel, several in places.items():
        now = {chosen[place][1][0] for place in several}
        differing = [
            {"before": chosen[place][0], "now": chosen[place][1], "sections": _differing(*cubins[place])}
            for place in several
            if place in cubins and cubins[place][0] != cubins[place][1]
        ]
        found[kernel] = {
            "kernel": kernel,
            "from": old["hashes"][kernel],
            "now": sorted(now),
            "to": [new["hashes"][name] for name in sorted(now)],
            "configurations": len(several),
            "equal_sources": sum(place not in ptx for place in several),
            "equal_ptx": sum(equal_ptx.get(place, False) for place in several),
            "cubins": sum(place in cubins for place in several),
            "differing": differing,
        }
    return {"nvrtc": new["nvrtc"], "kernels": found}


def _differing(old: dict[str, str], new: dict[str, str]) -> list[str]:
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def links(found: dict[str, Any], commits: Sequence[str]) -> list[dict[str, Any]]:
    """What --write notes: of each file that changed, and of which every configuration is equal, both hashes."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return [
        {
            **{name: row[name] for name in ("kernel", "from", "configurations")},
            **{name: row[name] for name in ("equal_sources", "equal_ptx", "cubins")},
            "now": row["now"][0],
            "to": row["to"][0],
            "date": date,
            "commits": list(commits),
            "nvrtc": found["nvrtc"],
            "shown_by": "tests/tools/same_code.py",
        }
        for row in found["kernels"].values()
        if not row["differing"]
        and len(row["now"]) == 1
        and (row["kernel"], row["from"]) != (row["now"][0], row["to"][0])
    ]


def _tree(before: str, folder: Path) -> tuple[Path, str | None]:
    """The folder of a tree that is given as a folder or as a commit, and the commit."""
    if Path(before).is_dir():
        return Path(before).resolve(), None
    archive = subprocess.run(
        ["git", "archive", before, "optimized", "reference"], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder, _git("rev-parse", before, cwd=ROOT)


def _git(*command: str, cwd: Path) -> str:
    return subprocess.run(["git", *command], cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kernels", nargs="*", help="kernel files, without .cu; all if none is named")
    parser.add_argument("--before", default="HEAD", help="a commit or a folder (default: HEAD)")
    parser.add_argument("--whole", action="store_true", help="compare the cubins of all configurations")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="processes")
    parser.add_argument("--write", action="store_true", help="note equal kernels in docs/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree, commit = _tree(arguments.before, Path(folder))
        trees = Tree(tree), Tree(ROOT)
        found = compare(trees, arguments.kernels, whole=arguments.whole, jobs=arguments.jobs)
        for one in trees:
            one.close()
    for row in found["kernels"].values():
        name = row["kernel"] if row["now"] == [row["kernel"]] else f"{row['kernel']} -> {', '.join(row['now'])}"
        print(
            f"{name}: {row['configurations']} configurations, sources of {row['equal_sources']} equal, "
            f"PTX of {row['equal_ptx']}, "
            f"{row['cubins']} cubins compared, {len(row['differing'])} differ"
        )
        for one in row["differing"]:
            print(f"    {one['before']}: {', '.join(one['sections'])}")
    if arguments.write:
        from optimized import measure

        clean = not _git("status", "--porcelain", "optimized/ops", "optimized/kernels/*.cu*", cwd=ROOT)
        if commit is None or not clean:
            raise SystemExit("--write names the commits that were compared: give one, and commit the kernels first.")
        measure.note_same_code(links(found, (commit, _git("rev-parse", "HEAD", cwd=ROOT))))
    return int(any(row["differing"] for row in found["kernels"].values()))


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        work()
    else:
        sys.exit(main())
