"""Every fenced block of the pages is taken by a test. Here: those that need no server and no engine."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from ray.serve.schema import ServeApplicationSchema

from omni_cluster.batch import Engines
from omni_cluster.cli import main
from omni_cluster.config.loader import check_config, load_config
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.metric_definitions import ALL
from omni_cluster.models.registry import ENTRY_POINTS, known_families
from omni_cluster.types.errors import ConfigError, OmniError
from tests.commands import IMAGE, files_named, lines_of, parse, simple_commands
from tests.pages import KINDS, PAGES, ROOT, Block, all_blocks, blocks_in, blocks_of

TESTS = Path(__file__).parent
COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
GENERATED = " Generated from here on: `make docs` writes it. "
OF_THE_READER = frozenset({"CONFIG.yaml", "omni_cluster.yaml", "http/result.json", "alone/result.json"})
"""Files that commands name and that a reader has."""
SOUND_BYTES = 60_000
CHEAP = ("check", "plan")
"""Commands of `omni-cluster` that start nothing."""


def one(blocks: list[Block]) -> Block:
    (block,) = blocks
    return block


# ------------------------------------------------------------ that none is left out


def kinds_taken() -> set[str]:
    """Those that tests ask `blocks_of` for."""
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "blocks_of":
                found |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def test_every_block_is_of_one_kind() -> None:
    blocks = list(all_blocks())
    assert len(blocks) > 50
    assert {str(block): block.kinds for block in blocks if len(block.kinds) != 1} == {}


def test_every_kind_has_blocks_and_a_test() -> None:
    assert kinds_taken() == set(KINDS)
    assert [kind for kind in KINDS if not blocks_of(kind)] == []


def test_every_fence_is_read() -> None:
    for page in PAGES:
        text = page.read_text()
        assert text.count("```") == 2 * len(list(blocks_in("", text))), page


def test_a_block_that_no_test_takes_is_found() -> None:
    unknown, begun = blocks_in("a.md", "```text\nword\n```\n\n1. So:\n    ```bash\n    make demo\n    ```\n")
    assert (unknown.kinds, begun.kinds, begun.text, str(begun)) == ([], ["commands"], "make demo\n", "a.md:6")


def test_nothing_invisible_is_in_a_page_but_that_it_is_generated() -> None:
    hidden = {(page.name, text) for page in PAGES for text in COMMENT.findall(page.read_text())}
    assert hidden == {("configuration.md", GENERATED), ("metrics.md", GENERATED)}


# ------------------------------------------------------------ commands


@pytest.mark.parametrize("block", blocks_of("commands"), ids=str)
def test_commands_are_known_and_their_files_are_there(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = [command for line in lines_of(block.text) for command in simple_commands(line)]
    assert commands
    made = set(OF_THE_READER)
    for command in commands:
        parse(command)
        made |= files_made(command)
        assert [name for name in sorted(files_named(command) - made) if not (ROOT / name).exists()] == []


def files_made(command: list[str]) -> set[str]:
    """Those that it writes; of a copy, and behind a `>`, the last word."""
    written = {command[-1]} if command[0] in ("cp", ">") else set()
    return written | {after for option, after in itertools.pairwise(command) if option == "--write"}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("ray up --now ray_cluster.yaml", "--now"),
        ("ray exec f.yaml 'serve run --nonblocking a:b'", "--nonblocking"),
        (".venv/bin/serve rn deployments:app", "rn"),
        ("make demos", "demos"),
        ("python -m tests.nothing", "nothing"),
        ("python examples/nothing.py", "nothing"),
        ("examples/curl/nothing.sh", "nothing"),
        ("kubectl aply -f f.yaml", "aply"),
        (f"docker run --gpus all {IMAGE} serve rn a:b", "rn"),
    ],
)
def test_a_wrong_command_is_found(line: str, fault: str) -> None:
    with pytest.raises(Exception, match=fault):
        for command in simple_commands(line):
            parse(command)


def test_a_wrong_option_of_ours_is_found() -> None:
    with pytest.raises(OmniError, match="chek"):
        parse(["omni-cluster", "chek"])


def test_a_line_may_go_on() -> None:
    assert list(lines_of("a \\\n  b\n\nc '{\n  d}'  # e\n")) == ["a    b", "c '{\n  d}'  # e"]
    assert list(simple_commands("(cat a; b) > c && d | e")) == [["cat", "a"], ["b"], [">", "c"], ["d"], ["e"]]


def cheap_commands() -> list[list[str]]:
    commands = [
        command for block in blocks_of("commands") for line in lines_of(block.text) for command in simple_commands(line)
    ]
    ours = [command for command in commands if command[0].removeprefix(".venv/bin/") == "omni-cluster"]
    return [command[1:] for command in ours if command[1] in CHEAP and "--card-gib" not in command]


@pytest.mark.parametrize("arguments", cheap_commands(), ids=" ".join)
def test_commands_that_start_nothing_run(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "stage_configs", "stage_configs")
    for written in ("my.yaml", "planned.yaml"):
        if written in arguments and "--write" not in arguments:
            shutil.copy(ROOT / "stage_configs/qwen2_5_omni_one_gpu.yaml", written)
    assert main(arguments) == 0, capsys.readouterr().err
    assert "thinker" in capsys.readouterr().out


# ------------------------------------------------------------ configuration


IN_PLACE_OF = {"gpus": "num_gpus", "num_gpus": "gpus", "autoscaling": "num_replicas"}


def with_fragment(fragment: dict[str, Any], number: int) -> dict[str, Any]:
    """A shipped configuration with what a page has: of the whole, or of the stage of this number."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "stage_configs/qwen2_5_omni.yaml").read_text())
    if fragment.keys() <= PipelineConfig.model_fields.keys():
        return config | fragment
    replaced = {IN_PLACE_OF.get(key) for key in fragment}
    stage = {key: value for key, value in config["stages"][number].items() if key not in replaced}
    config["stages"][number] = stage | fragment
    return config


