"""A new backend to begin with: an out-of-tree distribution for a pretend device, which passes the profile `inference-core` as it is.

`template/` is that distribution, complete and working, under the name `acme`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from hardpoint.interfaces.errors import ConfigError
from hardpoint.plugins import ENTRY_POINT_GROUP

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_TEMPLATE_NAME = "acme"
_SUFFIX = ".template"  # of files that tools would otherwise take for ones of this package, such as tests


def create(name: str, path: Path) -> Path:
    """Write the distribution `hardpoint-<name>`, a backend for a pretend device, and return its folder.

    Args:
        name: of the backend: a lower-case identifier.
        path: the folder to write; it may be there if it is empty.

    Raises:
        ConfigError: the name is impossible or taken, the folder is not empty, or it cannot be written.
    """
    _check_name(name)
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(
                f"a new backend was to be written to {path}",
                found="it is not an empty folder",
                hint="Give a folder that is empty or not there yet",
            )
        for relative, source in _template_files(files(__package__) / "template", PurePosixPath()):
            target = path / _named(str(relative).removesuffix(_SUFFIX), name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_named(source.read_text(encoding="utf-8"), name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"a new backend cannot be written to {path}", found=str(error)) from error
    return path


def _check_name(name: str) -> None:
    wanted = f"a backend was to be named '{name}'"
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            wanted,
            found="it is not a lower-case identifier",
            hint="Use letters a to z, digits and single underscores, with a letter first",
        )
    if name in {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}:
        raise ConfigError(wanted, found="a backend of this name is installed", hint="Choose another name")


def _template_files(folder: Traversable, relative: PurePosixPath) -> Iterator[tuple[PurePosixPath, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            if not entry.name.endswith(("_cache", "__pycache__")):  # tools leave them in a checkout
                yield from _template_files(entry, relative / entry.name)
        else:
            yield relative / entry.name, entry


def _named(text: str, name: str) -> str:
    """Return a text of the template for another name: `acme`, and in names of classes and in prose `Acme`."""
    title = "".join(part.capitalize() for part in name.split("_"))
    return text.replace(_TEMPLATE_NAME.capitalize(), title).replace(_TEMPLATE_NAME, name)
