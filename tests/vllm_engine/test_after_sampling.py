"""Frames of three codes from vLLM are those of the plain loop, whatever happens to their requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.types.inputs import KnownOutput, OmniRequest, Prompt
from omni_cluster.types.outputs import StageChunk
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.engine.stages import begun_at_once, collect, until_counts, until_free
from tests.vllm_engine.residual_decoder import MAX_POSITIONS, NAME, VOCAB, Beside, Decoder, Reference

pytestmark = pytest.mark.parity
FRAMES = 40
LENGTHS = (3, 7, 20, 33, 50, 12, 5, 41)
"""Of prompts; the longest take two steps."""
ONE_BY_ONE = {"logprobs": 0}
"""A step then gives one token of the request."""
SEEDED = {"temperature": 1.0, "top_k": 50, "seed": 7}

Frames = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def loop() -> Reference:
    return Reference()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def decoder(
    forked_engines: None, loop: Reference, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[StageLLM]:
    """Four tokens a step; eight requests do not fit into its KV cache at once."""
    folder: Path = tmp_path_factory.mktemp("decoder")
    loop.save(folder)
    config = StageConfig(
        stage_id=0,
        model_stage=NAME,
        num_gpus=0,
        final_output_type="audio",
        max_decode_steps=4,
        engine_args={
            "dtype": "float32",
            "enforce_eager": not torch.cuda.is_available(),  # a card replays CUDA graphs
            "max_model_len": MAX_POSITIONS,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "block_size": 32,
            "kv_cache_memory_bytes": 12 * 32 * 1024,  # twelve blocks
        },
        default_sampling_params={"temperature": 0, "max_tokens": FRAMES},
    )
    pipeline = PipelineConfig(model=str(folder), family="none", stages=[config])
    stage = StageLLM(config, pipeline, Decoder(), str(folder))
    await stage.start()
    yield stage
    await stage.shutdown()


def prompt(length: int) -> tuple[int, ...]:
    return tuple((7 * length + i * i) % (VOCAB - 1) for i in range(length))


def asked(request_id: str, length: int, **sampling: Any) -> OmniRequest:
    return OmniRequest(request_id, Prompt("", prompt(length)), sampling={NAME: sampling})


async def frames(decoder: StageLLM, request: OmniRequest) -> Frames:
    return frames_of(await collect(decoder.generate(request)))


def frames_of(made: StageChunk) -> Frames:
    assert made.codes is not None and made.codes.start == 0 and made.rows is None
    return [tuple(frame) for frame in made.codes.values.tolist()]


async def crowd(decoder: StageLLM, **sampling: Any) -> list[Frames]:
    """Of requests at once, more than fit, which begin and end at different steps."""
    before = (await decoder.counts())["preemptions"]
    limits = [FRAMES - 2 * number for number in range(len(LENGTHS))]
    made = await begun_at_once(
        decoder,
        [
            frames(decoder, asked(f"crowd-{length}-{sampling}", length, **sampling, max_tokens=limit))
            for length, limit in zip(LENGTHS, limits, strict=True)
        ],
    )
    assert (await decoder.counts())["preemptions"] > before
    await until_free(decoder)
    return made


def test_without_its_residual_codes_as_input_the_decoder_says_something_else(loop: Reference) -> None:
    made, without = (loop.frames(prompt(20), FRAMES, feeds_back=feeds_back) for feeds_back in (True, False))
    assert len(set(made)) > FRAMES / 2 and made[0] == without[0]
    assert sum(one[0] != other[0] for one, other in zip(made, without, strict=False)) > FRAMES / 2


@pytest.mark.parametrize("sampling", [{}, ONE_BY_ONE], ids=["four a step", "one a step"])
@pytest.mark.parametrize("length", LENGTHS[:4])
async def test_frames_are_those_of_the_loop(
    decoder: StageLLM, loop: Reference, length: int, sampling: dict[str, Any]
) -> None:
    before = (await decoder.counts())["steps"]
    made = await frames(decoder, asked(f"alone-{length}-{len(sampling)}", length, **sampling))
    assert made == loop.frames(prompt(length), FRAMES)
    steps = (await decoder.counts())["steps"] - before
    assert steps >= FRAMES if sampling else steps < FRAMES / 2


@pytest.mark.parametrize("sampling", [{}, ONE_BY_ONE], ids=["four a step", "one a step"])
async def test_a_crowd_of_which_some_are_preempted_makes_the_same_frames(
    decoder: StageLLM, loop: Reference, sampling: dict[str, Any]
) -> None:
    for length, made in zip(LENGTHS, await crowd(decoder, **sampling), strict=True):
        assert made == loop.frames(prompt(length), len(made))


async def test_seeded_frames_hang_on_no_other_request(decoder: StageLLM) -> None:
    for length, made in zip(LENGTHS, await crowd(decoder, **SEEDED), strict=True):
        alone = await frames(decoder, asked(f"seeded-{length}", length, **SEEDED, **ONE_BY_ONE))
        assert made == alone[: len(made)]


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
async def test_a_request_that_is_begun_again_goes_on_behind_what_is_known(
    decoder: StageLLM, sampling: dict[str, Any]
) -> None:
    request = asked(f"whole-{len(sampling)}", 20, **sampling)
    whole = (await collect(decoder.generate(request))).codes
    assert whole is not None
    for cut in (1, 18, FRAMES - 1):
        known = KnownOutput(codes=whole.between(0, cut))
        again = replace(request, request_id=f"again-{len(sampling)}-{cut}", known={NAME: known})
        assert (await collect(decoder.generate(again))).codes == whole


async def test_a_stop_code_has_no_frame(decoder: StageLLM, loop: Reference) -> None:
    made = loop.frames(prompt(20), FRAMES)
    stops = {"stop_token_ids": [made[9][0]]}
    first = [frame[0] for frame in made].index(made[9][0])
    request = asked("stopped", 20, **stops)
    chunk = await collect(decoder.generate(request))
    assert (frames_of(chunk), chunk.finish_reason) == (made[:first], "stop")


async def test_positions_without_their_id_are_held_and_neighbours_are_not(decoder: StageLLM, loop: Reference) -> None:
    wanted = {length: loop.frames(prompt(length), FRAMES) for length in (20, 41)}
    whole = await collect(decoder.generate(asked("before", 20)))
    assert whole.codes is not None
    known = {NAME: KnownOutput(codes=whole.codes.between(0, 2))}
    again = replace(asked("late-again", 20), known=known)
    gates = {request.request_id: asyncio.Event() for request in (again, asked("late", 41))}
    made = {
        request.request_id: asyncio.create_task(
            collect(decoder.generate(request, reply(prompt(length), gates[request.request_id])))
        )
        for request, length in ((again, 20), (asked("late", 41), 41))
    }
    await until_counts(decoder, held=2)
    assert await frames(decoder, asked("beside", 7)) == loop.frames(prompt(7), FRAMES)
    for (name, task), length in zip(made.items(), (20, 41), strict=True):
        assert not task.done()
        gates[name].set()
        assert frames_of(await task) == wanted[length]


async def reply(ids: tuple[int, ...], gate: asyncio.Event) -> AsyncIterator[StageChunk]:
    """One id after another; those behind the third once the gate is open."""
    given = Beside.of(ids).reply
    for number, token in enumerate(given):
        if number == 3:
            await gate.wait()
        yield StageChunk(token_ids=(token,), finish_reason="stop" if number == len(given) - 1 else None)


async def test_penalties_count_the_output_alone(decoder: StageLLM, loop: Reference) -> None:
    """To penalise all tokens of the vocabulary, which the prompt has, would change nothing."""
    ids = tuple(range(VOCAB))
    wanted = loop.frames(ids, FRAMES, penalty=1.3)
    assert wanted != loop.frames(ids, FRAMES)
    request = OmniRequest("penalised", Prompt("", ids), sampling={NAME: {"repetition_penalty": 1.3}})
    whole = await collect(decoder.generate(request))
    assert frames_of(whole) == wanted and whole.codes is not None
    known = {NAME: KnownOutput(codes=whole.codes.between(0, 5))}
    again = replace(request, request_id="penalised-again", known=known)
    assert frames_of(await collect(decoder.generate(again))) == wanted


async def test_a_stop_code_is_not_sampled_before_min_tokens(decoder: StageLLM, loop: Reference) -> None:
    stop = loop.frames(prompt(20), 1)[0][0]
    wanted = loop.frames(prompt(20), FRAMES, late=(stop, 2))
    tokens = [frame[0] for frame in wanted]
    asks = {"stop_token_ids": [stop], "min_tokens": 2}
    chunk = await collect(decoder.generate(asked("not so soon", 20, **asks)))
    assert frames_of(chunk) == wanted[: tokens.index(stop) if stop in tokens else FRAMES]
