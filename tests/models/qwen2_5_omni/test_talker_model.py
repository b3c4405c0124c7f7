from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds
from omni_cluster.models.qwen2_5_omni.talker_model import ARCHITECTURE, never_sampled, talker_config


def test_codes_and_stops_may_be_sampled_and_nothing_else(tiny: Path) -> None:
    config = read_config(tiny)
    ids, size = SpecialIds.from_config(config), config["talker_config"]["vocab_size"]
    allowed = set((~never_sampled(size, ids)).nonzero().flatten().tolist())
    assert allowed == {*range(ids.num_codes), ids.codec_pad, ids.codec_eos}


def test_start_of_speech_is_never_sampled_even_where_it_is_a_code() -> None:
    ids = SpecialIds(codec_pad=5, codec_bos=1, codec_eos=6, codec_mask=7, text_pad=0, text_eos=0, num_codes=4)
    assert never_sampled(8, ids).tolist() == [False, True, False, False, True, False, False, True]


def test_talkers_config_is_its_part_of_the_checkpoints(tiny: Path) -> None:
    whole = AutoConfig.from_pretrained(tiny)
    ids = SpecialIds.from_config(read_config(tiny))
    made = talker_config(whole)
    assert made.architectures == [ARCHITECTURE] and made.special_ids == ids
    assert made.hidden_size == whole.talker_config.hidden_size


def test_talkers_config_stays_as_it_is(tiny: Path) -> None:
    made = talker_config(AutoConfig.from_pretrained(tiny))
    ids = made.special_ids
    assert talker_config(made) is made and made.special_ids is ids


def test_mask_is_of_booleans_over_the_whole_vocabulary(tiny: Path) -> None:
    mask = never_sampled(8448, SpecialIds.from_config(read_config(tiny)))
    assert mask.dtype == torch.bool and mask.shape == (8448,)
