"""What the commands show: their tables, compared with tests/golden/commands.

A test that fails shows the first lines that differ; where the change was meant, record it with
`PYTHONPATH=.:tests python tests/snapshots.py` and read the diff.
"""

import argparse
import contextlib
import copy
import functools
import io
import re
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import figures
import pytest
import snapshots
import torch
from faults import Fault, Faulty
from markupsafe import Markup
from rich.console import Console

import reference as te
from optimized import measure
from optimized.bench import adam
from optimized.commands import (
    bench,
    parity,
    replay_page,
    tables,
)
from optimized.commands import replay as replay_command
from optimized.commands.report import Report
from optimized.compare import Tally
from optimized.recordings import case as parity_inputs
from optimized.recordings import outputs
from reference import scaling

FOLDER = "commands"


class Pictures(Report):
    """A report whose pictures are the lines of their figures."""

    def picture(self, figure: Any, caption: str, alternative: str) -> None:
        lines = [f"<figure {alternative}>", *figures.lines(figure, digits=3), f"</figure {caption}>"]
        self._blocks.append(("text", Markup("\n".join(lines))))


def lines_of(report: Report) -> list[str]:
    """Its text, a paragraph or a row of a table per line."""
    page = report.html().partition("<main>")[2].partition("</main>")[0]
    text = re.sub(r"(</tr>|</p>|</h2>|</figcaption>|</pre>)", "\\1\n", page)
    return [line for line in text.splitlines() if line.strip()]


def payload_of(name: str, at: int) -> dict[str, Any]:
    """A result of `adam`'s form."""
    row = {"optimizer": f"[{name}]", "bytes_a_number": at, "ms": {"median": 1.5 * at}, "of_copy": 0.125 * at}
    versions = {"cuda": "13.0", "torch": "2.99", "cupy": "14.0", "transformer_engine": "2.9"}
    origin = {"date": f"2026-01-0{at}T03:04:05+00:00", "gpu": None, "nvidia_smi": None, **versions, "kernels": {}}
    return {"numbers": 10**6 * at, "rows": [row], "provenance": origin}


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """What a command takes."""
    shown = ("option_strings", "dest", "default", "choices", "metavar", "help")
    return [str({key: getattr(one, key) for key in shown}) for one in parser._actions]


def run_of_bench() -> snapshots.Sections:
    """`twin bench` where there is a Hopper GPU, as it were, and where only some results are recorded."""
    parser, written = argparse.ArgumentParser(), list[str]()
    bench.add_arguments(parser)

    def module(name: str, at: int) -> Any:
        def run(progress: Callable[[float], None]) -> dict[str, Any]:
            progress(0.5)
            written.append(f"ran {name}")
            return payload_of(name, at)

        return types.SimpleNamespace(NAME=name, run=run)

    def write(name: str, payload: Any) -> str:
        written.append(f"written {name} of {payload['provenance']['date']}")
        return f"results/{name}.json"

    def load(name: str) -> dict[str, Any] | None:
        return payload_of(name, 1) if name == "one" else None

    found: dict[str, tuple[list[str], int]] = {"help": (options_of(parser), 30)}
    names = {"one": module("one", 1), "two": module("two", 2)}
    builders = {**tables.BUILDERS, "one": adam.tables, "two": adam.tables}
    for gpu, asked in (
        (False, []), (False, ["all"]), (False, ["--table"]),
        (True, ["all"]), (True, ["--write"]), (True, ["--recorded"]),
    ):  # fmt: skip
        console = Console(file=io.StringIO(), width=100, force_terminal=False)
        with (
            mock.patch.object(bench, "hopper", return_value=torch.device("cuda") if gpu else None),
            mock.patch.object(bench, "BENCHMARKS", names),
            mock.patch.object(bench, "WHAT", {**bench.WHAT, "one": "the [first]", "two": "the second"}),
            mock.patch.object(tables, "BUILDERS", builders),
            mock.patch.object(tables, "load", load),
            mock.patch.object(measure, "write_result", write),
            mock.patch.object(measure, "outdated", lambda payload: ["adam"] * (payload["numbers"] < 0)),
            contextlib.redirect_stdout(console.file),
        ):
            assert bench.run(parser.parse_args(asked), console) == 0
        text = re.sub(r"\d:\d\d:\d\d|-:--:--", "time", console.file.getvalue())  # type: ignore[attr-defined]
        found[f"{'GPU' if gpu else 'CPU'} {' '.join(asked)}"] = text.splitlines(), 60
    what = [f"{name}: {what}" for name, what in bench.WHAT.items()]
    return {**found, "done": (written, 20), "what": (what, 20)}


