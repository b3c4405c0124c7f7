"""What one replica of each stage carries with the sound stage on cards of its own, and the policy's rules for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omni_cluster.planning.curves import AnswerTime, Curve, OpenLoop
from omni_cluster.planning.measured import Measured, Request
from omni_cluster.planning.policy import StageRule

GAPLESS = 0.99
"""Of all streams: a sound card that leaves more of them with a gap is past its end."""
FULL = 0.8
"""The part of what it carries at which a stage grows: the rest is for the time in which the next replica starts."""
MAX_STREAMS = 64
"""Requests at once in one engine: what the shipped configurations say."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """One replica. `most_per_s`: answers that it makes when it never rests; `carries_per_s`: that it should make."""

    name: str
    gpus: float
    most_per_s: float
    carries_per_s: float
    residence_s: float
    """Of a request, while others are there too."""
    tokens: float
    """Of a request, in this stage."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Text, codes, sound: the three stages in the order of the data."""

    text: StageWork
    codes: StageWork
    sound: StageWork
    open_loop: OpenLoop
    sound_s: float
    """Of an answer: how long its client hears it."""

    @property
    def stages(self) -> tuple[StageWork, StageWork, StageWork]:
        return self.text, self.codes, self.sound

    def rules(self, most: Mapping[str, int]) -> dict[str, StageRule]:
        """Each stage by its own signal, up to so many replicas."""
        text, codes, sound = self.text, self.codes, self.sound
        at_work = {each.name: FULL * each.carries_per_s * each.residence_s for each in (text, codes)}
        return {
            text.name: StageRule(most[text.name], max_streams=MAX_STREAMS, max_requests=at_work[text.name]),
            codes.name: StageRule(
                most[codes.name],
                max_streams=MAX_STREAMS,
                max_backlog_tokens=at_work[codes.name] * codes.tokens / 2,  # half of each is said already
            ),
            sound.name: StageRule(most[sound.name], max_streams=MAX_STREAMS, max_slack_use=FULL),
        }


def prompt_s(measured: Measured, tokens: float) -> float:
    """What a prompt takes longer than those of the cells; for a shorter one 0."""
    by_length = measured.first_audio_by_prompt
    curve = Curve(tuple(zip(by_length.prompt_tokens, by_length.seconds, strict=True)))
    return curve.at(tokens) - by_length.seconds[0]


def together(measured: Measured, request: Request) -> OpenLoop:
    """What clients notice of one card with all stages, by its answers a second of such requests."""
    work_s = AnswerTime.fitted(measured).work_s
    longer = request.sound_s / measured.request.sound_s + prompt_s(measured, request.prompt_tokens) / work_s
    return OpenLoop.measured(measured, "together").stretched(1 / longer)


def apart(measured: Measured, request: Request) -> Pipeline:
    """The first two stages on half a card each, the sound stage on whole ones, of such requests."""
    text, codes, sound = (measured.makers[part] for part in ("text", "codes", "sound"))
    text_gpus, codes_gpus, sound_gpus = (measured.gpus["apart"][name] for name in (text, codes, sound))
    front, longer = measured.front, request.sound_s / measured.request.sound_s
    token_s, code_s = front.token_s, front.sound_token_s * front.beside
    carries = front.answers_per_s(request, prompt_s(measured, request.prompt_tokens))
    open_loop = OpenLoop.measured(measured, "apart").stretched(1 / longer)
    most = 1 / (AnswerTime.fitted(measured, "apart").work_s * longer)
    return Pipeline(
        StageWork(text, text_gpus, carries / front.busy, carries, request.text_tokens * token_s, request.text_tokens),
        StageWork(
            codes, codes_gpus, carries / front.busy, carries, request.sound_tokens * code_s, request.sound_tokens
        ),
        StageWork(sound, sound_gpus, most, open_loop.carried_per_s(GAPLESS), 1.0 * longer, 0.0),
        open_loop,
        request.sound_s,
    )
