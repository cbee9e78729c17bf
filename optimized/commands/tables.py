"""The tables of measured results, built from docs/results/*.json alone.

`python -m optimized.commands.tables` puts them between two marks: two tables into README.md, one into docs/one_gpu.md,
all of them into docs/results.md. tests/pages/test_readme.py fails if a page and the results disagree. A benchmark's
module builds its tables.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from optimized import bench, measure
from optimized.bench import Payload
from optimized.bench.kernels import gemm
from optimized.bench.layers import layer_tables, rowwise_torchao
from optimized.bench.table import Table, origin, table
from reference.inspect.drills.drill import OUTCOMES
from reference.support import files

_GEMMS = ("gemm", "gemm_blocks", "gemm_epilogue", "gemm_shapes", "gemm_equality", "ladder")
_MODULES = (
    *_GEMMS,
    "cast",
    "norm",
    "activation",
    "attention",
    "cross_entropy",
    "embedding",
    "adam",
    "layer",
    "layer_recipes",
    "layer_sweep",
    "rowwise_torchao",
    "stats",
    "timeline",
    "single_gpu",
    "training",
    "train",
    "seeds",
    "trainer",
    "decode",
    "first_step",
)
_FOUND = [one.name for one in pkgutil.walk_packages(bench.__path__, f"{bench.__name__}.")]
_PLACES = {name.rpartition(".")[2]: name for name in _FOUND}
BENCHMARKS: tuple[Any, ...] = tuple(importlib.import_module(_PLACES[name]) for name in _MODULES)


def gpu_suite(payload: Payload) -> list[Table]:
    """The outcome of the GPU suite."""
    row = (f"`{payload['command']}`", str(payload["passed"]), str(payload["failed"]))
    how = "Tests that ran on a GPU, most of which compare every bit of an op or layer with the CPU's."
    return [table(payload, "The GPU suite", ("command", "passed", "failed"), [row], how)]


def parity(payload: Payload) -> list[Table]:
    """How many words of an H200 a CPU has computed again."""
    rows = [(row["of"], f"{row['words']:,}", f"{row['different']:,}") for row in payload["rows"]]
    how = (
        "An H200 computed the words; a CPU computed each of them again. The recording of our kernels keeps an output "
        "of more than 96 words as a digest of 128 bits: if it is equal, every word is. Two of cuBLASLt's shapes "
        "are computed with K in slices, as cuBLASLt does there; the length of a slice was found by trial."
    )
    columns = ("recorded on an H200", "words compared", "words different")
    note = f"`{payload['command']}`, {payload['provenance']['date'][:10]}."
    return [Table("Recordings", columns, tuple(rows), how, note)]


def transformer_engine(payload: Payload) -> list[Table]:
    """Words of Transformer Engine compared with ours, by op on its own arguments, and by layer."""
    ops = []
    for op in dict.fromkeys(row["op"] for row in payload["ops"]):
        rows = [row for row in payload["ops"] if row["op"] == op]
        equal = [row for row in rows if not row["different"]]
        if equal:
            parts = ", ".join(row["part"] for row in equal)
            ops.append((op, parts, f"{sum(row['compared'] for row in equal):,}", "0", ""))
        for row in rows:
            if row["different"]:
                ops.append((op, row["part"], f"{row['compared']:,}", f"{row['different']:,}", row["why"]))
    layers = []
    for case in dict.fromkeys(row["case"] for row in payload["cases"]):
        rows = [row for row in payload["cases"] if row["case"] == case]
        different = [row for row in rows if row["different"]]
        why = "; ".join(different[0]["ops"]) if different else ""
        counts = (sum(row["compared"] for row in rows), sum(row["different"] for row in different))
        layers.append((case, f"{len(rows) - len(different)} of {len(rows)}", *(f"{n:,}" for n in counts), why))
    words = ("words compared", "words different", "why")
    return [
        table(
            payload,
            "Transformer Engine's ops",
            ("op", "part", *words),
            ops,
            "Each call that its layers made on an H200, repeated by `reference` on the same arguments.",
        ),
        table(
            payload,
            "Transformer Engine's layers",
            ("layer", "tensors equal", *words),
            layers,
            "Six training steps, each from the state that Transformer Engine had; the last column names the ops that "
            "differ within a step.",
        ),
    ]


def mutation(payload: Payload) -> list[Table]:
    """How many mutants the fast tests kill."""
    counts = payload["mutants"]
    drawn, killed = counts["drawn"], counts["killed"]
    same = sum((one["judged"] or "").startswith("Changes nothing") for one in payload["survivors"])
    shares = f"{killed / drawn:.1%}", f"{killed / (drawn - same):.1%}"
    columns = ("command", "drawn", "killed", "survived", "change nothing", "killed of all", "of the others")
    row = (f"`{payload['command']}`", *map(str, (drawn, killed, drawn - killed, same)), *shares)
    how = "Small changes of the Python source, drawn at random: a change that no test notices has survived."
    note = (
        f"{payload['tool']} knows {counts['known']} changes; each survivor is judged in docs/results/mutation.json. "
        "Some change nothing that a program can see, such as `==` for `is` between types: the last column leaves them "
        "out."
    )
    if "by_time" in counts:
        note += f" By its time alone a test killed {counts['by_time']}."
    return [Table("Mutants", columns, (row,), how, note)]


def house(payload: Payload) -> list[Table]:
    """What a change costs in this tree, and what it cost before its rooms."""
    before, now = payload["before"], payload["now"]

    def row(what: str, number: Callable[[Payload], Any]) -> tuple[str, ...]:
        return (what, *(f"{number(tree):,}" for tree in (before, now)))

    rows = [
        row("files of code that a new op touches, median", lambda tree: tree["op"]["files"]),
        row("of these not its own", lambda tree: tree["op"]["others"]),
        row("Python calls of a TransformerLayer before its first op", lambda tree: tree["before_first_op"]["calls"]),
        row("of these reads of what a thread holds", lambda tree: tree["before_first_op"]["asked"]),
        row("circles of modules", lambda tree: len(tree["circles"])),
        row("lines of source", lambda tree: sum(tree["lines"]["source"].values())),
        row("lines of tests", lambda tree: sum(tree["lines"]["tests"].values())),
    ]
    recipes = [
        f"{name}'s commits touched {found['files']} files of code, {found['other_source']} of source and "
        f"{found['other_tests']} of tests not its own."
        for name, found in payload["recipes"].items()
    ]
    suite = payload.get("suite")
    took = [] if suite is None else [f"The fast suite took {suite['seconds']} s on {suite['cores']} cores."]
    how = "Counted from the files and the history: what a change costs, and how large the tree is."
    note = " ".join([*recipes, *took, f"`{payload['command']}`, {payload['provenance']['date'][:10]}."])
    columns = ("", f"before the rooms ({payload['before_commit']})", "now")
    return [Table("The tree", columns, tuple(rows), how, note)]


def drill(payload: Payload) -> list[Table]:
    """What became of faults that were injected into a step."""
    rows = []
    for kind, found in payload["kinds"].items():
        outcomes = found["outcomes"]
        ops = sorted(found["at"].items(), key=lambda one: -one[1])
        where = ", ".join(name.removeprefix("twin::") for name, _ in ops[:3])
        counts = (found["flips"], found["changed"], *(outcomes[what] for what in OUTCOMES))
        rows.append((kind, *(f"{n:,}" for n in counts), where))
    names = ("no effect", "op and word named", "op named", "a later op named", "not judged", "missed")
    how = (
        "One flipped bit in each recorded step of a small TransformerLayer in FP8, and what a replay of the recording "
        "said; a product, an aligned sum and an accumulator are inside the tensor core's model."
    )
    note = (
        f"`{payload['command']}`, {payload['provenance']['date'][:10]}. Without effect: every result is as without the "
        f"flip. Not judged: torch's own ops, which the verdict names."
    )
    columns = ("what is flipped", "flips", "change a result", *names, "named most often at")
    return [Table("Flipped bits", columns, tuple(rows), how, note)]


BUILDERS: dict[str, Callable[[Payload], list[Table]]] = {
    **{module.NAME: module.tables for module in BENCHMARKS},
    "parity": parity,
    "gpu_suite": gpu_suite,
    "mutation": mutation,
    "house": house,
    "drill": drill,
    "transformer_engine": transformer_engine,
}
DETAILS = {  # more tables of a result, for docs/results.md
    "layer_ops": ("layer", layer_tables.layer_ops),
    "layer_memory": ("layer", layer_tables.layer_memory),
}
GROUPS = {
    "GEMM": _GEMMS,
    "Casts, norms, activations": ("cast_transpose", "norm", "activation"),
    "Attention": ("attention",),
    "Loss and embedding": ("cross_entropy", "embedding"),
    "Optimizer": ("adam",),
    "The layer": (
        *("layer", "layer_recipes", "rowwise_torchao", "layer_sweep", "timeline", *DETAILS),
        *("stats", "decode", "first_step"),
    ),
    "Training": ("single_gpu", "training", "train", "seeds", "trainer"),
    "How it was tested": ("parity", "transformer_engine", "gpu_suite", "mutation", "drill", "house"),
}
PICTURES = {  # of a group, above its tables
    "Attention": "![Bars show TFLOP/s by sequence, forward and backward: exact attention and cuDNN's](attention.png)",
    "How it was tested": "![Bars show what became of flipped bits, by what was flipped: none was missed](drill.png)",
}


def load(name: str) -> Payload | None:
    """The recorded result, or None."""
    return measure.read_result(name) if (measure.RESULTS / f"{name}.json").is_file() else None


def _built(result: str, build: Callable[[Payload], Any]) -> Any:
    """What `build` makes of a recorded result; None if it is not recorded."""
    payload = load(result)
    try:
        return None if payload is None else build(payload)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise files.Damaged(
            f"{measure.RESULTS / result}.json is damaged: its table cannot be made ({error!r}){measure.RESTORED}."
        ) from error


def recorded(name: str) -> list[Table]:
    """The tables of a recorded result; none if it is not recorded.

    Raises:
        files.Damaged: the file does not have what its tables show.
    """
    return _built(*DETAILS[name] if name in DETAILS else (name, BUILDERS[name])) or []


def markdown(names: Iterable[str] = tuple(BUILDERS)) -> str:
    """Every recorded table, as docs/results.md shows them."""
    found = [one.markdown() for name in names for one in recorded(name)]
    return "\n\n".join(found) if found else "Nothing has been recorded yet."


def summary() -> str:
    """README's table: the layer against PyTorch and Transformer Engine, the GEMM against cuBLASLt."""
    layers, products = _built("layer", layer_tables.summary), _built("gemm", gemm.summary)
    if layers is None or products is None:
        return "Nothing has been recorded yet."
    how = "How many times faster FP8 is here than others in the same run; [all results](docs/results.md)."
    note = (
        "Forward and backward of one layer on one GPU. PyTorch's time is that of its fastest variant, with cuDNN's "
        "attention; Transformer Engine chooses its attention itself. A CPU reproduces the bits of exact attention. "
        "Layers run eagerly; in the small one the host's time dominates."
    )
    columns = ("on one H200", "Twin Engine, FP8", "compared with", "faster")
    one = Table("Speed", columns, (*layers, products), how, f"{note} {_built('layer', origin)}")
    return one.markdown()


