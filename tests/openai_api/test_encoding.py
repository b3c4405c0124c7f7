from __future__ import annotations

import gc
import hashlib
import io
from typing import get_args

import av
import numpy as np
import numpy.typing as npt
import psutil
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_cluster.openai_api.audio import pcm16, wav_bytes
from omni_cluster.openai_api.encoding import MEDIA_TYPES, SoundEncoder, SoundFormat, encode
from omni_cluster.openai_api.media import decode_audio

RATE_HZ = 24_000
SECONDS_AND_ONE = 3 * RATE_HZ + 1
LENGTHS = [1, 479, SECONDS_AND_ONE]
FORMATS: tuple[SoundFormat, ...] = get_args(SoundFormat)
LOSSLESS: list[SoundFormat] = ["wav", "pcm16", "pcm", "flac"]
LOSSY: list[SoundFormat] = ["mp3", "opus", "aac"]
# Measured on _voice, 479 to 72001 samples: mp3 40 to 45 dB, opus 26 to 30 dB, aac 24 to 32 dB.
MIN_SNR_DB = {"mp3": 36.0, "opus": 23.0, "aac": 20.0}
MP3_STREAM_DELAY = 1105
AAC_DELAY = AAC_FRAME = 1024
MP3_FRAME = 576

Samples = npt.NDArray[np.float32]


def _voice(count: int) -> Samples:
    """Harmonics of a pitch that moves, in syllables, with a little noise: `[count]` at 24 kHz."""
    time_s = np.arange(count) / RATE_HZ
    phase = 2 * np.pi * np.cumsum(140 + 30 * np.sin(2 * np.pi * 2.3 * time_s)) / RATE_HZ
    tone = np.sum([np.sin(k * phase) / k for k in range(1, 25)], axis=0)
    envelope = 0.55 + 0.45 * np.sin(2 * np.pi * 3.1 * time_s)
    noise = 0.002 * np.random.default_rng(0).standard_normal(count)
    return np.asarray(0.25 * envelope * tone + noise, np.float32)


def _values(samples: Samples) -> list[int]:
    return np.frombuffer(pcm16(samples), "<i2").tolist()


def _decoded(data: bytes, format: SoundFormat) -> tuple[int, npt.NDArray[np.generic]]:
    """Rate in Hz and samples as PyAV has them: 16-bit values for the lossless formats, floats for the others."""
    if format in ("pcm16", "pcm"):
        return RATE_HZ, np.frombuffer(data, "<i2")
    # Two frames of AAC are too few to be told from other bytes.
    with av.open(io.BytesIO(data), format="aac" if format == "aac" else None) as container:
        frames = [frame.to_ndarray()[0] for frame in container.decode(audio=0)]
        rate_hz = container.streams.audio[0].rate
    return rate_hz, np.concatenate(frames) if frames else np.empty(0, np.int16)


def _streamed(samples: Samples, format: SoundFormat, cuts: list[int]) -> bytes:
    with SoundEncoder(RATE_HZ, format) as encoder:
        pieces = [encoder.push(piece) for piece in np.split(samples, cuts)]
        return b"".join([*pieces, encoder.finish()])


def _snr_db(decoded: npt.NDArray[np.float64], samples: Samples) -> float:
    """Against the sound as loud as it came out: LAME turns everything down by 5 %."""
    reference = np.clip(samples, -1, 1).astype(np.float64)
    reference *= (decoded @ reference) / (reference @ reference)
    return float(10 * np.log10((reference @ reference) / np.sum((decoded - reference) ** 2)))


