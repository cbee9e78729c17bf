"""`InferenceParams`: a cache of keys and values, so that a model that writes text projects only what is new.

    params = InferenceParams(max_batch_size, max_sequence_length, num_heads_kv, head_dim_k, dtype)
    params.pre_step({sequence: new tokens, ...})     row r of the batch is the r-th of these sequences
    y = layer(x, inference_params=params)            in every layer, each with a layer_number of its own

Keys and values [max_batch_size, max_sequence_length, num_heads_kv, head_dim] of a layer are allocated once. Of a
sequence with n tokens in the cache, new token i has position n + i: q and k are rotated by its angle, k and v are
copied to row n + i, and its query sees keys 0 .. n + i under a causal mask type (all of its sequence under any other),
as far as the window permits. Nothing is computed in another way than without a cache: `twin::attention` reads its keys
in the same blocks, from key 0, and what is hidden from a query changes no bit of its row (docs/inference.md).

With `is_paged` keys and values are [total_num_pages, page_size, num_heads_kv, head_dim], and a sequence takes pages as
it grows. `share` begins a sequence with another one's first tokens, in the same pages. With qkv_format="thd" the new
tokens of a step lie one after the other, sequence by sequence: [tokens, hidden] in layers of "thd", a batch of one,
[tokens, 1, hidden] and [1, tokens, hidden], in those of "sbhd" and "bshd". `reference.nn.attentions.pages` says who has
which pages; `twin::attention_paged` reads them.

Source: Transformer Engine's `pytorch/attention/inference.py`.
"""

import weakref
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from reference.arguments import check_arguments, is_int
from reference.nn.attentions.fixed_step import FixedStep
from reference.nn.attentions.fp8_keys_values import CODES
from reference.nn.attentions.inference_checks import check_begun, check_forward, new_tokens
from reference.nn.attentions.inference_step import Cached, StepTensors, mixed_tensors
from reference.nn.attentions.pages import Pages
from reference.nn.core.attributes import OfCache
from reference.nn.core.parameters import DeviceDefault
from reference.ops.attentions.attention import BLOCK
from reference.support import not_offered, pinned


