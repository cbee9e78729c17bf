"""`Schedule`: which requests run and which wait, as slots and pages of the cache suffice, and what each has got.

Points 2 and 5 of generator.py. A request that waits is in `waiting`, one that has a slot in `running`, in the order of
their admission. `kept` are the prefixes of sequences that have ended, the oldest first: whoever needs a page takes
theirs.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from reference.generation.requests import Batch, Request, Token, common
from reference.nn.attentions.kv_cache import InferenceParams


class Schedule:
    """Requests by their state, over a cache in pages.

    Args:
        cache: where their keys and values lie.
        piece: of a prompt a step computes so many tokens at most; None is all.
    """

    def __init__(self, cache: InferenceParams, piece: int | None) -> None:
        assert cache.pages is not None
        self.cache, self.pages, self.piece = cache, cache.pages, piece
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.kept: dict[tuple[str, int], list[int]] = {}
        self._batch = Batch([])
        self.stuck: int | None = None  # who waits until a running request is over, for lack of pages

    def batch(self) -> Batch:
        """The running requests; the same object as long as these are the same."""
        if self._batch.names != list(self.running):
            self._batch = Batch(list(self.running.values()))
        return self._batch

    def missing(self, request: Request) -> list[int]:
        """Tokens of a request that are not in the cache."""
        return request.text[self.pages.lengths.get(request.name, 0) :]

    def may_admit(self) -> bool:
        """Whether somebody waits whom a step might admit."""
        free = len(self.running) < self.cache.max_batch_size
        return bool(self.waiting) and free and self.waiting[0].name != self.stuck

    def admit(self) -> None:
        """Let requests run, in their order, while there are slots and pages."""
        while self.waiting and len(self.running) < self.cache.max_batch_size:
            one = self.waiting[0]
            source, tokens = self._prefix(one.text)
            most = len(one.text) - 1
            if any(common(one.text, r.text, most) >= tokens + self.pages.size for r in self.running.values()):
                return  # this step computes more of its prefix, so the next one need not
            if tokens:
                self.cache.share(one.name, source, tokens)
            self.running[one.name] = one
            if not self.fits({}):
                self.running.pop(one.name)
                if tokens:
                    self.cache.drop(one.name)
                self.stuck = one.name
                return
            self.waiting.popleft()

    def _prefix(self, text: list[int]) -> tuple[Any, int]:
        """The sequence in the cache that begins like a text, and with how many tokens: a page at least, or 0."""
        texts: dict[Any, list[int]] = {**self.kept, **{name: r.text for name, r in self.running.items()}}
        best: tuple[Any, int] = (None, 0)
        for name, length in self.pages.lengths.items():
            tokens = common(text, texts[name], min(len(text) - 1, length))
            if tokens >= max(self.pages.size, best[1] + 1):
                best = (name, tokens)
        return best

    def fits(self, extra: dict[int, list[int]]) -> bool:
        """Whether pages suffice for a step of all running requests with `extra` tokens; prefixes may go for it."""
        lengths, piece = self.pages.lengths, self.piece
        steps: dict[Hashable, int] = {name: len(one.text) - lengths.get(name, 0) for name, one in self.running.items()}
        if piece is not None:
            steps = {name: min(n, piece) for name, n in steps.items()}
        for name, tokens in extra.items():
            if name in steps:
                steps[name] += len(tokens)
        return self.room(steps)

    def room(self, steps: Mapping[Hashable, int]) -> bool:
        """Whether pages suffice for these new tokens; prefixes may go for it."""
        while self.pages.needed(steps) > len(self.pages.free):
            if not self.kept:
                return False
            oldest = next(iter(self.kept))
            del self.kept[oldest]
            self.cache.drop(oldest)
        return True

    def make_room(self, drafts: dict[int, list[int]]) -> None:
        """If pages run out, drafts become empty, and then the requests that were admitted last wait."""
        if self.fits(drafts):
            return
        drafts.update({name: [] for name in drafts})
        while not self.fits(drafts):
            self.evict(next(reversed(self.running)))

    def evict(self, name: int) -> None:
        """A request that runs, if it does, waits at the front again."""
        one = self.running.pop(name, None)
        if one is not None:
            self.waiting.appendleft(one)
            self._leave(name)

    def cancel(self, name: int) -> None:
        """Forget a request."""
        if self.running.pop(name, None) is not None:
            self._leave(name)
        self.waiting = deque(one for one in self.waiting if one.name != name)

    def end(self, one: Request) -> None:
        """A running request has its last token; its text stays as a prefix."""
        kept = ("kept", one.name)
        self.cache.share(kept, one.name, len(one.text) - 1)
        self.kept[kept] = one.text
        del self.running[one.name]
        self._leave(one.name)

    def _leave(self, name: int) -> None:
        """A request that runs no longer gives up its pages."""
        self.stuck = None
        if name in self.pages.lengths:
            self.cache.drop(name)

    def forget(self) -> None:
        """Nothing is in the cache; running requests wait again."""
        waiting = {one.name for one in self.waiting}  # an error in between leaves a request in both
        for name in list(self.running)[::-1]:
            one = self.running.pop(name)
            if name not in waiting:
                self.waiting.appendleft(one)
        self.kept.clear()
        self.cache.reset()
        self.stuck = None

    @property
    def most(self) -> int:
        """Tokens that a text may have."""
        return min(self.cache.max_sequence_length, self.pages.count * self.pages.size)

    def take_all(self, batch: Batch, tokens: list[int], logprobs: list[float]) -> Iterable[Token]:
        """Add a token to the text of each request of a batch, all of which run and may get another one."""
        for text, token in zip(batch.texts, tokens, strict=True):
            text.append(token)
        ended: list[str | None] = [None] * len(tokens)
        for i in [i for i, stop in batch.stops if tokens[i] in stop]:
            ended[i] = "stop"
            self.end(batch.requests[i])
        return map(Token._make, zip(batch.names, tokens, logprobs, ended, strict=True))

    def take(self, one: Request, tokens: list[int], logprobs: list[float], draft: list[int]) -> list[Token]:
        """Add to a running request's text the next token, and those after it as far as the draft was right."""
        last, found = len(tokens) - 1, []
        for i, token in enumerate(tokens):
            one.text.append(token)
            ended = "stop" if token in one.stop else None if one.left else "length"
            found.append(Token(one.name, token, logprobs[i], ended))
            if ended:
                break
            if i == last:
                return found
            if draft[i] != token:
                break
        if i < last:
            self.cache.cut(one.name, len(one.text) - 1)
        if ended:
            self.end(one)
        return found