def _heard(data: bytes, format: SoundFormat, count: int, skipped: int = 0) -> npt.NDArray[np.float64]:
    """The decoded samples that lie where those of 24 kHz lay."""
    rate_hz, decoded = _decoded(data, format)
    return decoded[:: rate_hz // RATE_HZ][skipped : skipped + count].astype(np.float64)


def test_every_format_has_a_media_type() -> None:
    assert set(MEDIA_TYPES) == set(FORMATS)


@pytest.mark.parametrize("count", [0, *LENGTHS])
@pytest.mark.parametrize("format", LOSSLESS)
def test_lossless_formats_keep_every_value(format: SoundFormat, count: int) -> None:
    samples = np.random.default_rng(0).uniform(-1, 1, count).astype(np.float32)
    for data in (encode(samples, RATE_HZ, format), _streamed(samples, format, [])):
        rate_hz, decoded = _decoded(data, format)
        assert rate_hz == RATE_HZ
        assert decoded.tolist() == _values(samples)


@pytest.mark.parametrize("format", LOSSLESS)
def test_values_are_clipped_and_nan_is_silence(format: SoundFormat) -> None:
    samples = np.array([2.0, -2.0, np.nan, np.inf, -np.inf, 0.5], np.float32)
    expected = [32767, -32768, 0, 32767, -32768, 16384]
    assert _decoded(encode(samples, RATE_HZ, format), format)[1].tolist() == expected
    assert _decoded(_streamed(samples, format, [1, 3]), format)[1].tolist() == expected


def test_wav_and_pcm_are_those_of_the_audio_module() -> None:
    samples = _voice(999)
    assert encode(samples, RATE_HZ, "wav") == wav_bytes(samples, RATE_HZ)
    assert encode(samples, RATE_HZ, "pcm") == encode(samples, RATE_HZ, "pcm16") == pcm16(samples)


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_a_flac_file_states_its_length_and_checksum(count: int) -> None:
    samples = _voice(count)
    data = encode(samples, RATE_HZ, "flac")
    stream_info = data[8:42]
    assert int.from_bytes(stream_info[13:18], "big") & (2**36 - 1) == count
    assert stream_info[18:34] == hashlib.md5(pcm16(samples)).digest()


@pytest.mark.parametrize("count", [479, SECONDS_AND_ONE])
@pytest.mark.parametrize("format", LOSSY)
def test_lossy_files_are_aligned_and_close_to_the_sound(format: SoundFormat, count: int) -> None:
    samples = _voice(count)
    skipped = AAC_DELAY if format == "aac" else 0
    assert _snr_db(_heard(encode(samples, RATE_HZ, format), format, count, skipped), samples) > MIN_SNR_DB[format]


@pytest.mark.parametrize("format", LOSSY)
def test_lossy_streams_are_close_to_the_sound_after_the_documented_delay(format: SoundFormat) -> None:
    samples = _voice(SECONDS_AND_ONE)
    skipped = {"mp3": MP3_STREAM_DELAY, "opus": 0, "aac": AAC_DELAY}[format]
    heard = _heard(_streamed(samples, format, [7, 30_000]), format, samples.size, skipped)
    assert _snr_db(heard, samples) > MIN_SNR_DB[format]


@pytest.mark.parametrize("format", LOSSY)
def test_lossy_formats_clip_and_take_nan_as_silence(format: SoundFormat) -> None:
    loud = 4 * _voice(RATE_HZ)
    clipped = np.clip(loud, -1, 1)
    heard = _heard(encode(loud, RATE_HZ, format), format, loud.size)
    assert np.array_equal(heard, _heard(encode(clipped, RATE_HZ, format), format, loud.size))
    silence = _heard(encode(np.full(RATE_HZ, np.nan, np.float32), RATE_HZ, format), format, RATE_HZ)
    assert np.abs(silence).max() < 1e-4


@pytest.mark.parametrize("count", [1, 2, 479, 480, 481, SECONDS_AND_ONE])
def test_opus_is_exactly_as_long_as_the_sound(count: int) -> None:
    for data in (encode(_voice(count), RATE_HZ, "opus"), _streamed(_voice(count), "opus", [])):
        rate_hz, decoded = _decoded(data, "opus")
        assert (rate_hz, decoded.size) == (48_000, 2 * count)


# LAME's last frame is padding alone for 577 to 622 samples; 47 and 623 fill theirs.
@pytest.mark.parametrize("count", [47, 479, 577, 600, 622, 623, 624, 1153, SECONDS_AND_ONE])
def test_an_mp3_file_is_exactly_as_long_as_the_sound(count: int) -> None:
    data = encode(_voice(count), RATE_HZ, "mp3")
    assert _decoded(data, "mp3")[1].size == count
    assert soundfile.read(io.BytesIO(data))[0].size == count


@pytest.mark.parametrize("count", [1, 46])
def test_ffmpeg_leaves_silence_after_the_shortest_mp3_files(count: int) -> None:
    data = encode(_voice(count), RATE_HZ, "mp3")
    assert _decoded(data, "mp3")[1].size == count + 529
    assert soundfile.read(io.BytesIO(data))[0].size == count


@pytest.mark.parametrize("count", LENGTHS)
def test_an_mp3_stream_has_silence_before_and_after_the_sound(count: int) -> None:
    size = _decoded(_streamed(_voice(count), "mp3", []), "mp3")[1].size
    assert 0 <= size - MP3_STREAM_DELAY - count < MP3_FRAME


@pytest.mark.parametrize("count", [*LENGTHS, 1023, 1024, 1025, 2048])
def test_aac_has_silence_before_and_after_the_sound(count: int) -> None:
    """Whole and streamed alike: it is the same bytes."""
    data = encode(_voice(count), RATE_HZ, "aac")
    assert data == _streamed(_voice(count), "aac", [count // 2])
    rate_hz, decoded = _decoded(data, "aac")
    assert rate_hz == RATE_HZ
    assert 0 <= decoded.size - AAC_DELAY - count < AAC_FRAME


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 24_000, 44_100, 48_000])
def test_aac_is_read_by_the_api_itself(rate_hz: int) -> None:
    samples = np.sin(np.arange(rate_hz) * 2 * np.pi * 440 / rate_hz, dtype=np.float32) / 2
    heard = decode_audio(encode(samples, rate_hz, "aac"), format="aac", max_s=2.0, param="audio")
    assert np.argmax(np.abs(np.fft.rfft(heard[:16_000]))) == 440


def test_files_and_streams_without_sound() -> None:
    nothing = np.empty(0, np.float32)
    for streamed in (False, True):
        sizes = {f: len(_streamed(nothing, f, []) if streamed else encode(nothing, RATE_HZ, f)) for f in FORMATS}
        assert sizes["wav"] == 44
        assert sizes["pcm"] == sizes["pcm16"] == sizes["aac"] == 0
    opus = encode(nothing, RATE_HZ, "opus")
    assert opus.startswith(b"OggS") and b"OpusHead" in opus and b"OpusTags" in opus
    assert b"Info" in encode(nothing, RATE_HZ, "mp3")
    assert _streamed(nothing, "mp3", []) == b""


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, 6000), max_size=30).map(sorted))
def test_cuts_do_not_change_the_sound(format: SoundFormat, cuts: list[int]) -> None:
    samples = _voice(6000)
    whole, pieces = (_decoded(_streamed(samples, format, where), format)[1] for where in ([], cuts))
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize("format", ["wav", "pcm", "flac"])
def test_single_samples_make_the_same_bytes_as_one_push(format: SoundFormat) -> None:
    samples = _voice(5000)
    assert _streamed(samples, format, list(range(1, 5000))) == _streamed(samples, format, [])


