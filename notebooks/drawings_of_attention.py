"""The drawings of the deep dive on attention, and its simulation of who waits; their look is in pictures.py."""

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle
from pictures import GRAD, LABEL, PALE, WRONG, X, Y

from optimized.bench.kernels import attention_plot

ADD, ENDS, AHEAD = 0.5, 0.75, 2  # an addition, either end of a work, and shares that may wait, in products of a tile


def works_of(order: str, heads: int, blocks: int, causal: bool, together: int = 1, tiles: int = 1) -> list[Any]:
    """(head, key block, its tiles of queries in order) in the order of tickets; `tiles` for each block of keys."""
    works = []
    for begin in range(0, heads, together):
        for key in range(blocks) if order == "first to last" else range(blocks)[::-1]:
            walk = list(range(tiles * key if causal else 0, tiles * blocks))  # under a causal mask: from the diagonal
            if order == "first to last":
                walk.reverse()
            if order == "rotation":
                walk = walk[tiles * key :] + walk[: tiles * key]
            works += [(head, key, walk) for head in range(begin, min(begin + together, heads))]
    return works


def turn_of(order: str, blocks: int, causal: bool, tiles: int = 1) -> Callable[[int, int], int]:
    """How many shares of a tile come before that of a key block."""

    def turn(key: int, tile: int) -> int:
        row = tile // tiles
        turns = {"first to last": key, "last to first": (row if causal else blocks - 1) - key}
        return turns[order] if order in turns else (row - key) % blocks

    return turn


def simulate(works: list[Any], turn: Any, multiprocessors: int, jitter: float = 0.0) -> tuple[float, list[Any]]:
    """When it is done (infinity: never), and spans (multiprocessor, work, what, tile, from, to). No turn, no order."""
    draw = np.random.default_rng(0)
    events: list[Any]
    waiting: dict[Any, Any]
    added: dict[Any, int]
    tickets, number, events, waiting, added = iter(works), itertools.count(), [], {}, {}
    spans: list[Any] = []
    state: list[Any] = [None] * multiprocessors

    def later(time: float, what: str, i: int) -> None:
        heapq.heappush(events, (time, next(number), what, i))

    def take(now: float, i: int) -> None:
        state[i] = work = next(tickets, None)
        if work is not None:
            state[i] = {"work": work, "multiplied": 0, "added": 0, "multiplies": False, "adds": False, "since": now}
            later(now + ENDS, "begin", i)

    def go_on(now: float, i: int) -> None:
        one = state[i]
        head, key, walk = one["work"]
        if not one["multiplies"] and one["multiplied"] < min(len(walk), one["added"] + AHEAD):
            until = now + 1 + jitter * draw.uniform(-1, 1)
            spans.append((i, one["work"], "multiplies", walk[one["multiplied"]], now, until))
            one["multiplies"] = True
            later(until, "multiplied", i)
        if not one["adds"] and one["added"] < one["multiplied"]:
            tile = (head, walk[one["added"]])
            before = 0 if turn is None else turn(key, tile[1])
            if added.get(tile, 0) < before:
                if waiting.get((tile, before)) is None:
                    waiting[tile, before], one["since"] = i, now
                return
            one["adds"] = True
            later(now + ADD, "added", i)

    for i in range(multiprocessors):
        take(0.0, i)
    now = 0.0
    while events:
        now, _, what, i = heapq.heappop(events)
        one = state[i]
        if what == "multiplied":
            one["multiplied"] += 1
            one["multiplies"] = False
        elif what == "turn":
            spans.append((i, one["work"], "waits", one["work"][2][one["added"]], one["since"], now))
        elif what == "added":
            tile = (one["work"][0], one["work"][2][one["added"]])
            spans.append((i, one["work"], "adds", tile[1], now - ADD, now))
            added[tile] = added.get(tile, 0) + 1
            one["added"] += 1
            one["adds"] = False
            if turn is not None and (tile, added[tile]) in waiting:
                later(now, "turn", waiting.pop((tile, added[tile])))
            if one["added"] == len(one["work"][2]):
                take(now + ENDS, i)
                continue
        go_on(now, i)
    return (np.inf if any(state) else now), spans


