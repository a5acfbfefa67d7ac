"""A report as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def to_html(report: Mapping[str, Any]) -> str:
    """Return the page."""
    return "<!doctype html><title>Hardpoint conformance</title>"
