"""Models by id on ModelScope, over a stand-in for its package with the two calls that are made of it, as version 1.40 has them."""

from __future__ import annotations

import fnmatch
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hardpoint.interfaces.errors import ConfigError, ModelError, ModelNotFound
from hardpoint.models import open_model
from hardpoint_conformance.tiny_model import Shape, tiny_model

REPO = "someone/tiny-model"
SHAPE = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=256, max_len=128)


class Scope:
    """What the hub holds: the files of a folder."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.is_down = self.is_cut = False
        self.asked: list[dict[str, Any]] = []

    def get_model_files(
        self, model_id: str, revision: str | None = None, root: str | None = None, recursive: bool = True
    ) -> list[dict[str, Any]]:
        if self.is_down or model_id != REPO:
            raise ConnectionError("no answer")
        return [{"Path": file.name, "Size": file.stat().st_size} for file in self.folder.iterdir()]

    def snapshot_download(
        self,
        model_id: str | None = None,
        revision: str | None = None,
        cache_dir: str | None = None,
        *,
        allow_patterns: list[str] | None = None,
        local_files_only: bool = False,
    ) -> str:
        self.asked.append({"revision": revision, "cache_dir": cache_dir, "local_files_only": local_files_only})
        if local_files_only:
            if not self.cache.is_dir():
                raise ValueError("not in the cache")
            return str(self.cache)
        self.cache.mkdir(exist_ok=True)
        for file in self.folder.iterdir():
            if any(fnmatch.fnmatch(file.name, one) for one in allow_patterns or ["*"]):
                shutil.copy(file, self.cache)
        if self.is_cut:
            (self.cache / "model.safetensors").unlink()
        return str(self.cache)


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scope:
    folder = tmp_path / "hub"
    shutil.copytree(tiny_model(SHAPE).path, folder)
    (folder / "README.md").write_text("Read me")
    made = Scope(folder, tmp_path / "cache")
    modules = {name: ModuleType(name) for name in ("modelscope", "modelscope.hub", "modelscope.hub.api")}
    download = ModuleType("modelscope.hub.snapshot_download")
    modules["modelscope.hub.api"].HubApi = lambda: made  # type: ignore[attr-defined]
    download.snapshot_download = made.snapshot_download  # type: ignore[attr-defined]
    for name, module in {**modules, download.__name__: download}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("HARDPOINT_USE_MODELSCOPE", "1")
    return made


def test_a_model_is_fetched_with_what_it_needs_and_found_without_a_network(scope: Scope) -> None:
    source = open_model(REPO, revision="v1", download_dir="there")
    assert source.path == scope.cache
    assert not (scope.cache / "README.md").exists()
    assert scope.asked == [{"revision": "v1", "cache_dir": "there", "local_files_only": False}]
    scope.is_down = True
    assert open_model(REPO).path == scope.cache


def test_what_cannot_be_had_is_one_typed_error(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match="no answer"):
        open_model("someone/else")
    scope.is_cut = True
    with pytest.raises(ModelError, match=r"came in part: without model\.safetensors"):
        open_model(REPO)
    monkeypatch.setitem(sys.modules, "modelscope.hub.api", None)
    with pytest.raises(ConfigError, match="pip install modelscope"):
        open_model(REPO)
    monkeypatch.setenv("HARDPOINT_USE_MODELSCOPE", "perhaps")
    with pytest.raises(ConfigError, match="Set it to 1 or 0"):
        open_model(REPO)
