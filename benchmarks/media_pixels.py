"""What the thinker's processor takes for images and videos, beside transformers' own way to the same pixels.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python -m benchmarks.media_pixels [--rounds 5]

One thread, bfloat16, the published checkpoint's sizes of images and frames, no engine. The variable gives the process
the huge pages that a stage's processes have. Both ways are compared to the bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from vllm.multimodal import MULTIMODAL_REGISTRY

from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import bind
from omni_cluster.models.qwen2_5_omni.checkpoint import embedded_checkpoint, pixel_limits
from omni_cluster.models.qwen2_5_omni.thinker import video_item
from omni_cluster.models.qwen2_5_omni.thinker_processor import ThinkerProcessor
from omni_cluster.models.registry import known_families
from omni_cluster.models.stage_spec import ARSpec
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs

IMAGES = ((640, 480), (1920, 1080), (4000, 3000))
VIDEOS = ((20, 640, 360), (120, 640, 360), (128, 1280, 720))
SETTINGS = "processor_config.json"


def published_sizes(folder: Path) -> Path:
    """The tiny checkpoint, whose images are as large as the published one's. Frames have sizes of transformers' own."""
    shutil.copytree(embedded_checkpoint("tiny"), folder)
    settings = json.loads((folder / SETTINGS).read_text())
    settings["image_processor"]["size"], _ = pixel_limits("7b")
    (folder / SETTINGS).write_text(json.dumps(settings))
    return folder


def make_processor(folder: Path) -> ThinkerProcessor:
    bound = bind(load_config("stage_configs/qwen2_5_omni_tiny.yaml", known_families=known_families()))
    thinker = bound.config.stages[0]
    spec = cast(ARSpec, bound.spec(thinker))
    args = OmniEngineArgs.for_ar_stage(thinker, bound.config, str(folder), spec)
    args.dtype = "bfloat16"
    return MULTIMODAL_REGISTRY.create_processor(args.create_engine_config().model_config)  # type: ignore[return-value]


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)


def median_ms(work: Callable[[], Any], rounds: int) -> float:
    taken_s = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        work()
        taken_s.append(time.perf_counter() - began_s)
    return 1000 * statistics.median(taken_s)


def show(name: str, processor: ThinkerProcessor, media: Mapping[str, Any], rounds: int) -> None:
    items = processor.info.parse_mm_data(media, validate=False)

    def plain() -> Any:  # past `ThinkerProcessor`, whose media it takes
        return super(ThinkerProcessor, processor)._apply_hf_processor_main(items, {})

    def ours() -> Any:
        return processor._apply_hf_processor_main(items, {})

    wanted, made = plain(), ours()
    (field,) = made.keys() & {"pixel_values", "pixel_values_videos"}
    if not torch.equal(wanted[field], made[field]):
        raise SystemExit(f"{name}: other pixels")
    before_ms, now_ms = median_ms(plain, rounds), median_ms(ours, rounds)
    print(f"| {name} | {before_ms:.1f} | {now_ms:.1f} | {now_ms / before_ms:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        processor = make_processor(published_sizes(Path(folder) / "checkpoint"))
        print("| medium | transformers' way, ms | here, ms | ratio |\n|---|---|---|---|")
        for width, height in IMAGES:
            show(f"image, {width} x {height}", processor, {"image": [Image.fromarray(drawn(height, width))]}, rounds)
        for frames, width, height in VIDEOS:
            video = video_item(drawn(frames, height, width), 2.0, None)
            show(f"{frames} frames, {width} x {height}", processor, {"video": [video]}, rounds)


if __name__ == "__main__":
    main()
