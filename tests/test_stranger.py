"""The commands that a stranger types are README's."""

from __future__ import annotations

import pytest

from tests.stranger import ROOT, Commands, said


def test_readme_has_three_commands_to_an_answer_and_a_program_that_listens() -> None:
    commands = Commands.of((ROOT / "README.md").read_text())
    assert (commands.install, commands.serve) == ("make setup", ".venv/bin/serve run deployments:app")
    assert commands.ask.startswith("curl ") and "\n" not in commands.ask.partition("-d '")[0]
    compile(commands.listen, "README.md", "exec")


def test_a_readme_without_a_command_is_refused() -> None:
    with pytest.raises(ValueError, match="serve run"):
        Commands.of("```\nmake demo\n```\n")


def test_the_text_of_an_answer_is_found_behind_what_curl_prints() -> None:
    printed = '  % Total\r100  42 {"id": "a", "choices": [{"message": {"content": "Hello"}}]}'
    assert said(printed) == "Hello"