@not_offered.without_methods
class InferenceParams(OfCache, DeviceDefault):
    """The caches of a model's layers, and how far each sequence is. Arguments are Transformer Engine's.

    Args:
        max_batch_size: sequences at a time.
        max_sequence_length: tokens of a sequence, its prompt included.
        num_heads_kv, head_dim_k: heads of keys and their size: a layer's num_gqa_groups and kv_channels.
        head_dim_v: size of a head of values; None is head_dim_k.
        dtype: of the caches: the activations' dtype, or torch.autocast's.
        is_paged, total_num_pages, page_size: pages, their number, and the tokens of each; bf16 or fp16. Any number is
            accepted, Transformer Engine's max_batch_size * max_sequence_length / page_size as well as fewer.
        qkv_format: "thd" packs the new tokens; "sbhd" and "bshd" have no effect, because a layer's own format counts.
        max_ctx_len: accepted as in Transformer Engine, without effect. custom_cache_manager: only None is offered.
        device: of the caches; None is the package's own.
        fp8_kv: pages hold FP8 codes of keys and values, and scales of each head of each token; dtype is bf16, and heads
            have a multiple of 16 channels. Attention reads what they stand for (`fp8_keys_values.py`): pages of the
            batch are dequantized in each step.

    Attributes:
        scales: with fp8_kv by layer number, scale_inv of keys and of values, fp32 [pages, page_size, num_heads_kv].
        cache: by layer number, keys and values [max_batch_size, max_sequence_length, num_heads_kv, head_dim_k or _v];
            in pages [total_num_pages, page_size, ...].
        sequences: the length of each sequence in the batch, its new tokens included, in the order of the batch.
        batch_size: how many they are.
        pre_step_seqlens: int32 [max_batch_size], their lengths before the step, on the device.
        kept: what a model keeps beside the cache, as angles of all positions.
        pages: `Pages`, where the cache has them; with "thd" it always has, if need be a page for each whole sequence.

    `pre_step` changes tensors where they lie. So a step of one token, once captured in a CUDA graph, can be replayed
    after each `pre_step`; in a capture attention reads the whole cache, because a graph's shapes stay.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
        *,
        device: torch.device | str | None = None,
        fp8_kv: bool = False,
    ) -> None:
        check_arguments("InferenceParams", {name: x for name, x in locals().items() if name != "fp8_kv"})
        assert num_heads_kv is not None
        assert head_dim_k is not None
        assert dtype is not None
        self.max_batch_size, self.max_sequence_length = int(max_batch_size), int(max_sequence_length)
        self.num_heads_kv, self.head_dim_k, self.dtype = int(num_heads_kv), int(head_dim_k), dtype
        self.head_dim_v, self.is_paged = self.head_dim_k if head_dim_v is None else int(head_dim_v), is_paged
        self.packed, self.total_num_pages, self.page_size = qkv_format == "thd", total_num_pages, page_size
        self.pages = self._pages(is_paged, total_num_pages, page_size)
        self.fp8_kv = bool(fp8_kv)
        if self.fp8_kv and (self.pages is None or dtype != torch.bfloat16 or head_dim_k % 16 or self.head_dim_v % 16):
            raise ValueError(
                f"InferenceParams: fp8_kv=True with dtype={dtype}, heads of {head_dim_k} and {self.head_dim_v} "
                f"channels and is_paged={is_paged}; bfloat16, multiples of 16 and pages ('thd' has them) are accepted."
            )
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.kept: dict[Any, Any] = {}
        self.sequences: dict[Hashable, int] = {}
        self._starts: list[int] = []
        self._steps: list[int] = []
        self._used = 0  # rows of the caches that hold, or held, a sequence
        self._owners: dict[int, Any] = {}
        self._ran: set[int] = set()  # layers, since the last `pre_step`
        self._captured = False
        self._mixed: dict[Any, tuple[torch.Tensor, ...]] = {}
        self._fixed: dict[int, FixedStep] = {}  # by their rows
        self._held: FixedStep | None = None  # what the next forward reads
        self._before: FixedStep | None = None  # what the last one read, if `step_again` goes on from there,
        self._got_pages: list[int] = []  # and who has got a page since
        self.max_ctx_len = self.max_sequence_length if max_ctx_len is None else int(max_ctx_len)
        self.input_qkv_format, self.cache_qkv_format = qkv_format, "bshd"
        device = self.resolve_device(device)
        with torch.inference_mode(False):  # outside of it, torch changes no tensor that was made in it
            self._seqlens = torch.zeros(self.max_batch_size, dtype=torch.int32, device=device)
            self._rows = torch.zeros(self.max_batch_size, dtype=torch.int64, device=device)
            self._first = torch.arange(self.max_batch_size, device=device) * self.max_sequence_length
            self._columns = torch.arange(self.max_sequence_length, dtype=torch.int32, device=device)
        self._seqlens_late, self._seqlens_read = False, False  # whether they lack the step, and if anybody wants them
        self.device = self._seqlens.device
        self._hidden: dict[int, torch.Tensor] = {}  # with one token of each sequence, by the window's left side

    def _pages(self, is_paged: bool, count: int | None, size: int | None) -> Pages | None:
        """The page table, after a check of what pages need."""
        if is_paged is not (count is not None) or is_paged is not (size is not None):
            raise ValueError(
                f"InferenceParams: total_num_pages={count} and page_size={size} with is_paged={is_paged}; both are "
                f"accepted with True, None with False."
            )
        if not is_paged and not self.packed:
            return None
        if self.dtype == torch.float32:
            raise TypeError(
                f"InferenceParams: dtype={self.dtype} in pages, or with qkv_format='thd'; bfloat16 and float16 are "
                f"accepted."
            )
        return Pages(count or self.max_batch_size, size or self.max_sequence_length)

    def __repr__(self) -> str:
        names = ("max_batch_size", "max_sequence_length", "num_heads_kv", "head_dim_k", "head_dim_v", "dtype", "device")
        names = (*names, *(("total_num_pages", "page_size") if self.is_paged else ()))
        return f"InferenceParams({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    @property
    def batch_size(self) -> int:
        """How many sequences the batch has."""
        return len(self.sequences)

    @property
    def pre_step_seqlens(self) -> torch.Tensor:  # type: ignore[override]
        """See the class. In pages they are copied to the device when first read, and from then on in each step."""
        if self._seqlens_late:
            self._fill_seqlens()
        self._seqlens_read = True
        return self._seqlens

    def _fill_seqlens(self) -> None:
        before = torch.tensor(self._starts, dtype=torch.int32, device="cpu")
        pinned.fill(self._seqlens[: len(before)], before)  # the step before may still run
        self._seqlens_late = False

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """`pre_step_seqlens`."""
        return self.pre_step_seqlens

    def allocate_memory(self, layer_number: int) -> None:
        """Make the cache of a layer that has none. Layers do so; `DotProductAttention` by itself needs it done."""
        if not is_int(layer_number) or layer_number < 1:
            raise ValueError(f"InferenceParams: layer_number={layer_number!r}; an int from 1 on is accepted.")
        if layer_number in self.cache:
            return
        check_begun(self, "InferenceParams", layer_number)
        rows = (self.max_batch_size, self.max_sequence_length)
        if self.pages is not None:
            rows = (self.pages.count, self.pages.size)
        shape = (*rows, self.num_heads_kv)
        with torch.inference_mode(False):
            sizes = (self.head_dim_k, self.head_dim_v)
            dtype = CODES if self.fp8_kv else self.dtype
            made = [torch.zeros(*shape, size, dtype=dtype, device=self.device) for size in sizes]
            if self.fp8_kv:
                scales = [torch.zeros(shape, dtype=torch.float32, device=self.device) for _ in sizes]
                self.scales[int(layer_number)] = (scales[0], scales[1])
        self.cache[int(layer_number)] = (made[0], made[1])

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        self.sequences, self._starts, self._steps = {}, [], []
        self._ran, self._held, self._before = set(), None, None
        self._mixed.clear()
        if self.pages is not None:
            self.pages.reset()

    def share(self, sequence: Hashable, source: Hashable, tokens: int) -> None:
        """Begin `sequence` with the first tokens of `source`, in its pages; the next `pre_step` adds what follows.

        Either may be a name that no step has: it stays in its pages until `drop`, so a prefix can be kept for later.
        """
        pages = self._with_pages("share")
        if sequence in pages.lengths or not 0 < tokens <= pages.lengths.get(source, 0):
            raise ValueError(
                f"InferenceParams.share: sequence={sequence!r}, source={source!r} and tokens={tokens!r}; a new name, "
                f"one of the sequences {dict(pages.lengths)} and 1 to all of its tokens are accepted."
            )
        pages.share(sequence, source, tokens)

    def cut(self, sequence: Hashable, tokens: int) -> None:
        """Forget all but the first tokens of a sequence, as after a draft that was wrong."""
        pages = self._with_pages("cut")
        if not 0 < tokens <= pages.lengths.get(sequence, 0):
            raise ValueError(
                f"InferenceParams.cut: sequence={sequence!r} and tokens={tokens!r}; one of the sequences "
                f"{dict(pages.lengths)} and 1 to all of its tokens are accepted."
            )
        pages.cut(sequence, tokens)
        if sequence in self.sequences:
            self.sequences[sequence] = tokens

    def drop(self, sequence: Hashable) -> None:
        """Forget a sequence now, and not at the next `pre_step` that does not name it."""
        pages = self._with_pages("drop")
        if sequence not in pages.lengths:
            raise ValueError(f"InferenceParams.drop: sequence={sequence!r}; one of {list(pages.lengths)} is accepted.")
        pages.drop(sequence)
        self.sequences.pop(sequence, None)

    def _with_pages(self, method: str) -> Pages:
        if self.pages is None:
            raise ValueError(f"InferenceParams.{method}: is_paged=False; True is accepted, or qkv_format='thd'.")
        return self.pages

    # --- a step's beginning --------------------------------------------------------------------------

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> dict[Hashable, int]:
        """Say which sequences the next forward has, in the batch's order, and how many new tokens each; their lengths.

        A name that the step before had goes on (by as many tokens as said; Transformer Engine's by one). A new name
        begins a sequence. One that is left out is over, and the cache has room for another. Where sequences have
        different numbers of new tokens, those of each are at its row's beginning.
        """
        steps = new_tokens(self, step_dict)
        self._held = self._before = None
        if self.pages is not None:
            return self._step_in_pages(self.pages, dict(zip(step_dict, steps, strict=True)))
        before = list(self.sequences)
        origins = [before.index(name) if name in self.sequences else None for name in step_dict]
        goes_on = origins == list(range(len(before))) and len(set(self._steps)) == 1
        self._move(origins)
        moved_on = self._steps[0] if goes_on else 0
        starts = [self.sequences.get(name, 0) for name in step_dict]
        self.sequences = {name: start + n for name, start, n in zip(step_dict, starts, steps, strict=True)}
        self._starts, self._steps, self._ran = starts, steps, set()
        self._used = max(self._used, len(steps))
        self._mixed.clear()
        if goes_on:  # without a copy from the host, which would wait for the GPU
            self._seqlens[: len(steps)] += moved_on
        else:
            self._seqlens[: len(steps)] = torch.tensor(starts, dtype=torch.int32, device="cpu")
        torch.add(self._first, self._seqlens, out=self._rows)
        for left, hidden in self._hidden.items():
            self._hide(left, hidden)
        return self.sequences

    def _step_in_pages(self, pages: Pages, steps: dict[Hashable, int]) -> dict[Hashable, int]:
        """`pre_step` where sequences have pages."""
        for name in self.sequences.keys() - steps.keys():
            pages.drop(name)
        starts = [pages.lengths.get(name, 0) for name in steps]
        copies = [copy for name, new in steps.items() for copy in pages.extend(name, new)]
        if copies:
            at, to = (torch.tensor(one, dtype=torch.int64, device=self.device) for one in zip(*copies, strict=True))
            for both in (*self.cache.values(), *self.scales.values()):
                for one in both:
                    cache = one.view(torch.uint8) if one.dtype == CODES else one
                    cache.index_copy_(0, to, cache.index_select(0, at))
        self.sequences = {name: pages.lengths[name] for name in steps}
        self._starts, self._steps, self._ran = starts, list(steps.values()), set()
        self._mixed.clear()
        self._new_seqlens()
        return self.sequences

    def _new_seqlens(self) -> None:
        self._seqlens_late = True
        if self._seqlens_read:
            self._fill_seqlens()

    def step_again(self, names: Sequence[Hashable]) -> bool:
        """`pre_step` of one more token of each sequence of the batch, if it is the same batch; whether it was done.

        It is quick: lengths are moved on together, and only sequences that get a page are looked at one by one. It is
        not done where `pre_step` would copy a page or refuse, or without pages.
        """
        lengths = list(self.sequences.values())
        ran = self._captured or not self.cache.keys() - self._ran
        if (
            self.pages is None
            or not ran
            or not names
            or list(self.sequences) != names
            or self._steps != [1] * len(names)
        ):
            return False
        known = self.pages.lengths
        if max(lengths) >= self.max_sequence_length or [known.get(name) for name in names] != lengths:
            return False
        found = self.pages.grow(names)
        if found is None:
            return False
        self.sequences, self._starts, self._ran = dict(zip(names, found[0], strict=True)), lengths, set()
        self._held, self._before, self._got_pages = None, self._held, found[1]
        self._mixed.clear()
        self._new_seqlens()
        return True

    def hold(self, tokens: list[int] | torch.Tensor | None, rows: int) -> FixedStep:
        """Let the next forward read its tokens and their places from tensors that stay where they are, for CUDA graphs.

        It follows on a `pre_step` of one token of each sequence, where new tokens are packed. Nobody waits: the step
        before may still run on the same stream. The forward is then followed by `held.end` and `ended`.

        Args:
            tokens: the new token of each sequence; or int64 [rows] on the device; or None where the tensor that the
                last call with these rows has returned holds them.
            rows: of the forward, as many as there are sequences or more; the others are copies of the first one.

        Returns:
            The step's tensors; the same object for as many rows.
        """
        count = len(tokens) if isinstance(tokens, list) else len(self._steps)
        if not self.packed or self._steps != [1] * count or rows < count or not count:
            raise ValueError(
                f"InferenceParams.hold: {count} tokens and rows={rows} with packed={self.packed} after a "
                f"pre_step of {self._steps}; one token of each sequence, packed, and no fewer rows are accepted."
            )
        pages = self._with_pages("hold")
        if rows not in self._fixed:
            self._fixed[rows] = FixedStep(rows, self._columns_of(pages), pages.size, self.device)
        held = self._held = self._fixed[rows]
        changed = self._got_pages if self._before is held else None
        of = pages.of
        its = [] if changed == [] else [of[name] for name in self.sequences]
        held.fill(tokens, list(self.sequences.values()), its, changed)
        return held

    def replayed(self) -> None:
        """All layers have run: a graph has replayed their step."""
        self._ran.update(self.cache)

    def ended(self) -> None:
        """On the host: a step that was held has been launched up to its end."""
        if self._held is not None:
            self._held.ended()

    def _move(self, origins: list[int | None]) -> None:
        """Bring the rows of all caches into the batch's order."""
        moves = [(to, at) for to, at in enumerate(origins) if at is not None and to != at]
        # What is hidden has the weight +0, but +0 times an infinity that a sequence left behind would be NaN.
        stale = [to for to, at in enumerate(origins) if at is None and to < self._used]
        for keys, values in self.cache.values():
            for cache in (keys, values) if moves else ():
                cache[[to for to, _ in moves]] = cache[[at for _, at in moves]]
            for row in stale:
                values[row].zero_()

    def _hide(self, left: int, hidden: torch.Tensor) -> None:
        """Which keys the next token of each sequence does not see; `left` is the window's, or -1."""
        view, last = hidden[:, 0, 0], self._seqlens[:, None]
        torch.gt(self._columns, last, out=view)
        if left >= 0:
            view.logical_or_(self._columns < last - left)

    # --- what layers ask -----------------------------------------------------------------------------

    check = check_forward

    def step_of(self, core: Any, causal: bool, window: tuple[int, int]) -> tuple[Cached, StepTensors]:
        """How a layer that `check` accepts reads its cache in this step, which now counts as done."""
        number = core.layer_number
        self.allocate_memory(number)
        self._owners[number] = weakref.ref(core)
        self._ran.add(number)
        cache, length, longest = self.cache[number], max(self._steps), max(self.sequences.values())
        if self.pages is not None:
            most, scales = self._columns_of(self.pages) * self.pages.size, self.scales.get(number, (None, None))
            if self._held is not None:
                queries = core.num_attention_heads_per_partition // core.num_gqa_groups_per_partition
                rows: Any = self._held.together(queries)
                return Cached("paged", 0, most, 1), StepTensors(*cache, *self._held.tensors, *scales, *rows)
            if "paged" not in self._mixed:
                self._mixed["paged"] = self._paged_tensors(self.pages, length)
            keys = min(-(-longest // BLOCK) * BLOCK, most)
            return Cached("paged", 0, keys, length), StepTensors(*cache, *self._mixed["paged"], *scales)
        if length == 1:
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            self._captured = self._captured or capturing
            # Whole blocks of keys: for as many steps, all launches are the same.
            blocks = self.max_sequence_length if capturing else -(-longest // BLOCK) * BLOCK
            keys, batch = min(blocks, self.max_sequence_length), self.batch_size
            hidden = self._hidden_from(window[0])[:batch, :, :, :keys]
            parts = (self._seqlens[:batch], self._rows[:batch], None, hidden)
            return Cached("one", 0, keys), StepTensors(*cache, *parts)
        if len(set(zip(self._starts, self._steps, strict=True))) == 1:
            return Cached("equal", self._starts[0], longest), StepTensors(*cache)
        if (causal, window) not in self._mixed:
            given = (self._starts, self._steps, self.max_sequence_length, longest, causal, window, self.device)
            self._mixed[causal, window] = mixed_tensors(*given)
        return Cached("mixed", 0, longest), StepTensors(*cache, *self._mixed[causal, window])

    @property
    def positions(self) -> torch.Tensor:
        """int64: each new token's place in its sequence, of tokens in the order [b, s]; packed as they lie. After a
        held step has ended, those of the next one."""
        if self._held is not None:
            return self._held.places
        places = [list(range(start, start + n)) for start, n in zip(self._starts, self._steps, strict=True)]
        if not self.packed:
            longest = max(self._steps, default=0)
            places = [one + one[-1:] * (longest - len(one)) for one in places]
        return torch.tensor([place for one in places for place in one], dtype=torch.int64, device=self.device)

    def _columns_of(self, pages: Pages) -> int:
        """Pages that a sequence has at most."""
        return -(-self.max_sequence_length // pages.size)

    def _paged_tensors(self, pages: Pages, length: int) -> Any:
        """positions and what follows it in `StepTensors`."""
        places, source = self.positions, None
        if not self.packed and len(set(self._steps)) > 1:
            source = [row * length + i for row, n in enumerate(self._steps) for i in range(n)]
        rows = [
            row for name, start in zip(self.sequences, self._starts, strict=True) for row in pages.rows(name, start)
        ]
        tables, columns = [pages.of[name] for name in self.sequences], self._columns_of(pages)
        if not self.packed:  # as rotary embedding wants them, [s, b]
            places = places.view(-1, length).t().flatten()
        made: Any = [
            None if x is None else torch.tensor(x, dtype=torch.int64, device=self.device) for x in (rows, source)
        ]
        for x in (
            [one + [0] * (columns - len(one)) for one in tables],
            self._steps,
            list(self.sequences.values()),
            [0, *accumulate(self._steps)],
        ):
            made.append(torch.tensor(x, dtype=torch.int32, device=self.device))
        return (places.int(), *made[:2], None, *made[2:])

    def _hidden_from(self, left: int) -> torch.Tensor:
        if left not in self._hidden:
            shape = (self.max_batch_size, 1, 1, self.max_sequence_length)
            with torch.inference_mode(False):
                self._hidden[left] = torch.empty(shape, dtype=torch.bool, device=self.device)
            self._hide(left, self._hidden[left])
        return self._hidden[left]
