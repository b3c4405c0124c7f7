"""A connection's message as another implementation of MessagePack reads it: the format is the standard's alone."""

from __future__ import annotations

import msgpack
import numpy as np

from omni_cluster.cluster.wire import MessageItem, packed
from omni_cluster.types.errors import RequestError
from omni_cluster.types.outputs import AudioChunk, StageChunk


def test_another_reader_of_messagepack_reads_a_links_message() -> None:
    sound = np.array([0.5, -0.25], np.float32)
    chunk = StageChunk(7, (11, 12), "é", audio=AudioChunk(480, sound, 24_000), finish_reason="stop")
    head, *arrays = packed([MessageItem(3, chunk, rows_at=5), MessageItem(4, None, RequestError("No."))])
    (reader, said, error, rows_at), (other, ended, refusal, no_rows) = msgpack.unpackb(head)
    assert (reader, error, rows_at, other, ended, no_rows) == (3, None, 5, 4, None, None)
    assert said[:5] == [7, [11, 12], "é", None, [480, [1, "<f4"], 24_000]]
    assert np.array_equal(np.frombuffer(arrays[0], np.float32), sound)
    assert refusal == [["RequestError", "OmniError"], "No.", ""]
