"""The requests that are sent, and when."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from omni_cluster.bench.mix import Lengths, Mix
from omni_cluster.bench.speech import RECORDING_S, Samples, recorded, speech

NUMBERS_A_CELL = 1_000_000
"""The first number of a cell is a multiple of this: the rest is a request's place in its cell."""

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
"""What is asked, and what comes of it: a request, or a whole conversation."""

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power"
)


@dataclass(frozen=True, slots=True)
class Load:
    """What requests are: their lengths, which are exact but for the prompt's, and how the answer is to come.

    `prompt_tokens` is the number of words of the message, each a token or little more; the chat template comes on top.
    With a `mix` each request has lengths of its own, and the three that all would have say nothing.
    `turns` are the requests of one user, each with all of the ones before in its prompt; `pause_s` passes between the
    end of an answer's sound and what the user says next.
    """

    prompt_tokens: int = 100
    text_tokens: int = 64
    codec_tokens: int = 512
    voice: str | None = None
    stream: bool = True
    seed: int = 0
    mix: Mix | None = None
    turns: int = 1
    pause_s: float = 1.0

    def of(self, codes_per_s: float) -> Load:
        """The load for a model with so many codec tokens a second of sound."""
        return self if self.mix is None else replace(self, mix=replace(self.mix, codes_per_s=codes_per_s))

    def prepare(self) -> None:
        """Makes what spoken prompts are cut from, so that no request waits for it."""
        if self.mix is not None and self.mix.spoken_share:
            recorded(RECORDING_S)

    def lengths(self, number: int) -> Lengths:
        """Of request `number`: those of its place, so that all cells have the same ones."""
        if self.mix is None:
            return Lengths(self.prompt_tokens, self.text_tokens, self.codec_tokens)
        return self.mix.lengths(self.seed, number % NUMBERS_A_CELL)

    def message(self, number: int) -> str:
        """The words of request `number`: always the same ones, and others for each number."""
        words = random.Random(f"{self.seed} {number}").choices(_WORDS.split(), k=self.lengths(number).prompt_tokens)
        return " ".join(words)

    def speech(self, number: int) -> Samples | None:
        """What the prompt of request `number` is in place of words; None for one of words."""
        spoken_s = self.lengths(number).spoken_s
        return speech(spoken_s, f"{self.seed} {number}") if spoken_s else None

    def sampling(self, number: int, stages: Mapping[Any, str]) -> dict[str, dict[str, Any]]:
        """What fixes the lengths, by stage name; `stages`: which stage makes "text" and "codes"."""
        text, codes = self.lengths(number).text_tokens, self.lengths(number).codec_tokens
        sampled = {
            "text": {"max_tokens": text, "min_tokens": text, "ignore_eos": True},
            "codes": {"max_tokens": codes, "min_tokens": codes},
        }
        return {stages[part]: asked for part, asked in sampled.items() if part in stages}


def poisson_arrivals(rate_per_s: float, count: int, seed: int) -> tuple[float, ...]:
    """When each of `count` requests is sent, seconds since the first: gaps are exponential, equal for equal seeds."""
    return tuple(itertools.islice(_poisson(rate_per_s, seed), count))


def poisson_count(rate_per_s: float, seconds: float, seed: int) -> int:
    """How many of these arrivals are within `seconds`."""
    return sum(1 for _ in itertools.takewhile(lambda at_s: at_s < seconds, _poisson(rate_per_s, seed)))


def _poisson(rate_per_s: float, seed: int) -> Iterator[float]:
    gaps = random.Random(seed)
    return itertools.accumulate((gaps.expovariate(rate_per_s) for _ in itertools.count()), initial=0.0)


async def closed_loop(
    ask: Callable[[Asked], Awaitable[Answer]], requests: Sequence[Asked], concurrency: int
) -> list[Answer]:
    """`concurrency` clients, each of which sends its next request when its last has ended."""
    waiting = iter(requests)

    async def client() -> list[Answer]:
        return [await ask(request) for request in waiting]

    return _joined(await asyncio.gather(*[client() for _ in range(concurrency)]))


async def bursts(
    ask: Callable[[Asked], Awaitable[Answer]], requests: Sequence[Asked], concurrency: int
) -> list[Answer]:
    """`concurrency` requests at once, the next as many when all of them have ended."""
    batches = [requests[i : i + concurrency] for i in range(0, len(requests), concurrency)]
    return _joined([await asyncio.gather(*map(ask, batch)) for batch in batches])


async def open_loop(
    ask: Callable[[Asked], Awaitable[Answer]], requests: Sequence[Asked], arrivals_s: Sequence[float]
) -> list[Answer]:
    """Each request at its time, whether or not earlier ones have ended."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()

    async def one(request: Asked, at_s: float) -> Answer:
        await asyncio.sleep(started_s + at_s - loop.time())
        return await ask(request)

    return list(await asyncio.gather(*itertools.starmap(one, zip(requests, arrivals_s, strict=True))))


def _joined(lists: Iterable[Iterable[Answer]]) -> list[Answer]:
    return list(itertools.chain.from_iterable(lists))
