"""A process that reads requests whose media or length could harm their reader; `decoders.py` starts it.

Its memory is bounded: if a file makes a library ask for too much, only this process ends. It knows none of the
server's secrets and is sent nothing but jobs; it ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import select
import socket
import sys
import threading
import warnings
from typing import Any, Final, Literal

import msgspec
import numpy as np
from PIL import Image

from omni_cluster.openai_api.chat import ChatRequest, CheckedChat, check_chat_request, open_chat_request
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.limits import NO_DEFAULTS, ApiDefaults, ApiLimits
from omni_cluster.openai_api.memory_bound import bound_memory, room_bytes
from omni_cluster.openai_api.messages import MediaUrl
from omni_cluster.openai_api.parcel import Parcel, packed, unpacked
from omni_cluster.openai_api.responses import CheckedResponses, check_responses_request, open_responses_request
from omni_cluster.openai_api.transcription import Task, TranscriptionRequest, open_transcription
from omni_cluster.types.errors import RequestError

READY: Final = b"ready"
JOB: Final = b"job"
DONE: Final = b"done"
LAST: Final = b"last"
"""As `DONE`, but the process ends: it kept so much memory that the next job would have less."""

MAX_WORD_BYTES: Final = 16
_HEAD_BYTES: Final = 1 << 20
_KEPT_PART: Final = 8
"""The part of its memory that may stay taken from one job to the next."""
_NICE: Final = 5


class Form(msgspec.Struct, frozen=True):
    """What a form's body is read by: the header Content-Type, and what is to become of its sound."""

    content_type: str
    task: Task


Kind = Literal["chat", "responses"]
"""Of a body of JSON: by the path that it is sent to."""


class Job(msgspec.Struct, frozen=True):
    """The body of a request, and what was fetched for it, by param; `form`: of a transcription's, which is no JSON."""

    body: np.ndarray
    fetched: dict[str, np.ndarray]
    models: list[str]
    voices: list[str]
    limits: ApiLimits
    defaults: ApiDefaults = NO_DEFAULTS
    form: Form | None = None
    kind: Kind = "chat"

    @property
    def max_bytes(self) -> int:
        """The most bytes that a job may have."""
        return 2 * self.limits.max_body_bytes + _HEAD_BYTES


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A request that is accepted, its media decoded; `repeated`: see `ResponsesRequest`."""

    chat: ChatRequest
    repeated: dict[str, Any] = {}


class OpenedSound(msgspec.Struct, frozen=True, tag=True):
    """A form that is accepted, its sound decoded."""

    transcription: TranscriptionRequest


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """What must be fetched first."""

    urls: tuple[MediaUrl, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A `BadRequest` by its parts."""

    message: str
    param: str | None
    code: str | None
    status: int


Answer = Opened | OpenedSound | Wanted | Refused


def max_answer_bytes(limits: ApiLimits) -> int:
    """The most bytes of an answer: the media, and the checked body, whose texts may be longer than as they came.

    What a response repeats comes twice.
    """
    return limits.max_decoded_bytes + 8 * limits.max_body_bytes + _HEAD_BYTES


def answered(job: Job, memory_bytes: int) -> Answer:
    try:
        return _read(job)
    except BadRequest as error:
        return Refused(error.message, error.param, error.code, error.status)
    except RequestError as error:
        return Refused(str(error), None, None, 400)
    except MemoryError:
        return Refused(
            f"The request needs more than {memory_bytes} bytes of memory to decode, which is the most it may take.",
            None,
            "media_too_large",
            413,
        )


def _checked(job: Job) -> CheckedChat | CheckedResponses:
    body = job.body.tobytes()
    if job.kind == "responses":
        return check_responses_request(body, models=job.models, limits=job.limits)
    return check_chat_request(body, models=job.models, voices=job.voices, limits=job.limits, defaults=job.defaults)


def _read(job: Job) -> Answer:
    # Pillow refuses pictures of more than twice as many; its own number would refuse what the configuration accepts.
    Image.MAX_IMAGE_PIXELS = -(-job.limits.max_image_pixels // 2)
    if (form := job.form) is not None:
        body = job.body.tobytes()
        made = open_transcription(body, form.content_type, form.task, models=job.models, limits=job.limits)
        return OpenedSound(made)
    checked = _checked(job)
    if any(each.param not in job.fetched for each in checked.urls):
        return Wanted(checked.urls)
    fetched = {param: data.tobytes() for param, data in job.fetched.items()}
    if isinstance(checked, CheckedResponses):
        response = open_responses_request(checked, fetched, job.limits)
        return Opened(response.chat, response.repeated)
    return Opened(open_chat_request(checked, fetched, job.limits))


def _serve(link: socket.socket, memory_bytes: int, max_parcel_bytes: int) -> None:
    """Answers one job after the other until the other side is gone."""
    bound_memory(memory_bytes)
    link.send(READY)
    while parcel := _received(link):
        job = unpacked(parcel, Job, max_parcel_bytes)
        answer = answered(job, memory_bytes)
        sent = _packed(answer, max_answer_bytes(job.limits))
        del parcel, job, answer
        _trim()
        is_last = room_bytes() < memory_bytes - memory_bytes // _KEPT_PART
        socket.send_fds(link, [LAST if is_last else DONE], [sent.descriptor])
        sent.close()
        if is_last:
            return


def _packed(answer: Answer, max_bytes: int) -> Parcel:
    """MessagePack has no whole numbers of more than 64 bits; JSON has, in what a client writes for the model alone."""
    try:
        return packed(answer, max_bytes)
    except OverflowError:
        sentence = "The request has a whole number of more than 64 bits; send a smaller one, or send it as text."
        return packed(Refused(sentence, None, "invalid_value", 400), max_bytes)


def _received(link: socket.socket) -> Parcel | None:
    word, descriptors, _, _ = socket.recv_fds(link, MAX_WORD_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    return Parcel(descriptors[0]) if word == JOB and descriptors else None


def _trim() -> None:
    """Gives free memory back, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _end_with(link: socket.socket) -> None:
    """Ends this process, whatever it does, once the other side is gone: also by kill -9."""
    watch = select.poll()
    watch.register(link.fileno(), select.POLLHUP)
    watch.poll()
    os._exit(0)


def main(descriptor: str, memory_bytes: str, max_parcel_bytes: str) -> None:
    os.nice(_NICE)  # engines go first
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limits say what is too large
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the answer says what is wrong with a form
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    link = socket.socket(fileno=int(descriptor))
    threading.Thread(target=_end_with, args=(link,), daemon=True).start()
    _serve(link, int(memory_bytes), int(max_parcel_bytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