def equality() -> str:
    """README's table of what has the same bits."""
    recorded_rows, problems = _built("parity", lambda payload: payload["rows"]), _built("gemm_equality", dict)
    if recorded_rows is None or problems is None:
        return "Nothing has been recorded yet."
    sliced = {"cuBLASLt: GEMMs": "K in slices for two shapes; their length was found by trial"}
    rows: list[tuple[str, ...]] = [
        (f"CPU and {row['of']}", f"{row['words']:,}", f"{row['different']:,}", sliced.get(row["of"], ""))
        for row in recorded_rows
        if not row["of"].startswith("Transformer Engine")  # op by op below
    ]
    whys = "; ".join(dict.fromkeys(row["why"] for row in problems["rows"] if row["differing_words"]))
    count, equal = problems["problems"], problems["problems_with_every_word_equal"]
    rows.append(
        (
            f"our GEMM and cuBLASLt's on one GPU, {count} problems, {equal} of them equal in every word",
            f"{problems['words']:,}",
            f"{problems['differing_words']:,}",
            whys,
        )
    )
    rows += _built("rowwise_torchao", rowwise_torchao.equality) or []
    theirs = _built("transformer_engine", lambda payload: payload["ops"]) or []
    for what, differs in (("all else", False), ("norms, activations, fused additions", True)):
        names = {row["op"] for row in theirs if row["different"]}
        mine = [row for row in theirs if (row["op"] in names) == differs]
        if mine:
            counts = (sum(row["compared"] for row in mine), sum(row["different"] for row in mine))
            plain = (
                row["op"].removeprefix("current ").removeprefix("block ").removesuffix(" in 16 bits") for row in mine
            )
            what = what if differs else ", ".join(dict.fromkeys(plain))
            why = "its own roundings ([each op](docs/results.md#how-it-was-tested))" if differs else ""
            rows.append((f"CPU and Transformer Engine: {what}", *(f"{n:,}" for n in counts), why))
    layers = _built("transformer_engine", lambda payload: payload["cases"]) or []
    others = ("current scaling", "block scaling")
    for recipe in ("delayed scaling", *others):
        mine = [
            row for row in layers if next((one for one in others if one in row["case"]), "delayed scaling") == recipe
        ]
        if mine:
            what = f"{len({row['case'] for row in mine})} layers without attention, {recipe}"
            counts = (sum(row["compared"] for row in mine), sum(row["different"] for row in mine))
            why = "norms, activations and fused additions, inside layers"
            rows.append((f"CPU and Transformer Engine: {what}", *(f"{n:,}" for n in counts), why))
    how = "A word is one number of a result: 32, 16 or 8 bits."
    note = (
        "`twin parity --replay` compares what must be equal with the recordings again, on any CPU, in half a minute. "
        "[How to check every row](docs/numerics.md#9-how-to-check-it), on your own GPU too."
    )
    return Table("Equality", ("compared", "words", "words different", "why"), tuple(rows), how, note).markdown()


def everything() -> str:
    """Every table by group, with the group's picture, for docs/results.md."""
    parts = ((f"## {title}", PICTURES.get(title), markdown(names)) for title, names in GROUPS.items())
    return "\n\n".join(part for group in parts for part in group if part is not None)


def rungs() -> str:
    """The first table of `twin bench single_gpu`, for docs/one_gpu.md; all of them are in docs/results.md."""
    return "\n\n".join(one.markdown() for one in recorded("single_gpu")[:1])


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    measure.ROOT / "README.md": {"equality": equality, "results": summary},
    measure.ROOT / "docs" / "results.md": {"results": everything},
    measure.ROOT / "docs" / "one_gpu.md": {"rungs": rungs},
}


def updated(path: Path) -> str:
    """A page's text with the tables between its marks."""
    page = path.read_text("utf-8")
    for name, content in PAGES[path].items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n{content()}\n{end}{after}"
    return page


if __name__ == "__main__":
    measure.repository("the tables of README.md and docs")
    for path in PAGES:
        files.write(path, updated(path))
