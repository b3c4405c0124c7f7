"""Media that came inside a request, decoded under limits: base64 to bytes, audio to 16 kHz mono, images to RGB.

Sentences never quote what the libraries below say: their messages name addresses, paths and objects.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer
from PIL import Image, ImageFile, ImageOps

from omni_cluster.openai_api.audio import S16_STEP
from omni_cluster.openai_api.containers import FAULTS, is_decoded_by, read_only
from omni_cluster.openai_api.errors import BadRequest, lasts_too_long, media_too_large
from omni_cluster.openai_api.sound_formats import READINGS, AudioFormat, open_sound

SAMPLE_RATE_HZ: Final = 16_000
MAX_CHANNELS: Final = 8
MIN_RATE_HZ: Final = 4_000
MAX_RATE_HZ: Final = 192_000

MIN_SAMPLES: Final = 321
"""Of a sound at 16 kHz, 20 ms: three frames of its spectrum, of which the model's tower makes one position."""
MAX_SAMPLE: Final = 32_768.0
"""The largest that a sample of floating point may be, on either side.

Full scale is 1; files that keep the scale of 16 bits are in use, and nothing that was recorded is louder. The spectrum
is 200 times that, squared, in float32: finite up to 1e16 or so, and beyond that the model's input is no number.
"""
MAX_ASPECT_RATIO: Final = 200
"""Of a picture's longer side to its shorter one: the processors take no narrower ones."""

# Base64 as others leave it: in URLs percent-encoded, in the URL-safe alphabet, and in lines.
_ESCAPES: Final = {
    escape: bytes.fromhex(escape[1:].decode())
    for escape in (b"%2B", b"%2b", b"%2F", b"%2f", b"%3D", b"%3d", b"%0A", b"%0a", b"%0D", b"%0d", b"%20")
}
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
_SPACES: Final = b" \t\r\n"
_JOINED_SAMPLES: Final = 16_384
_RGB_BYTES: Final = 3
_STRIP_ROWS: Final = 256
_IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_GREY_STEPS: Final = {"L;2": 85, "L;4": 17}
"""Of a PNG's greys of 2 and 4 bits, by Pillow's names of how they are coded, in 8 bits."""
# What PIL raises for files that break its readers.
_IMAGE_FAULTS: Final = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


def decode_base64(value: str, max_bytes: int, param: str) -> bytes:
    """Bytes of a base64 text or of a `data:...;base64,` URL; the length is checked before anything is decoded.

    The URL-safe alphabet is read too, and what mailers, shells and URLs make of base64: lines, no padding, `%2B`.
    Raises BadRequest (413 above `max_bytes`) that names `param`.
    """
    digits = _digits(_base64_part(value, param))
    size_bytes = len(digits) * 3 // 4
    if size_bytes > max_bytes:
        raise media_too_large(param, f"{param} has {size_bytes} bytes, but at most {max_bytes} are accepted.")
    if not digits:
        raise _no_base64(param)
    try:
        return base64.b64decode(digits + b"=" * (-len(digits) % 4), validate=True)
    except binascii.Error:
        raise _no_base64(param) from None


def _digits(text: str) -> bytes:
    """Of base64 in the standard alphabet, without padding; whatever else is there stays."""
    # A character that is no ASCII becomes a question mark, which is no digit either.
    digits = text.encode("ascii", "replace")
    if b"%" in digits:
        for escape, plain in _ESCAPES.items():
            digits = digits.replace(escape, plain)
    return digits.translate(_STANDARD, _SPACES).rstrip(b"=")


def _base64_part(value: str, param: str) -> str:
    if value[:5].lower() != "data:":
        return _not_empty(value, param)
    head, comma, text = value.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise BadRequest(
            f"{param} is a data URL without base64; send it as 'data:<type>;base64,<data>'.",
            param=param,
            code="invalid_base64",
        )
    return _not_empty(text, param)


def _no_base64(param: str) -> BadRequest:
    return BadRequest(f"{param} is not valid base64; send a whole file as base64.", param=param, code="invalid_base64")


