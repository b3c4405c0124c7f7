from __future__ import annotations

import base64
import functools
import io
import struct
import tracemalloc
import wave
import zlib
from typing import Any
from urllib.parse import quote

import av
import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin
from transformers import WhisperFeatureExtractor

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.media import MAX_SAMPLE, decode_audio, decode_base64, read_picture
from omni_cluster.openai_api.sound_formats import audio_format_of
from tests.openai_api.sounds import RECORDED, recorded, wide_band_amr

PARAM = "messages[0].content[0].input_audio.data"
LEAKS = ("object at", "0x", "BytesIO", "av.", "PIL", "Errno", "avcodec", "Traceback", "<_io", "<PIL")
FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def tone(seconds: float, rate: int, hz: float = 440.0) -> npt.NDArray[np.float64]:
    return 0.5 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)


def sound_file(samples: npt.NDArray[Any], rate: int, container: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=container, subtype=subtype)
    return file.getvalue()


def mp3_file(samples: npt.NDArray[np.float64], rate: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, mode="w", format="mp3") as container:
        stream = container.add_stream("libmp3lame", rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray((samples * 32767).astype(np.int16)[None], format="s16p", layout="mono")
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def wav_header(rate: int, channels: int, codec_tag: int, data: bytes) -> bytes:
    layout = struct.pack("<HHIIHH", codec_tag, channels, rate, rate * channels * 2, channels * 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(layout)) + layout + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def image_file(image: Image.Image, container: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, container, **options)
    return file.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(header: bytes, rows: bytes, clear: bytes = b"") -> bytes:
    chunks = [(b"IHDR", header), (b"tRNS", clear), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*each) for each in chunks if each != (b"tRNS", b""))


def png_with_header(width: int, height: int) -> bytes:
    return png_of(struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"\0" * 9)


def png_of_16_bits(mode: str, values: npt.NDArray[np.uint16], clear: tuple[int, ...] = ()) -> bytes:
    """`values` in every channel, and nothing clear but the colour `clear`; Pillow writes no such file of colours."""
    kind, colours = {"I;16": (0, 1), "RGB": (2, 3), "LA": (4, 1), "RGBA": (6, 3)}[mode]
    opaque = np.full(values.shape, 65_535, np.uint16)
    channels = np.stack([values] * colours + [opaque] * (kind >= 4), axis=2)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in channels)
    height, width = values.shape
    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    return png_of(header, rows, struct.pack(f">{len(clear)}H", *clear))


def decoded(data: bytes, format: Any, max_s: float = 10.0) -> npt.NDArray[np.float32]:
    return decode_audio(data, format=format, max_s=max_s, param=PARAM)


def refusal(caught: pytest.ExceptionInfo[BadRequest]) -> BadRequest:
    error = caught.value
    assert error.param == PARAM and error.message.startswith(PARAM) and error.message.endswith(".")
    assert not any(leak in error.message for leak in LEAKS), error.message
    assert error.__cause__ is None
    return error


