"""vLLM's configuration of one stage."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import vllm.logger

from omni_cluster.engine.build import bind
from omni_cluster.models.stage_spec import ARSpec, RowsAt
from omni_cluster.types.errors import ConfigError
from omni_cluster.vllm_engine.engine_args import ADDITIONAL_KEY, OmniEngineArgs
from omni_cluster.vllm_engine.scheduler import OmniAsyncScheduler, OmniScheduler
from tests.engine.stages import pipeline_config, thinker_stage
from tests.vllm_engine.residual_decoder import Decoder


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tuple[logging.Logger, Path]]:
    """A logger that writes through a buffer, as Ray Serve's do."""
    file = tmp_path / "replica.log"
    logger, handler = logging.getLogger("of a replica"), logging.FileHandler(file)
    logger.addHandler(buffer := MemoryHandler(1, target=handler))
    yield logger, file
    logger.removeHandler(buffer)
    handler.close()


def test_a_stage_s_configuration_leaves_the_logs_of_its_process_open(
    log: tuple[logging.Logger, Path], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm.logger, "_last_configured_logging_config", None)
    monkeypatch.setenv("VLLM_XGRAMMAR_CACHE_MB", "512")  # put back at the end
    logger, file = log
    bound = bind(pipeline_config())
    thinker = bound.config.stages[0]
    args = OmniEngineArgs.for_ar_stage(thinker, bound.config, str(tiny), cast(ARSpec, bound.spec(thinker)))
    config = args.create_engine_config()
    assert vllm.logger._last_configured_logging_config == config.logging_config  # none is left for the engine
    logger.warning("it goes on")
    assert file.read_text() == "it goes on\n"


@pytest.mark.parametrize("groups", [1, 2])
def test_the_scheduler_is_the_one_that_vllm_decided_on(
    groups: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are counted ahead only where vLLM's runner does so too: not on a CPU, nor of layers in two groups."""
    monkeypatch.setenv("VLLM_XGRAMMAR_CACHE_MB", "512")  # put back at the end
    thinker = thinker_stage().model_copy(update={"pipeline_parallel_size": groups})
    bound = bind(pipeline_config(thinker))
    args = OmniEngineArgs.for_ar_stage(thinker, bound.config, str(tiny), cast(ARSpec, bound.spec(thinker)))
    scheduling = args.create_engine_config().scheduler_config
    assert scheduling.async_scheduling == (groups == 1 and torch.cuda.is_available())
    assert scheduling.get_scheduler_cls() is (OmniAsyncScheduler if scheduling.async_scheduling else OmniScheduler)


class _DecoderWithRows(Decoder):
    emits = frozenset({"codes", "rows"})
    rows_kind = "of tests"


class _WithRowsOut(Decoder):
    has_residual_codes = False
    reads = frozenset()
    has_rows_out = True


@pytest.mark.parametrize(
    ("spec", "parts", "words"),
    [
        (
            _DecoderWithRows(),
            1,
            r"stage 0 \(thinker\): its spec emits hidden states and has_residual_codes, .*leave one out\.$",
        ),
        (_WithRowsOut(), 2, "pipeline_parallel_size is 2, and one group of layers only"),
    ],
)
def test_a_spec_of_which_no_engine_is_made_is_refused(spec: ARSpec, parts: int, words: str) -> None:
    config = pipeline_config(thinker_stage().model_copy(update={"pipeline_parallel_size": parts}))
    with pytest.raises(ConfigError, match=words):
        OmniEngineArgs.for_ar_stage(config.stages[0], config, "none", spec)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"async_scheduling": True}, r"engine_args\.async_scheduling is true"),
        ({"attention_backend": "FLASHINFER"}, r"engine_args\.attention_backend is 'FLASHINFER'"),
        ({"attention_config": {"backend": "flashinfer"}}, r"engine_args\.attention_config\.backend is 'flashinfer'"),
    ],
)
def test_what_goes_with_one_token_a_step_is_refused_beside_several(given: dict[str, Any], words: str) -> None:
    spec, stage = _Passing(), thinker_stage()
    spec.rows_at = "prompt"  # type: ignore[misc]
    config = pipeline_config(stage.model_copy(update={"engine_args": {**stage.engine_args, **given}}))
    with pytest.raises(ConfigError, match=rf"stage 0 \(thinker\): {words}, which .* set max_decode_steps to 1\.$"):
        OmniEngineArgs.for_ar_stage(config.stages[0], config, "none", spec)


class _Passing(Decoder):
    """Takes ids, and emits rows."""

    emits = frozenset({"codes", "rows"})
    rows_kind = "of tests"
    has_residual_codes = False


@pytest.mark.parametrize(("rows_at", "steps"), [("all", 1), ("prompt", 8)])
def test_rows_of_later_positions_go_out_one_position_a_step(tiny: Path, rows_at: RowsAt, steps: int) -> None:
    spec, config = _Passing(), pipeline_config(thinker_stage())
    spec.rows_at = rows_at  # type: ignore[misc]
    args = OmniEngineArgs.for_ar_stage(config.stages[0], config, str(tiny), spec)
    assert args.additional_config[ADDITIONAL_KEY]["max_decode_steps"] == steps  # type: ignore[index]
