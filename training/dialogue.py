"""Talks to a server of the toy by its realtime sessions, and talks over some of its answers.

    python -m training.dialogue --url http://127.0.0.1:8000 --turns 10 --interruptions 3 --out dialogue.json

It tells how many transcripts are what was said, and whether the server remembers of an answer that was talked over
just the words that were played. It needs espeak-ng, and the project's extra `training`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from rich.table import Table
from websockets.exceptions import WebSocketException

from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.realtime import RealtimeOptions, session, until_one_ends
from omni_cluster.bench.table import wide_console
from omni_cluster.cli_values import count, whole
from training.asking import spoken
from training.caller import Caller, Played
from training.exam import percent, written
from training.marking import plain, share
from training.recogniser import NoRecogniser, Recogniser
from training.saying import ANSWER_HZ, SPEAKERS
from training.speech import QUESTION_HZ, NoEspeak, Sound, resampled
from training.world import Item, Kind, held_out

LISTENS_S: Final = (0.3, 1.2)
"""Of an answer that is talked over: so much is played before the client speaks, which the server hears 0.3 s later."""
LONG: Final = 6
"""Words of an answer that can be talked over."""
NEAR: Final = 1
"""Word by which what is remembered may end before or behind what was played: one is cut through."""
SETTINGS: Final = {
    "transcription": {"model": "toy"},
    "turn_detection": {"type": "server_vad", "silence_duration_ms": 500},
}
ASKED: Final = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]}
"""What is asked behind an answer of which the server tells how long it is."""
TIMEOUT_S: Final = 500.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What is said, at the rate of sessions. `listens_s`: to its answer, before the next turn talks over it."""

    question: str
    wanted: str
    sound: Sound
    listens_s: float | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of a turn. `remembered`: so many words of an answer that was talked over are in later prompts."""

    turn: Turn
    transcript: str
    answer: Played
    remembered: int | None


def turns(number: int, interruptions: int, seed: int = 0) -> list[Turn]:
    """Those whose answer is talked over are spread evenly, before the last one. Raises NoEspeak."""
    cut = {(2 * place + 1) * (number - 1) // (2 * interruptions) for place in range(interruptions)}
    short = iter([item for item in held_out(2 * number, seed) if item.picture is None])
    long = iter([item for item in _repeated(8 * interruptions, seed) if len(item.answer.split()) >= LONG])
    rng = Random(f"dialogue {seed}")
    return [_turn(next(long) if place in cut else next(short), place in cut, rng) for place in range(number)]


def _repeated(most: int, seed: int) -> list[Item]:
    return held_out(most, seed, Kind.REPEAT) if most else []


def _turn(item: Item, is_cut: bool, rng: Random) -> Turn:
    sound = resampled(spoken(item.question, rng), QUESTION_HZ, ANSWER_HZ)
    return Turn(item.question, item.answer, sound, rng.uniform(*LISTENS_S) if is_cut else None)


# ------------------------------------------------------------------ the conversation


async def talk(url: str, said: Sequence[Turn], voice: str) -> list[Taken]:
    """Raises BenchError for what ends the conversation before its end."""
    try:
        async with asyncio.timeout(TIMEOUT_S), session(RealtimeOptions(url, Path(), "", timeout_s=TIMEOUT_S)) as socket:
            caller = Caller(socket)
            return await until_one_ends(_conversation(caller, said, voice), caller.send_sound(), caller.read())
    except TimeoutError:
        raise BenchError(f"the conversation took longer than {TIMEOUT_S:g} s.") from None
    except (OSError, WebSocketException) as error:
        raise BenchError(f"{url} ended the session ({str(error) or type(error).__name__}).") from None


async def _conversation(caller: Caller, said: Sequence[Turn], voice: str) -> list[Taken]:
    await caller.update(audio={"input": SETTINGS, "output": {"voice": voice}})
    spoken_turns = []
    for turn in said:
        items, answer = await caller.say(turn.sound)
        await caller.listen(answer, turn.listens_s)
        spoken_turns.append((turn, items, answer))
    return [
        Taken(turn, plain(await caller.transcripts(items)), answer, await _remembered(caller, answer))
        for turn, items, answer in spoken_turns
    ]


async def _remembered(caller: Caller, answer: Played) -> int | None:
    """Words of an answer that was talked over: a prompt with so many has as many tokens as one with the item itself."""
    if answer.stopped_s is None:
        return None
    wanted = await caller.prompt_tokens({"type": "item_reference", "id": answer.item_id}, ASKED)
    ends = [0, *(word.end() for word in re.finditer(r"\S+", answer.text))]
    for number, end in enumerate(ends):
        said = [_said(answer.text[:end])] if end else []
        if await caller.prompt_tokens(*said, ASKED) == wanted:
            return number
    raise BenchError(f"no beginning of {answer.text!r} has the {wanted} tokens of what the server remembers of it.")


def _said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


# ------------------------------------------------------------------ the figures


def report(taken: Sequence[Taken], recogniser: Recogniser) -> dict[str, Any]:
    its = [_figures(each, recogniser) for each in taken]
    cut = [each for each in its if each["played_s"] is not None]
    apart = [each["remembered"] - each["played"] for each in cut]
    return {
        "turns": len(its),
        "transcripts": share(each["transcript"] == each["question"] for each in its),
        "text": share(each["said"] == each["wanted"] for each in its if each["played_s"] is None),
        "interruptions": share(abs(words) <= NEAR for words in apart),
        "words_apart": apart,
        "conversation": its,
    }


def _figures(taken: Taken, recogniser: Recogniser) -> dict[str, Any]:
    """`played`: words that the sound says which was played before it was stopped."""
    turn, answer = taken.turn, taken.answer
    figures = {
        "question": turn.question,
        "transcript": taken.transcript,
        "wanted": turn.wanted,
        "said": plain(answer.text),
        "status": answer.status,
        "sound_s": round(answer.sound_s, 2),
        "played_s": None if answer.stopped_s is None else round(answer.stopped_s, 2),
        "remembered": taken.remembered,
    }
    is_cut = answer.stopped_s is not None
    return {**figures, "played": len(recogniser.begun(answer.text, answer.heard(), ANSWER_HZ)) if is_cut else None}


def table(result: Mapping[str, Any]) -> Table:
    made = Table("said", "transcript", "answer", "played", "remembered", title=_title(result))
    for each in result["conversation"]:
        is_heard = each["transcript"] == each["question"]
        cells = (each["question"], "as said" if is_heard else each["transcript"], each["said"])
        made.add_row(*cells, *map(_words, (each["played"], each["remembered"])))
    return made


def _title(result: Mapping[str, Any]) -> str:
    names = {"transcripts": "transcripts as said", "text": "whole answers right", "interruptions": "cuts at the word"}
    return ", ".join(f"{words} {percent(result[name])}" for name, words in names.items())


def _words(number: int | None) -> str:
    return "" if number is None else f"{number} words"


# ------------------------------------------------------------------ the command


def main() -> None:
    parser = argparse.ArgumentParser(description="Talks to a server of the toy, and talks over some of its answers.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--turns", type=count, default=10)
    parser.add_argument("--interruptions", type=whole, default=3)
    parser.add_argument("--voice", choices=[*SPEAKERS], default=next(iter(SPEAKERS)))
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file with all figures and the conversation")
    given = parser.parse_args()
    if 2 * given.interruptions > given.turns:
        parser.error(
            f"--interruptions is {given.interruptions}, but at most every second of {given.turns} turns is cut."
        )
    try:
        recogniser = Recogniser()
        said = turns(given.turns, given.interruptions, given.seed)
        result = report(asyncio.run(talk(given.url, said, given.voice)), recogniser)
    except (BenchError, NoEspeak, NoRecogniser) as error:
        sys.exit(str(error))
    written({"url": given.url, "seed": given.seed, "voice": given.voice, **result}, "training.dialogue", given.out)
    wide_console().print(table(result))


if __name__ == "__main__":
    main()