def _not_empty(text: str, param: str) -> str:
    if not text:
        raise BadRequest(f"{param} is empty; send the file as base64.", param=param, code="invalid_base64")
    return text


def decode_audio(data: bytes, *, format: AudioFormat, max_s: float, param: str) -> npt.NDArray[np.float32]:
    """Samples `[n]` of a sound file: float32, mono, 16 kHz.

    Channels are averaged with equal weight, so that the mix hides none of them. 16-bit samples
    are s / 32768; a 16 kHz mono 16-bit WAV comes out exactly so. A WAV that ends before its header says yields what it
    holds, because recorders that stream write no length. Of a file with a video beside its sound, the sound.

    Raises BadRequest that names `param`: the file cannot be read, has no sound or several, more than `MAX_CHANNELS`
    channels, a rate outside `MIN_RATE_HZ`..`MAX_RATE_HZ`, samples above `MAX_SAMPLE`, fewer than `MIN_SAMPLES`, or
    (413, found while decoding) more than `max_s` seconds.
    """
    try:
        samples = resampled(_mono_blocks(data, format, max_s, param))
    except MemoryError:
        raise
    except FAULTS:
        raise _unreadable_audio(format, param) from None
    if not samples.size:
        raise _unreadable_audio(format, param)
    check_length(samples, param)
    return samples


def check_length(samples: npt.NDArray[np.float32], param: str) -> None:
    """Raises BadRequest for samples `[n]` at 16 kHz that are too few to be heard."""
    if samples.size < MIN_SAMPLES:
        lasts_ms, least_ms = (1000 * count / SAMPLE_RATE_HZ for count in (samples.size, MIN_SAMPLES))
        raise _bad_audio(f"{param} has {lasts_ms:g} ms of sound, but at least {least_ms:g} ms are needed.", param)


Block = tuple[int, npt.NDArray[np.float32]]
"""Sample rate and mono samples of a decoded frame."""


def _mono_blocks(data: bytes, format: AudioFormat, max_s: float, param: str) -> Iterator[Block]:
    with open_sound(data, format) as container:
        stream = _only_audio(container.streams.audio, format, param)
        read_only(stream, container)
        yield from mono_blocks(container, stream, max_s, param)


def mono_blocks(container: InputContainer, stream: AudioStream, max_s: float, param: str) -> Iterator[Block]:
    """Sample rate and mono samples of each decoded frame, while they last at most `max_s` together."""
    decoded_samples, channels = 0, None
    # Interleaved, because PyAV 18 reads past the planes of a planar frame of eight channels, and crashes.
    interleaved = AudioResampler(format="flt")
    for frame in container.decode(stream):
        _check_frame(frame, param)
        decoded_samples += frame.samples
        if decoded_samples > max_s * frame.sample_rate:
            raise lasts_too_long("audio", max_s, param)
        channels = channels or frame.layout.nb_channels
        if frame.layout.nb_channels != channels:
            raise ValueError("the number of channels changes")
        if frame.format.name == "s16":  # as most WAVs have them; the way through a resampler takes ten times as long
            yield frame.sample_rate, _average(_channels(frame) * S16_STEP)
            continue
        for converted in interleaved.resample(frame):
            samples = _channels(converted)
            _check_samples(samples, param)
            yield frame.sample_rate, _average(samples)


def _channels(frame: AudioFrame) -> npt.NDArray[Any]:
    """Samples `[n, channels]` of an interleaved frame."""
    return frame.to_ndarray().reshape(-1, frame.layout.nb_channels)


