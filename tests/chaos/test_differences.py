"""What a soak says of an answer that is not the undisturbed one, and of the request that it belongs to."""

from __future__ import annotations

import numpy as np

from tests.chaos.clients import SAMPLES_A_CODE, Outcome, difference
from tests.chaos.report import Leaks, Recovery, Report, recoveries_in
from tests.chaos.told import Told

CODES = 10
SOUND = (8_000 * np.sin(np.arange(CODES * SAMPLES_A_CODE) / 7)).astype(np.int16)
LOG = """
(ingress pid=7) INFO request 5f-1: chat answered 200 after 3.125 s, recovered from talker in 812 ms, recovered from \
code2wav and thinker in 40 ms
(ingress pid=8) INFO request 5f-2: /v1/chat answered 200 after 0.250 s
"""


def test_a_text_differs_from_a_character_on() -> None:
    assert difference(Told("The sea."), Told("The sea.")) == ""
    assert difference(Told("The sun."), Told("The sea.")) == "text from character 5 of 8 on: 'un.' in place of 'ea.'"
    assert difference(Told("The"), Told("The sea.")) == "text from character 3 of 8 on: '' in place of ' sea.'"


def test_a_sound_differs_from_a_code_on() -> None:
    other = SOUND.copy()
    other[4 * SAMPLES_A_CODE :] //= 2
    assert difference(Told(sound=SOUND + 1), Told(sound=SOUND)) == ""
    assert difference(Told(sound=other), Told(sound=SOUND)) == "sound at 8.2 dB, from code 4 of 10 on"
    assert difference(Told(sound=SOUND[:-1]), Told(sound=SOUND)) == "4799 samples in place of 4800"


def test_the_log_names_the_requests_that_went_on() -> None:
    assert recoveries_in(LOG) == [
        Recovery("5f-1", "talker", 812),
        Recovery("5f-1", "code2wav", 40),
        Recovery("5f-1", "thinker", 40),
    ]


def test_the_report_says_whether_an_answer_that_differs_had_lost_a_replica() -> None:
    outcomes = [Outcome("greedy", "differs", "text", request_id=name) for name in ("5f-1", "5f-2")]
    report = Report(0, 60.0, outcomes, (), recoveries_in(LOG), Leaks())
    assert report.lines()[-2:] == [
        "differs: greedy: text (request 5f-1, recovered from talker, code2wav, thinker)",
        "differs: greedy: text (request 5f-2, recovered from nothing)",
    ]


def test_what_did_not_come_is_a_fault_of_the_soak() -> None:
    assert Report(0, 60.0, (), (), (), Leaks()).is_good
    report = Report(0, 60.0, (), (), (), Leaks(), ("no talker came again",))
    assert not report.is_good and report.lines()[-1] == "no talker came again"
