"""What one request may ask of a deployment."""

from __future__ import annotations

from pydantic import Field, model_validator

from omni_cluster.config.advanced import PUBLIC
from omni_cluster.config.problems import Problem, Strict, refuse


class Limits(Strict):
    """What one request may ask, and how many run and wait; each bound is checked before memory is taken."""

    max_payload_elements: int = Field(
        default=134_217_728,
        ge=1,
        description="Elements of the hidden states that one stage sends to the next at once: 32,768 of 4,096 each.",
        examples=[134_217_728],
    )
    max_prompt_tokens: int = Field(
        default=28_000,
        ge=1,
        description="Tokens of a prompt, media included.",
        examples=[28_000],
        json_schema_extra=PUBLIC,
    )
    # A request has all of its conversation: each spoken turn is one of its parts.
    max_audio_parts: int = Field(
        default=64,
        ge=0,
        description="Audio parts of a request; each spoken turn of a conversation is one.",
        examples=[64],
    )
    max_image_parts: int = Field(default=16, ge=0, description="Image parts of a request.", examples=[16])
    max_video_parts: int = Field(default=4, ge=0, description="Video parts of a request.", examples=[4])
    max_media_bytes: int = Field(
        default=26_214_400, ge=1, description="Bytes of one media file.", examples=[26_214_400]
    )
    max_audio_input_s: float = Field(default=600.0, gt=0, description="Seconds of one audio part.", examples=[600.0])
    max_image_pixels: int = Field(default=178_956_970, ge=1, description="Pixels of one image.", examples=[178_956_970])
    # The largest image that is accepted, at three bytes a pixel.
    max_decoded_bytes: int = Field(
        default=536_870_912,
        ge=1,
        description="Bytes that all media of a request come to when decoded: the largest image alone, or two videos of "
        "300 s with their sound.",
        examples=[536_870_912],
    )
    max_video_s: float = Field(default=300.0, gt=0, description="Seconds of one video part.", examples=[300.0])
    max_video_frames: int = Field(
        default=128, ge=2, description="Frames of one video that the model is shown.", examples=[128]
    )
    max_frame_pixels: int = Field(
        default=8_847_360, ge=1, description="Pixels of a video's frame: 4096 x 2160.", examples=[8_847_360]
    )
    max_body_bytes: int = Field(
        default=67_108_864,
        ge=1,
        description="Bytes of an HTTP body, and of all files together that its URLs name.",
        examples=[67_108_864],
    )
    max_output_tokens: int = Field(
        default=4_096,
        ge=1,
        description="Text tokens that a request may ask for.",
        examples=[4_096],
        json_schema_extra=PUBLIC,
    )
    max_codec_tokens: int = Field(
        default=4_096,
        ge=1,
        description="Codec tokens of a request, of which its sound is made.",
        examples=[4_096],
        json_schema_extra=PUBLIC,
    )
    max_choices: int = Field(default=4, ge=1, le=64, description="Answers to one chat request, its `n`.", examples=[4])
    max_ongoing_requests: int = Field(
        default=128,
        ge=1,
        description="Requests that run at once; the ingresses share them, in equal parts, rounded up.",
        examples=[128],
        json_schema_extra=PUBLIC,
    )
    max_queued_requests: int = Field(
        default=128,
        ge=0,
        description="Requests that wait for a slot before a further one gets a 429; the ingresses share them.",
        examples=[128],
        json_schema_extra=PUBLIC,
    )
    max_wait_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that a request waits for a slot at most. It gets a 429 then, or at once if it would wait "
        "longer by how often a slot is given back. Not set: as long as those before it take.",
        examples=[1.0],
    )
    max_sessions: int = Field(
        default=200,
        ge=1,
        description="Sessions on WebSockets that are open at once; the ingresses share them.",
        examples=[200],
    )
    max_session_s: float = Field(default=3_600.0, gt=0, description="Seconds of a session.", examples=[3600.0])
    max_session_bytes: int = Field(
        default=33_554_432,
        ge=1,
        description="Bytes of sound, pictures and text, as they are in memory, that a realtime session keeps: some "
        "nine minutes of speech. The oldest items are dropped.",
        examples=[33_554_432],
    )
    request_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds from a request's headers to the end of its answer.",
        examples=[600.0],
        json_schema_extra=PUBLIC,
    )
    closing_grace_s: float = Field(
        default=30.0,
        ge=0,
        description="Seconds in which running requests may end after SIGTERM of `serve run`.",
        examples=[30.0],
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        le=10,
        description="How often a request is retried on other replicas when one that works on it is lost; 0: never, "
        "it ends with `stage_died`.",
        examples=[3],
    )
    upload_timeout_s: float = Field(
        default=60.0, gt=0, description="Seconds in which each MiB of a body has to come.", examples=[60.0]
    )
    max_upload_bytes: int = Field(
        default=536_870_912,
        ge=1_048_576,
        description="Bytes of all bodies that one ingress holds and does not work on yet; at least `max_body_bytes` "
        "and 1 MiB.",
        examples=[536_870_912],
    )
    max_unread_bytes: int = Field(
        default=8_388_608,
        ge=131_072,
        description="Bytes of an answer that a client may leave unread; one that reads nothing for 5 s is then ended.",
        examples=[8_388_608],
    )
    max_unread_total_bytes: int = Field(
        default=268_435_456,
        ge=131_072,
        description="Bytes of all answers that clients of one host's HTTP proxy may leave unread; at least "
        "`max_unread_bytes`.",
        examples=[268_435_456],
    )
    outbox_max_bytes: int = Field(
        default=2_147_483_648,
        ge=1,
        description="Bytes of hidden states and audio of one request that a replica keeps for its readers.",
        examples=[2**31],
    )
    replica_outbox_max_bytes: int = Field(
        default=8_589_934_592,
        ge=1,
        description="The same of all requests of a replica, with what it received and has not read, and what it is "
        "sending. Above it new requests wait, until their deadline. At least `outbox_max_bytes`.",
        examples=[2**33],
    )
    kept_media_bytes: int = Field(
        default=4_294_967_296,
        ge=1_048_576,
        description="Bytes of processed media that an engine keeps for later turns that have them too.",
        examples=[2**32],
    )
    kept_grammars_bytes: int = Field(
        default=134_217_728,
        ge=1_048_576,
        description="Bytes of compiled grammars of structured output that an engine keeps.",
        examples=[2**27],
    )

    @model_validator(mode="after")
    def _sums_hold_one(self) -> Limits:
        problems = []
        if self.max_upload_bytes < (least := self.max_body_bytes + 1_048_576):
            fix = f"it must hold a body of max_body_bytes and 1 MiB, for example {least}"
            problems.append(Problem("max_upload_bytes", self.max_upload_bytes, fix))
        if self.max_unread_total_bytes < self.max_unread_bytes:
            fix = f"it must be at least max_unread_bytes, for example {self.max_unread_bytes}"
            problems.append(Problem("max_unread_total_bytes", self.max_unread_total_bytes, fix))
        if self.replica_outbox_max_bytes < self.outbox_max_bytes:
            fix = f"it must be at least outbox_max_bytes, for example {self.outbox_max_bytes}"
            problems.append(Problem("replica_outbox_max_bytes", self.replica_outbox_max_bytes, fix))
        refuse(problems)
        return self
