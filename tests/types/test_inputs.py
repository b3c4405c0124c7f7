from __future__ import annotations

from dataclasses import replace

import numpy as np
from PIL import Image

from omni_cluster.types.inputs import Media, OmniRequest, Video


def test_a_request_without_its_media_is_the_same_in_all_else() -> None:
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    media = Media((np.zeros(5, np.float32),), (Image.new("RGB", (2, 2)),), (Video(frames, 2.0),))
    request = OmniRequest("1", "prompt", media, voice="v", sampling={"a": {"top_k": 1}}, seed=3, streams_audio=True)
    bare = request.without_media()
    assert bare.media == Media() and request.media is media
    assert replace(bare, media=media) == request
