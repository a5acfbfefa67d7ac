"""What is asked of a server, and when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from hardpoint.bench.workload import Lengths, arrivals, random_asks, read_asks
from hardpoint.interfaces.errors import ConfigError

TWO = Lengths.parse("2")


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(
    low=some.integers(1, 500),
    more=some.integers(0, 500),
    sigma=some.floats(0, 3),
    at=some.floats(0, 1),
    count=some.integers(0, 40),
)
def test_lengths_lie_in_their_range_and_are_written_as_they_are_read(
    low: int, more: int, sigma: float, at: float, count: int
) -> None:
    most = low + more
    median = 1 + at * (most - 1)
    for text in (str(low), f"{low}:{most}", f"lognormal:{median:.3f}:{sigma:.3f}:{most}"):
        lengths = Lengths.parse(text)
        drawn = lengths.draw(generator(count), count)
        assert len(drawn) == count
        assert all(lengths.low <= length <= lengths.high for length in drawn)
        assert Lengths.parse(str(lengths)).draw(generator(), 5) == pytest.approx(
            lengths.draw(generator(), 5), rel=0.01, abs=1
        )


def test_lognormal_lengths_have_the_median_and_a_long_tail() -> None:
    drawn = Lengths.parse("lognormal:200:1:100000").draw(generator(), 4000)
    assert np.median(drawn) == pytest.approx(200, rel=0.1)
    assert np.mean(drawn) == pytest.approx(200 * np.exp(0.5), rel=0.15)


@pytest.mark.parametrize(
    "text", ["", "x", "0", "3:2", "1:2:3", "lognormal:5:1", "lognormal:x:1:9", "lognormal:20:1:9", "lognormal:2:-1:9"]
)
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=repr(text)):
        Lengths.parse(text)


@given(
    rate=some.floats(0.1, 1e4), burstiness=some.floats(0.1, 10), count=some.integers(1, 50), seed=some.integers(0, 99)
)
def test_arrivals_begin_at_once_and_never_go_back(rate: float, burstiness: float, count: int, seed: int) -> None:
    offsets = arrivals(generator(seed), count, rate, burstiness)
    assert len(offsets) == count
    assert offsets[0] == 0
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_spread_asked_for(burstiness: float) -> None:
    gaps = np.diff(arrivals(generator(), 20_000, 50.0, burstiness))
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    # Of a gamma distribution: standard deviation over mean is one over the root of its shape.
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_without_a_rate_all_come_at_once() -> None:
    assert arrivals(generator(), 3, None, 1.0) == [0, 0, 0]


def test_random_requests_have_the_lengths_and_repeat_with_the_seed() -> None:
    inputs, outputs = Lengths.parse("5:9"), Lengths.parse("3:4")
    asks = random_asks(generator(1), 20, inputs, outputs, chat=False)
    assert {len(ask["prompt"]) for ask in asks} == {5, 6, 7, 8, 9}
    assert {ask["max_tokens"] for ask in asks} == {3, 4}
    assert asks == random_asks(generator(1), 20, inputs, outputs, chat=False)
    assert asks != random_asks(generator(2), 20, inputs, outputs, chat=False)
    (chat,) = random_asks(generator(1), 1, TWO, TWO, chat=True)
    assert len(chat["messages"][0]["content"].split()) == 2


def test_prompts_of_a_file_come_in_order_and_again(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 9}\n\n{"prompt": [1, 2], "id": 3}\n')
    asks = read_asks(file, generator(), 3, TWO, chat=False)
    assert asks == [
        {"prompt": "a", "max_tokens": 9},
        {"prompt": [1, 2], "max_tokens": 2},
        {"prompt": "a", "max_tokens": 9},
    ]
    file.write_text('{"prompt": "a"}\n{"messages": [{"role": "system", "content": "b"}]}\n')
    asks = read_asks(file, generator(), 2, TWO, chat=True)
    assert asks[0]["messages"] == [{"role": "user", "content": "a"}]
    assert asks[1]["messages"] == [{"role": "system", "content": "b"}]
    # Editors begin files with a mark, and JSON's texts may have ends of line that are not a file's.
    file.write_text('\ufeff{"prompt": "a\u2028b"}\r\n', "utf-8")
    assert read_asks(file, generator(), 1, TWO, chat=False)[0]["prompt"] == "a\u2028b"


@pytest.mark.parametrize(
    ("content", "chat", "said"),
    [
        ("", False, "is empty"),
        ('{"prompt": "a"}\n{', False, "line 2"),
        ('{"prompt": "a"}\n\n{', False, "line 3"),
        ("[" * 100_000, False, "line 1"),
        ("1" * 5_000, False, "line 1"),
        ("7", False, "no prompt"),
        ('{"messages": []}', False, "no prompt"),
        ('{"prompt": 7}', False, "no prompt"),
        ('{"prompt": [7]}', True, "no messages"),
        ('{"prompt": "a", "max_tokens": 0}', False, "max_tokens"),
        ('{"prompt": "a", "max_tokens": true}', False, "max_tokens"),
    ],
)
def test_a_file_of_something_else_is_refused_by_its_line(tmp_path: Path, content: str, chat: bool, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_asks(file, generator(), 2, TWO, chat=chat)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_asks(tmp_path / "none", generator(), 2, TWO, chat=False)
