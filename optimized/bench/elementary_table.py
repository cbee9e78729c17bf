"""docs/elementary.md's price list, from docs/results/elementary.json and the machine code:

    python -m optimized.bench.elementary_table

Needs no GPU. Bold: the candidates that `kernels/elementary.cuh` uses.
"""

from typing import Any

from optimized import measure
from optimized.bench import sass
from optimized.bench.elementary_error import CANDIDATES
from reference import files

PAGE = measure.ROOT / "docs" / "elementary.md"
MARKS = ("<!-- prices: begin -->", "<!-- prices: end -->")
CHOSEN = ("exp_grid15", "exp", "rsqrt", *(f"{name}{form}" for name in CANDIDATES for form in ("", "_f32")))
ACTIVATIONS = ("gelu", "dgelu", "silu", "dsilu")
SPECIAL = "MUFU"


def _name(function: str) -> str:
    return f"**`{function}`**" if function in CHOSEN else f"`{function}`"


def _ulp(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _over(times: dict[str, Any], name: str, base: str) -> str:
    """Time over the base's, in percent."""
    return f"{100 * (times[name]['median'] / times[base]['median'] - 1):+.{0 if base != 'plain' else 1}f} %"


def _stream(result: dict[str, Any], function: str) -> str:
    times = result["stream"]["times"]
    return " / ".join(_over(times, f"{function} {out}", f"identity {out}") for out in ("bf16", "e4m3"))


def rows(result: dict[str, Any], names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Name, cycles and the rest of a row for every candidate, without the instructions."""
    found: list[tuple[str, ...]] = []
    for function in (candidate for name in names for candidate in CANDIDATES[name]):
        errors = result["errors"][function]
        start = (_name(function), f"{result['scheduler_cycles_per_warp'][function]:.1f}")
        if "bf16" in errors:
            both = [errors["bf16"], errors["fp16"]]
            largest, mean = (max(e[f"{kind}_ulp_substantial"] for e in both) for kind in ("max", "mean"))
            gemm = result["gemm"]["times"]
            found.append(
                (
                    *start,
                    f"{_ulp(largest)} / {_ulp(mean)}",
                    f"{max(e['max_absolute'] for e in both):.1e}",
                    str(sum(sum(e["e4m3_codes_that_differ"]) for e in both)),
                    _stream(result, function),
                    _over(gemm, function, "plain") if function in gemm else "·",
                )
            )
        else:
            ulps = f"{_ulp(errors['max_ulp'])} / {_ulp(errors['mean_ulp'])}"
            found.append((*start, ulps, f"{errors['max_relative']:.1e}", _stream(result, function)))
    return found


def instructions(function: str) -> tuple[str, str]:
    """Those of the special function unit, and all, of one evaluation."""
    counts = sass.per_element(function)
    special = sum(count for name, count in counts.items() if name.startswith(SPECIAL))
    return str(special), f"{sum(counts.values())}{', slow path' if sass.has_slow_path(counts) else ''}"


def markdown(result: dict[str, Any]) -> str:
    """Both tables."""
    blocks = []
    for names, last in (
        (("exp", "rsqrt"), ("relative", "stream, bf16 / E4M3 out")),
        (ACTIVATIONS, ("absolute", "codes", "stream, bf16 / E4M3 out", "fc1's GEMM")),
    ):
        columns = ("function", "special", "instructions", "cycles", "ulp, largest / mean", *last)
        lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for name, *rest in rows(result, names):
            lines.append(f"| {' | '.join((name, *instructions(name.strip('*`')), *rest))} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def main() -> None:
    """Put the tables between the page's marks."""
    result = measure.read_result("elementary")
    before, rest = PAGE.read_text("utf-8").split(MARKS[0])
    files.write(PAGE, f"{before}{MARKS[0]}\n{markdown(result)}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