def _works(axes: plt.Axes, order: str, causal: bool, multiprocessors: int) -> tuple[float, float]:
    end, spans = simulate(works_of(order, 1, 8, causal), turn_of(order, 8, causal), multiprocessors)
    waited = 0.0
    for _, (_, key, _), what, tile, begin, until in spans:
        if what == "multiplies":
            axes.add_patch(Rectangle((begin, key), until - begin, 0.5, fc=PALE, ec="white"))
            axes.text((begin + until) / 2, key + 0.25, tile, ha="center", va="center", size=6.5)
        else:
            waited += (what == "waits") * (until - begin)
            colour = GRAD if what == "adds" else WRONG
            axes.add_patch(Rectangle((begin, key + 0.5), until - begin, 0.36, fc=colour, ec="white", lw=0.5))
    name = f"{'causal' if causal else 'no mask'}, {order}"
    after = "never done" if np.isinf(end) else f"done after {end:.4g}, waits {waited:.4g}"
    axes.set_title(f"{name}: {after}", size=9)
    axes.set(xlim=(0, 13.5), ylim=(8.1, -0.1), yticks=np.arange(8) + 0.43)
    axes.set_yticklabels(range(8), size=7)
    return end, waited


def works(cases: Sequence[tuple[str, bool]], multiprocessors: int) -> dict[tuple[str, bool], tuple[float, float]]:
    """One head's works by time, a panel for each (order, causal): when each is done, and how long it waits."""
    rows = len(cases) // 2
    _, panels = plt.subplots(rows, 2, figsize=(8.5, 2.7 * rows), sharex=True, squeeze=False)
    found = {case: _works(axes, *case, multiprocessors) for axes, case in zip(panels.flat, cases, strict=True)}
    for axes in panels[:, 0]:
        axes.set_ylabel("block of keys")
    for axes in panels[-1]:
        axes.set(xlabel="time, in products of a tile", xlim=(0, 13.5 if multiprocessors == 8 else 22))
    return found


def online(tops: Sequence[float], paths: Mapping[str, Any], counts: Sequence[int], errors: Mapping[str, Any]) -> None:
    """How m grows over the blocks of keys, and the error of out by the number of keys."""
    _, (left, right) = plt.subplots(1, 2, figsize=(8.5, 2.9))
    left.plot(tops, "o", color=X, ms=5, label="largest of the block")
    for (name, path), colour in zip(paths.items(), (Y, LABEL), strict=True):
        left.step(range(len(tops)), path, where="post", color=colour, label=f"m: {name}")
        right.plot(counts, errors[name], ".-", color=colour, label=f"m: {name}")
    left.set(xlabel="block of 128 keys", ylabel="exponent of 2", title="one query", ylim=(None, max(tops) + 1.6))
    left.legend(fontsize=8, loc="upper left")
    right.set_xscale("log", base=2)
    right.set(xlabel="keys that a query sees", ylabel="% of out", title="error of out")
    right.legend(fontsize=8)


def words_of_dq(pairs: Mapping[str, Any]) -> None:
    """Which words of dq differ between two runs."""
    fig, panels = plt.subplots(1, 3, figsize=(8.5, 4.1), sharey=True)
    for axes, (name, wrong) in zip(panels, pairs.items(), strict=True):
        look = {"cmap": ListedColormap([PALE, WRONG]), "vmin": 0, "vmax": 1}
        axes.imshow(wrong, interpolation="nearest", aspect="auto", **look)
        axes.set(xlabel="channel", title=f"{name}: {int(wrong.sum()):,}", xticks=(0, 32, 63))
    panels[0].set_ylabel("query")
    fig.suptitle("words of dq that differ between run 0 and run 1 (red)", fontsize=10)


def measured(payload: Any) -> None:
    """TFLOP/s of exact attention and cuDNN's, by sequence."""
    fig, panels = plt.subplots(2, 2, figsize=(8.5, 5), sharey=True)
    for row, way in zip(panels, attention_plot.WAYS, strict=True):
        for axes, mask in zip(row, attention_plot.MASKS, strict=True):
            attention_plot.panel(axes, payload, way, mask)
        row[0].set_ylabel("TFLOP/s")
    fig.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
