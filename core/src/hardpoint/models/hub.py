"""Models by hub id: `org/name`, `org/name@revision`, `org/name:file.gguf`, `org/name:Q4_K_M`.

`huggingface_hub` fetches and caches, and is set as everywhere: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE,
HF_HUB_DISABLE_PROGRESS_BARS. Here is which files of a repository a model needs, and what is said where they cannot be had.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.interfaces.errors import ConfigError, CorruptWeights, ModelError, ModelNotFound
from hardpoint.weights.checkpoint import SAFETENSORS_SINGLE, listed

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_log = logging.getLogger("hardpoint")

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::(?P<file>[^@:]+))?(?:@(?P<revision>[^@]+))?",
    re.ASCII,
)
_SMALL_FILES = re.compile(r"[^/]+\.(json|jinja|txt|model|tiktoken)|[^/]+/[^/]+\.jinja")
"""Configuration, tokenizer and chat templates."""
_TIMEOUT = 20.0
"""Seconds that a hub has to say what a repository holds."""


@dataclass(frozen=True)
class HubModel:
    """A model on a hub.

    Attributes:
        repo: organisation and name.
        file: a GGUF file of it, or the end of one's name; None for the repository's only model.
        revision: a branch, tag or commit; None for the main branch.
    """

    repo: str
    file: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubModel | None:
        """Return what a text names, None where it is no hub id."""
        found = _ID.fullmatch(text)
        return None if found is None else cls(found["repo"], found["file"], found["revision"])

    def at(self, revision: str | None) -> HubModel:
        """Return it at a revision, None for its own; raises ConfigError where it has another."""
        if revision is not None and self.revision not in (None, revision):
            raise ConfigError(
                f"two revisions of {self.repo} are asked for",
                found=f"'{self.revision}' in the model's name, revision='{revision}'",
                hint="Give one of them",
            )
        return self if revision is None else replace(self, revision=revision)

    def __str__(self) -> str:
        file, revision = (f":{self.file}" if self.file else ""), (f"@{self.revision}" if self.revision else "")
        return f"{self.repo}{file}{revision}"


@dataclass(frozen=True)
class FetchedModel:
    """A model in the cache.

    Attributes:
        path: its folder or GGUF file.
        model: with the commit as its revision, so that others fetch the same.
    """

    path: Path
    model: HubModel


def fetch(model: HubModel, *, cache: str | None = None, weights: bool = True, code: bool = False) -> FetchedModel:
    """Return a model, downloaded where the cache has not got it.

    Args:
        cache: folder of the cache; None for huggingface_hub's own.
        weights: fetch them too, not only configuration and tokenizer.
        code: fetch Python files, which the caller trusts.

    Raises:
        ModelNotFound: there is no such repository, revision or file, or nobody who may see it; or no network and nothing in the cache.
        CorruptWeights: what came is not what the hub says it is; it is not kept.
        ModelError: the download failed otherwise.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(model.repo)
        if constants.HF_HUB_OFFLINE:
            # As its client refuses each request; to make one reads all certificates.
            raise OfflineModeIsEnabled
        info = HfApi().model_info(model.repo, revision=model.revision, files_metadata=True, timeout=_TIMEOUT)
    except HFValidationError as error:
        raise ModelNotFound(f"'{model}' is not a hub id", found=str(error)) from error
    except Exception as error:
        # Whatever kept the hub from answering: what was fetched before is as good.
        cached = _cached(model, cache, weights, code)
        if cached is None:
            has_answered = isinstance(error, HfHubHTTPError)
            raise (_refused(model, error) if has_answered else _unreachable(model, error)) from error
        if isinstance(error, HfHubHTTPError):
            _log.warning("%s is taken from the cache: %s", model, _first_line(error))
        return cached
    return _download(model, info, cache, weights, code)


def _download(model: HubModel, info: ModelInfo, cache: str | None, weights: bool, code: bool) -> FetchedModel:
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    hashes = {one.rfilename: one.lfs.sha256 if one.lfs else None for one in info.siblings or ()}
    wanted = wanted_files(model, hashes, weights, code)
    fresh = [
        name
        for name in wanted
        if not isinstance(try_to_load_from_cache(model.repo, name, cache_dir=cache, revision=info.sha), str)
    ]
    patterns = [glob.escape(name) for name in wanted]
    try:
        # By the revision's own name, under which the cache finds it without a network.
        folder = Path(snapshot_download(model.repo, revision=model.revision, cache_dir=cache, allow_patterns=patterns))
    except Exception as error:
        raise _refused(model, error) from error
    if folder.name == info.sha:  # and not a commit that came meanwhile
        _check(folder, {name: hashes[name] for name in fresh})
    return _fetched(model, folder, wanted)


