"""What the whole test session shares: the tiny checkpoint, transformers' reference of it, and one running pipeline."""

from __future__ import annotations

import gc
import os
import sys

# Before torch and vLLM are imported, which read these once.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["tests.ending", "tests.traced"]
GROUPS = {
    **dict.fromkeys(("cluster", "served"), "served"),
    **dict.fromkeys(("engine", "server/test_local.py", "vllm_engine/test_after_sampling.py"), "pipeline"),
    "models/qwen3_omni/test_talker_stage.py": "pipeline",
    **dict.fromkeys(("clients", "server", "engine/test_omni_llm.py"), "omni"),
}
"""The fixture that tests of a folder share, but for single modules; other tests share what is in their module alone."""

if TYPE_CHECKING:
    from omni_cluster.engine.omni_llm import AsyncOmniLLM, OmniLLM
    from tests.engine.stages import Speak
    from tests.reference import Reference, SpeechReference

# Examples have no deadline: the machine may be busy.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--apart", action="store_true", help="`served` has each stage on a node of its own")
    parser.addoption("--screenshots", metavar="DIR", help="keep pictures of the playground in DIR")


@pytest.fixture
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of `--screenshots`, else one of the test's own."""
    folder = Path(request.config.getoption("--screenshots") or tmp_path / "pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Looking for garbage takes a quarter of the time of imports; what they made is never looked at again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if torch.cuda.is_available():
            if item.get_closest_marker("parity"):
                item.add_marker(pytest.mark.gpu)
        elif item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA card"))


def pytest_collection_finish() -> None:
    """transformers writes each configuration it reads into errors that it then hides, which takes 0.2 s."""
    if "transformers" in sys.modules:
        from transformers import PreTrainedConfig

        PreTrainedConfig.__repr__ = object.__repr__  # type: ignore[method-assign]


class ByGroup(LoadScopeScheduling):
    """Tests of one group are run by one process, in their order: there they share a cluster, or engines."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0].removeprefix("tests/")
        return GROUPS.get(module) or GROUPS.get(module.split("/")[0], module)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByGroup:
    return ByGroup(config, log)


@pytest.fixture(scope="session")
def tiny() -> Path:
    from omni_cluster.models.qwen2_5_omni.checkpoint import embedded_checkpoint

    return embedded_checkpoint("tiny")


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Reference:
    from tests.reference import Reference

    return Reference(tiny)


@pytest.fixture(scope="session")
def speak(tiny: Path, reference: Reference) -> Speak:
    """The reference's spoken reply to `prompt_text(kind)`, made once for each kind, voice and seed that is asked."""
    from tests.reference import media, prompt_text

    made: dict[tuple[str, str, int], SpeechReference] = {}

    def spoken(kind: str, voice: str = "Chelsie", seed: int = 0) -> SpeechReference:
        key = (kind, voice, seed)
        if key not in made:
            made[key] = reference.speech(prompt_text(kind), *media(kind), voice=voice, seed=seed)
        return made[key]

    return spoken


@pytest.fixture(scope="session")
def forked_engines() -> None:
    """As a replica's: from a process that imports vLLM once for all of them, which is most of an engine's start."""
    from omni_cluster.vllm_engine.engine_processes import ENGINE_PROCESSES

    ENGINE_PROCESSES.import_beside()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pipeline(forked_engines: None) -> AsyncIterator[AsyncOmniLLM]:
    """The whole pipeline on the tiny checkpoint; tests leave no request in it."""
    from omni_cluster.engine.omni_llm import AsyncOmniLLM
    from tests.engine.stages import pipeline_config

    omni = AsyncOmniLLM(pipeline_config())
    await omni.start()
    yield omni
    await omni.shutdown()


@pytest.fixture(scope="session")
def omni(forked_engines: None) -> Iterator[OmniLLM]:
    """The embedded default inside this process, with the lengths of `pipeline`; tests leave no request in it."""
    from omni_cluster.engine.omni_llm import OmniLLM
    from tests.engine.stages import short_default

    with OmniLLM(short_default()) as running:
        yield running
