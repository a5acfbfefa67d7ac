"""Waivers: failures that are known and accepted for a while, each with a reason that the report shows.

A file (TOML or JSON) has a list `waivers` of tables with `id` (of a clause, or of one test), `reason` and `until`: the first version of
the backend's distribution that must pass without the waiver. A waiver that is not needed, or that is too old, is an error. Level 0 and
tests whose process died or hung cannot be waived.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from hardpoint_conformance.levels import Level
from hardpoint_conformance.outcomes import WAIVABLE, Outcome

KEYS = ("id", "reason", "until")


def read_waivers(file: Path) -> list[dict[str, str]]:
    """Return the waivers of a file; raises ValueError (what is wrong with it) or OSError."""
    text = file.read_text("utf-8")
    data = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    entries = data.get("waivers") if isinstance(data, dict) else None
    if not isinstance(entries, list) or (isinstance(data, dict) and set(data) != {"waivers"}):
        raise ValueError("it must hold one list, 'waivers'")
    for entry in entries:
        if not isinstance(entry, dict) or sorted(entry) != sorted(KEYS) or not all(_is_text(v) for v in entry.values()):
            raise ValueError(f"a waiver has the texts {', '.join(KEYS)} and nothing else, not {entry!r}")
        try:
            Version(entry["until"])
        except InvalidVersion as error:
            raise ValueError(f"until is a version of the backend: {error}") from error
    ids = [entry["id"] for entry in entries]
    if len(set(ids)) < len(ids):
        raise ValueError("two waivers have the same id")
    return entries


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def unknown(waivers: Iterable[Mapping[str, str]], tests: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the ids of waivers that name neither a clause nor a test of a list."""
    known = {name for test in tests for name in (test["id"], test["clause"])}
    return [waiver["id"] for waiver in waivers if waiver["id"] not in known]


def names(waiver: Mapping[str, str], test: Mapping[str, Any]) -> bool:
    """Return whether a waiver is for a test."""
    return waiver["id"] in (test["id"], test["clause"])


def expired(waiver: Mapping[str, str], version: str | None) -> bool:
    """Return whether a backend of this version must do without a waiver; one without a version must."""
    try:
        return version is None or Version(version) >= Version(waiver["until"])
    except InvalidVersion:
        return True


def can_waive(outcome: str, level: int) -> bool:
    """Return whether a result is one that a waiver may accept."""
    return Outcome(outcome) in WAIVABLE and level != Level.PACKAGING


def apply_waivers(
    results: Iterable[dict[str, Any]], waivers: Iterable[Mapping[str, str]], version: str | None
) -> list[dict[str, Any]]:
    """Return the results with those that a waiver accepts marked so; what they were is kept in `waived_outcome`."""
    valid = [waiver for waiver in waivers if not expired(waiver, version)]
    marked = []
    for result in results:
        waiver = next((waiver for waiver in valid if names(waiver, result)), None)
        if waiver is not None and can_waive(result["outcome"], result["level"]):
            result = result | {
                "outcome": Outcome.WAIVED.value,
                "waived_outcome": result["outcome"],
                "waiver": waiver["id"],
            }
        marked.append(result)
    return marked