@pytest.mark.parametrize("format", FORMATS)
def test_what_came_so_far_can_be_decoded(format: SoundFormat) -> None:
    pushed = 10 * [RATE_HZ // 10]
    with SoundEncoder(RATE_HZ, format) as encoder:
        pieces = [encoder.push(piece) for piece in np.split(_voice(RATE_HZ), np.cumsum(pushed)[:-1])]
    assert all(pieces)
    rate_hz, decoded = _decoded(b"".join(pieces), format)
    assert decoded.size / rate_hz >= 0.904


@pytest.mark.parametrize(("format", "magic"), [("wav", b"RIFF\xff\xff\xff\xff"), ("flac", b"fLaC"), ("opus", b"OggS")])
def test_the_header_comes_with_the_first_push(format: SoundFormat, magic: bytes) -> None:
    with SoundEncoder(RATE_HZ, format) as encoder:
        assert encoder.push(np.empty(0, np.float32)).startswith(magic)


def test_a_wav_stream_is_read_by_soundfile_and_by_the_api_itself() -> None:
    samples = _voice(5000)
    stream = _streamed(samples, "wav", [100])
    assert soundfile.read(io.BytesIO(stream), dtype="int16")[0].tolist() == _values(samples)
    at_16_khz = decode_audio(stream, format="wav", max_s=1.0, param="audio")
    assert np.array_equal(at_16_khz, decode_audio(wav_bytes(samples, RATE_HZ), format="wav", max_s=1.0, param="audio"))


@pytest.mark.parametrize("format", FORMATS)
def test_a_closed_encoder_refuses_sound(format: SoundFormat) -> None:
    finished = SoundEncoder(RATE_HZ, format)
    finished.finish()
    with SoundEncoder(RATE_HZ, format) as left:
        left.push(_voice(10))
    for encoder in (finished, left):
        encoder.close()
        with pytest.raises(ValueError, match="closed"):
            encoder.push(_voice(10))
        with pytest.raises(ValueError, match="closed"):
            encoder.finish()


# Not closed, they hold 300 MB (flac) and 40 MB (mp3).
@pytest.mark.parametrize(("format", "count", "max_bytes"), [("flac", 40, 60e6), ("mp3", 100, 15e6)])
def test_closing_unfinished_encoders_gives_their_memory_back(format: SoundFormat, count: int, max_bytes: float) -> None:
    process = psutil.Process()
    _closed_unfinished(format)
    gc.disable()
    try:
        before_bytes = process.memory_info().rss
        closed = [_closed_unfinished(format) for _ in range(count)]
        assert process.memory_info().rss - before_bytes < max_bytes
        assert len(closed) == count
    finally:
        gc.enable()


def _closed_unfinished(format: SoundFormat) -> SoundEncoder:
    with SoundEncoder(RATE_HZ, format) as encoder:
        encoder.push(_voice(5000))
    return encoder


@pytest.mark.parametrize(("format", "rate_hz"), [("opus", 22_050), ("mp3", 96_000), ("aac", 192_000)])
def test_a_rate_that_the_format_lacks_is_a_value_error(format: SoundFormat, rate_hz: int) -> None:
    with pytest.raises(ValueError, match=str(rate_hz)):
        encode(_voice(10), rate_hz, format)
    with pytest.raises(ValueError, match=str(rate_hz)):
        SoundEncoder(rate_hz, format)


@pytest.mark.parametrize("format", ["wav", "flac", *LOSSY])
def test_another_rate_is_stated(format: SoundFormat) -> None:
    rate_hz, decoded = _decoded(encode(_voice(1600), 16_000, format), format)
    assert rate_hz == (48_000 if format == "opus" else 16_000)
    if format != "aac":
        assert decoded.size / rate_hz == 0.1
