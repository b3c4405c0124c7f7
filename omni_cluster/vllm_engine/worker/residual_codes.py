"""The residual codes of a runner's requests: made after sampling, and the input of the positions that follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from omni_cluster.models.after_sampling import NO_CODE, AfterSampling, Sampled
from omni_cluster.types.codes import Codes
from omni_cluster.types.rows import RESIDUAL_CODES
from omni_cluster.vllm_engine.worker.sampled_rows import on_device
from omni_cluster.vllm_engine.worker.step_rows import NO_FACTS, NOWHERE, RowsOfStep, TokenSpan


@dataclass(slots=True)
class RequestCodes:
    """Where the codes of a request are: from place `first` on, or, of one that is preempted, `aside` on the host."""

    prompt_length: int
    first: int
    aside: torch.Tensor | None = None


class ResidualCodes:
    """The codes at each position of each request, `max_positions` at most, on the device.

    The codes of a step are inputs of the next one, and need not go to the host for that. They are found by request, so
    the order of the batch may change. Up to `max_requests` requests run; preempted ones take no room on the device.
    """

    def __init__(self, model: AfterSampling, max_requests: int, max_positions: int) -> None:
        self._model = model
        self._max_positions = max_positions
        self._dropped = max_requests * max_positions
        """The place of tokens that are dropped."""
        buffer = model.residual_codes
        self._codes = buffer.new_full((self._dropped + 1, buffer.shape[1]), NO_CODE)
        self._free = list(range(0, self._dropped, max_positions))
        self._requests: dict[str, RequestCodes] = {}
        self._making: list[TokenSpan] = []

    def admit(
        self, request_id: str, prompt_length: int, known: Codes | None = None, of_prompt: Codes | None = None
    ) -> None:
        """Takes a new request. `of_prompt`: codes of positions of its prompt; `known`: of the output that follows it.

        Of both the tokens are the first values.
        """
        self.remove(request_id)
        request = self._requests[request_id] = RequestCodes(prompt_length, self._free.pop())
        own = self._of(request).fill_(NO_CODE)
        for codes, first in ((of_prompt, 0), (known, prompt_length)):
            if codes is not None:
                residual = torch.from_numpy(codes.values[:, 1:])
                own[first + codes.start : first + codes.end] = residual.to(own.device)

    def set_aside(self, request_id: str) -> None:
        """Of a request that is preempted; ignores one that is not here."""
        request = self._requests.get(request_id)
        if request is not None and request.aside is None:
            request.aside = self._of(request).to("cpu", copy=True)
            self._free.append(request.first)

    def bring_back(self, request_id: str) -> None:
        """Of a request that goes on, if it was set aside."""
        request = self._requests[request_id]
        if request.aside is not None:
            request.first, aside, request.aside = self._free.pop(), request.aside, None
            self._of(request).copy_(aside)

    def remove(self, request_id: str) -> None:
        """Ignores a request that is not here."""
        request = self._requests.pop(request_id, None)
        if request is not None and request.aside is None:
            self._free.append(request.first)

    def _of(self, request: RequestCodes) -> torch.Tensor:
        return self._codes[request.first : request.first + self._max_positions]

    def feed(self, spans: Sequence[TokenSpan]) -> None:
        """Gives the model the codes at the positions of a step."""
        places = self._places(spans)
        torch.index_select(self._codes, 0, places, out=self._model.residual_codes[: len(places)])

    def begin(self, spans: Sequence[TokenSpan]) -> None:
        """A step is about to make the tokens at these positions, for each request of the batch; it may drop some."""
        self._making = list(spans)

    def make(self, sampled: Sampled, ahead: int) -> None:
        """The codes of token number `ahead` that the step makes of each request."""
        codes = self._model.after_sampling(sampled)
        places = self._places([span.one(ahead) for span in self._making])
        self._codes.index_copy_(0, places, codes)

    def take(self) -> RowsOfStep | None:
        """The codes that the step has made, at the places of their tokens in the output of each request."""
        made, self._making = [span for span in self._making if span.length], []
        if not made:
            return None
        codes = self._codes.index_select(0, self._places(made))
        facts = {span.request_id: NO_FACTS for span in made}
        return RowsOfStep.of(RESIDUAL_CODES, codes, [self._in_output(span) for span in made], facts)

    def _in_output(self, span: TokenSpan) -> TokenSpan:
        return replace(span, start=span.start - self._requests[span.request_id].prompt_length)

    def _places(self, spans: Iterable[TokenSpan]) -> torch.Tensor:
        """Those of all positions of the spans, int64 `[n]`, on the device."""
        places = [place for span in spans for place in self._places_of(span)]
        return on_device(np.array(places, dtype=np.int64), self._codes.device)

    def _places_of(self, span: TokenSpan) -> Sequence[int]:
        if span.start == NOWHERE:
            return [self._dropped] * span.length
        first = self._requests[span.request_id].first + span.start
        return range(first, first + span.length)

    def __len__(self) -> int:
        return len(self._requests)
