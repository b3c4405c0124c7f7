"""Code2wav's input: the talker's codes, as one job of all of them or piece by piece while the talker makes more."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_cluster.models.code_reader import CodeReader
from omni_cluster.models.sound import SoundJob
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk

SAMPLE_RATE_HZ = 24_000
"""Of the vocoder; no checkpoint says it."""

FIRST_CODES = (2, 2, 4)
"""Codes of a stream's first pieces, at least. One code is 0.06 s of sound, in which a loaded talker makes no two more.
Those that follow have `LATER_CODES` at least, and more when more wait."""
LATER_CODES = 8

PASS_CODES = 64
"""Codes of a request in a pass at most: what a pass takes in memory is then the same whatever an answer's length."""
PASS_ROWS = 512
"""Codes of a pass at most, those of all its pieces and of the context before them: an H200 needs 3 ms for the
arithmetic of so many at its bound."""

_KERNEL, _DILATIONS = 7, (1, 3, 9)
"""Of the decoder's convolutions; no checkpoint says them."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How samples lie in codes: `samples_per_code`, `missing_samples` of a request's end, and the `context` codes
    before a piece that its samples depend on through the convolutions.
    """

    samples_per_code: int
    missing_samples: int
    context: int

    @classmethod
    def of(cls, ratios: Sequence[int], rates: Sequence[int]) -> Reach:
        """`ratios` of the convolutions before the decoder, `rates` of those in it, whose kernels are of two strides."""
        missing = 0
        for rate in rates:
            missing = (missing + 1) * rate
        first = -missing - (_KERNEL - 1)
        for rate in reversed(rates):
            first = (first - (_KERNEL - 1) * sum(_DILATIONS)) // rate
        first -= _KERNEL - 1
        for ratio in reversed(ratios):
            first = (first - (_KERNEL - 1)) // ratio
        return cls(math.prod(ratios) * math.prod(rates), missing, -first)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Reach:
        """Without transformers, which the ingress does not load."""
        code2wav = config["code2wav_config"]
        return cls.of(code2wav["upsampling_ratios"], code2wav["upsample_rates"])

    def samples(self, codes: int) -> int:
        """Samples that so many codes of a request allow."""
        return max(0, codes * self.samples_per_code - self.missing_samples)


class Code2WavSession:
    """One request in code2wav.

    Whole mode is one job of all codes, in parts of a pass each. Streaming, a piece is what codes are there, without
    look-ahead; its size counts those before it that the convolutions see again. A request that is begun again begins
    with its first code, in pieces as large as they may be, of which those are not heard that the client has: so its
    sound goes on exactly, and even minutes of it are made again in a fraction of a second.
    """

    def __init__(
        self,
        request: OmniRequest,
        upstream: AsyncIterator[StageChunk],
        reach: Reach,
        num_codes: int,
        codebooks: int,
        max_piece_codes: int,
    ) -> None:
        """`max_piece_codes` is at most `PASS_CODES`."""
        self._request = request
        self._codes = CodeReader(upstream, num_codes, codebooks)
        self._reach = reach
        self._max_piece_codes = max_piece_codes
        self._delivered = request.known_of("code2wav").num_samples
        self._start = self._end = 0

    async def jobs(self) -> AsyncGenerator[SoundJob, None]:
        """See `SoundSession.jobs`; raises what the upstream raised. Closing it ends the reading of the upstream."""
        async with self._codes.reading():
            if not self._request.streams_audio:
                await self._codes.wait_for_all()
                if len(self._codes):
                    yield self.latest()
                return
            for least in self._least_codes():
                await self._codes.wait_for(self._start + least)
                if len(self._codes) <= self._start:
                    return
                yield self.latest()
                self._start = self._end

    def _least_codes(self) -> Iterator[int]:
        """Of the next piece; asked when the one before it has its size."""
        while self._reach.samples(self._start + self._max_piece_codes) <= self._delivered:
            yield self._max_piece_codes
        for number in itertools.count():
            yield min(FIRST_CODES[number] if number < len(FIRST_CODES) else LATER_CODES, self._max_piece_codes)

    def latest(self) -> SoundJob:
        """See `SoundSession.latest`."""
        streams = self._request.streams_audio
        there = len(self._codes)
        self._end = min(there, self._start + self._max_piece_codes) if streams else there
        samples = range(self._reach.samples(self._start), self._reach.samples(self._end))
        count = self._end - self._start
        before = self._start if streams else max(0, count - PASS_CODES)
        return SoundJob(
            self._codes.between(self._start, self._end),
            samples,
            size=min(count, PASS_CODES) + min(before, self._reach.context),
            stream=self._request.request_id if streams else None,
            is_heard=not streams or samples.stop > self._delivered,
            parts=-(-count // PASS_CODES),
        )