def _average(channels: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Of samples `[n, channels]`, float32."""
    return channels[:, 0] if channels.shape[1] == 1 else channels.mean(axis=1, dtype=np.float32)


def _check_samples(samples: npt.NDArray[np.float32], param: str) -> None:
    """Of float files, and of codecs whose files may be made to say anything."""
    largest = float(np.abs(samples).max(initial=0))
    if largest <= MAX_SAMPLE:
        return
    said = f"as large as {largest:g}" if math.isfinite(largest) else "that are infinite or no numbers"
    raise _bad_audio(f"{param} has samples {said}, but at most {MAX_SAMPLE:g} is accepted, and full scale is 1.", param)


def _only_audio(streams: tuple[AudioStream, ...], format: AudioFormat, param: str) -> AudioStream:
    if len(streams) != 1:
        raise _bad_audio(f"{param} has {len(streams)} sound tracks, but should have one.", param)
    decoders, codecs = READINGS[format].decoders, READINGS[format].codecs
    if not is_decoded_by(streams[0], decoders):
        raise _bad_audio(f"{param} has sound of a codec that is not accepted in {format} files; send {codecs}.", param)
    return streams[0]


def _check_frame(frame: AudioFrame, param: str) -> None:
    channels = frame.layout.nb_channels
    if channels > MAX_CHANNELS:
        raise _bad_audio(f"{param} has {channels} channels, but at most {MAX_CHANNELS} are accepted.", param)
    if not MIN_RATE_HZ <= frame.sample_rate <= MAX_RATE_HZ:
        raise _bad_audio(
            f"{param} has {frame.sample_rate} samples a second, but {MIN_RATE_HZ} to {MAX_RATE_HZ} are accepted.", param
        )


def resampled(blocks: Iterator[Block]) -> npt.NDArray[np.float32]:
    """All blocks at 16 kHz. Raises ValueError for a rate that changes, which the resampler would not notice."""
    resampler = AudioResampler(format="fltp", layout="mono", rate=SAMPLE_RATE_HZ)
    pieces: list[npt.NDArray[np.float32]] = []
    first_rate: int | None = None
    for rate, block in _joined(blocks):
        first_rate = first_rate or rate
        if rate != first_rate:
            raise ValueError("the sample rate changes")
        pieces += [block] if rate == SAMPLE_RATE_HZ else _pieces(resampler, _mono_frame(rate, block))
    if first_rate not in (None, SAMPLE_RATE_HZ):
        pieces += _pieces(resampler, None)
    return np.concatenate(pieces) if pieces else np.empty(0, np.float32)


def _pieces(resampler: AudioResampler, frame: AudioFrame | None) -> list[npt.NDArray[Any]]:
    return [out.to_ndarray()[0] for out in resampler.resample(frame)]


def _joined(blocks: Iterator[Block]) -> Iterator[Block]:
    """The same samples in blocks of `_JOINED_SAMPLES` or a little more, each of one rate.

    A call of the resampler takes about as long for a thousand samples as for ten thousand.
    """
    held: list[npt.NDArray[np.float32]] = []
    held_rate, held_samples = 0, 0
    for rate, block in blocks:
        if held and (rate != held_rate or held_samples >= _JOINED_SAMPLES):
            yield held_rate, np.concatenate(held)
            held, held_samples = [], 0
        held.append(block)
        held_rate, held_samples = rate, held_samples + len(block)
    if held:
        yield held_rate, np.concatenate(held)


def _mono_frame(rate: int, block: npt.NDArray[np.float32]) -> AudioFrame:
    frame = AudioFrame.from_ndarray(block[None], format="fltp", layout="mono")
    frame.sample_rate = rate
    return frame


def _unreadable_audio(format: AudioFormat, param: str) -> BadRequest:
    article = "an" if format[0] in "ao" else "a"
    return _bad_audio(f"{param} cannot be read as {article} {format} file; send a whole file.", param)


def _bad_audio(sentence: str, param: str) -> BadRequest:
    return BadRequest(sentence, param=param, code="bad_audio")


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture whose header was read: `size` is width and height before it is turned as its EXIF data say."""

    data: bytes
    size: tuple[int, int]
    param: str

    @property
    def decoded_bytes(self) -> int:
        return self.size[0] * self.size[1] * _RGB_BYTES

    def decode(self) -> npt.NDArray[np.uint8]:
        """RGB `[H, W, 3]`, turned as its EXIF data say, transparent parts on white; a GIF's first frame.

        Raises BadRequest (400) that names `param` when it cannot be decoded.
        """
        image = Image.open(io.BytesIO(self.data), formats=_IMAGE_FORMATS)
        _scale_clear_colour(image)
        try:
            ImageOps.exif_transpose(image, in_place=True)
            return _on_white(image)
        except _IMAGE_FAULTS:
            raise BadRequest(
                f"{self.param} is a damaged {image.format} image; send a whole file.",
                param=self.param,
                code="bad_image",
            ) from None


def read_picture(data: bytes, *, max_pixels: int, param: str) -> Picture:
    """Reads the header, decodes nothing.

    Raises BadRequest that names `param`: 415 when it is none of PNG, JPEG, WEBP, GIF and BMP, 413 when its header says
    more than `max_pixels`, 400 when it is narrower than `MAX_ASPECT_RATIO`.
    """
    with _opened(data, max_pixels, param) as image:
        width, height = image.size
    if width * height > max_pixels:
        raise _too_many_pixels(max_pixels, param)
    check_aspect_ratio(width, height, param)
    return Picture(data, (width, height), param)


def check_aspect_ratio(width: int, height: int, param: str, *, what: str = "", code: str = "bad_image") -> None:
    """Raises BadRequest above `MAX_ASPECT_RATIO`. `what`: of these sides, as in "frames of "."""
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise BadRequest(
            f"{param} has {what}{width} x {height} pixels, but a side may be at most {MAX_ASPECT_RATIO} times as long "
            "as the other.",
            param=param,
            code=code,
        )


def _opened(data: bytes, max_pixels: int, param: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=_IMAGE_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(max_pixels, param) from None
    except _IMAGE_FAULTS:
        raise BadRequest(
            f"{param} is not a readable image; send a {', '.join(_IMAGE_FORMATS[:-1])} or {_IMAGE_FORMATS[-1]}.",
            param=param,
            code="unsupported_image",
            status=415,
        ) from None


def _on_white(image: Image.Image) -> npt.NDArray[np.uint8]:
    """By strips: a copy of the whole in each of its forms would be three times what it comes to."""
    image.load()
    width, height = image.size
    strip_on_white = _layer_on_white if image.has_transparency_data else _as_rgb
    rgb = np.empty((height, width, _RGB_BYTES), np.uint8)
    for top in range(0, height, _STRIP_ROWS):
        bottom = min(top + _STRIP_ROWS, height)
        rgb[top:bottom] = np.asarray(strip_on_white(_of_bytes(image.crop((0, top, width, bottom)))))
    return rgb


def _of_bytes(image: Image.Image) -> Image.Image:
    """The upper byte of values of 16 bits, as Pillow reads those of colours; its own conversion clips greys."""
    if image.mode != "I;16":
        return image
    values = np.asarray(image)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return grey
    is_clear = values == image.info["transparency"]
    return Image.merge("LA", (grey, Image.fromarray(np.where(is_clear, 0, 255).astype(np.uint8))))


def _scale_clear_colour(image: ImageFile.ImageFile) -> None:
    """As Pillow scales the pixels: it leaves the colour as the file has it, and would compare it with scaled ones."""
    clear, coded = image.info.get("transparency"), image.tile[0].args if image.tile else None
    if isinstance(clear, tuple) and coded == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in clear)
    elif isinstance(clear, int) and coded in _GREY_STEPS:
        image.info["transparency"] = clear * _GREY_STEPS[coded]


def _as_rgb(image: Image.Image) -> Image.Image:
    return image.convert("RGB")


def _layer_on_white(image: Image.Image) -> Image.Image:
    layer = image.convert("RGBA")
    ground = Image.new("RGB", layer.size, "white")
    ground.paste(layer, mask=layer.getchannel("A"))
    return ground


def _too_many_pixels(max_pixels: int, param: str) -> BadRequest:
    return BadRequest(
        f"{param} has more pixels than the {max_pixels} that are accepted.",
        param=param,
        code="image_too_large",
        status=413,
    )
