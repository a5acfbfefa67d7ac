"""Models by id on ModelScope instead of Hugging Face's hub, where HARDPOINT_USE_MODELSCOPE (or VLLM_USE_MODELSCOPE) says so.

The package `modelscope` fetches and caches, and is set as everywhere: MODELSCOPE_CACHE, MODELSCOPE_ENDPOINT, MODELSCOPE_API_TOKEN.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path

from hardpoint.interfaces.errors import ConfigError, ModelError, ModelNotFound
from hardpoint.models.hub import FetchedModel, HubModel, wanted_files

_VARIABLES = ("HARDPOINT_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE")


def is_chosen() -> bool:
    """Whether model ids are of ModelScope; raises ConfigError for a value that says neither."""
    for name in _VARIABLES:
        value = os.environ.get(name, "").lower()
        if value in ("1", "true"):
            return True
        if value not in ("", "0", "false"):
            raise ConfigError(f"{name} is neither true nor false", found=value, hint="Set it to 1 or 0")
    return False


def fetch(model: HubModel, *, cache: str | None = None, weights: bool = True, code: bool = False) -> FetchedModel:
    """Return a model, downloaded where the cache has not got it; arguments and errors as for `hub.fetch`.

    Raises ConfigError where the package is not installed.
    """
    try:
        from modelscope.hub.api import HubApi
        from modelscope.hub.snapshot_download import snapshot_download
    except ImportError as error:
        raise ConfigError(
            "models of ModelScope need its package",
            found=str(error),
            hint=f"pip install modelscope, or unset {' and '.join(_VARIABLES)}",
        ) from error

    def download(names: list[str] | None) -> Path:
        patterns = None if names is None else [glob.escape(name) for name in names]
        return Path(
            snapshot_download(
                model.repo,
                revision=model.revision,
                cache_dir=cache,
                allow_patterns=patterns,
                local_files_only=names is None,
            )
        )

    try:
        listed = HubApi().get_model_files(model.repo, revision=model.revision, recursive=True)
    except Exception as error:  # of the package's own kinds, which differ between its versions
        try:
            folder = download(None)
            names = wanted_files(model, _files(folder), weights, code)
        except Exception:
            raise ModelNotFound(
                f"there is no folder or file '{model}', nor is the model in ModelScope's cache or on its hub",
                found=f"{type(error).__name__}: {error}",
                hint=f"Check the name and the network, or unset {' and '.join(_VARIABLES)} for Hugging Face's hub",
            ) from error
    else:
        names = wanted_files(model, [str(one["Path"]) for one in listed], weights, code)
        try:
            folder = download(names)
        except Exception as error:
            raise ModelError(
                f"the model {model} cannot be downloaded", found=f"{type(error).__name__}: {error}", hint="Try again"
            ) from error
        missing = sorted(set(names) - set(_files(folder)))
        if missing:  # the package returns what it has
            raise ModelError(f"the model {model} came in part", found=f"without {', '.join(missing)}", hint="Try again")
    return FetchedModel(folder / names[0] if names[0].endswith(".gguf") else folder, model)


def _files(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
