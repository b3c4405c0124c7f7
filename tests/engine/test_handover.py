from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from omni_cluster.engine import handover as handover_module
from omni_cluster.engine.handover import Handover
from omni_cluster.types.outputs import StageChunk


async def given(*chunks: StageChunk) -> AsyncGenerator[StageChunk, None]:
    for chunk in chunks:
        yield chunk


async def drained(handover: Handover, *chunks: StageChunk) -> list[StageChunk]:
    return [chunk async for chunk in handover.watched(given(*chunks))]


async def test_last_chunk_says_how_long_chunks_were_under_way() -> None:
    handover, now_s = Handover(), time.time()
    sent = [StageChunk(i, (i,), made_at_s=now_s - age_s) for i, age_s in enumerate((5.0, 1.0, 9.0))]
    assert await drained(handover, *sent) == sent
    times = handover.signed(StageChunk(finish_reason="stop")).handover
    passed_s = time.time() - now_s
    assert times is not None
    assert 5.0 <= times.p50_s <= 5.0 + passed_s and 9.0 <= times.max_s <= 9.0 + passed_s


async def test_a_chunk_of_a_host_whose_clock_is_ahead_took_no_time() -> None:
    observed = list[float]()
    await drained(Handover(observed.append), StageChunk(0, (1,), made_at_s=time.time() + 3600))
    assert observed == [0.0]


async def test_a_traced_request_has_a_span_of_its_first_chunk_s_way(monkeypatch: pytest.MonkeyPatch) -> None:
    written, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(written))
    monkeypatch.setattr(handover_module, "TRACER", provider.get_tracer("a"))
    now_s = time.time()
    with provider.get_tracer("b").start_as_current_span("request") as request:
        traced = Handover()
    await drained(traced, *(StageChunk(i, (i,), made_at_s=now_s - age_s) for i, age_s in enumerate((2.0, 1.0))))
    await drained(Handover())
    span = next(span for span in written.get_finished_spans() if span.name == "handover")
    assert len(written.get_finished_spans()) == 2  # a stage to which nothing came has none
    assert span.parent == request.get_span_context()
    assert span.start_time == pytest.approx((now_s - 2) * 1e9) and 2 <= (span.end_time - span.start_time) / 1e9 < 60
    assert span.attributes is not None and span.attributes["chunks"] == 2


async def test_only_the_last_chunk_says_it() -> None:
    handover = Handover()
    await drained(handover, StageChunk())
    middle = StageChunk(0, (1,))
    assert handover.signed(middle) is middle


async def test_a_stage_without_a_source_has_no_handover() -> None:
    last = StageChunk(finish_reason="stop")
    assert Handover().signed(last) is last


def test_joined_chunks_are_as_old_as_the_first_of_them() -> None:
    first, second = StageChunk(0, (1,)), StageChunk(1, (2,))
    assert StageChunk.joined([first, replace(second, made_at_s=first.made_at_s + 1)]).made_at_s == first.made_at_s


async def test_closing_the_watch_closes_the_source() -> None:
    closed = []

    async def endless() -> AsyncGenerator[StageChunk, None]:
        try:
            while True:
                yield StageChunk()
        finally:
            closed.append(True)

    watched = Handover().watched(endless())
    await anext(watched)
    await watched.aclose()
    assert closed == [True]
