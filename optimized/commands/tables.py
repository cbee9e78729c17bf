"""The tables of measured results, built from docs/results/*.json alone.

`python -m optimized.commands.tables` writes them: two tables and a sentence between marks of README.md, the table of
checks in docs/numerics.md, one in docs/one_gpu.md, and a page for each group, docs/results/<group>.md, with
docs/results.md as their index. tests/pages/test_readme.py fails if a page and the results disagree. A benchmark's
module builds its tables.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimized import bench, measure
from optimized.bench import Payload
from optimized.bench.kernels import gemm
from optimized.bench.layers import layer_tables, rowwise_torchao, small_layers
from optimized.bench.models import data_parallel, generator, seeds, tensor_parallel, train, trainer
from optimized.bench.table import Table, about
from optimized.commands import tested
from reference.support import files

_GEMMS = ("gemm", "gemm_blocks", "gemm_epilogue", "gemm_shapes", "gemm_equality", "ladder")
_MODULES = (
    *_GEMMS,
    "cast",
    "norm",
    "activation",
    "attention",
    "attention_long",
    "cross_entropy",
    "embedding",
    "adam",
    "layer",
    "layer_recipes",
    "layer_sweep",
    "small_layers",
    "rowwise_torchao",
    "stats",
    "timeline",
    "single_gpu",
    "training",
    "train",
    "seeds",
    "trainer",
    "trail",
    "decode",
    "generator",
    "first_step",
)
_FOUND = [one.name for one in pkgutil.walk_packages(bench.__path__, f"{bench.__name__}.")]
_PLACES = {name.rpartition(".")[2]: name for name in _FOUND}
BENCHMARKS: tuple[Any, ...] = tuple(importlib.import_module(_PLACES[name]) for name in _MODULES)


BUILDERS: dict[str, Callable[[Payload], list[Table]]] = {
    **{module.NAME: module.tables for module in BENCHMARKS},
    "data_parallel": data_parallel.tables,
    "tensor_parallel": tensor_parallel.tables,
    "parity": tested.parity,
    "gpu_suite": tested.gpu_suite,
    "mutation": tested.mutation,
    "house": tested.house,
    "drill": tested.drill,
    "transformer_engine": tested.transformer_engine,
}
DETAILS = {  # more tables of a result
    "layer_ops": ("layer", layer_tables.layer_ops),
    "layer_memory": ("layer", layer_tables.layer_memory),
}
README_RESULTS = (
    *("layer", "small_layers", "train", "trainer", "generator", "data_parallel", "gemm"),
    *("seeds", "gemm_equality", "rowwise_torchao"),
)
"""The results that README's rows show and that depend on kernels."""


@dataclass(frozen=True)
class Group:
    """A page of results, docs/results/<name>.md: the picture docs/<picture>.png, which shows `shows`, and tables.

    `more` are names and descriptions of pictures after the tables.
    """

    title: str
    name: str
    picture: str
    shows: str
    results: tuple[str, ...]
    more: tuple[tuple[str, str], ...] = ()

    @property
    def path(self) -> Path:
        """The page."""
        return measure.ROOT / "docs" / "results" / f"{self.name}.md"

    def page(self) -> str:
        """The page's text."""
        how = {
            "tested": "What was compared, injected and counted.",
            "several_gpus": "What a table shows ran in one run, one after the other, on warm GPUs.",
        }.get(self.name, "All libraries of a table ran in one run, in an order that is drawn again for each round.")
        again = "[All results](../results.md), and how to measure again."
        first, *others = (f"![{shows}](../{name}.png)" for name, shows in ((self.picture, self.shows), *self.more))
        return "\n\n".join([f"# {self.title}", first, f"{how} {again}", markdown(self.results), *others]) + "\n"

    def entry(self) -> str:
        """The group in the index: a heading, to which other pages link, and its tables' titles."""
        titles = dict.fromkeys(one.title.partition(":")[0] for name in self.results for one in recorded(name))
        listed = "; ".join(titles) or "nothing has been recorded yet"
        return f"## {self.title}\n\n[{self.title}: tables and picture](results/{self.name}.md): {listed}."


