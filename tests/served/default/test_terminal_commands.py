"""`omni-cluster chat` and `omni-cluster top` against the cluster."""

from __future__ import annotations

import asyncio
import wave
from pathlib import Path

from omni_cluster.openai_api.audio import wav_bytes
from tests.chatting import run
from tests.reference import synthetic_audio
from tests.served.app import BASE_URL, STAGES, ServedApp

RATE_HZ = 24_000


async def test_a_spoken_question_is_answered_by_text_and_sound_and_top_counts_it(
    served: ServedApp, tmp_path: Path
) -> None:
    (tmp_path / "question.wav").write_bytes(wav_bytes(synthetic_audio(1.0), 16_000))
    typed = f"/file {tmp_path}/question.wav\nWhat do you hear?\n"
    chat = await asyncio.to_thread(
        run, "chat", "--url", BASE_URL, "--voice", "ethan", "--save", str(tmp_path), typed=typed
    )
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.strip()
    with wave.open(str(tmp_path / "answer_1.wav")) as file:
        assert file.getframerate() == RATE_HZ and any(file.readframes(file.getnframes()))
    top = await asyncio.to_thread(run, "top", "--url", BASE_URL, "--once", "--every", "1")
    assert top.returncode == 0, top.stderr
    assert f"{served.model} at {BASE_URL}: ready; 0 requests run" in top.stdout
    assert all(f" {name} " in top.stdout for name in (*STAGES, "/v1/chat/completions"))
