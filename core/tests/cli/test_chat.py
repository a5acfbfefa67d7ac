"""`hardpoint chat`: turns, commands, interruption."""

from __future__ import annotations

import builtins
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def test_piped_lines_are_turns_and_only_answers_are_printed(hp: Any, llms: Any) -> None:
    result = hp("chat", "-m", "demo", stdin="hi\n\nyou\n")
    assert result.code == 0
    assert result.out == "<USER>HI\n<USER>HI<ASSISTANT><USER>HI<USER>YOU\n"
    assert [p.max_tokens for p in llms[0].params] == [512, 512]


def test_the_system_message_stays_and_reset_forgets_the_rest(hp: Any, llms: Any) -> None:
    hp("chat", "-m", "demo", "--system", "be", stdin="a\n/reset\nb\n/exit\nnever\n")
    assert llms[0].prompts == ["<system>be<user>a", "<system>be<user>b"]


def test_another_system_message_begins_anew(hp: Any, llms: Any) -> None:
    hp("chat", "demo", "--system", "be", stdin="a\n/system  be brief\nb\n/system\nc\n")
    assert llms[0].prompts == ["<system>be<user>a", "<system>be brief<user>b", "<user>c"]


def test_a_message_may_have_several_lines(hp: Any, llms: Any) -> None:
    hp("chat", "demo", stdin='a\\\nb\\\n c\n/reset\n"""\nd\n\n /exit\\\n"""\n/reset\n"""\nno end')
    assert llms[0].prompts == ["<user>a\nb\n c", "<user>d\n\n /exit\\", "<user>no end"]


def test_help_names_every_command(hp: Any, llms: Any) -> None:
    result = hp("chat", "demo", stdin="/help\n")
    assert all(command in result.err for command in ("/system", "/reset", "/help", "/exit", "backslash", '"""'))
    assert llms[0].prompts == []


def test_an_empty_input_is_an_empty_conversation(hp: Any, llms: Any) -> None:
    assert hp("chat", "-m", "demo", stdin="").out == ""


def test_a_model_without_template_is_refused(hp: Any, prepare: Any) -> None:
    def without_template(llm: Any) -> None:
        llm.tokenizer.chat_template = None

    prepare(without_template)
    result = hp("chat", "-m", "demo", stdin="hi\n")
    assert result.code == 1
    assert "no chat template" in result.err
    assert "--raw" in result.err


def test_a_piped_message_that_does_not_fit_is_an_error(hp: Any) -> None:
    result = hp("chat", "-m", "demo", stdin="x" * 600)
    assert result.code == 1
    assert "tokens" in result.err


def typing(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Let `input` return lines or raise, then end."""
    rest: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def read(prompt: str = "") -> str:
        line = next(rest)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)


def test_in_a_terminal_a_message_that_does_not_fit_is_told_and_taken_back(
    hp: Any, llms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    typing(monkeypatch, "x" * 600, "ok")
    result = hp("chat", "-m", "demo", terminal=True)
    assert result.code == 0
    assert "/reset starts anew" in result.err
    assert llms[0].prompts == ["<user>ok"]


def test_in_a_terminal_each_answer_says_what_it_took(hp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    typing(monkeypatch, "hello")
    result = hp("chat", "-m", "demo", terminal=True)
    assert "11 tokens" in result.err
    assert "1 of 11 prompt tokens from the cache" in result.err
    assert "acme (Acme One, simulated)" in result.err


def test_ctrl_c_stops_the_answer_and_not_the_program(hp: Any, prepare: Any, llms: Any, monkeypatch: Any) -> None:
    def press_at_third_token(llm: Any) -> None:
        steps = iter(range(1000))

        def on_step() -> None:
            if next(steps) == 2:
                signal.raise_signal(signal.SIGINT)

        llm.on_step = on_step

    prepare(press_at_third_token)
    typing(monkeypatch, "hello", KeyboardInterrupt, "more")
    result = hp("chat", "-m", "demo", terminal=True)
    assert result.code == 0
    assert result.out.splitlines()[0] == "<US"
    assert "stopped" in result.err
    assert len(llms[0].engine.aborted) == 1
    assert llms[0].prompts[1] == "<user>hello<assistant><US<user>more"


def test_a_second_ctrl_c_ends_the_program(hp: Any, prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def press_twice(llm: Any) -> None:
        def on_step() -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        llm.on_step = on_step

    prepare(press_twice)
    assert hp("chat", "-m", "demo", stdin="hello\n").code == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


_CHAT_IN_A_TERMINAL = """
import sys
sys.path.insert(0, sys.argv.pop())
import conftest, hardpoint
hardpoint.LLM = conftest.EchoLLM
from hardpoint.cli import main
try:
    main()
finally:
    print(conftest.EchoLLM.made[0].prompts)
"""


def test_arrow_keys_bring_earlier_lines_back_and_move_in_them() -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", _CHAT_IN_A_TERMINAL, "chat", "demo", str(Path(__file__).parent)]
    environment = os.environ | {"TERM": "xterm", "INPUTRC": os.devnull}
    shown = b""

    def read(until: bytes) -> None:
        nonlocal shown
        while until not in shown:
            assert select.select([controller], [], [], 60)[0], shown
            shown += os.read(controller, 4096)

    ends = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with subprocess.Popen(command, env=environment, start_new_session=True, **ends) as child:
        try:
            up, left = b"\x1b[A", b"\x1b[D"
            for line in (b"ab\n", b"/reset\n", up + up + left + b"c\n", b"\x04"):
                read(until=b"\n> ")
                shown = b""
                os.write(controller, line)
            read(until=b"]")
        finally:
            child.kill()
            os.close(terminal)
            os.close(controller)
    assert b"['<user>ab', '<user>acb']" in shown
