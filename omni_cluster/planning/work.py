"""What one replica of each stage carries in a layout, and the policy's rules for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omni_cluster.planning.curves import Curve, OpenLoop
from omni_cluster.planning.measured import Layout, Measured, Request
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

    layout: Layout
    text: StageWork
    codes: StageWork
    sound: StageWork
    open_loop: OpenLoop
    sound_s: float
    """Of an answer: how long its client hears it."""

    @property
    def stages(self) -> tuple[StageWork, StageWork, StageWork]:
        return self.text, self.codes, self.sound

    @property
    def front_cards(self) -> int:
        """Cards of one replica of each stage before the sound; 0: they are on its card."""
        return 0 if self.layout == "together" else round(self.text.gpus + self.codes.gpus)

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


def prompt_s(measured: Measured, tokens: float, than_tokens: float | None = None) -> float:
    """What a prompt takes longer than those of the cells, or than another; for a shorter one 0."""
    than = measured.card.request.prompt_tokens if than_tokens is None else than_tokens
    by_length = measured.first_audio_by_prompt
    curve = Curve(tuple(zip(by_length.prompt_tokens, by_length.seconds, strict=True)))
    return max(0.0, curve.at(tokens) - curve.at(than))


def pipeline(measured: Measured, layout: Layout, request: Request) -> Pipeline:
    """The stages in such a layout, of such requests."""
    card, prompt = measured.card, prompt_s(measured, request.prompt_tokens)
    longer, most_per_s = request.sound_s / card.request.sound_s, card.most_per_s(layout)
    work_s = longer / most_per_s + (prompt if layout == "together" else 0.0)
    open_loop = OpenLoop.measured(card, layout).stretched(1 / (work_s * most_per_s))
    carries = open_loop.carried_per_s(GAPLESS)
    name = measured.makers["sound"]
    sound = StageWork(name, measured.gpus[layout][name], max(carries, 1 / work_s), carries, longer, 0.0)
    text, codes = _front(measured, layout, request, sound)
    return Pipeline(layout, text, codes, sound, open_loop, request.sound_s)


def _front(measured: Measured, layout: Layout, request: Request, sound: StageWork) -> tuple[StageWork, StageWork]:
    """On the sound stage's card they carry what the card does."""
    text, codes = (replace(sound, name=name, gpus=measured.gpus[layout][name]) for name in _before_sound(measured))
    if layout == "together":
        return text, codes
    front = measured.fronts[layout]
    prompt = prompt_s(measured, request.prompt_tokens, front.prompt_tokens)
    longer = request.sound_s / measured.card.request.sound_s
    most, carries = (1 / (longer / per_s + prompt) for per_s in (front.most_per_s, front.carries_per_s))
    return (
        StageWork(text.name, text.gpus, most, carries, front.text_s * longer, request.text_tokens),
        StageWork(codes.name, codes.gpus, most, carries, front.codes_s * longer, request.sound_tokens),
    )


def _before_sound(measured: Measured) -> tuple[str, str]:
    return measured.makers["text"], measured.makers["codes"]