def _fetched(model: HubModel, folder: Path, wanted: list[str]) -> FetchedModel:
    # huggingface_hub calls the folder of a snapshot by its commit.
    path = folder / wanted[0] if wanted[0].endswith(".gguf") else folder
    return FetchedModel(path, replace(model, revision=folder.name))


def wanted_files(model: HubModel, names: Collection[str], weights: bool, code: bool) -> list[str]:
    """Return the files that a model needs of those in its repository, a GGUF file alone or first; raises ModelNotFound, ModelError."""
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if model.file is not None:
        found = [name for name in ggufs if name == model.file] or [
            name
            for name in ggufs
            if name.lower().removesuffix(".gguf").endswith(model.file.lower().removesuffix(".gguf"))
        ]
        if len(found) != 1:
            raise ModelNotFound(
                f"{model.repo} has {'no' if not found else 'more than one'} GGUF file '{model.file}'",
                found=listed(sorted(found or ggufs)) or "no GGUF file",
                hint="Give a file's whole name after the colon",
            )
        return found
    if "config.json" not in names:
        if len(ggufs) == 1:
            return ggufs
        raise ModelNotFound(
            f"{model.repo} is not a model that Hardpoint reads",
            found=f"no config.json, and {listed(sorted(ggufs)) or 'no GGUF file'}",
            hint=f"Name one of its GGUF files: {model.repo}:FILE" if ggufs else None,
        )
    wanted = [name for name in names if _SMALL_FILES.fullmatch(name) or (code and name.endswith(".py"))]
    if weights:
        tensors = [name for name in names if "/" not in name and name.endswith(".safetensors")]
        # Beside the files of transformers some repositories have the same weights once more as their authors' own.
        standard = [name for name in tensors if name == SAFETENSORS_SINGLE or name.startswith("model-")]
        if not tensors:
            pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
            raise ModelError(
                f"{model.repo} has no weights that Hardpoint reads",
                found=listed(pickled or sorted(names)),
                hint="Safetensors and GGUF files are read; pickled ones can run code. Look for a revision or copy in safetensors",
            )
        wanted += standard or tensors
    return sorted(wanted)


def _cached(model: HubModel, cache: str | None, weights: bool, code: bool) -> FetchedModel | None:
    """Return a model as the cache has it, None where it does not have all of it."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model.repo, revision=model.revision, cache_dir=cache, local_files_only=True, allow_patterns=[]
        )
    except Exception:
        return None
    folder = Path(found)
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    try:
        wanted = wanted_files(model, names, weights, code)
    except ModelError:
        return None
    return _fetched(model, folder, wanted)


def _check(folder: Path, hashes: Mapping[str, str | None]) -> None:
    """Compare files that were just fetched with the SHA-256 that the hub has of its large ones; raises CorruptWeights."""
    for name, expected in hashes.items():
        if expected is None:
            continue
        link = folder / name
        with link.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            blob = link.resolve()
            link.unlink()
            blob.unlink(missing_ok=True)
            raise CorruptWeights(
                f"{name} came otherwise than the hub has it",
                found=f"SHA-256 {found[:12]}..., expected {expected[:12]}...",
                hint="It was removed from the cache: load the model again",
            )


def _unreachable(model: HubModel, error: Exception) -> ModelNotFound:
    """Return what is said where no hub answers."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    is_offline = isinstance(error, OfflineModeIsEnabled)
    revision = f" --revision {model.revision}" if model.revision else ""
    return ModelNotFound(
        f"there is no folder or file '{model}', nor is it in the cache of the hub's models",
        found="HF_HUB_OFFLINE is set" if is_offline else f"the hub cannot be reached, {_first_line(error)}",
        hint=(
            f"{'Unset HF_HUB_OFFLINE' if is_offline else 'Let HF_ENDPOINT name a mirror that can be reached'}, or fetch it on a machine"
            f" with a network, `hf download {model.repo}{revision} --local-dir FOLDER`, and give the folder or a GGUF file of it"
        ),
    )


def _refused(model: HubModel, error: Exception) -> ModelError:
    """Return what is said of a download that failed."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError) or status == 403:
        return ModelNotFound(
            f"the model {model} is only for those whom its owner lets in",
            found=_first_line(error),
            hint="Accept its terms on the hub, and set HF_TOKEN to a token of yours",
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFound(f"{model.repo} has no revision '{model.revision}'", hint="Give a branch, tag or commit")
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return ModelNotFound(
            f"there is no model {model}",
            found="neither a folder or file of this name, nor on the hub a repository that you may see",
            hint="Check the name; a private one needs HF_TOKEN",
        )
    if status == 429:
        return ModelError(
            f"the hub has too many requests to send {model}", found=_first_line(error), hint="Try again later"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(
            f"there is no space for {model}",
            found=str(error),
            hint="Free some, or set HF_HOME or download_dir to another disk",
        )
    return ModelError(
        f"the model {model} cannot be downloaded", found=_first_line(error), hint="What came is kept; try again"
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"
