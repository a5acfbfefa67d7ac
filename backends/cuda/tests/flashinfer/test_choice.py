"""What is said of FlashInfer without importing it, what the backend claims then, and which class attends."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.interfaces import AttentionFeature, Determinism, Device, DType
from hardpoint.interfaces.errors import ConfigError
from hardpoint.triton.build import TorchBuild
from hardpoint_cuda import capabilities
from hardpoint_cuda.flashinfer import flashinfer_obstacle
from hardpoint_cuda.flashinfer.signatures import differences

from .conftest import REFERENCE

DEVICE = Device("cuda", 0, "any", "any")
FLASH_ATTN = "flash-attn is not used: it pages a cache in blocks of a multiple of 256 tokens, and these have 16 to 128"


def note() -> str:
    """Return what `hardpoint doctor` prints of attention: the first of the claims' notes."""
    return capabilities.capabilities(DEVICE).notes[0]


@pytest.fixture(autouse=True)
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is missing that Triton's kernels need."""
    monkeypatch.setattr(TorchBuild, "requirements", lambda build: ())
    monkeypatch.delenv("HARDPOINT_ATTENTION", raising=False)


def test_without_flashinfer_triton_attends_and_claims_batch_invariance() -> None:
    assert note() == f"attention: triton (Hardpoint's own kernels; flashinfer is not installed; {FLASH_ATTN})"
    claims = capabilities.capabilities(DEVICE).attention
    assert claims.determinism is Determinism.BATCH_INVARIANT


@pytest.mark.usefixtures("flashinfer")
def test_with_flashinfer_a_trial_decides_and_the_claims_hold_for_both() -> None:
    assert note().startswith("attention: auto (flashinfer for a model that it serves right and faster in a trial")
    assert FLASH_ATTN in note()
    assert capabilities.capabilities(DEVICE).notes[1].startswith("flashinfer: of an unknown release, whose source has")
    claims = capabilities.capabilities(DEVICE).attention
    assert claims.determinism is Determinism.RUN_TO_RUN
    assert AttentionFeature.SINKS in claims.features
    assert DType.FLOAT32 in claims.dtypes


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("asked", ["triton", "auto", "flashinfer"])
def test_kernels_are_chosen_by_name(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARDPOINT_ATTENTION", asked)
    claims = capabilities.capabilities(DEVICE).attention
    assert note().startswith(f"attention: {asked} (")
    assert (claims.determinism is Determinism.BATCH_INVARIANT) is (asked == "triton")
    assert (AttentionFeature.SINKS in claims.features) is (asked != "flashinfer")


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("asked", ["triton", "auto", "flashinfer"])
def test_class_that_attends_is_that_of_the_choice(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hardpoint_cuda import attention

    monkeypatch.setenv("HARDPOINT_ATTENTION", asked)
    expected = attention.CudaAttention if asked == "triton" else attention.CudaFlashInferAttention
    assert attention.attention() is expected


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("flashinfer", "flashinfer is not installed"),
        ("flash-attn", "multiple of 256 tokens"),
        ("magic", "'magic' is not known"),
    ],
)
def test_what_cannot_be_used_is_an_error_that_says_why(asked: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARDPOINT_ATTENTION", asked)
    with pytest.raises(ConfigError, match=why):
        capabilities.capabilities(DEVICE)


# Releases that are not the one that calls were written for


def changed(folder: Path, file: str, old: str, new: str) -> Path:
    """Write the reference FlashInfer into a folder with one change."""
    for source in (REFERENCE / "flashinfer").glob("*.py"):
        text = source.read_text("utf-8")
        assert source.name != file or old in text
        (folder / source.name).write_text(text.replace(old, new) if source.name == file else text, "utf-8")
    return folder


@pytest.mark.parametrize(
    ("file", "old", "new", "sentence"),
    [
        ("prefill.py", "class BatchPrefill", "class Prefill", "prefill.py has no class BatchPrefillWithPagedKVCache"),
        (
            "decode.py",
            "def workspace_size",
            "def size",
            "there is no BatchDecodeWithPagedKVCacheWrapper.workspace_size",
        ),
        ("decode.py", "paged_kv_indices_buffer:", "buffer:", "__init__ has no argument paged_kv_indices_buffer"),
        ("prefill.py", "causal: bool = False", "causality: bool = False", "Wrapper.plan has no argument causal"),
        ("decode.py", "        out: Tensor,", "        out: Tensor, lse: Tensor,", "Wrapper.run asks for lse"),
    ],
)
def test_other_release_is_refused_with_what_differs(
    tmp_path: Path, file: str, old: str, new: str, sentence: str
) -> None:
    (found,) = differences(changed(tmp_path, file, old, new))
    assert sentence in found


def test_arguments_that_are_handed_on_are_those_of_the_implementation(tmp_path: Path) -> None:
    handed_on = "def plan(self, indptr: Tensor, *more: object, **options: object) -> None: ...\n\n    def _plan_impl("
    assert differences(changed(tmp_path, "decode.py", "def plan(", handed_on)) == []


def test_other_release_is_not_used_and_cannot_be_named(
    flashinfer: pytest.MonkeyPatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flashinfer").mkdir()
    changed(tmp_path / "flashinfer", "prefill.py", "causal: bool", "causality: bool")
    flashinfer.syspath_prepend(str(tmp_path))
    flashinfer_obstacle.cache_clear()
    text = "installed and has other functions than are called: BatchPrefillWithPagedKVCacheWrapper.plan has no argument causal"
    assert note().startswith("attention: triton (Hardpoint's own kernels; flashinfer")
    assert text in note()
    monkeypatch.setenv("HARDPOINT_ATTENTION", "flashinfer")
    with pytest.raises(ConfigError, match="has no argument causal"):
        capabilities.capabilities(DEVICE)