def run_of_parity() -> snapshots.Sections:
    """`twin parity` of three comparisons that are made up, one of which differs; with a GPU, as it were."""
    parser = argparse.ArgumentParser()
    parity.add_arguments(parser)
    found: dict[str, tuple[list[str], int]] = {"help": (options_of(parser), 30)}
    recording = types.SimpleNamespace(provenance={"date": "2026-01-02T03:04:05+00:00"})
    tallies = {"a": [Tally(1000, 0), Tally(234, 0)], "b": [Tally(5, 2)]}

    def jobs(gpu: Any, cases: Any) -> list[tuple[str, str, Callable[[], Tally]]]:
        return [(op, "case", functools.partial(copy.copy, one)) for op, several in tallies.items() for one in several]

    for asked, gpu, code in (([], True, 1), (["--op", "a"], True, 0), (["--replay", "--op", "b"], True, 1)):
        console = Console(file=io.StringIO(), width=150, force_terminal=False)
        with (
            mock.patch.object(parity, "hopper", return_value=torch.device("cuda") if gpu else None),
            mock.patch.object(torch.cuda, "get_device_name", return_value="pretended H200"),
            mock.patch.object(measure, "outdated", return_value=["adam", "norm"]),
            mock.patch.object(parity, "_jobs", jobs),
            mock.patch.object(outputs, "read", return_value=recording),
        ):
            assert parity.run(parser.parse_args(asked), console) == code
        found[" ".join(["asked", *asked])] = console.file.getvalue().splitlines(), 40  # type: ignore[attr-defined]
    return found


def recorded_step(path: Path, fault: Fault, keep: bool) -> None:
    """A step of an MLP in FP8 and of a Linear in 16 bits between torch's own ops; its numbers are the same anywhere."""
    torch.manual_seed(7)
    mlp = te.LayerNormMLP(32, 64, activation="relu", params_dtype=torch.bfloat16)
    model = torch.nn.ModuleDict({"mlp": mlp, "head": te.Linear(32, 16, bias=False, params_dtype=torch.bfloat16)})
    x, grad = (parity_inputs.numbers((16, n), torch.bfloat16, seed) for n, seed in ((32, 1), (16, 2)))
    step = Faulty(model, path, None, keep)
    step.fault = fault
    # Models of other tests may still be alive, and this thread's autocast would update their scales.
    with mock.patch.dict(scaling._MODULES, clear=True), step:
        with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
            h = mlp(x.requires_grad_()).abs()
        model["head"](h).backward(grad)


def run_of_replay() -> snapshots.Sections:
    """`twin replay` of a step, and of the same step with memory that changed, and with a wrong result."""
    parser, found = argparse.ArgumentParser(), dict[str, tuple[list[str], int]]()
    replay_command.add_arguments(parser)
    found["help"] = options_of(parser), 30
    pages: list[Pictures] = []

    def kept(*given: str) -> Report:
        pages.append(Pictures(*given))
        return pages[-1]

    faults = {
        "the same": (Fault(-1, "before"), False),
        "memory": (Fault(5, "before", read=0), False),
        "a result": (Fault(16, "after"), True),
        "digests alone": (Fault(5, "while", read=1, bit=24 / 32), False),
    }
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(replay_page, "Report", kept):
        path, page = Path(folder, "step.safetensors"), Path(folder, "page.html")
        for what, (fault, keep) in faults.items():
            recorded_step(path, fault, keep)
            console = Console(file=io.StringIO(), width=100, force_terminal=False)
            code = replay_command.run(parser.parse_args([str(path), "--output", str(page)]), console)
            text = console.file.getvalue().replace(folder, "...")  # type: ignore[attr-defined]
            lines = [f"exit code {code}", *text.splitlines(), "-- the page", *lines_of(pages[-1])]
            moment = r"recorded on .* at [^,]*, torch [^<]*?(?=</|$)"
            found[what] = [re.sub(moment, "recorded at some time", line) for line in lines], 12 if fault.op + 1 else 80
    return found


RUNS: dict[str, Callable[[], snapshots.Sections]] = {
    "bench": run_of_bench,
    "parity": run_of_parity,
    "replay": run_of_replay,
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_shown_is_what_is_recorded(name: str) -> None:
    snapshots.check(FOLDER, name, RUNS[name]())
