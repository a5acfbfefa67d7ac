"""What the times of answers say."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from hardpoint.bench.answers import Answer
from hardpoint.bench.sending import Sent
from hardpoint.bench.statistics import Objective, percentiles, summary

GAPS = some.lists(some.floats(0, 5), max_size=6)
OBJECTIVES = some.lists(
    some.builds(Objective, some.sampled_from(["ttft", "itl", "tpot", "e2e"]), some.floats(0.001, 8))
)


def answer(gaps: list[float], tokens: int, error: str | None) -> Answer:
    times = list(accumulate(gaps, initial=100.0))[1:]
    return Answer(100.0, times, (times or [100.0])[-1] + 0.5, 10, tokens, error, "why" if error else "")


ANSWERS = some.lists(
    some.builds(answer, GAPS, some.integers(0, 20), some.none() | some.sampled_from(["http_500", "timeout"]))
)


def test_the_times_of_one_answer() -> None:
    one = answer([0.2, 0.1, 0.3], 5, None)
    assert one.ttft == pytest.approx(0.2)
    assert one.itl == pytest.approx([0.1, 0.3])
    assert one.tpot == pytest.approx(0.4 / 4)
    assert one.e2e == pytest.approx(1.1)
    nothing = answer([], 0, None)
    assert (nothing.ttft, nothing.itl, nothing.tpot) == (None, [], None)


@given(some.lists(some.floats(0, 1e3)))
def test_percentiles_rise_from_the_least_to_the_greatest(values: list[float]) -> None:
    found = percentiles(values)
    if not values:
        assert found is None
        return
    assert found is not None
    order = [found[name] for name in ("min", "p50", "p90", "p95", "p99", "max")]
    assert all(a <= b + 1e-9 for a, b in pairwise(order))
    assert (order[0], order[-1]) == (min(values), max(values))
    # At least that share of the values is not above a percentile.
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert sum(value <= found[name] + 1e-9 for value in values) >= share * (len(values) - 1)


@given(ANSWERS, OBJECTIVES, some.floats(0.1, 100))
def test_a_summary_counts_every_answer_once(answers: list[Answer], objectives: list[Objective], seconds: float) -> None:
    report = summary(Sent(answers, seconds, seconds / 4, 2), objectives)
    done = [one for one in answers if one.error is None]
    assert report["requests"] == len(answers) == report["succeeded"] + report["failed"]
    assert report["failed"] == sum(report["errors"].values())
    assert report["errors"].keys() == report["error_examples"].keys()
    assert report["output_tokens"] == sum(one.output_tokens for one in done)
    assert report["output_tokens_per_second"] == pytest.approx(report["output_tokens"] / seconds)
    assert report["total_tokens_per_second"] * seconds == pytest.approx(report["output_tokens"] + 10 * len(done))
    assert report["client_processor_share"] == pytest.approx(0.25)
    assert (report["unfinished"], report["elapsed_seconds"]) == (2, seconds)
    assert ("goodput" in report) == bool(objectives)
    if objectives:
        good = report["goodput"]["good_requests"]
        assert good <= len(done)
        assert report["goodput"]["requests_per_second"] == pytest.approx(good / seconds)
        easier = [replace(one, seconds=one.seconds * 2) for one in objectives]
        assert summary(Sent(answers, seconds, 0, 0), easier)["goodput"]["good_requests"] >= good
        for one in objectives:
            assert summary(Sent(answers, seconds, 0, 0), [one])["goodput"]["good_requests"] >= good


def test_goodput_is_of_those_that_meet_every_objective() -> None:
    answers = [
        answer([0.1, 0.01, 0.01], 3, None),
        answer([0.3, 0.01, 0.01], 3, None),  # a late first token
        answer([0.1, 0.01, 0.2], 3, None),  # one long gap
        answer([], 0, None),  # no text at all
        answer([0.1, 0.01, 0.01], 3, "timeout"),
    ]
    objectives = [Objective.parse("ttft:200"), Objective.parse("itl:50")]
    found = summary(Sent(answers, 2.0, 0.1, 0), objectives)["goodput"]
    assert found["objectives_seconds"] == {"ttft": 0.2, "itl": 0.05}
    assert (found["good_requests"], found["share"], found["requests_per_second"]) == (1, 0.2, 0.5)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "speed:1"]
)
def test_objectives_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="ttft:200"):
        Objective.parse(text)