GROUPS = (
    Group(
        "GEMM",
        "gemm",
        "gemm_shapes",
        "Dots show our speed over cuBLASLt's, by the size of a GEMM",
        _GEMMS,
        (
            ("gemm_roofline", "Our GEMMs and cuBLASLt's under the roof of memory and tensor cores"),
            ("ladder", "TFLOP/s of each rung of the ladder, and cuBLASLt's"),
        ),
    ),
    Group(
        "Casts, norms, activations",
        "casts",
        "casts",
        "Bars show the bandwidth of casts, norms and activations as a share of a copy's",
        ("cast_transpose", "norm", "activation"),
    ),
    Group(
        "Attention",
        "attention",
        "attention",
        "Bars show TFLOP/s by sequence, forward and backward: exact attention and cuDNN's",
        ("attention", "attention_long"),
    ),
    Group(
        "Loss and embedding",
        "loss",
        "loss",
        "Bars show the bandwidth of cross-entropy and embedding as a share of a copy's",
        ("cross_entropy", "embedding"),
    ),
    Group(
        "Optimizer",
        "optimizer",
        "optimizer",
        "Bars show the time of an optimizer's step, here and in PyTorch",
        ("adam",),
    ),
    Group(
        "The layer",
        "layer",
        "speed",
        "Four bars: a layer's step in compiled PyTorch, Transformer Engine, Twin Engine; its GEMMs and attention alone",
        (
            *("layer", "layer_recipes", "rowwise_torchao", "layer_sweep", "small_layers", "timeline", *DETAILS),
            *("stats", "decode", "generator", "first_step"),
        ),
        (
            ("layer", "Bars show a layer's step by each contestant, and what our FP8 steps consist of"),
            ("layer_sweep", "Lines show how many times faster than PyTorch a layer is, by width and by tokens"),
        ),
    ),
    Group(
        "Training",
        "training",
        "train",
        "Left: losses of a GPT over 2,000 steps. Right: tokens per second beside compiled PyTorch",
        ("train", "seeds", "trainer", "trail", "training", "single_gpu"),
        (
            ("seeds", "Losses by recipe; beside bf16's, a band over seeds; the last tenth"),
            ("single_gpu", "Bars show samples a second and GiB of a BERT's training; each row adds one technique"),
        ),
    ),
    Group(
        "Several GPUs",
        "several_gpus",
        "several_gpus",
        "Bars show a training step on two GPUs in each way of sharing it, here and in PyTorch",
        ("data_parallel", "tensor_parallel"),
    ),
    Group(
        "How it was tested",
        "tested",
        "drill",
        "Bars show what became of flipped bits, by what was flipped: none was missed",
        ("parity", "transformer_engine", "gpu_suite", "mutation", "drill", "house"),
    ),
)


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
    """Every recorded table of some results."""
    found = [one.markdown() for name in names for one in recorded(name)]
    return "\n\n".join(found) if found else "Nothing has been recorded yet."


def losses() -> str:
    """README's sentence about FP8's loss beside bf16's."""
    return _built("seeds", seeds.sentence) or "Nothing has been recorded yet."


def summary() -> str:
    """README's table: the layer against PyTorch and Transformer Engine, training, the GEMM against cuBLASLt."""
    layers, products = _built("layer", layer_tables.summary), _built("gemm", gemm.summary)
    if layers is None or products is None:
        return "Nothing has been recorded yet."
    old = outdated()
    builders = {
        **{"small_layers": small_layers.summary, "train": train.summary, "trainer": trainer.summary},
        "generator": generator.summary,
        "data_parallel": data_parallel.summary,
    }
    shown = (_built(name, build) or () for name, build in builders.items() if name not in old)
    rows = [*layers, *(row for one in shown for row in one), products]
    how = "How many times faster FP8 is here than others in the same run; [all results](docs/results.md)."
    note = (
        "A layer's time is that of forward and backward. Twin Engine has exact attention, whose bits a CPU reproduces. "
        f"PyTorch has cuDNN's attention. {_built('layer', layer_tables.fastest)} "
        f"{_built('layer', layer_tables.launches)} {_built('layer', about)}"
    )
    left_out = [name for name in old if name in builders]
    if left_out:
        note += f" Left out, since a kernel has changed and they are to be measured again: {', '.join(left_out)}."
    shown_old = [name for name in old if name not in builders]
    if shown_old:
        note += f" **Measured before the last change of their kernels: {', '.join(shown_old)}.**"
    columns = ("on one H200", "Twin Engine, FP8", "compared with", "faster")
    return Table("Speed", columns, tuple(rows), how, note).markdown()


def outdated() -> list[str]:
    """README's results that are older than one of their kernels."""
    return [name for name in README_RESULTS if _built(name, measure.outdated)]


_ENGINE = "Transformer Engine"
_THEIR_OWN = "norms, activations, fused additions"
# README's rows of equality: how each is checked on any CPU, and on a Hopper GPU.
_REPLAY = "`twin parity --replay`"
_COMPARE = "`python tests/golden/record_transformer_engine.py --compare` counts again; `git diff docs/results` is empty"
_RECORD = "the same, where Transformer Engine is installed, with `optimized/recordings/data`; then `--compare`"
_TENSOR_CORE = "`python tests/golden/record_tensor_core.py optimized/recordings/data`, then `twin parity --replay`"
CHECKS: dict[str, tuple[str, str]] = {
    "our kernels: every op and layer": (_REPLAY, "`twin parity`; in a clone `pytest -m gpu --require-gpu`"),
    "an H200's tensor cores, single steps": (_REPLAY, _TENSOR_CORE),
    "cuBLASLt: GEMMs": (_REPLAY, _TENSOR_CORE),
    "cuBLASLt: a Linear's six training steps": (
        _REPLAY,
        "`python tests/golden/record_linear.py optimized/recordings/data`, then `twin parity --replay`",
    ),
    "our GEMM and cuBLASLt's on one GPU": ("needs a GPU", "`twin bench gemm_equality`"),
    "our row-wise `Linear` and torchao's on one GPU": (
        "`pytest tests/recipes/test_rowwise_scaling.py -k torchaos`: its definition in plain PyTorch",
        "`twin bench rowwise_torchao`, where torchao is installed",
    ),
    "Transformer Engine: casts, GEMMs, scales": (_COMPARE, _RECORD),
    f"Transformer Engine: {_THEIR_OWN}": (_COMPARE, _RECORD),
    "Transformer Engine: layers without attention": (_COMPARE, _RECORD),
}