class TestBase64:
    @given(st.binary(min_size=1, max_size=50), st.sampled_from(["", "data:audio/wav;base64,", "data:;base64,"]))
    def test_bytes_come_back(self, data: bytes, prefix: str) -> None:
        value = prefix + base64.b64encode(data).decode()
        assert decode_base64(value, max_bytes=len(data), param=PARAM) == data
        with pytest.raises(BadRequest, match=f"has {len(data)} bytes, but at most {len(data) - 1}") as caught:
            decode_base64(value, max_bytes=len(data) - 1, param=PARAM)
        assert refusal(caught).status == 413

    def test_the_length_is_checked_before_the_alphabet(self) -> None:
        with pytest.raises(BadRequest, match="at most 10 "):
            decode_base64("*" * 1000, max_bytes=10, param=PARAM)

    @pytest.mark.parametrize(
        "changed",
        [
            lambda text: text.rstrip("="),
            lambda text: "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76)),
            lambda text: f" {text[:9]} \t{text[9:]}\n",
            lambda text: text.replace("+", "-").replace("/", "_"),
            lambda text: quote(text, safe=""),
            lambda text: text.replace("+", "%2b").replace("/", "%2F").replace("=", "%3d") + "%0A",
            lambda text: text.rstrip("=").replace("+", "-").replace("/", "_") + "\n",
        ],
    )
    @pytest.mark.parametrize("prefix", ["", "data:;base64,", "DATA:audio/wav;BASE64,"])
    @pytest.mark.parametrize("size", [100, 101, 102])
    def test_what_others_make_of_base64_is_read(self, changed: Any, prefix: str, size: int) -> None:
        data = bytes(np.random.default_rng(size).integers(0, 256, size, np.uint8))
        value = prefix + changed(base64.b64encode(data).decode())
        assert decode_base64(value, max_bytes=size, param=PARAM) == data
        with pytest.raises(BadRequest, match=f"has {size} bytes, but at most {size - 1}"):
            decode_base64(value, max_bytes=size - 1, param=PARAM)

    @pytest.mark.parametrize(
        "value",
        ["A", "AAAAA", "AA==AA==", "A*AA", "ÄAAA", "A\0AA", "====", " \n", "%", "%3D", "AA%2", "%41AAA", "A.AA",
         "data:audio/wav;base64,A", "data:audio/wav;base64,%2B"],
    )  # fmt: skip
    def test_what_is_no_base64_is_refused(self, value: str) -> None:
        with pytest.raises(BadRequest, match="not valid base64") as caught:
            decode_base64(value, max_bytes=100, param=PARAM)
        assert refusal(caught).status == 400

    @pytest.mark.parametrize("junk", ["%", "%2B", "\n", "=", "-", "A%"])
    def test_work_on_large_texts_is_bounded(self, junk: str) -> None:
        value = junk * ((8 << 20) // len(junk))
        tracemalloc.start()
        try:
            with pytest.raises(BadRequest):
                decode_base64(value, max_bytes=1 << 20, param=PARAM)
            assert tracemalloc.get_traced_memory()[1] < 4 * len(value)
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ("", "is empty"),
            ("data:audio/wav;base64,", "is empty"),
            ("http://example.com/a.wav", "not valid base64"),
            ("HTTPS://example.com/a.wav", "not valid base64"),
            ("data:audio/wav,abcd", "without base64"),
            ("data:audio/wav;base64", "without base64"),
        ],
    )
    def test_other_forms_are_named(self, value: str, words: str) -> None:
        with pytest.raises(BadRequest, match=words) as caught:
            decode_base64(value, max_bytes=100, param=PARAM)
        refusal(caught)


