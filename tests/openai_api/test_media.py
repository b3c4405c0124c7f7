from __future__ import annotations

import base64
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

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.media import decode_audio, decode_base64, read_picture

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
        with pytest.raises(BadRequest, match="cannot be read as a wav"):
            decoded(adpcm, "wav")

    @pytest.mark.parametrize("codec_tag", [0x1234, 0x2000, 0x0055])
    def test_a_wav_that_announces_another_codec_is_refused(self, codec_tag: int) -> None:
        with pytest.raises(BadRequest, match="cannot be read as a wav"):
            decoded(wav_header(16_000, 1, codec_tag, b"\0\0" * 4_000), "wav")

    def test_infinities_that_cancel_are_refused(self) -> None:
        samples = np.stack([tone(0.2, 16_000)] * 2, axis=1)
        samples[100] = (np.inf, -np.inf)
        with pytest.raises(BadRequest, match="cannot be read"):
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

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_samples_that_are_no_numbers_are_refused(self, bad: float) -> None:
        samples = tone(0.2, 16_000)
        samples[100] = bad
        with pytest.raises(BadRequest, match="cannot be read"):
            decoded(sound_file(samples, 16_000, "WAV", "FLOAT"), "wav")

    def test_a_wav_by_the_standard_library_is_read(self) -> None:
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setparams((1, 2, 16_000, 0, "NONE", ""))
            writer.writeframes(b"\x00\x40" * 50)
        assert decoded(file.getvalue(), "wav").tolist() == [0.5] * 50

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