def checks() -> str:
    """docs/numerics.md's table: how to check every row of README's table of equality."""
    columns = ("row of README's table", "on any CPU, from recordings", "on a Hopper GPU, anew")
    lines = ["| " + " | ".join(columns) + " |", "| --- | --- | --- |"]
    lines += [f"| {name} | {cpu} | {gpu} |" for name, (cpu, gpu) in CHECKS.items()]
    found = _built("parity", lambda payload: payload["rows"]) or []
    total, theirs = (sum(row["words"] for row in found if row["of"].startswith(of)) for of in ("", _ENGINE))
    why = (
        f"`twin parity --replay` ends with {total:,} words: README's first four rows, and {theirs:,} words of "
        f"{_ENGINE}'s ops, those that must be equal. `twin walkthrough` repeats the two rows of cuBLASLt alone."
    )
    return "\n".join([*lines, "", why])


def equality() -> str:
    """README's table of what has the same bits; the names of its rows are those of `CHECKS`."""
    recorded_rows, problems = _built("parity", lambda payload: payload["rows"]), _built("gemm_equality", dict)
    if recorded_rows is None or problems is None:
        return "Nothing has been recorded yet."
    sliced = {"cuBLASLt: GEMMs": "K in slices for two shapes; their length was found by trial"}
    rows: list[tuple[str, ...]] = [
        (row["of"], f"{row['words']:,}", f"{row['different']:,}", sliced.get(row["of"], ""))
        for row in recorded_rows
        if not row["of"].startswith(_ENGINE)  # op by op below
    ]
    whys = "; ".join(dict.fromkeys(row["why"] for row in problems["rows"] if row["differing_words"]))
    count, equal = problems["problems"], problems["problems_with_every_word_equal"]
    words = (f"{problems[name]:,}" for name in ("words", "differing_words"))
    rows.append(
        ("our GEMM and cuBLASLt's on one GPU", *words, f"{equal} of {count} GEMMs are equal in every word; {whys}")
    )
    rows += _built("rowwise_torchao", rowwise_torchao.equality) or []
    theirs = _built("transformer_engine", lambda payload: payload["ops"]) or []
    names = {row["op"] for row in theirs if row["different"]}
    for what, differs in (("casts, GEMMs, scales", False), (_THEIR_OWN, True)):
        mine = [row for row in theirs if (row["op"] in names) == differs]
        why = "its own roundings ([each op](docs/results/tested.md))" if differs else ""
        rows += _counted(f"Transformer Engine: {what}", mine, why)
    layers = _built("transformer_engine", lambda payload: payload["cases"]) or []
    rows += _counted("Transformer Engine: layers without attention", layers, f"{_THEIR_OWN} inside them")
    how = "A CPU's words (numbers of a result) beside those of an H200; two rows compare libraries on one GPU."
    note = "[How to check every row](docs/numerics.md#9-how-to-check-it), on your own GPU too."
    return Table("Equality", ("compared", "words", "words different", "why"), tuple(rows), how, note).markdown()


def _counted(what: str, rows: list[Payload], why: str) -> list[tuple[str, ...]]:
    """A row with the sums of some rows, if there are any."""
    counts = (sum(row[name] for row in rows) for name in ("compared", "different"))
    return [(what, *(f"{n:,}" for n in counts), why)] if rows else []


def index() -> str:
    """docs/results.md: a heading and a link for each group."""
    return "\n\n".join(group.entry() for group in GROUPS)


def rungs() -> str:
    """The first table of `twin bench single_gpu`, for docs/one_gpu.md; all of them are in docs/results/training.md."""
    return "\n\n".join(one.markdown() for one in recorded("single_gpu")[:1])


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    measure.ROOT / "README.md": {"losses": losses, "equality": equality, "results": summary},
    measure.ROOT / "docs" / "numerics.md": {"checks": checks},
    measure.ROOT / "docs" / "results.md": {"results": index},
    measure.ROOT / "docs" / "one_gpu.md": {"rungs": rungs},
    measure.ROOT / "docs" / "two_runs.md": {"results": lambda: markdown(("trail",))},
    **{group.path: {"": group.page} for group in GROUPS},  # built as a whole
}


def updated(path: Path) -> str:
    """A page's text with the tables between its marks."""
    if "" in PAGES[path]:
        return PAGES[path][""]()
    page = path.read_text("utf-8")
    for name, content in PAGES[path].items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n{content()}\n{end}{after}"
    return page


if __name__ == "__main__":
    measure.repository("the tables of README.md and docs/")
    for path in PAGES:
        files.write(path, updated(path))