class TestAudio:
    def test_a_16_khz_mono_wav_is_exact(self) -> None:
        values = np.random.default_rng(0).integers(-32768, 32768, 40_000).astype(np.int16)
        samples = decoded(sound_file(values, 16_000, "WAV"), "wav")
        assert samples.dtype == np.float32
        assert np.array_equal(samples, values.astype(np.float32) / 32768)

    def test_a_16_khz_mono_flac_is_exact(self) -> None:
        values = np.random.default_rng(0).integers(-32768, 32768, 40_000).astype(np.int16)
        assert np.array_equal(decoded(sound_file(values, 16_000, "FLAC"), "flac"), values.astype(np.float32) / 32768)

    @pytest.mark.parametrize("channels", [2, 3, 6, 8])
    def test_channels_are_averaged_with_equal_weight(self, channels: int) -> None:
        values = np.random.default_rng(1).integers(-32768, 32768, (20_000, channels)).astype(np.int16)
        expected = (values.astype(np.float64) / 32768).mean(axis=1)
        assert np.allclose(decoded(sound_file(values, 16_000, "WAV"), "wav"), expected, atol=1e-6)

    @pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"])
    def test_every_plain_wav_coding_is_read(self, subtype: str) -> None:
        samples = decoded(sound_file(tone(0.5, 16_000), 16_000, "WAV", subtype), "wav")
        assert np.abs(samples - tone(0.5, 16_000)).max() < (0.03 if subtype in ("PCM_U8", "ULAW", "ALAW") else 1e-4)

    @pytest.mark.parametrize(("used", "taken"), [(24, 32), (20, 32), (16, 32), (16, 24), (20, 24), (12, 16), (8, 16)])
    @pytest.mark.parametrize("before", [b"", b"JUNK\x03\0\0\0abc\0"])
    def test_a_wav_whose_samples_take_more_bits_than_they_use_is_exact(
        self, used: int, taken: int, before: bytes
    ) -> None:
        """As recorders of Windows write 24 bits in 32."""
        values = np.random.default_rng(4).integers(-(1 << used - 1), 1 << used - 1, 16_000).astype(np.int32)
        data = sound_file(values << np.int32(32 - used), 16_000, "WAVEX", f"PCM_{taken}")
        said = struct.pack("<HH", 22, used)
        made = data[:12] + before + data[12:36] + said + data[40:]
        assert np.array_equal(decoded(made, "wav"), values.astype(np.float32) / np.float32(1 << used - 1))

    @pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 24_000, 44_100, 48_000, 192_000])
    def test_other_rates_are_resampled(self, rate: int) -> None:
        samples = decoded(sound_file(tone(1.0, rate), rate, "WAV"), "wav")
        assert abs(samples.size - 16_000) <= 2
        middle = slice(500, 15_500)
        assert np.abs(samples[middle] - tone(1.0, 16_000)[: samples.size][middle]).max() < 0.01

    @pytest.mark.parametrize("rate", [16_000, 44_100])
    def test_an_mp3_is_read(self, rate: int) -> None:
        samples = decoded(mp3_file(tone(2.0, rate), rate), "mp3")
        assert abs(samples.size - 32_000) < 2_500
        spectrum = np.abs(np.fft.rfft(samples[4_000:20_000]))
        assert np.argmax(spectrum) == 440

    def test_tags_that_are_not_utf8_do_no_harm(self) -> None:
        name = b"\0caf\xe9"
        frame = b"TIT2" + struct.pack(">I", len(name)) + b"\0\0" + name
        tag = b"ID3\x03\0\0" + bytes([0, 0, 0, len(frame)]) + frame
        assert decoded(tag + mp3_file(tone(1.0, 16_000), 16_000), "mp3").size > 15_000

    def test_an_audio_bomb_stops_at_the_limit(self) -> None:
        silence = sound_file(np.zeros(16_000 * 600, np.int16), 16_000, "FLAC")
        assert len(silence) < 200_000
        with pytest.raises(BadRequest, match=r"lasts longer than 5\.5 s") as caught:
            decoded(silence, "flac", max_s=5.5)
        assert refusal(caught).status == 413

    def test_the_limit_itself_is_allowed(self) -> None:
        silence = sound_file(np.zeros(32_000, np.int16), 16_000, "WAV")
        assert decoded(silence, "wav", max_s=2.0).size == 32_000
        with pytest.raises(BadRequest, match="longer"):
            decoded(silence, "wav", max_s=1.99)

    @pytest.mark.parametrize("then", [(16_000, 2, "PCM_16"), (22_050, 1, "PCM_16"), (16_000, 1, "PCM_24")])
    def test_a_flac_that_becomes_another_is_refused(self, then: tuple[int, int, str]) -> None:
        rate, channels, subtype = then
        first = sound_file(tone(0.3, 16_000), 16_000, "FLAC", "PCM_16")
        second = sound_file(np.stack([tone(0.3, rate)] * channels, 1), rate, "FLAC", subtype)
        with pytest.raises(BadRequest, match="cannot be read as a flac"):
            decoded(first + second, "flac")

    @pytest.mark.parametrize("channels", [1, 2, 8])
    @pytest.mark.parametrize(("subtype", "scale"), [("PCM_16", 32_768), ("PCM_24", 1 << 23), ("PCM_32", 1 << 31)])
    def test_a_long_wav_of_many_packets_is_exact(self, channels: int, subtype: str, scale: int) -> None:
        values = np.random.default_rng(0).integers(-scale, scale, (50_021, channels)).astype(np.int32)
        left = np.int32({"PCM_16": 1 << 16, "PCM_24": 1 << 8, "PCM_32": 1}[subtype])  # soundfile keeps the upper bits
        samples = decoded(sound_file(values * left, 16_000, "WAV", subtype), "wav")
        wanted = (values.astype(np.float32) * np.float32(1 / scale)).mean(axis=1, dtype=np.float32)
        assert np.array_equal(samples, wanted)

    def test_a_truncated_flac_is_refused(self) -> None:
        noise = np.random.default_rng(2).integers(-9000, 9000, 32_000).astype(np.int16)
        data = sound_file(noise, 16_000, "FLAC")
        with pytest.raises(BadRequest, match="cannot be read as a flac") as caught:
            decoded(data[: len(data) // 2], "flac")
        refusal(caught)

    def test_a_wav_that_ends_early_yields_what_it_holds(self) -> None:
        values = np.random.default_rng(3).integers(-9000, 9000, 16_000).astype(np.int16)
        data = sound_file(values, 16_000, "WAV")
        assert np.array_equal(decoded(data[:-2_000], "wav"), values[:-1_000].astype(np.float32) / 32768)

    @pytest.mark.parametrize("format", ["wav", "mp3", "flac"])
    @pytest.mark.parametrize("data", [b"", b"R", b"RIFF", b"\0" * 5000, b"hello world, this is not audio" * 20])
    def test_no_audio_is_refused(self, data: bytes, format: str) -> None:
        with pytest.raises(BadRequest, match=f"cannot be read as a {format}") as caught:
            decoded(data, format)
        refusal(caught)

    @pytest.mark.parametrize("kept", [4, 12, 20, 44])
    def test_a_wav_cut_in_its_header_is_refused(self, kept: int) -> None:
        with pytest.raises(BadRequest, match="cannot be read"):
            decoded(sound_file(tone(1.0, 16_000), 16_000, "WAV")[:kept], "wav")

    def test_another_format_than_named_is_refused(self) -> None:
        with pytest.raises(BadRequest, match="cannot be read as a wav"):
            decoded(sound_file(tone(1.0, 16_000), 16_000, "FLAC"), "wav")

    def test_a_playlist_is_never_followed(self, tmp_path: Any) -> None:
        secret = tmp_path / "secret.wav"
        secret.write_bytes(sound_file(tone(1.0, 16_000), 16_000, "WAV"))
        playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{secret}\n#EXT-X-ENDLIST\n".encode()
        for format in ("wav", "mp3", "flac"):
            with pytest.raises(BadRequest, match="cannot be read"):
                decoded(playlist, format)

    def test_a_codec_that_is_not_listed_is_refused(self) -> None:
        adpcm = sound_file(tone(1.0, 16_000), 16_000, "WAV", "IMA_ADPCM")
        with pytest.raises(BadRequest, match="a codec that is not accepted in wav files; send PCM"):
            decoded(adpcm, "wav")

    @pytest.mark.parametrize("codec_tag", [0x1234, 0x2000, 0x0055])
    def test_a_wav_that_announces_another_codec_is_refused(self, codec_tag: int) -> None:
        with pytest.raises(BadRequest, match="a codec that is not accepted in wav files"):
            decoded(wav_header(16_000, 1, codec_tag, b"\0\0" * 4_000), "wav")

    @pytest.mark.parametrize("pair", [(np.inf, -np.inf), (1e30, -1e30)])
    def test_channels_that_cancel_are_refused(self, pair: tuple[float, float]) -> None:
        samples = np.stack([tone(0.2, 16_000)] * 2, axis=1)
        samples[100] = pair
        with pytest.raises(BadRequest, match=r"has samples .* at most 32768 is accepted"):
            decoded(sound_file(samples, 16_000, "WAV", "FLOAT"), "wav")

    def test_too_many_channels_are_named(self) -> None:
        with pytest.raises(BadRequest, match="9 channels, but at most 8") as caught:
            decoded(sound_file(np.zeros((100, 9), np.int16), 16_000, "WAV"), "wav")
        refusal(caught)

    @pytest.mark.parametrize("rate", [1, 3_999, 192_001, 2_000_000_000])
    def test_an_absurd_rate_is_named(self, rate: int) -> None:
        with pytest.raises(BadRequest, match=f"{rate} samples a second") as caught:
            decoded(wav_header(rate, 1, 1, b"\0\0" * 100), "wav", max_s=1e9)
        refusal(caught)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39, -1e300])
    @pytest.mark.parametrize("rate", [16_000, 44_100])
    def test_samples_that_are_no_numbers_are_refused(self, bad: float, rate: int) -> None:
        samples = tone(0.2, rate)
        samples[100] = bad
        with pytest.raises(
            BadRequest, match="has samples that are infinite or no numbers, but at most 32768"
        ) as caught:
            decoded(sound_file(samples, rate, "WAV", "DOUBLE"), "wav")
        assert refusal(caught).code == "bad_audio"

    @pytest.mark.parametrize("largest", [32_769, -1e6, 1e18, -1e30, 3e38])
    @pytest.mark.parametrize("subtype", ["FLOAT", "DOUBLE"])
    @pytest.mark.parametrize("rate", [16_000, 44_100])
    def test_samples_that_no_recording_has_are_refused(self, largest: float, subtype: str, rate: int) -> None:
        samples = tone(0.2, rate)
        samples[-1] = largest
        words = f"has samples as large as {abs(largest):g}, but at most 32768 is accepted".replace("+", r"\+")
        with pytest.raises(BadRequest, match=words) as caught:
            decoded(sound_file(samples, rate, "WAV", subtype), "wav")
        assert (refusal(caught).code, caught.value.status) == ("bad_audio", 400)

    @pytest.mark.parametrize("rate", [4_000, 16_000, 44_100, 192_000])
    def test_the_spectrum_of_the_largest_samples_is_finite(self, rate: int) -> None:
        """Of a square wave and of noise, whose edges the resampler overshoots."""
        square = np.where(np.arange(rate) % 16 < 8, 1.0, -1.0)
        noise = np.random.default_rng(0).choice([-1.0, 1.0], rate)
        for shape in (square, noise):
            samples = decoded(sound_file(shape * MAX_SAMPLE, rate, "WAV", "FLOAT"), "wav")
            assert MAX_SAMPLE / 2 < np.abs(samples).max() < 4 * MAX_SAMPLE
            log_mel = WhisperFeatureExtractor(feature_size=128)(samples, sampling_rate=16_000, return_tensors="np")
            assert np.isfinite(log_mel["input_features"]).all()
            assert np.abs(log_mel["input_features"]).max() < 8

    def test_samples_next_to_nothing_are_silence(self) -> None:
        samples = decoded(sound_file(np.full(16_000, 1e-45), 16_000, "WAV", "FLOAT"), "wav")
        assert np.isfinite(samples).all() and np.abs(samples).max() < 1e-44

    @pytest.mark.parametrize("samples", [1, 320])
    def test_a_sound_too_short_to_be_heard_is_refused(self, samples: int) -> None:
        with pytest.raises(BadRequest, match=rf"has {samples / 16:g} ms of sound, but at least 20\.0625 ms") as caught:
            decoded(sound_file(np.zeros(samples, np.int16), 16_000, "WAV"), "wav")
        refusal(caught)
        assert decoded(sound_file(np.zeros(321, np.int16), 16_000, "WAV"), "wav").size == 321

    def test_a_wav_by_the_standard_library_is_read(self) -> None:
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setparams((1, 2, 16_000, 0, "NONE", ""))
            writer.writeframes(b"\x00\x40" * 400)
        assert decoded(file.getvalue(), "wav").tolist() == [0.5] * 400

    @FUZZ
    @given(st.sampled_from(["wav", "mp3", "flac"]), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255))))
    def test_damaged_files_bring_no_other_error(self, format: Any, changes: list[tuple[float, int]]) -> None:
        data = bytearray(WHOLE_FILES[format])
        for place, value in changes:
            data[int(place**3 * (len(data) - 1))] = value
        try:
            samples = decoded(bytes(data), format, max_s=1.0)
        except BadRequest as error:
            assert not any(leak in error.message for leak in LEAKS)
            return
        assert samples.dtype == np.float32 and np.isfinite(samples).all()


