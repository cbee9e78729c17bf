"""`Generator`: text from a model for many requests at a time, each with the words that it would get alone.

    generator = te.Generator(model, max_batch_size=8, max_sequence_length=512)
    for done in generator.generate([[1, 2, 3], [1, 2]], max_new_tokens=20, sampling=te.Sampling(0.8, top_p=0.9)):
        print(done.tokens, done.logprobs)

The way of a request:

1. `add` puts it into the queue. A **request** is a prompt, a limit, a `Sampling` and tokens that end it.
2. `step` admits requests in their order while there is a **slot** (max_batch_size sequences run at a time) and enough
   **pages** are free. Where a sequence in the cache begins with the same tokens, a page of them at least, the new one
   begins in its pages, and computes only what follows (`InferenceParams.share`; a page is copied before somebody writes
   into it). Ended sequences stay in the cache as such prefixes, as long as nobody needs their pages.
3. `step` packs what is new of all running sequences into one forward: a prompt that was just admitted, or a piece of it
   (`prefill_tokens`), one token of every other, and the tokens of a **draft**. `InferenceParams` (inference.py) says
   where they lie, and `attended_in_pages` (inference_step.py) writes their keys and attends.
4. Each sequence's last rows of logits give its next tokens (sampling.py), and their log-probabilities are the words of
   `twin::cross_entropy`, the op of the trainer's loss. Of a draft as many tokens are kept as are what would have been
   drawn anyway; the keys of the others are cut off.
5. If pages run out, prefixes that nobody uses go first, the oldest first; then drafts; then the sequence that was
   admitted last is **evicted**: it gives up its pages, waits at the front of the queue, and is computed again from its
   tokens.

Why nobody else changes a word: a row of a product, a norm, an activation or a rotation is computed by itself; attention
reads the keys of one sequence, in blocks of 128 from key 0, wherever they lie; a token is drawn by its sequence's own
seed and length. So a text is a function of model, prompt and `Sampling`; the order of requests, slots, pages, drafts
and evictions decide when it is there. Its log-probabilities are those of the trainer's forward of the whole text, bit
for bit, in 16 bits and in FP8; a recipe whose scales depend on a step's tokens is refused.

On a GPU a step is launched op by op, or from tapes; with `cuda_graphs` a step of one token of each sequence is a CUDA
graph (graphed_step.py). Random words are computed on the host. Pages of a multiple of 128 tokens are read where they
lie, others are gathered in each step (`reference.ops.attentions.attention_paged`).

With `cuda_graphs` and without drafts the host is a step ahead: `step` launches the next one, and then reads what the
one before it has found. A next step of one token of each running sequence needs no token on the host: the GPU has them,
and moves their places on. So such a step is a graph and a copy to the host, and little of Python for each sequence.
Any other one, as for a request that can be admitted, for a page that somebody has to give up, or where a sequence gets
its last token, is launched when the one before has been read. A sequence of which a stop token is read has another step
on its way. What that finds is dropped; the keys that it writes lie behind the text's, where nobody reads them before
they are written again. It draws by the sequence's own seed and length, so no other draw changes.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

from reference.float8.kept_tensor import KeptTensor
from reference.generation.drafts import prompt_lookup
from reference.generation.graphed_step import Found, GraphedStep, rows_of
from reference.generation.new_kv_cache import attention_of, cache_for
from reference.generation.requests import Batch, Completion, Flight, Request, Token
from reference.generation.sampling import Drawing, Sampling, drawing_of, next_tokens
from reference.generation.schedule import Schedule
from reference.nn.attentions.kv_cache import InferenceParams
from reference.state import autocast
from reference.support import pinned

Forward = Callable[[torch.Tensor, InferenceParams], torch.Tensor]
Draft = Callable[[Sequence[int], int], Sequence[int]]


class Generator:
    """Continuous batching over a paged cache, with words that do not depend on the batch (see the module's docstring).

    Args:
        model: in eval mode; all of its attention is causal self-attention of this package's layers, each with a
            `layer_number` of its own.
        forward: `(tokens, cache) -> logits`. tokens are int64 `[t, 1]`, or `[1, t]` where the layers are "bshd"; logits
            have another dimension V, in fp32, bf16 or fp16. The layers get `inference_params=cache`; `cache.positions`
            are the tokens' places in their sequences. None is `model(tokens, inference_params=cache)`, or for a
            Hugging Face model that `te.convert(model, blocks=True)` has changed its own forward.
        max_batch_size: sequences that run at a time.
        max_sequence_length: of a prompt and its new tokens together.
        page_size, total_num_pages: of the cache; None is as many pages as max_batch_size sequences can fill.
        dtype: of the cache; None is that of the model's parameters if it has 16 bits, else bf16.
        bos: a token that every text begins with, so that a prompt may be empty; or None.
        draft_tokens: how many tokens of a draft a step tries at most; 0 tries none.
        draft: `(text, count) -> tokens`, up to count of them that may follow; by default `drafts.prompt_lookup`. Where
            it has a method `many(texts, counts)`, as `te.DraftModel` has, that is called once for all sequences.
        prefill_tokens: of a prompt a step computes so many tokens at most, so that others wait less; None is all.
        fp8_kv: the cache has FP8 codes of keys and values (`reference.nn.attentions.fp8_keys_values`); None is as
            `te.keys_and_values_in_fp8` has set the model's attention, so that its trainer computes the same words.
        cuda_graphs: replay steps of one token from a CUDA graph for each batch size, rounded up to a power of two.
            `forward` must not wait for the GPU, nor write a parameter, and weights must stay where they are. Pages
            whose size is no multiple of 128 are gathered up to max_sequence_length. On a CPU such steps read the
            same fixed tensors, without a graph. Without drafts `step` then returns tokens one call later, and all
            calls are made on one stream: a step may still run when the next one is launched.

    Attributes:
        cache: the `InferenceParams`.
        schedule, waiting, running: requests by their state.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Forward | None = None,
        *,
        max_batch_size: int = 8,
        max_sequence_length: int = 2048,
        page_size: int = 128,
        total_num_pages: int | None = None,
        dtype: torch.dtype | None = None,
        bos: int | None = None,
        draft_tokens: int = 0,
        draft: Draft = prompt_lookup,
        prefill_tokens: int | None = None,
        fp8_kv: bool | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        if prefill_tokens is not None and prefill_tokens < 1:
            raise ValueError(f"Generator: prefill_tokens={prefill_tokens}; None or 1 and more are accepted.")
        cores = attention_of(model)
        self.model, self.draft_tokens, self.draft, self.bos = model, draft_tokens, draft, bos
        self.prefill_tokens = prefill_tokens
        sizes = (max_batch_size, max_sequence_length, page_size, total_num_pages)
        self.cache = cache_for(next(model.parameters()), cores, *sizes, dtype, fp8_kv)
        self._forward = forward or self._forward_of_model
        self._graphed = GraphedStep(self._next_of, self._weights) if cuda_graphs else None
        self._batch_first = cores[0].qkv_format == "bshd"
        self.schedule = Schedule(self.cache, prefill_tokens)
        self._count = 0
        self._flight: Flight | None = None
        self._sure = 0  # steps that are surely nobody's last, nor that of a prompt
        self._tokens: list[Token] = []  # read, and not yet returned

    def _forward_of_model(self, tokens: torch.Tensor, cache: InferenceParams) -> torch.Tensor:
        if not hasattr(self.model, "prepare_inputs_for_generation"):  # as Hugging Face's models have it
            return self.model(tokens, inference_params=cache)  # type: ignore[no-any-return]
        where = {"position_ids": cache.positions[None], "use_cache": False}
        return self.model(input_ids=tokens, inference_params=cache, **where).logits  # type: ignore[no-any-return]

    def _weights(self) -> list[torch.Tensor]:
        """The memory of the model's parameters."""
        return [one.codes if isinstance(one, KeptTensor) else one.detach() for one in self.model.parameters()]

    def _logits_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [t, V] of tokens [t], whose places `pre_step` has said."""
        logits = self._forward(tokens[None] if self._batch_first else tokens[:, None], self.cache)
        return logits.reshape(len(tokens), -1).contiguous()

    def _next_of(self, tokens: torch.Tensor, drawing: Drawing | None) -> Found:
        """What follows on tokens [t], whose places `pre_step` has said."""
        return Found(*next_tokens(self._logits_of(tokens), drawing))

    @property
    def waiting(self) -> deque[Request]:
        """Requests that wait."""
        return self.schedule.waiting

    @property
    def running(self) -> dict[int, Request]:
        """Requests that run, by name."""
        return self.schedule.running

    @property
    def busy(self) -> bool:
        """Whether a request is not done, or a token of one is not yet returned."""
        return bool(self.waiting or self.running or self._tokens)

    def add(
        self,
        prompt: Iterable[int],
        max_new_tokens: int = 16,
        sampling: Sampling | None = None,
        stop: Iterable[int] = (),
    ) -> int:
        """Put a request into the queue; its name.

        Args:
            prompt: tokens; without a `bos` one at least.
            max_new_tokens: it ends after so many.
            sampling: None takes the likeliest tokens.
            stop: it ends after one of these.
        """
        request = self._request(prompt, max_new_tokens, sampling, stop)
        self.waiting.append(request)
        return request.name

    def _request(self, prompt: Iterable[int], limit: int, sampling: Sampling | None, stop: Iterable[int]) -> Request:
        """A request under a new name, which is not in the queue yet."""
        text = [*([] if self.bos is None else [self.bos]), *map(int, prompt)]
        if not text:
            raise ValueError("Generator.add: prompt is empty; a token is accepted, or a Generator with bos.")
        most = self.schedule.most
        if limit < 1 or len(text) + limit > most:
            raise ValueError(
                f"Generator.add: a text of {len(text)} tokens with max_new_tokens={limit}; 1 or more are accepted, and "
                f"together {most} (max_sequence_length, and what all pages hold)."
            )
        self._count += 1
        return Request(self._count, text, limit, sampling or Sampling(), frozenset(map(int, stop)))

    def generate(
        self,
        prompts: Iterable[Iterable[int]],
        max_new_tokens: int = 16,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Iterable[int] = (),
    ) -> list[Completion]:
        """Add requests, step until all are done, and return what each has got, in the order of the prompts.

        Args:
            sampling: of all, or one for each prompt. The rest is as in `add`.
        """
        if self.busy:
            raise RuntimeError(
                "Generator.generate: other requests are not done; step() until busy is False is accepted."
            )
        every, stop = list(prompts), list(stop)
        each = [sampling] * len(every) if sampling is None or isinstance(sampling, Sampling) else list(sampling)
        requests = [self._request(x, max_new_tokens, one, stop) for x, one in zip(every, each, strict=True)]
        self.waiting.extend(requests)
        found: dict[int, list[Token]] = {one.name: [] for one in requests}
        while self.busy:
            for token in self.step():
                found[token.name].append(token)
        return [
            Completion([x.token for x in tokens], [x.logprob for x in tokens], tokens[-1].ended or "")
            for tokens in found.values()
        ]

    def evict(self, name: int) -> None:
        """Let a running request give up its pages and wait at the front of the queue; no word of its text changes.

        A request that waits, or has its last token, stays as it is. After an error all requests wait again.
        """
        try:
            self._read()  # which may find the last token of any request
        except BaseException:
            self.forget()
            raise
        self.schedule.evict(name)

    def cancel(self, name: int) -> None:
        """Forget a request that is running or waits, and its tokens that no call has returned yet."""
        self.schedule.cancel(name)
        self._tokens = [token for token in self._tokens if token.name != name]

    def forget(self) -> None:
        """Forget all keys and values, as after a change of the model's weights; running requests wait again.

        Their next tokens then follow on keys and values of the new weights.
        """
        self.schedule.forget()
        flight, self._flight = self._flight, None
        try:
            if flight is not None:
                flight.found.wait()  # it reads what a graph has
        finally:
            if self._graphed is not None:
                self._graphed.forget()

    # --- a step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Token]:
        """Admit requests, run one forward, and return the tokens that it has found; nothing without requests.

        With `cuda_graphs` and without drafts a call launches a forward and returns the tokens of the one that the call
        before had launched. `busy` is True until all tokens were returned. After a stop token a forward may still be on
        its way, whose tokens nobody takes.

        After an error all requests wait again, with what they have.
        """
        state = autocast.current()
        recipe: Any = getattr(vars(self.model).get("forward"), "recipe", None)  # te.convert's, where none is open
        recipe = state.recipe if state.enabled else recipe
        if self.model.training or (recipe is not None and recipe.sees_other_tokens):
            what = f"the recipe {type(recipe).__name__}" if not self.model.training else "model.training=True"
            raise ValueError(
                f"Generator: {what}, in which a token depends on others or on chance; model.eval() is accepted, with a "
                f"recipe whose scales do not depend on a step's tokens."
            )
        ahead = self._graphed is not None and not self.draft_tokens
        try:
            if ahead and self._goes_on():
                before, self._flight = self._flight, self._one_more()
                self._read(before)
            else:
                self._sure = 0
                self._read()
                self.schedule.admit()
                drafts = self._drafts()
                self.schedule.make_room(drafts)
                self._flight = self._launched(drafts) if self.running else None
            if not ahead:
                self._read()
        except BaseException:
            self.forget()
            raise
        tokens, self._tokens = self._tokens, []
        return tokens

    @property
    def pages(self) -> Any:
        """The cache's page table."""
        return self.cache.pages

    def _drafts(self) -> dict[int, list[int]]:
        """Drafts of requests whose prompt is in the cache, for tokens that they may still get beside the next one."""
        if not self.draft_tokens:
            return {name: [] for name in self.running}
        counts = {
            name: min(self.draft_tokens, one.left - 1) if len(self.schedule.missing(one)) == 1 else 0
            for name, one in self.running.items()
        }
        names = [name for name, count in counts.items() if count > 0]
        texts, wanted = [self.running[name].text for name in names], [counts[name] for name in names]
        many = getattr(self.draft, "many", None)
        found = many(texts, wanted) if many is not None and names else map(self.draft, texts, wanted)
        drafts = {name: [int(x) for x in one][: counts[name]] for name, one in zip(names, found, strict=True)}
        return {name: drafts.get(name, []) for name in self.running}

    def _goes_on(self) -> bool:
        """Whether the next step is one more token of each running request, whatever the step on its way draws.

        If so, the cache has room for it, and knows of it.
        """
        if self._flight is None or not self.running or self.schedule.may_admit():
            return False
        if self._sure:
            self._sure -= 1
        else:
            lengths, least = self.pages.lengths, min(one.left for one in self.running.values())
            if least < 2 or any(lengths.get(name) != len(one.text) for name, one in self.running.items()):
                return False  # it is over then, or its prompt is not yet in the cache
            self._sure = least - 2
        names = self.schedule.batch().names
        if self.cache.step_again(names):
            return True
        steps: dict[Hashable, int] = dict.fromkeys(names, 1)
        fits = self.schedule.room(steps)
        if fits:
            self.cache.pre_step(steps)
        return fits

    def _one_more(self) -> Flight:
        """Launch a step of the tokens that the step on its way draws."""
        flight, batch = self._flight, self.schedule.batch()
        assert flight is not None
        assert self._graphed is not None
        tokens, before = None, flight.batch
        if flight.held is None or len(batch.names) != len(before.names):  # others, or other rows
            rows = dict(zip(before.names, range(len(before.names)), strict=True))
            at = [rows[name] for name in batch.names]
            at += at[:1] * (rows_of(len(at), self.cache.max_batch_size) - len(at))
            tokens = flight.tokens.index_select(
                0, pinned.sent(torch.tensor(at, dtype=torch.int64, device="cpu"), self.cache.device)
            )
        positions = list(self.cache.sequences.values())
        return Flight.of_graph(batch, self._graphed(tokens, batch.settings, positions, self.cache))

    def _launched(self, drafts: dict[int, list[int]]) -> Flight | None:
        """Launch the forward of all running requests and their drafts, and their draws; None if there are none."""
        batch = self.schedule.batch()
        running = batch.requests
        missing = [self.schedule.missing(one) for one in running]
        new = [text[: self.prefill_tokens] for text in missing]
        ready = [len(part) == len(text) for part, text in zip(new, missing, strict=True)]
        new = [part + drafts[one.name] for part, one in zip(new, running, strict=True)]
        self.cache.pre_step({one.name: len(tokens) for one, tokens in zip(running, new, strict=True)})
        packed = [x for one in new for x in one]
        if self._graphed is not None and len(packed) == len(running) and all(ready):
            positions = [len(one.text) for one in running]
            return Flight.of_graph(batch, self._graphed(packed, batch.settings, positions, self.cache))
        logits = self._logits_of(torch.tensor(packed, dtype=torch.int64, device=self.cache.device))
        if not any(ready):
            return None
        ends = accumulate(map(len, new))
        counts = [1 + len(drafts[one.name]) if last else 0 for one, last in zip(running, ready, strict=True)]
        rows = [end - n + i for end, n in zip(ends, counts, strict=True) for i in range(n)]
        if rows != list(range(len(logits))):
            at = torch.tensor(rows, dtype=torch.int64, device="cpu")
            logits = logits.index_select(0, pinned.sent(at, logits.device))
        settings = [one.sampling for one, n in zip(running, counts, strict=True) for _ in range(n)]
        positions = [len(one.text) + i for one, n in zip(running, counts, strict=True) for i in range(n)]
        tokens, losses = next_tokens(logits, drawing_of(settings, positions, logits.device))
        drawn = Batch([one for one, n in zip(running, counts, strict=True) if n])
        return Flight(drawn, [n for n in counts if n], drafts, tokens, None, pinned.Fetched(tokens, losses))

    def _read(self, flight: Flight | None = None) -> None:
        """Wait for a step, by default the one on its way, and take its tokens; of requests that run no longer, none."""
        if flight is None:
            flight, self._flight = self._flight, None
        if flight is None:
            return
        tokens, logprobs = flight.wait()
        if self._flight is not None and self._flight.batch is flight.batch:  # all go on, and this is nobody's last
            self._tokens += self.schedule.take_all(flight.batch, tokens, logprobs)
            return
        at = 0
        for one, n in zip(flight.batch.requests, flight.counts, strict=True):
            if one.name in self.running:
                drawn = slice(at, at + n)
                its = (tokens[drawn], logprobs[drawn], flight.drafts.get(one.name, []))
                self._tokens += self.schedule.take(one, *its)
            at += n
