"""Bad stage files, and the one sentence that each of them gets."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_cluster.config.loader import DEFAULT_CONFIG, MAX_CONFIG_BYTES, STAGE_CONFIGS, load_config
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.types.errors import ConfigError

FAMILIES = ("qwen2_5_omni", "qwen3_omni")
SHIPPED = sorted(STAGE_CONFIGS.glob("*.yaml"))
REMOVED = object()

GOOD: dict[str, Any] = {
    "model": "preset:tiny",
    "family": "qwen2_5_omni",
    "stages": [
        {"stage_id": 0, "model_stage": "thinker", "num_gpus": 0, "final_output_type": "text"},
        {"stage_id": 1, "model_stage": "talker", "num_gpus": 0, "engine_input_source": [0]},
        {
            "stage_id": 2,
            "model_stage": "code2wav",
            "num_gpus": 0,
            "engine_input_source": [1],
            "final_output_type": "audio",
        },
    ],
}

Changes = dict[tuple[str | int, ...], Any]


def changed(changes: Changes) -> dict[str, Any]:
    config = copy.deepcopy(GOOD)
    for (*path, last), value in changes.items():
        at: Any = config
        for step in path:
            at = at[step]
        if value is REMOVED:
            del at[last]
        else:
            at[last] = value
    return config


def write(folder: Path, content: object) -> Path:
    path = folder / "qwen.yaml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def sentence(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, known_families=FAMILIES)
    return str(caught.value).replace(str(path), path.name)


def of_stage(index: int, **changes: Any) -> Changes:
    return {("stages", index, name): value for name, value in changes.items()}


# Each: what is changed in a good configuration, then key, value and a good value as the sentence names them.
BAD: dict[str, tuple[Changes, str, str, str]] = {
    "misspelt key": ({("modle",): "x"}, "modle", "'x'", "did you mean model"),
    "misspelt stage key": (of_stage(0, num_gpu=1), "stages[0].num_gpu", "1", "did you mean num_gpus"),
    "key like no other": ({("zzz",): 1}, "zzz", "1", "use one of model, family"),
    "misspelt limit": (
        {("limits",): {"max_prompt_token": 5}},
        "limits.max_prompt_token",
        "5",
        "did you mean max_prompt_tokens",
    ),
    "options by their former name": (
        of_stage(2, diffusion={"max_streams": 2}),
        "stages[2].diffusion",
        "{'max_streams': 2}",
        "rename it to options",
    ),
    "no model": ({("model",): REMOVED}, "model", "missing", "model: preset:tiny"),
    "empty model": ({("model",): ""}, "model", "''", "for example preset:tiny"),
    "number as model": ({("model",): 7}, "model", "7", "text, for example preset:tiny"),
    "no such family": ({("family",): "qwen9"}, "family", "'qwen9'", "use one of qwen2_5_omni"),
    "voice not on offer": (
        {("voices",): ["Ethan"], ("default_voice",): "Cherry"},
        "default_voice",
        "'Cherry'",
        "use one of ['Ethan']",
    ),
    "sound by default where none is made": (
        {("api",): {"default_modalities": ["audio"]}, ("stages",): GOOD["stages"][:1]},
        "api.default_modalities",
        "['audio']",
        'no stage here makes sound, use ["text"]',
    ),
    "no modality by default": (
        {("api",): {"default_modalities": []}},
        "api.default_modalities",
        "[]",
        "['text', 'audio']",
    ),
    "no voices": ({("voices",): []}, "voices", "[]", "for example ['Chelsie']"),
    "limits as number": ({("limits",): 3}, "limits", "3", "a mapping, for example {'max_prompt_tokens': 28000}"),
    "limit of zero": ({("limits",): {"max_body_bytes": 0}}, "limits.max_body_bytes", "0", "for example 67108864"),
    "endless limit": (
        {("limits",): {"request_timeout_s": float("inf")}},
        "limits.request_timeout_s",
        "inf",
        "a finite number, for example 600.0",
    ),
    "a limit that is gone": (
        {("limits",): {"max_stall_s": 0.25}},
        "limits.max_stall_s",
        "0.25",
        "leave it out, max_ongoing_requests bounds what runs",
    ),
    "a key that is gone": (
        {("handover",): {"rows": "inline"}},
        "handover.rows",
        "'inline'",
        "leave it out, hidden states are always Ray objects now",
    ),
    "folder of no root": (
        {("cache_dir",): "kernels"},
        "cache_dir",
        "'kernels'",
        "write it from / or ~/, for example ~/omni_cache",
    ),
    "folder as list": ({("cache_dir",): ["/a"]}, "cache_dir", "['/a']", "text, for example /var/cache/omni_cluster"),
    "no stages": ({("stages",): []}, "stages", "[]", "'model_stage': 'thinker'"),
    "stages as text": ({("stages",): "all"}, "stages", "'all'", "a list, for example [{"),
    "stage as text": ({("stages", 1): "talker"}, "stages[1]", "'talker'", "a mapping, for example {"),
    "number as text": (of_stage(0, stage_id="0"), "stages[0].stage_id", "'0'", "a whole number, for example 0"),
    "truth as number": (of_stage(0, num_gpus=True), "stages[0].num_gpus", "true", "a number, for example 1"),
    "no devices": (of_stage(0, num_gpus=REMOVED), "stages[0].num_gpus", "missing", "for example 1, or 0 for CPU"),
    "negative GPUs": (of_stage(0, num_gpus=-1), "stages[0].num_gpus", "-1", "at least 0, for example 1"),
    "one card and a half": (of_stage(0, num_gpus=1.5), "stages[0].num_gpus", "1.5", "for example 2"),
    "pinned and scheduled": (of_stage(0, num_gpus=1, gpus=[0]), "stages[0].gpus", "[0]", "for example num_gpus: 1"),
    "device twice": (of_stage(0, num_gpus=REMOVED, gpus=[1, 1]), "stages[0].gpus", "[1, 1]", "use [1]"),
    "device of minus one": (of_stage(0, num_gpus=REMOVED, gpus=[-1]), "stages[0].gpus", "[-1]", "for example [0]"),
    "device by name": (of_stage(0, num_gpus=REMOVED, gpus=["a"]), "stages[0].gpus[0]", "'a'", "for example 0"),
    "no device": (of_stage(0, num_gpus=REMOVED, gpus=[]), "stages[0].gpus", "[]", "at least 1, for example [0]"),
    "split wider than num_gpus": (
        of_stage(0, num_gpus=1, tensor_parallel_size=2),
        "stages[0].tensor_parallel_size",
        "2",
        "it must be 1",
    ),
    "split narrower than gpus": (
        of_stage(0, num_gpus=REMOVED, gpus=[0, 1]),
        "stages[0].tensor_parallel_size",
        "1",
        "gpus names 2, so it must be 2",
    ),
    "more groups of layers than cards": (
        of_stage(0, num_gpus=4, tensor_parallel_size=2, pipeline_parallel_size=4),
        "stages[0].pipeline_parallel_size",
        "4",
        "so times tensor_parallel_size, 2, it must be 4",
    ),
    "more hosts than parts": (
        of_stage(0, tensor_parallel_size=2, hosts_per_replica=3),
        "stages[0].hosts_per_replica",
        "3",
        "it must divide 2",
    ),
    "pinned on several hosts": (
        of_stage(0, num_gpus=REMOVED, gpus=[0, 1], tensor_parallel_size=2, hosts_per_replica=2),
        "stages[0].hosts_per_replica",
        "2",
        "say num_gpus: 2 instead",
    ),
    "several hosts, few replicas on one": (
        of_stage(0, tensor_parallel_size=2, hosts_per_replica=2, placement={"max_replicas_per_node": 1}),
        "stages[0].hosts_per_replica",
        "2",
        "leave placement.max_replicas_per_node out",
    ),
    "cards of several hosts": (
        of_stage(0, num_gpus=2, tensor_parallel_size=2, hosts_per_replica=2, engine_args={}),
        "stages[0].engine_args.kv_cache_memory_bytes",
        "missing",
        "for example 40000000000",
    ),
    "fixed and following": (
        of_stage(0, num_replicas=2, autoscaling={"max_replicas": 3, "signals": {"max_requests": 24}}),
        "stages[0].num_replicas",
        "2",
        "for example autoscaling",
    ),
    "following and standing by": (
        of_stage(0, standby_replicas=1, autoscaling={"max_replicas": 3, "signals": {"max_requests": 24}}),
        "stages[0].standby_replicas",
        "1",
        "for example autoscaling",
    ),
    "replicas upside down": (
        of_stage(0, autoscaling={"min_replicas": 5, "max_replicas": 2, "signals": {"max_requests": 24}}),
        "stages[0].autoscaling.min_replicas",
        "5",
        "for example 2",
    ),
    "start outside the bounds": (
        of_stage(
            0,
            autoscaling={"min_replicas": 2, "max_replicas": 3, "signals": {"max_requests": 24}, "initial_replicas": 4},
        ),
        "stages[0].autoscaling.initial_replicas",
        "4",
        "for example 2",
    ),
    "following nothing": (
        of_stage(0, autoscaling={"max_replicas": 3}),
        "stages[0].autoscaling.signals",
        "missing",
        "for example signals: {'max_requests': 24}",
    ),
    "fewer than none": (
        of_stage(0, autoscaling={"min_replicas": -1, "max_replicas": 3, "signals": {"max_requests": 24}}),
        "stages[0].autoscaling.min_replicas",
        "-1",
        "at least 0, for example 1",
    ),
    "a target": (
        of_stage(0, autoscaling={"max_replicas": 3, "target": 2.5, "signals": {"max_requests": 24}}),
        "stages[0].autoscaling.target",
        "2.5",
        "set signals instead, for example signals: {max_requests: 24}",
    ),
    "a share of the card's multiprocessors": (
        of_stage(0, card_percent=70),
        "stages[0].card_percent",
        "70",
        "leave it out, a stage may use its whole card",
    ),
    "no signal": (
        of_stage(0, autoscaling={"max_replicas": 3, "signals": {}}),
        "stages[0].autoscaling.signals.max_requests",
        "null",
        "for example max_requests: 24",
    ),
    "no upper bound": (
        of_stage(0, autoscaling={"min_replicas": 1, "signals": {"max_requests": 24}}),
        "stages[0].autoscaling.max_replicas",
        "missing",
        "max_replicas: 4",
    ),
    "no replicas": (of_stage(0, num_replicas=0), "stages[0].num_replicas", "0", "at least 1, for example 1"),
    "engine args as list": (
        of_stage(0, engine_args=["a"]),
        "stages[0].engine_args",
        "['a']",
        "a mapping, for example {'max_model_len': 32768}",
    ),
    "engine arg with a number as name": (of_stage(0, engine_args={5: 1}), "stages[0].engine_args[5]", "5", "text"),
    "more than all memory": (
        of_stage(0, engine_args={"gpu_memory_utilization": 1.2}),
        "stages[0].engine_args.gpu_memory_utilization",
        "1.2",
        "for example 0.9",
    ),
    "cache size as text": (
        of_stage(0, engine_args={"kv_cache_memory_bytes": "64 MiB"}),
        "stages[0].engine_args.kv_cache_memory_bytes",
        "'64 MiB'",
        "for example 67108864",
    ),
    "origin with a path": (
        {("api",): {"cors_origins": ["http://localhost:8080", "https://app.example/"]}},
        "api.cors_origins",
        "'https://app.example/'",
        "for example https://app.example",
    ),
    "origin without a scheme": (
        {("api",): {"cors_origins": ["http://localhost:8080", "app.example"]}},
        "api.cors_origins",
        "'app.example'",
        "for example https://app.example",
    ),
    "origin in capitals": (
        {("api",): {"cors_origins": ["http://localhost:8080", "https://App.example"]}},
        "api.cors_origins",
        "'https://App.example'",
        "for example https://app.example",
    ),
    "origin with a space": (
        {("api",): {"cors_origins": ["http://localhost:8080", "https://a.example https://b.example"]}},
        "api.cors_origins",
        "'https://a.example https://b.example'",
        "for example https://app.example",
    ),
    "URL as a host": (
        {("fetch",): {"allowed_hosts": ["cdn.example.org", "https://media.example.org"]}},
        "fetch.allowed_hosts",
        "'https://media.example.org'",
        "a host's whole name alone, for example media.example.org",
    ),
    "host with a port": (
        {("fetch",): {"allowed_hosts": ["cdn.example.org", "media.example.org:443"]}},
        "fetch.allowed_hosts",
        "'media.example.org:443'",
        "a host's whole name alone, for example media.example.org",
    ),
    "hosts by a pattern": (
        {("fetch",): {"allowed_hosts": ["cdn.example.org", "*.example.org"]}},
        "fetch.allowed_hosts",
        "'*.example.org'",
        "a host's whole name alone, for example media.example.org",
    ),
    "host with a root": (
        {("fetch",): {"allowed_hosts": ["cdn.example.org", "media.example.org."]}},
        "fetch.allowed_hosts",
        "'media.example.org.'",
        "a host's whole name alone, for example media.example.org",
    ),
    "no host": (
        {("fetch",): {"allowed_hosts": ["cdn.example.org", ""]}},
        "fetch.allowed_hosts",
        "''",
        "a host's whole name alone, for example media.example.org",
    ),
    "more ingresses than requests": (
        {("ingress_replicas",): 9, ("limits",): {"max_ongoing_requests": 8}},
        "ingress_replicas",
        "9",
        "so it must be at most limits.max_ongoing_requests, 8",
    ),
    "sequences as text": (
        of_stage(0, engine_args={"max_num_seqs": "64 sequences"}),
        "stages[0].engine_args.max_num_seqs",
        "'64 sequences'",
        "a whole number above 0, for example 64",
    ),
    "no sequence": (
        of_stage(0, engine_args={"max_num_seqs": 0}),
        "stages[0].engine_args.max_num_seqs",
        "0",
        "a whole number above 0, for example 64",
    ),
    "length as vLLM's command line has it": (
        of_stage(0, engine_args={"max_model_len": "32k"}),
        "stages[0].engine_args.max_model_len",
        "'32k'",
        "a whole number above 0, for example 32768",
    ),
    "tokens of a step as text": (
        of_stage(0, engine_args={"max_num_batched_tokens": "2k"}),
        "stages[0].engine_args.max_num_batched_tokens",
        "'2k'",
        "a whole number above 0, for example 2048",
    ),
    "half a block": (
        of_stage(0, engine_args={"block_size": 0.5}),
        "stages[0].engine_args.block_size",
        "0.5",
        "a whole number above 0, for example 16",
    ),
    "one limit for all media": (
        of_stage(0, engine_args={"limit_mm_per_prompt": 3}),
        "stages[0].engine_args.limit_mm_per_prompt",
        "3",
        "a mapping of whole numbers, for example {'audio': 64, 'image': 16, 'video': 4}",
    ),
    "limit of media as text": (
        of_stage(0, engine_args={"limit_mm_per_prompt": {"audio": "many"}}),
        "stages[0].engine_args.limit_mm_per_prompt",
        "{'audio': 'many'}",
        "a mapping of whole numbers, for example {'audio': 64, 'image': 16, 'video': 4}",
    ),
    "quantization of a word": (
        of_stage(0, engine_args={"quantization_config": "fp8_per_block"}),
        "stages[0].engine_args.quantization_config",
        "'fp8_per_block'",
        "a mapping, for example {'moe': 'fp8_per_block'}",
    ),
    "unknown output": (
        of_stage(0, final_output_type="video"),
        "stages[0].final_output_type",
        "'video'",
        "'text', 'audio'",
    ),
    "id twice": (of_stage(1, stage_id=0), "stages[1].stage_id", "0", "for example 3"),
    "source that no stage is": (
        of_stage(1, engine_input_source=[7]),
        "stages[1].engine_input_source",
        "[7]",
        "no stage has id 7, use ids among 0, 2",
    ),
    "source of itself": (
        of_stage(1, engine_input_source=[1]),
        "stages[1].engine_input_source",
        "[1]",
        "use ids among 0, 2",
    ),
    "key of two lines": ({("a\nb",): 1}, r"'a\nb'", "1", "use one of model, family"),
    "name of two lines": (
        of_stage(0, model_stage="a\nb"),
        "stages[0].model_stage",
        r"'a\nb'",
        "$', for example thinker",
    ),
    "source twice": (of_stage(1, engine_input_source=[0, 0]), "stages[1].engine_input_source", "[0, 0]", "use [0]"),
    "circle": (of_stage(0, engine_input_source=[2]), "stages[0].engine_input_source", "[2]", "use []"),
    "nothing for the client": (
        {("stages", 0, "final_output_type"): None, ("stages", 2, "final_output_type"): None},
        "stages[2].final_output_type",
        "null",
        "set it to text, audio or image",
    ),
    "work for nobody": (
        of_stage(2, final_output_type=None),
        "stages[2].final_output_type",
        "null",
        "add 2 to another stage's engine_input_source",
    ),
}
RESERVED = (
    "model",
    "worker_cls",
    "scheduler_cls",
    "hf_overrides",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "additional_config",
    "enable_prompt_embeds",
    "trust_remote_code",
    "mm_processor_cache_type",
    "mm_processor_cache_gb",
    "data_parallel_size",
    "speculative_config",
    "spec_method",
    "spec_model",
    "spec_tokens",
    "scheduling_policy",
    "disable_cascade_attn",
    "kv_transfer_config",
    "kv_offloading_size",
    "distributed_executor_backend",
    *("enable_lora", "max_cpu_loras", "lora_target_modules", "default_mm_loras", "enable_tower_connector_lora"),
)


@pytest.mark.parametrize(("changes", "key", "value", "good"), BAD.values(), ids=BAD.keys())
def test_the_sentence_names_file_key_value_and_a_good_value(
    changes: Changes, key: str, value: str, good: str, tmp_path: Path
) -> None:
    told = sentence(write(tmp_path, changed(changes)))
    assert told.startswith(f"qwen.yaml: {key} is {value}; ")
    assert good in told.split("; ", 1)[1]
    assert told.endswith(".") and "\n" not in told and "further" not in told


@pytest.mark.parametrize("name", RESERVED)
def test_engine_arguments_that_are_ours_are_refused(name: str, tmp_path: Path) -> None:
    told = sentence(write(tmp_path, changed(of_stage(1, engine_args={name: 4}))))
    assert re.match(rf"qwen\.yaml: stages\[1\]\.engine_args\.{name} is 4; (set|remove) ", told)


def test_the_whole_sentence_of_an_unknown_source(tmp_path: Path) -> None:
    told = sentence(write(tmp_path, changed(of_stage(1, engine_input_source=[7]))))
    expected = "qwen.yaml: stages[1].engine_input_source is [7]; no stage has id 7, use ids among 0, 2."
    assert told == expected


def test_a_circle_is_told_stage_by_stage(tmp_path: Path) -> None:
    told = sentence(write(tmp_path, changed(of_stage(0, engine_input_source=[2]))))
    circle = [int(stage_id) for stage_id in re.findall(r"\d", told.split("stages ")[1].split(" feed")[0])]
    consumers = {0: 1, 1: 2, 2: 0}
    assert len(circle) == 4
    assert all(consumers[source] == target for source, target in itertools.pairwise(circle))


@pytest.mark.parametrize(
    ("sum_of_all", "one", "fix"),
    [
        ("max_upload_bytes", "max_body_bytes", "a body of max_body_bytes and 1 MiB"),
        ("max_unread_total_bytes", "max_unread_bytes", "at least max_unread_bytes"),
        ("replica_outbox_max_bytes", "outbox_max_bytes", "at least outbox_max_bytes"),
    ],
)
def test_what_all_may_have_together_is_enough_for_one(sum_of_all: str, one: str, fix: str, tmp_path: Path) -> None:
    told = sentence(write(tmp_path, changed({("limits",): {sum_of_all: 2_000_000, one: 2_000_001}})))
    assert f"limits.{sum_of_all}" in told and fix in told


@pytest.mark.parametrize(
    ("changes", "first", "count"),
    [
        ({("model",): 7, ("voices",): []}, "model", "(and 1 further problem)."),
        ({("model",): REMOVED, ("modle",): "x"}, "modle", "(and 1 further problem)."),
        (
            of_stage(0, num_gpus=1, tensor_parallel_size=2, engine_args={"model": 1, "worker_cls": 2}),
            "stages[0].tensor_parallel_size",
            "(and 2 further problems).",
        ),
        (
            {("family",): "qwen9", ("stages", 0, "num_gpus"): 1.5, ("stages", 2, "num_replicas"): 0},
            "family",
            "(and 2 further problems).",
        ),
        (
            {("stages", 1, "engine_input_source"): [7], ("stages", 2, "engine_input_source"): [8]},
            "stages[1].engine_input_source",
            "(and 1 further problem).",
        ),
    ],
)
def test_of_several_problems_one_is_told_and_all_are_counted(
    changes: Changes, first: str, count: str, tmp_path: Path
) -> None:
    told = sentence(write(tmp_path, changed(changes)))
    assert told.startswith(f"qwen.yaml: {first} is ")
    assert told.endswith(count)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "the file is empty"),
        ("# only a remark\n", "the file is empty"),
        ("- model: x\n", "the file is [{'model': 'x'}]; it must be a mapping"),
        ("just text\n", "the file is 'just text'; it must be a mapping"),
        ("model: a: b\n", "line 1, column 9: mapping values are not allowed here"),
        ("model: [a\n", "line 2, column 1: while parsing a flow sequence"),
        ("model: a\nfamily: b\nmodel: c\n", "line 3, column 1: the key model stands on line 1 already"),
        ("limits: {max_audio_parts: 1, max_audio_parts: 2}\n", "the key max_audio_parts stands on line 1 already"),
        ("model: !!python/name:os.system\n", "line 1, column 8: the tag tag:yaml.org,2002:python/name:os.system"),
        ("model: *nowhere\n", "found undefined alias 'nowhere'"),
        ("model: a\n---\nmodel: b\n", "expected a single document"),
        ("? [a]\n: b\n", "found unhashable key"),
        ("model: 0b_\n", "invalid literal for int()"),
        ('model: "\\ud800"\n', "surrogates not allowed"),
        ('"\\ud800": 1\n', "surrogates not allowed"),
        ("model: \x01\n", "special characters are not allowed"),
        (b"model: \xff\n", "byte 7 is not UTF-8"),
        ("[" * 5000, "the file is nested too deep"),
        (b"#" * (MAX_CONFIG_BYTES + 1), "the file is above 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_with_a_file_to_start_from(
    content: str | bytes, told: str, tmp_path: Path
) -> None:
    refusal = sentence(write(tmp_path, content))
    assert refusal.startswith("qwen.yaml: ") and told in refusal
    assert refusal.endswith(f"start from {DEFAULT_CONFIG}.")
    assert "\n" not in refusal


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert sentence(tmp_path / "qwen.yaml").startswith(
        "qwen.yaml: the file cannot be read (No such file or directory);"
    )


def test_a_shipped_file_is_found_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = f"stage_configs/{DEFAULT_CONFIG.name}"
    assert load_config(relative, known_families=FAMILIES) == load_config(known_families=FAMILIES)
    with pytest.raises(ConfigError, match=r"^stage_configs/none\.yaml: the file cannot be read \(No such file"):
        load_config("stage_configs/none.yaml", known_families=FAMILIES)


def test_a_file_of_the_working_folder_comes_before_a_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("stage_configs") / DEFAULT_CONFIG.name
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(GOOD | {"model": "another"}))
    assert load_config(path, known_families=FAMILIES).model == "another"


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert f"{tmp_path.name}: the file cannot be read (Is a directory);" in sentence(tmp_path)


def test_a_value_larger_than_memory_is_told_in_short(tmp_path: Path) -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 12)]
    told = sentence(write(tmp_path, "\n".join(["l0: &l0 [x, x]", *levels])))
    assert told.startswith("qwen.yaml: l0 is ['x', 'x'];") and len(told) < 400


def test_a_value_that_contains_itself_is_told_in_short(tmp_path: Path) -> None:
    told = sentence(write(tmp_path, "model: &m {a: *m}\n"))
    assert told.startswith("qwen.yaml: model is {'a': ") and len(told) < 400


def test_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    text = yaml.safe_dump({"model": "m", "family": "qwen2_5_omni"}) + (
        "stages:\n"
        "  - &first {stage_id: 0, model_stage: a, num_gpus: 0, final_output_type: text}\n"
        "  - &second {<<: *first, stage_id: 1, model_stage: b}\n"
        "  - {<<: *second, stage_id: 2, engine_input_source: [0, 1]}\n"
    )
    config = load_config(write(tmp_path, text), known_families=FAMILIES)
    assert [(stage.stage_id, stage.model_stage) for stage in config.stages] == [(0, "a"), (1, "b"), (2, "b")]


def test_a_date_stays_the_text_it_was(tmp_path: Path) -> None:
    text = yaml.safe_dump(GOOD).replace("stage_id: 0", "stage_id: 0\n  engine_args: {revision: 2024-13-45}")
    config = load_config(write(tmp_path, text), known_families=FAMILIES)
    assert config.stages[0].engine_args == {"revision": "2024-13-45"}


def test_a_good_file_comes_back_as_written(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD), known_families=FAMILIES)
    assert config == PipelineConfig.model_validate(GOOD)
    assert [stage.model_stage for stage in config.stages] == ["thinker", "talker", "code2wav"]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
YAML_VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3)
)


@settings(deadline=None)
@given(st.data())
def test_any_change_gives_a_configuration_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    top: list[tuple[str | int, ...]] = [(key,) for key in PipelineConfig.model_fields]
    of_a_stage = [("stages", 1, key) for key in StageConfig.model_fields]
    place = data.draw(st.sampled_from([*top, *of_a_stage]))
    path = write(tmp_path_factory.getbasetemp(), changed({place: data.draw(YAML_VALUES)}))
    try:
        load_config(path, known_families=FAMILIES)
    except ConfigError as error:
        assert str(error).startswith(f"{path}: ") and str(error).endswith(".") and "\n" not in str(error)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_each_shipped_file_loads(path: Path) -> None:
    config = load_config(path, known_families=FAMILIES)
    assert [stage.model_stage for stage in config.stages] == ["thinker", "talker", "code2wav"]


def test_the_shipped_files_are_those_that_are_promised() -> None:
    stems = {path.stem for path in SHIPPED}
    assert stems == {
        "qwen2_5_omni",
        "qwen2_5_omni_3b",
        "qwen2_5_omni_one_gpu",
        "qwen2_5_omni_one_gpu_low_precision",
        "qwen2_5_omni_two_gpus",
        "qwen2_5_omni_four_gpus",
        "qwen2_5_omni_tiny",
        "qwen2_5_omni_2x2_tiny",
        "qwen2_5_omni_toy",
        "qwen3_omni_tiny",
        "qwen3_omni_one_gpu",
        "qwen3_omni_one_gpu_low_precision",
        "qwen3_omni_two_gpus",
        "qwen3_omni_four_gpus",
    }


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_in_each_shipped_file_a_full_request_fits_its_engines(path: Path) -> None:
    config = load_config(path, known_families=FAMILIES)
    thinker, talker, code2wav = config.stages
    limits = config.limits
    assert limits.max_prompt_tokens + limits.max_output_tokens <= thinker.engine_args["max_model_len"]
    # The talker's prompt has up to six positions more than the thinker's.
    assert limits.max_prompt_tokens + 6 + limits.max_codec_tokens <= talker.engine_args["max_model_len"]
    assert talker.default_sampling_params["max_tokens"] <= limits.max_codec_tokens
    assert code2wav.all_options["max_streams"] >= min(64, limits.max_ongoing_requests)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_each_key_of_a_shipped_stage_says_why_it_is_there(path: Path) -> None:
    folders = ("stages:", "limits:", "handover:", "engine_args:", "default_sampling_params:", "options:", "advanced:")
    silent = ("- stage_id:", "model_stage:", *folders)
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    unexplained = [line for line in lines if line and not line.startswith(silent) and "#" not in line]
    assert unexplained == []


def test_the_default_is_the_trained_toy_on_cpu() -> None:
    config = load_config(known_families=FAMILIES)
    assert config == load_config(DEFAULT_CONFIG, known_families=FAMILIES)
    assert config.model == "preset:toy"
    assert [stage.gpus_per_replica for stage in config.stages] == [0, 0, 0]


def test_two_by_two_is_the_tiny_deployment_with_more_replicas() -> None:
    tiny = load_config(STAGE_CONFIGS / "qwen2_5_omni_tiny.yaml", known_families=FAMILIES).model_dump()
    two_by_two = load_config(STAGE_CONFIGS / "qwen2_5_omni_2x2_tiny.yaml", known_families=FAMILIES).model_dump()
    assert [stage.pop("num_replicas") for stage in two_by_two["stages"]] == [2, 2, 1]
    assert [stage.pop("num_replicas") for stage in tiny["stages"]] == [1, 1, 1]
    assert [config.pop("ingress_replicas") for config in (two_by_two, tiny)] == [2, 1]
    assert two_by_two == tiny


def test_toy_is_the_tiny_deployment_with_the_sampling_that_its_weights_need() -> None:
    tiny, toy = (
        load_config(STAGE_CONFIGS / f"qwen2_5_omni_{name}.yaml", known_families=FAMILIES).model_dump()
        for name in ("tiny", "toy")
    )
    assert (tiny.pop("model"), toy.pop("model")) == ("preset:tiny", "preset:toy")
    sampling = toy["stages"][1].pop("default_sampling_params")
    assert sampling == {"temperature": 0, "repetition_penalty": 1.0, "max_tokens": 400}
    del tiny["stages"][1]["default_sampling_params"]
    del toy["stages"][2]["advanced_options"]["num_steps"]
    assert toy == tiny