WHOLE_FILES = {
    "wav": sound_file(tone(0.2, 16_000), 16_000, "WAV"),
    "flac": sound_file(tone(0.2, 22_050), 22_050, "FLAC"),
    "mp3": mp3_file(tone(0.2, 16_000), 16_000),
}


@functools.cache
def recording(name: str, seconds: float = 1.0, **more: Any) -> bytes:
    return recorded(name, tone(seconds, 48_000).astype(np.float32), 48_000, **more)


def format_of(name: str) -> Any:
    return name.partition(" ")[0]


class TestRecordings:
    """Ogg, webm, m4a, aac and amr: what browsers, phones and messengers record in."""

    @pytest.mark.parametrize("name", RECORDED)
    def test_they_are_told_and_heard(self, name: str) -> None:
        data = recording(name)
        assert audio_format_of(data, PARAM) == format_of(name)
        samples = decoded(data, format_of(name))
        assert samples.dtype == np.float32 and 16_000 <= samples.size < 17_600
        spectrum = np.abs(np.fft.rfft(samples[:16_000]))
        assert abs(int(np.argmax(spectrum)) - 440) <= 1
        middle = samples[4_000:12_000]
        assert abs(np.sqrt((middle.astype(np.float64) ** 2).mean()) - 0.5 / np.sqrt(2)) < 0.06

    @pytest.mark.parametrize("name", RECORDED)
    def test_they_are_what_ffmpeg_decodes(self, name: str) -> None:
        """The mean of its channels at 16 kHz, by one resampler, with nothing before or after."""
        data = recording(name)
        with av.open(io.BytesIO(data)) as container:
            frames = list(container.decode(audio=0))
        channels = np.concatenate([frame.to_ndarray() for frame in frames], axis=1)
        whole = av.AudioFrame.from_ndarray(channels.mean(axis=0, keepdims=True), format="fltp", layout="mono")
        whole.sample_rate = frames[0].sample_rate
        resampler = av.AudioResampler(format="fltp", layout="mono", rate=16_000)
        pieces = [*resampler.resample(whole), *resampler.resample(None)]
        wanted = np.concatenate([piece.to_ndarray()[0] for piece in pieces])
        samples = decoded(data, format_of(name))
        assert samples.shape == wanted.shape
        assert np.abs(samples - wanted).max() < 1e-5

    def test_opus_has_as_many_samples_as_were_recorded(self) -> None:
        assert decoded(recording("ogg"), "ogg").size == decoded(recording("webm"), "webm").size == 16_000

    @pytest.mark.parametrize("seed", range(5))
    def test_wide_band_amr_is_heard(self, seed: int) -> None:
        data = wide_band_amr(50, seed)
        assert audio_format_of(data, PARAM) == "amr"
        samples = decoded(data, "amr")
        assert samples.size == 16_000 and 0.001 < np.abs(samples).max() < 100  # these decoders do not clip

    @pytest.mark.parametrize(("name", "video"), [("m4a", "libx264"), ("webm", "libvpx"), ("webm", "libvpx-vp9")])
    def test_of_a_video_the_sound_is_taken(self, name: str, video: str) -> None:
        assert np.array_equal(decoded(recording(name, video=video), name), decoded(recording(name), name))

    @pytest.mark.parametrize("name", ["m4a", "webm", "ogg"])
    def test_several_tracks_are_refused(self, name: str) -> None:
        with pytest.raises(BadRequest, match="has 2 sound tracks, but should have one") as caught:
            decoded(recording(name, tracks=2), name)
        refusal(caught)

    def test_a_video_without_sound_is_refused(self) -> None:
        with pytest.raises(BadRequest, match="has 0 sound tracks, but should have one"):
            decoded(recording("m4a", video="libx264", tracks=0), "m4a")

    @pytest.mark.parametrize("name", RECORDED)
    def test_the_limit_is_found_while_decoding(self, name: str) -> None:
        with pytest.raises(BadRequest, match=r"lasts longer than 2\.5 s") as caught:
            decoded(recording(name, 3.0), format_of(name), max_s=2.5)
        assert refusal(caught).status == 413

    def test_a_codec_of_another_container_is_refused(self) -> None:
        file = io.BytesIO()
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream("libmp3lame", rate=16_000, layout="mono")
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 8_000), np.int16), format="s16p", layout="mono")
            frame.sample_rate = 16_000
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        with pytest.raises(BadRequest, match="a codec that is not accepted in m4a files; send aac or opus") as caught:
            decoded(file.getvalue(), "m4a")
        refusal(caught)

    @pytest.mark.parametrize("name", RECORDED)
    @pytest.mark.parametrize("kept", [0.02, 0.5, 0.9])
    def test_half_a_recording_is_heard_so_far_or_refused(self, name: str, kept: float) -> None:
        data = recording(name)
        try:
            samples = decoded(data[: int(len(data) * kept)], format_of(name))
        except BadRequest as error:
            assert "cannot be read as a" in error.message or "ms of sound" in error.message
            return
        assert samples.size <= 17_600

    @pytest.mark.parametrize("name", ["ogg", "webm", "m4a", "aac", "amr"])
    def test_a_playlist_or_another_file_is_never_followed(self, name: Any, tmp_path: Any) -> None:
        secret = tmp_path / "secret.wav"
        secret.write_bytes(sound_file(tone(1.0, 16_000), 16_000, "WAV"))
        for text in (f"#EXTM3U\n#EXTINF:9,\n{secret}\n", f"ffconcat version 1.0\nfile {secret}\n"):
            with pytest.raises(BadRequest, match=r"cannot be read|sound tracks"):
                decoded(text.encode(), name)

    def test_boxes_that_claim_more_than_there_is_are_refused(self) -> None:
        data = bytearray(recording("m4a"))
        place = data.index(b"stsz") + 12
        data[place : place + 4] = b"\x7f\xff\xff\xff"
        with pytest.raises(BadRequest, match="cannot be read as a m4a"):
            decoded(bytes(data), "m4a")

    def test_first_bytes_say_more_than_a_label(self) -> None:
        flac = sound_file(tone(0.2, 16_000), 16_000, "FLAC")
        tag = b"ID3\x04\0\0\0\0\0\x0a" + bytes(10)
        assert audio_format_of(flac, PARAM, "wav") == "flac"
        assert audio_format_of(recording("webm"), PARAM, "mp3") == "webm"
        assert audio_format_of(tag + mp3_file(tone(0.2, 16_000), 16_000), PARAM, "wav") == "mp3"
        assert audio_format_of(tag + recording("aac"), PARAM, "mp3") == "aac"
        assert audio_format_of(tag + flac, PARAM) == "flac"
        assert audio_format_of(tag, PARAM) == "mp3"
        assert np.array_equal(decoded(tag + recording("aac"), "aac"), decoded(recording("aac"), "aac"))

    def test_a_label_is_taken_where_first_bytes_say_nothing(self) -> None:
        data = bytes(700) + mp3_file(tone(1.0, 16_000), 16_000)
        assert audio_format_of(data, PARAM, "mp3") == "mp3"
        assert decoded(data, "mp3").size > 15_000
        with pytest.raises(BadRequest, match="is no wav, mp3, flac, ogg, webm, m4a, aac or amr file") as caught:
            audio_format_of(data, PARAM)
        assert refusal(caught).status == 415

    @pytest.mark.parametrize("size", range(12))
    def test_too_few_bytes_are_of_no_format(self, size: int) -> None:
        for start in (b"RIFF....WAV", b"\xff", b"OggX", b"....ftyx", b"\x1a\x45", b"#!AM"):
            with pytest.raises(BadRequest, match="is no wav"):
                audio_format_of(start[:size], PARAM)

    @FUZZ
    @given(st.sampled_from(sorted(RECORDED)), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255))))
    def test_damage_brings_no_other_error(self, name: str, changes: list[tuple[float, int]]) -> None:
        data = bytearray(recording(name, 0.2))
        for place, value in changes:
            data[int(place**3 * (len(data) - 1))] = value
        try:
            samples = decoded(bytes(data), format_of(name), max_s=1.0)
        except av.error.MemoryError:  # FFmpeg makes no table of an absurd size; a decoder answers that with 413
            return
        except BadRequest as error:
            assert not any(leak in error.message for leak in LEAKS)
            return
        assert np.isfinite(samples).all() and np.abs(samples).max() <= 4 * MAX_SAMPLE


