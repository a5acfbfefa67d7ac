"""`hardpoint bench serve` against `hardpoint serve`."""

from __future__ import annotations

import json

import pytest

from hardpoint.cli import main
from tests.server.conftest import KEY, Running


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_benchmark_counts_the_servers_tokens(
    slow_server: Running, capsys: pytest.CaptureFixture[str], api: str
) -> None:
    options = ["--num-requests", "3", "--warmup", "0", "--input-len", "8:12", "--output-len", "5", "--concurrency", "2"]
    with pytest.raises(SystemExit) as ended:
        main(
            ["bench", "serve", "--base-url", slow_server.server.url, "--api-key", KEY, "--api", api, "--json", *options]
        )
    assert ended.value.code in (0, None)
    report = json.loads(capsys.readouterr().out)
    assert (report["succeeded"], report["failed"], report["output_tokens"]) == (3, 0, 15)
    assert report["settings"]["model"] == "demo"
    assert 24 <= report["input_tokens"] <= (36 if api == "completions" else 200)
    assert 0 < report["ttft_seconds"]["p50"] <= report["end_to_end_seconds"]["p50"] < report["elapsed_seconds"] + 1e-3
