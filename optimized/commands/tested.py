"""The tables of what was tested (docs/results/tested.md): recordings, GPU suite, mutants, flipped bits, tree."""

from collections.abc import Callable
from typing import Any

from optimized.bench import Payload
from optimized.bench.table import Table, table
from reference.inspect.drills.drill import OUTCOMES


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
