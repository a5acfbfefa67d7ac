"""What is said once on a machine, and not at every start: each text leaves a stamp in the user's cache directory."""

from __future__ import annotations

import hashlib
import logging

from hardpoint.memory import cache_directory

_log = logging.getLogger("hardpoint")


def warn_once(text: str) -> None:
    """Log a warning that this user has not seen on this machine; always, where there is no place to note that."""
    stamp = cache_directory() / "said" / hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch(exist_ok=False)
    except FileExistsError:
        return
    except OSError:
        pass
    _log.warning(text)