def picture(data: bytes, max_pixels: int = 10_000) -> Image.Image:
    return Image.fromarray(read_picture(data, max_pixels=max_pixels, param=PARAM).decode())


class TestImage:
    @pytest.mark.parametrize("container", ["PNG", "WEBP", "BMP", "GIF"])
    def test_lossless_images_are_exact(self, container: str) -> None:
        image = Image.new("RGB", (7, 5), (255, 0, 0))
        options = {"lossless": True} if container == "WEBP" else {}
        assert picture(image_file(image, container, **options)).tobytes() == image.tobytes()

    def test_a_jpeg_is_read(self) -> None:
        image = picture(image_file(Image.new("RGB", (16, 8), (10, 200, 30)), "JPEG", quality=95))
        assert (image.mode, image.size) == ("RGB", (16, 8))
        assert np.abs(np.asarray(image, int) - [10, 200, 30]).max() < 6

    @pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "I;16"])
    def test_every_mode_becomes_rgb(self, mode: str) -> None:
        assert picture(image_file(Image.new(mode, (3, 3)), "PNG")).mode == "RGB"

    @pytest.mark.parametrize("mode", ["I;16", "RGB", "RGBA", "LA"])
    def test_channels_of_16_bits_are_scaled(self, mode: str) -> None:
        """A ramp of all 256 values: the same picture as in 8 bits; in between, as the upper byte says."""
        ramp = np.arange(256, dtype=np.uint16).reshape(16, 16)
        depth_8 = np.repeat(ramp.astype(np.uint8)[..., None], 3, axis=2)
        for values in (ramp * 257, ramp * 256, ramp * 256 + 255):
            assert np.array_equal(np.asarray(picture(png_of_16_bits(mode, values))), depth_8)

    @pytest.mark.parametrize(("mode", "clear"), [("I;16", (0x8123,)), ("RGB", (0x8123, 0x8123, 0x8123))])
    def test_a_clear_colour_of_16_bits_is_white(self, mode: str, clear: tuple[int, ...]) -> None:
        values = np.array([[0x8123, 0x2300, 0x0023]], np.uint16)
        shown = np.asarray(picture(png_of_16_bits(mode, values, clear)))
        assert shown[0, :, 0].tolist() == [255, 0x23, 0]

    @pytest.mark.parametrize("depth", [2, 4])
    def test_a_clear_grey_of_few_bits_is_white(self, depth: int) -> None:
        header = struct.pack(">IIBBBBB", 2, 1, depth, 0, 0, 0, 0)
        row = bytes([0, (1 << depth | 2) << 8 - 2 * depth])  # the greys 1 and 2
        step = 255 // ((1 << depth) - 1)
        assert np.asarray(picture(png_of(header, row, b"\0\1")))[0, :, 0].tolist() == [255, 2 * step]
        assert np.asarray(picture(png_of(header, row, b"\0\3")))[0, :, 0].tolist() == [step, 2 * step]

    def test_a_turned_picture_of_16_bits_is_scaled(self) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        tall = Image.fromarray((np.arange(6, dtype=np.uint16) * 257 * 40).reshape(3, 2))
        wide = np.asarray(picture(image_file(tall, "PNG", exif=exif)))
        assert wide[..., 0].tolist() == [[160, 80, 0], [200, 120, 40]]

    def test_pngs_have_no_other_mode_of_more_than_8_bits(self) -> None:
        """Pillow's I and F, which would be clipped too, are of TIFF."""
        assert {mode for mode, _ in PngImagePlugin._MODES.values()} == {"1", "L", "I;16", "RGB", "P", "LA", "RGBA"}

    def test_a_cmyk_jpeg_is_read(self) -> None:
        ink = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
        assert np.abs(np.asarray(picture(image_file(ink, "JPEG", quality=95)), int) - [0, 255, 255]).max() < 6

    @pytest.mark.parametrize("container", ["WEBP", "PNG"])
    def test_of_moving_pictures_the_first_is_taken(self, container: str) -> None:
        frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
        options = {"lossless": True} if container == "WEBP" else {}
        data = image_file(frames[0], container, save_all=True, append_images=frames[1:], **options)
        assert picture(data).getpixel((0, 0)) == (255, 0, 0)

    @pytest.mark.parametrize("size", [(1, 200), (200, 1), (1, 1), (3, 600)])
    def test_the_narrowest_pictures_are_taken(self, size: tuple[int, int]) -> None:
        assert picture(image_file(Image.new("RGB", size), "PNG")).size == size

    @pytest.mark.parametrize("size", [(1, 201), (300, 1), (3, 601)])
    def test_narrower_ones_are_refused_by_their_header(self, size: tuple[int, int]) -> None:
        words = f"has {size[0]} x {size[1]} pixels, but a side may be at most 200 times as long as the other"
        with pytest.raises(BadRequest, match=words) as caught:
            read_picture(image_file(Image.new("RGB", size), "PNG"), max_pixels=10_000, param=PARAM)
        assert (refusal(caught).status, caught.value.code) == (400, "bad_image")

    def test_transparent_parts_are_white(self) -> None:
        image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
        image.putpixel((1, 0), (9, 8, 7, 255))
        assert np.asarray(picture(image_file(image, "PNG"))).tolist() == [[[255, 255, 255], [9, 8, 7]]]

    def test_the_first_frame_of_a_gif_is_taken(self) -> None:
        frames = [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
        image = picture(image_file(frames[0], "GIF", save_all=True, append_images=frames[1:]))
        assert image.getpixel((0, 0)) == (255, 0, 0)

    def test_the_exif_orientation_is_applied(self) -> None:
        image = Image.new("RGB", (4, 2), "black")
        image.putpixel((0, 0), (255, 255, 255))
        exif = Image.Exif()
        exif[0x0112] = 6
        turned = picture(image_file(image, "PNG", exif=exif))
        assert turned.size == (2, 4)
        assert turned.getpixel((1, 0)) == (255, 255, 255)

    @pytest.mark.parametrize(("width", "height"), [(101, 100), (20_000, 20_000), (2**31 - 1, 2**31 - 1)])
    def test_an_oversized_header_is_refused_before_decoding(self, width: int, height: int) -> None:
        with pytest.raises(BadRequest, match="more pixels than the 10000") as caught:
            picture(png_with_header(width, height))
        assert refusal(caught).status == 413

    def test_the_limit_itself_is_allowed(self) -> None:
        assert picture(image_file(Image.new("RGB", (100, 100)), "PNG")).size == (100, 100)

    @pytest.mark.parametrize("container", ["TIFF", "PPM", "TGA", "ICO", "PDF"])
    def test_other_formats_are_refused(self, container: str) -> None:
        with pytest.raises(BadRequest, match="send a PNG, JPEG, WEBP, GIF or BMP") as caught:
            picture(image_file(Image.new("RGB", (16, 16)), container))
        assert refusal(caught).status == 415

    @pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", b"<svg/>", b"\xff\xd8\xff", b"GIF89a"])
    def test_no_image_is_refused(self, data: bytes) -> None:
        with pytest.raises(BadRequest, match="not a readable image") as caught:
            picture(data)
        refusal(caught)

    @pytest.mark.parametrize("container", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
    def test_a_truncated_image_is_refused(self, container: str) -> None:
        data = image_file(NOISE, container)
        with pytest.raises(BadRequest) as caught:
            picture(data[: len(data) // 2])
        refusal(caught)

    @FUZZ
    @given(
        st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]),
        st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1),
    )
    def test_damaged_images_bring_no_other_error(self, container: str, changes: list[tuple[float, int]]) -> None:
        data = bytearray(image_file(NOISE, container))
        for place, value in changes:
            data[int(place**3 * (len(data) - 1))] = value
        try:
            image = picture(bytes(data))
        except BadRequest as error:
            assert not any(leak in error.message for leak in LEAKS)
            return
        assert image.mode == "RGB" and image.width * image.height <= 10_000


NOISE = Image.fromarray(np.random.default_rng(4).integers(0, 256, (40, 40, 3)).astype(np.uint8))
