"""`hardpoint bench`: what is run and what is reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hardpoint.cli.bench_parts import show


def test_throughput_reports_rates_and_percentiles(hp: Any, llms: Any) -> None:
    arguments = ["--num-prompts", "10", "--input-len", "3:9", "--output-len", "2", "--warmup", "1", "--json"]
    report = json.loads(hp("bench", "throughput", "-m", "demo", *arguments).out)
    lengths = [len(prompt) for prompt in llms[0].prompts[1:]]
    assert len(lengths) == 10
    assert min(lengths) >= 3
    assert max(lengths) <= 9
    assert report["input_tokens"] == sum(lengths)
    assert report["output_tokens"] == 20
    assert report["output_tokens_per_second"] == pytest.approx(20 / report["elapsed_seconds"])
    assert report["total_tokens_per_second"] == pytest.approx((20 + sum(lengths)) / report["elapsed_seconds"])
    assert report["ttft_seconds"]["mean"] == pytest.approx(0.55)
    assert report["ttft_seconds"]["p50"] == pytest.approx(0.55)
    assert report["tpot_seconds"]["max"] == pytest.approx(9.9)
    assert report["load_seconds"] == 0.25
    assert report["backend"]["simulated"] is True


def test_prompts_are_ordinary_tokens_and_repeat_with_the_seed(hp: Any, llms: Any) -> None:
    for seed in ("1", "1", "2"):
        hp("bench", "throughput", "-m", "demo", "--num-prompts", "3", "--seed", seed, "--json")
    assert llms[0].prompts == llms[1].prompts != llms[2].prompts
    assert all(1 < ord(token) < 1000 for prompt in llms[0].prompts for token in prompt)


def test_whole_lengths_are_generated_unless_told_otherwise(hp: Any, llms: Any) -> None:
    hp("bench", "throughput", "-m", "demo", "--num-prompts", "1", "--warmup", "0")
    hp("bench", "throughput", "-m", "demo", "--num-prompts", "1", "--warmup", "0", "--stop-at-eos")
    assert llms[0].params[0].ignore_eos
    assert not llms[1].params[0].ignore_eos


def test_latency_measures_new_prompts_after_the_warm_up(hp: Any, llms: Any) -> None:
    arguments = ["--input-len", "8", "--output-len", "4", "--batch-size", "2", "--iterations", "3", "--warmup", "2"]
    report = json.loads(hp("bench", "latency", "-m", "demo", *arguments, "--json").out)
    assert len(set(llms[0].prompts)) == 2 * 5
    assert set(report["end_to_end_seconds"]) == {"mean", "p50", "p90", "p95", "p99", "min", "max"}
    assert report["ttft_seconds"]["max"] == pytest.approx(0.2)


def test_tables_name_the_backend_and_its_simulation(hp: Any) -> None:
    out = hp("bench", "latency", "-m", "demo", "--input-len", "8", "--output-len", "4", "--iterations", "1").out
    assert "acme (Acme One, simulated)" in " ".join(out.split())
    assert "time to first token" in out


def test_no_figure_of_a_table_is_cut_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    times = {
        name: 12345.6789 + number for number, name in enumerate(("mean", "p50", "p90", "p95", "p99", "min", "max"))
    }
    show(
        {"requests_per_second": 1234567.89, "end_to_end_seconds": times, "ttft_seconds": times}, False, "a title " * 10
    )
    out = capsys.readouterr().out
    assert "1,234,567.89" in out
    assert all(f"{value * 1e3:,.1f}" in out for value in times.values())


@pytest.mark.parametrize("length", ["x", "0", "9:3", "3:", "-1", "1:9999999999"])
def test_lengths_that_are_none_are_usage_errors(hp: Any, llms: Any, length: str) -> None:
    result = hp("bench", "throughput", "-m", "demo", f"--input-len={length}")
    assert result.code == 2
    assert "--input-len" in result.err
    assert not llms


def test_lengths_beyond_the_context_are_refused(hp: Any) -> None:
    result = hp("bench", "latency", "-m", "demo", "--input-len", "450", "--output-len", "51")
    assert result.code == 1
    assert "501" in result.err
