"""Models by hub id, over a hub on the loopback interface that speaks huggingface_hub's protocol."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from core.tests.models.hub_server import COMMIT, Hub, serving_hub
from hardpoint import LLM, SamplingParams
from hardpoint.interfaces.errors import ConfigError, CorruptWeights, ModelError, ModelNotFound
from hardpoint.models import ModelFormat, open_model
from hardpoint.models.hub import HubModel
from hardpoint_conformance.tiny_model import Shape, tiny_model
from tests.e2e.test_command_interrupts import write_model

REPO = "someone/tiny-model"
SHAPE = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=256, max_len=128)


@pytest.fixture(scope="module")
def served() -> Iterator[Hub]:
    with serving_hub() as hub:
        yield hub


def reach(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Have huggingface_hub, which reads HF_ENDPOINT when it is imported, ask at a URL."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def hub(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    folder = Path(tiny_model(SHAPE).path)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    more = {
        "README.md": b"Read me",
        "pytorch_model.bin": b"\x80",
        "consolidated.safetensors": b"\0",
        "original/params.json": b"{}",
    }
    served.repos = {REPO: files | more}
    served.status, served.gated, served.cut, served.wrong, served.asked = None, False, (0, 0), 0, []
    reach(monkeypatch, served.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between huggingface_hub's tries
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return served


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    reach(monkeypatch, "http://127.0.0.1:9")


def test_a_model_is_fetched_once_and_only_what_it_needs_of_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(REPO, backend="cpu", skip_tokenizer_init=True, num_device_blocks=16) as llm:
        by_id = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))
    with LLM(tiny_model(SHAPE).path, backend="cpu", skip_tokenizer_init=True, num_device_blocks=16) as llm:
        by_path = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))
    assert by_id[0].outputs[0].token_ids == by_path[0].outputs[0].token_ids
    assert (
        {"config.json", "model.safetensors"}
        <= hub.files_asked()
        <= set(hub.repos[REPO])
        - {
            "README.md",
            "pytorch_model.bin",
            "consolidated.safetensors",
            "original/params.json",
        }
    )
    hub.asked.clear()
    source = open_model(REPO)
    assert hub.files_asked() == set()
    assert source.hub == HubModel(REPO, revision=COMMIT)
    unreachable(monkeypatch)
    assert open_model(REPO).path == open_model(f"{REPO}@{COMMIT}").path == source.path


def test_revisions(hub: Hub) -> None:
    assert open_model(REPO, revision="v1").path == open_model(f"{REPO}@v1").path == open_model(REPO).path
    with pytest.raises(ModelNotFound, match="no revision 'v2'"):
        open_model(f"{REPO}@v2")
    with pytest.raises(ConfigError, match="two revisions"):
        open_model(f"{REPO}@v1", revision="main")
    with pytest.raises(ConfigError, match="of models on a hub"):
        open_model("demo", revision="main")


def test_a_folder_of_that_name_comes_first(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / REPO
    here.parent.mkdir()
    here.symlink_to(tiny_model(SHAPE).path)
    monkeypatch.chdir(tmp_path)
    assert open_model(REPO).hub is None
    assert hub.asked == []


def test_dummy_weights_fetch_none(hub: Hub, tmp_path: Path) -> None:
    source = open_model(REPO, load_format="dummy", download_dir=str(tmp_path / "there"))
    assert source.format is ModelFormat.DUMMY
    assert source.path.is_relative_to(tmp_path / "there")
    assert hub.files_asked() == {"config.json"}


def test_gguf_files_by_name_and_by_quantisation(hub: Hub, tmp_path: Path) -> None:
    content = Path(write_model(tmp_path / "tiny.gguf")).read_bytes()
    hub.repos["someone/one-GGUF"] = {"README.md": b"", "smol-Q4_1.gguf": content}
    one = open_model("someone/one-GGUF")
    assert one.format is ModelFormat.GGUF
    assert one.path.read_bytes() == content
    hub.repos["someone/two-GGUF"] = {"smol-Q4_1.gguf": content, "smol-Q8_0.gguf": b"x"}
    for name in ("someone/two-GGUF:smol-Q4_1.gguf", "someone/two-GGUF:q4_1", "someone/two-GGUF:Q4_1@v1"):
        assert open_model(name).path.name == "smol-Q4_1.gguf"
    for name, told in [
        ("someone/two-GGUF", "Name one of its GGUF files"),
        ("someone/two-GGUF:Q2", "no GGUF file 'Q2'"),
        ("someone/two-GGUF:.gguf", "more than one"),
    ]:
        with pytest.raises(ModelNotFound, match=told):
            open_model(name)


def test_who_may_not_have_it_is_told_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match="there is no model someone/else"):
        open_model("someone/else")
    hub.gated = True
    with pytest.raises(ModelNotFound, match="HF_TOKEN"):
        open_model(REPO)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert open_model(REPO).hub is not None


@pytest.mark.parametrize(
    ("status", "told"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (429, "Try again later"), (500, "cannot be downloaded")]
)
def test_a_hub_that_refuses_is_one_error_and_the_cache_serves_on(
    hub: Hub, status: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.status = status
    with pytest.raises(ModelError, match=told):
        open_model(REPO)
    hub.status = None
    fetched = open_model(REPO)
    hub.status = status
    assert open_model(REPO).path == fetched.path


def test_without_a_network_nothing_that_is_not_whole_is_taken(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        unreachable(patch)
        with pytest.raises(ModelNotFound, match=rf"the hub cannot be reached.*hf download {REPO} --local-dir FOLDER"):
            open_model(REPO)
    open_model(REPO, load_format="dummy")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_model(REPO, load_format="dummy").hub is not None
    with pytest.raises(ModelNotFound, match=r"HF_HUB_OFFLINE is set.*Unset HF_HUB_OFFLINE"):
        open_model(REPO)


def test_a_download_that_breaks_off_is_resumed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.cut = 1000, 100
    with pytest.raises(ModelError, match="cannot be downloaded"):
        open_model(REPO)
    hub.cut = 0, 0
    fetched = open_model(REPO).path / "model.safetensors"
    assert fetched.read_bytes() == hub.repos[REPO]["model.safetensors"]


def test_what_is_not_what_its_hash_says_is_not_kept(hub: Hub) -> None:
    hub.wrong = 1
    with pytest.raises(CorruptWeights, match=r"model\.safetensors came otherwise"):
        open_model(REPO)
    fetched = open_model(REPO).path / "model.safetensors"
    assert fetched.read_bytes() == hub.repos[REPO]["model.safetensors"]


def test_no_space(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub.file_download, "http_get", full)
    with pytest.raises(ModelError, match="there is no space"):
        open_model(REPO)


def test_pickled_weights_are_refused(hub: Hub) -> None:
    hub.repos["someone/old"] = {"config.json": b"{}", "pytorch_model.bin": b"\x80"}
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*pickled ones can run code"):
        open_model("someone/old")
    assert hub.files_asked() == set()


@given(st.text(max_size=40))
def test_any_text_is_a_hub_id_or_none(text: str) -> None:
    found = HubModel.parse(text)
    assert found is None or str(found) == text
