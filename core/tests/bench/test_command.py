"""`hardpoint bench serve`: what it sends, prints and draws, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from timed_endpoint import Endpoint

from hardpoint.cli import main


def run(capsys: pytest.CaptureFixture[str], endpoint: Endpoint, *arguments: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--base-url", endpoint.url, *arguments])
    found = capsys.readouterr()
    return int(ended.value.code or 0), found.out, found.err


def test_a_report_of_all_requests_but_those_of_the_warm_up(
    capsys: pytest.CaptureFixture[str], endpoint: Endpoint, tmp_path: Path
) -> None:
    plot = tmp_path / "times.svg"
    options = ["--num-requests", "5", "--warmup", "2", "--input-len", "3:4", "--output-len", "3", "--json"]
    more = ["--goodput", "ttft:9000", "--goodput", "itl:1", "--plot", str(plot), "--extra-body", '{"top_k": 5}']
    code, out, _ = run(capsys, endpoint, *options, *more, "--api-key", "secret", "--seed", "4")
    report: dict[str, Any] = json.loads(out)
    assert code == 0
    assert len(endpoint.bodies) == 7
    assert (report["requests"], report["succeeded"], report["output_tokens"], report["input_tokens"]) == (5, 5, 15, 35)
    assert report["itl_seconds"].keys() == {"mean", "p50", "p90", "p95", "p99", "min", "max"}
    assert report["goodput"]["good_requests"] == 0
    assert report["settings"]["model"] == "steady"
    body = endpoint.bodies[-1]
    assert (body["path"], body["top_k"], body["seed"], body["ignore_eos"]) == ("/v1/completions", 5, 4, True)
    assert body["stream_options"] == {"include_usage": True}
    assert len(body["prompt"]) in (3, 4)
    assert set(endpoint.keys) == {"Bearer secret"}
    assert "secret" not in out
    drawn = "".join(ElementTree.parse(plot).getroot().itertext())
    assert "inter-token latency (ms)" in drawn
    assert "steady" in drawn


def test_chat_and_tables(capsys: pytest.CaptureFixture[str], endpoint: Endpoint) -> None:
    options = ["--api", "chat", "--num-requests", "2", "--output-len", "2", "--goodput", "e2e:60000", "--stop-at-eos"]
    code, out, _ = run(capsys, endpoint, *options)
    assert code == 0
    assert {body["path"] for body in endpoint.bodies} == {"/v1/chat/completions"}
    assert not any("ignore_eos" in body for body in endpoint.bodies)
    assert "(2 of 2)" in out
    assert all(f"{name} " in out for name in ("time to first token", "inter-token latency", "p95"))


def test_an_infinite_rate_is_all_at_once_and_the_report_is_json(
    capsys: pytest.CaptureFixture[str], endpoint: Endpoint
) -> None:
    code, out, _ = run(capsys, endpoint, "--request-rate", "inf", "--num-requests", "2", "--output-len", "1", "--json")
    report = json.loads(out, parse_constant=pytest.fail)
    assert (code, report["succeeded"], report["settings"]["request_rate"]) == (0, 2, None)


def test_tokens_that_the_server_does_not_count_are_told(capsys: pytest.CaptureFixture[str], endpoint: Endpoint) -> None:
    options = ["--num-requests", "2", "--warmup", "0", "--output-len", "1", "--json"]
    for model, uncounted in (("uncounted", 2), ("steady", 0)):
        _, out, err = run(capsys, endpoint, "--model", model, *options)
        assert json.loads(out)["uncounted"] == uncounted
        assert ("did not count the tokens of 2 answers" in err) == bool(uncounted)


def test_failed_requests_are_counted_by_kind_and_in_the_exit_code(
    capsys: pytest.CaptureFixture[str], endpoint: Endpoint
) -> None:
    options = ["--model", "refusing", "--num-requests", "3", "--output-len", "2"]
    code, out, _ = run(capsys, endpoint, "--warmup", "0", *options)
    assert code == 1
    assert "3 failed, http_429" in out
    code, _, err = run(capsys, endpoint, "--warmup", "1", *options)
    assert code == 1
    assert "warm-up failed: http_429" in err
    assert len(endpoint.bodies) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--goodput", "speed:1"], "--goodput"),
        (["--input-len", "lognormal:1"], "--input-len"),
        (["--plot", "times.txt"], "--plot"),
        (["--plot", "/nowhere/times.svg"], "--plot"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--extra-body", "{"], "--extra-body"),
        (["--extra-body", '{"top_p": 1e999}'], "--extra-body"),
        (["--temperature", "nan"], "--temperature"),
        (["--burstiness", "inf"], "--burstiness"),
        (["--goodput", "ttft:1", "--goodput", "ttft:2"], "--goodput"),
        (["--concurrency", "0"], "--concurrency"),
    ],
)
def test_wrong_options_end_it_before_any_request(
    capsys: pytest.CaptureFixture[str], endpoint: Endpoint, arguments: list[str], said: str
) -> None:
    code, _, err = run(capsys, endpoint, *arguments)
    assert code == 2
    assert said in err
    assert endpoint.bodies == []


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, arguments in (("client", []), ("plot", ["--plot", "x.svg"])):
        monkeypatch.setitem(sys.modules, f"hardpoint.bench.{name}", None)
        code, _, err = run(capsys, endpoint, *arguments)
        assert code == 1
        assert "hardpoint[bench]" in err


def test_ctrl_c_prints_what_there_is(endpoint: Endpoint) -> None:
    options = [
        "--model",
        "steady",
        "--num-requests",
        "500",
        "--warmup",
        "0",
        "--request-rate",
        "20",
        "--output-len",
        "1",
    ]
    command = [sys.executable, "-m", "hardpoint.cli", "bench", "serve", "--base-url", endpoint.url, *options]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert endpoint.has_request.wait(240)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "interrupted" in err
    report = json.loads(out)
    assert report["requests"] + report["unfinished"] == 500
    assert report["unfinished"] > 0
    assert report["failed"] == 0
