"""`hardpoint sleep-demo`: what is shown, and when the exit status says that it did not work."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hardpoint.cli import sleep_demo
from hardpoint.engine.sleep import EngineState, SleepReport, WakeReport
from hardpoint.interfaces import MemoryReport, SleepTier

MIB = 1 << 20


class Sleeper:
    """Gives an echoing engine a memory: 100 MiB of weights, of which a sleep gives `returns` back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, returns: int = 100 * MIB) -> None:
        self.returns = returns
        self.resident = 500 * MIB
        self.slept: list[dict[str, Any]] = []
        self.valid = True
        self.forgets = False
        monkeypatch.setattr(sleep_demo, "_resident", lambda: self.resident)

    def __call__(self, llm: Any) -> None:
        object.__setattr__(llm.info, "weight_bytes", 100 * MIB)
        llm.sleep, llm.wake_up, llm.reload_weights = self.sleep, self.wake_up, self.reload
        original = llm.generate

        def generate(prompts: list[str], params: Any, *, use_tqdm: bool) -> Any:
            changed = self.forgets and self.slept
            return original(
                [list(map(ord, "other" if changed else prompt)) for prompt in prompts], params, use_tqdm=use_tqdm
            )

        llm.generate = generate

    def sleep(self, **arguments: Any) -> SleepReport:
        self.slept.append(arguments)
        self.resident -= self.returns
        self.valid = arguments["level"] == 1
        memory = MemoryReport(100 * MIB, 20 * MIB, 0, {"total": 0.5}, 1000, 2000, unmapped=120 * MIB)
        tags = frozenset({"weights"})
        return SleepReport(
            True, arguments["level"], "abort", SleepTier.DISK, tags, frozenset(), tags, self.valid, 0.5, memory
        )

    def wake_up(self) -> WakeReport:
        self.resident += self.returns
        memory = MemoryReport(100 * MIB, 20 * MIB, 0, {"total": 0.25}, 2000, 1000, unmapped=120 * MIB)
        state = EngineState.RUNNING if self.valid else EngineState.WEIGHTS_MISSING
        return WakeReport(True, frozenset({"weights"}), frozenset(), self.valid, state, 0.25, memory)

    def reload(self) -> int:
        self.valid = True
        return 1


def test_each_cycle_is_measured_and_the_table_shows_it(hp: Any, prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(Sleeper(monkeypatch))
    monkeypatch.setenv("COLUMNS", "50")  # no figure is cut off for it
    result = hp("sleep-demo", "-m", "demo", "-p", "hello", "--cycles", "2")
    assert result.code == 0
    assert "acme (Acme One, simulated)" in result.out
    assert result.out.count("500 → 400") == 2
    assert "came back: 100.0 MiB, 100.0% of the weights' bytes" in result.out
    assert "wake 0.250 s, cold start 0.250 s: 1.0 times faster" in result.out
    assert "the same text in every cycle: HELLO" in result.out


def test_level_2_reloads(hp: Any, prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = Sleeper(monkeypatch)
    prepare(sleeper)
    report = json.loads(hp("sleep-demo", "-m", "demo", "--level", "2", "--json").out)
    assert [phase["name"] for phase in report["cycles"][0]["phases"]] == ["sleep", "wake", "reload"]
    assert [arguments["level"] for arguments in sleeper.slept] == [2]
    assert report["cycles"][0]["phases"][0]["bytes_per_second"] == 200 * MIB


def test_settings_reach_the_engine(hp: Any, llms: Any, prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(Sleeper(monkeypatch))
    hp("sleep-demo", "-m", "demo", "--tier", "source", "--directory", "backups")
    settings = llms[0].settings
    assert (settings["enable_sleep_mode"], settings["sleep_tier"]) == (True, "source")
    assert settings["sleep_disk_directory"] == "backups"


@pytest.mark.parametrize(("returns", "forgets"), [(89 * MIB, False), (100 * MIB, True)])
def test_memory_that_stays_or_another_text_is_a_failure(
    returns: int, forgets: bool, hp: Any, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = Sleeper(monkeypatch, returns)
    sleeper.forgets = forgets
    prepare(sleeper)
    result = hp("sleep-demo", "-m", "demo", "-p", "hello", "--json")
    report = json.loads(result.out)
    assert result.code == 1
    assert report["memory_came_back"] == (returns >= 90 * MIB)
    assert report["same_text"] == (not forgets)


@pytest.mark.parametrize("options", [("--level", "0"), ("--level", "3"), ("--cycles", "0")])
def test_wrong_options_are_usage_errors(options: tuple[str, ...], hp: Any) -> None:
    assert hp("sleep-demo", "-m", "demo", *options).code == 2