def faults(block: Block) -> list[str]:
    """Of the stages, where none of them may have it."""
    found = []
    for number in range(3):
        try:
            check_config(with_fragment(yaml.safe_load(block.text), number), str(block), known_families=known_families())
        except ConfigError as error:
            found.append(str(error))
        else:
            return []
    return found


@pytest.mark.parametrize("block", blocks_of("configuration"), ids=str)
def test_a_configuration_may_have_what_a_page_says(block: Block) -> None:
    assert faults(block) == []


def test_a_fragment_that_no_configuration_has_is_found() -> None:
    (block,) = blocks_in("a.md", "```yaml\nnum_replica: 2\n```\n")
    assert "no such key is known, did you mean num_replicas" in faults(block)[0]


@pytest.mark.parametrize("block", blocks_of("applications"), ids=str)
def test_an_application_is_of_serve_s_schema(block: Block) -> None:
    for given in yaml.safe_load(block.text)["applications"]:
        application = ServeApplicationSchema.model_validate(given)
        assert set(given) <= set(ServeApplicationSchema.model_fields)
        module, _, name = application.import_path.partition(":")
        assert hasattr(importlib.import_module(module), name)
        assert set(application.args) == {"config"}


def test_prometheus_is_given_what_the_shipped_file_has() -> None:
    """Prometheus itself runs by the same jobs in `tests/served/default/test_prometheus.py`."""
    jobs = {job["job_name"]: job for job in yaml.safe_load(one(blocks_of("prometheus")).text)["scrape_configs"]}
    assert jobs["ray"]["file_sd_configs"] == [{"files": ["/tmp/ray/prom_metrics_service_discovery.json"]}]
    assert set(jobs["omni_cluster"]) == {"job_name", "scrape_timeout", "authorization", "static_configs"}


# ------------------------------------------------------------ others


def test_engines_of_a_batch_take_what_the_page_gives() -> None:
    (code,) = [block.text for block in blocks_of("batch") if "Engines(" in block.text]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/use/batch.md", "exec"), names)
    assert isinstance(names["engines"], Engines)
    load_config(ROOT / str(names["engines"].config), known_families=known_families())


def test_the_entry_point_is_read_and_its_class_is_there() -> None:
    (points,) = tomllib.loads(one(blocks_of("entry point")).text)["project"]["entry-points"].items()
    assert points[0] == ENTRY_POINTS
    for name, path in points[1].items():
        module, _, attribute = path.partition(":")
        assert getattr(importlib.import_module(module), attribute).name == name


@pytest.mark.parametrize("block", blocks_of("picture"), ids=str)
def test_a_picture_has_the_stages_and_files_that_are_there(block: Block) -> None:
    config = load_config(ROOT / "stage_configs/qwen2_5_omni.yaml", known_families=known_families())
    assert [stage.model_stage for stage in config.stages if stage.model_stage not in block.text] == []
    named = re.findall(r"\w+/[\w/]*(?:\.py)?", block.text)
    assert [name for name in named if not (ROOT / "omni_cluster" / name).exists()] == []


def test_a_query_is_of_a_metric_and_a_label_that_are_there() -> None:
    (name,) = re.findall(r"ray_(omni_cluster_\w+)_bucket_total", one(blocks_of("query")).text)
    assert [each.kind for each in ALL if each.name == name] == ["histogram"]


def test_sound_to_play_is_small_and_made_by_a_command_of_its_page() -> None:
    files = sorted((ROOT / "docs" / "sound").iterdir())
    page = (ROOT / "docs/models/toy.md").read_text()
    assert len(files) == 2 and [file.name for file in files if f"-o {file.name}\n" not in page] == []
    assert sum(file.stat().st_size for file in files) < SOUND_BYTES
