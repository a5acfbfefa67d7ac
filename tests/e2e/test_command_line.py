"""The commands with the demo model, as a user runs them; with its first layers where the text does not matter."""

from __future__ import annotations

import builtins
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hardpoint.cli import main

SIZES = ("--num-blocks", "64", "--max-model-len", "512")
SMALL = ("--model", "demo", *SIZES, "--temperature", "0")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str, typed: tuple[str, ...] = ()) -> tuple[int, str, str]:
        stdin = io.StringIO()
        monkeypatch.setattr(stdin, "isatty", lambda: bool(typed), raising=False)
        monkeypatch.setattr("sys.stdin", stdin)
        lines = iter(typed)

        def read(prompt: str = "") -> str:
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", read)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_generate_prints_json_and_the_streamed_text_is_the_same(run: Run) -> None:
    prompt = ("--prompt", "Give three facts about the moon.", "--max-tokens", "24")
    code, out, _ = run("generate", *SMALL, *prompt, "--json")
    report = json.loads(out)
    (completion,) = report["outputs"][0]["completions"]
    assert code == 0
    assert "moon" in completion["text"]
    assert len(completion["token_ids"]) == 24
    assert completion["finish_reason"] == "length"
    assert report["backend"]["name"] == "cpu"
    assert report["timings"]["decode_tokens"] == 23
    assert report["timings"]["decode_tokens_per_second"] > 0

    code, streamed, err = run("generate", *SMALL, *prompt)
    assert (code, streamed) == (0, completion["text"] + "\n")
    assert "on cpu" in err
    assert "tokens/s" in err


def test_chat_computes_only_what_a_turn_adds(run: Run) -> None:
    code, out, err = run("chat", *SMALL, "--max-tokens", "24", typed=("Say the word banana.", "Which word was it?"))
    assert code == 0
    assert "banana" in out.splitlines()[0].lower()
    # Blocks of 32: the first turn's prompt and answer are about 60 tokens, of which full blocks are found again.
    ((cached, prompt),) = re.findall(r"(\d+) of (\d+) prompt tokens from the cache", err)
    assert 32 <= int(cached) < int(prompt)


def test_bench_counts_what_was_generated(run: Run, shallow_demo: str) -> None:
    numbers = ("--num-prompts", "3", "--input-len", "20", "--output-len", "5", "--warmup", "1")
    code, out, _ = run("bench", "throughput", "--model", shallow_demo, *SIZES, "--temperature", "0", *numbers, "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["input_tokens"], report["output_tokens"]) == (60, 15)
    assert 0 < report["ttft_seconds"]["min"] <= report["elapsed_seconds"]


@pytest.mark.parametrize(
    ("arguments", "phases"),
    [(("--tier", "disk", "--cycles", "2"), 2), (("--tier", "source"), 2), (("--level", "2"), 3)],
)
def test_sleep_demo_gives_memory_back_and_the_same_text(
    run: Run, shallow_demo: str, tmp_path: Path, arguments: tuple[str, ...], phases: int
) -> None:
    asked = ("--model", shallow_demo, *SIZES, "--max-tokens", "8", *arguments, "--directory", str(tmp_path))
    code, out, _ = run("sleep-demo", *asked, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["text"]
    assert (report["same_text"], report["memory_came_back"]) == (True, True)
    weights = report["engine"]["weight_bytes"]
    for cycle in report["cycles"]:
        assert cycle["returned_bytes"] >= 0.9 * weights
        assert len(cycle["phases"]) == phases
        sleep, wake = cycle["phases"][:2]
        assert sleep["resident_before"] - sleep["resident_after"] == cycle["returned_bytes"]
        assert sleep["mapped"] == wake["mapped"] >= weights
    assert report["cold_start_over_wake"] == report["cold_start_seconds"] / report["wake_seconds"]
    if "disk" in arguments:
        first, second = (cycle["phases"][0] for cycle in report["cycles"])
        assert first["copied"] >= weights
        assert second["skipped"] >= weights
