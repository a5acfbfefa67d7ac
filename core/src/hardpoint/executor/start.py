"""What a process does beside its real work while an engine starts: taking in torch is most of a small model's start."""

from __future__ import annotations

import atexit
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from hardpoint._native import load_library, return_free_memory

__all__ = ["await_torch", "begin", "begin_torch", "collection_paused", "return_free_memory"]

_Result = TypeVar("_Result")


def begin(function: Callable[[], _Result]) -> Future[_Result]:
    """Call a function in a thread that keeps no process from ending, whatever the function waits for."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


_torch: threading.Thread | None = None


def begin_torch() -> None:
    """Begin to load torch's shared libraries, once in a process, while the caller has other work before it imports torch."""
    global _torch
    if _torch is None and "torch" not in sys.modules:
        _torch = threading.Thread(target=_load_torch, daemon=True)
        _torch.start()
        # If the process ended while the libraries' initialisers run, it would destroy what they are building, and crash.
        atexit.register(_torch.join)


def await_torch() -> None:
    """Return when the libraries that were begun are loaded: an import that waits for them would keep the interpreter lock."""
    if _torch is not None:
        _torch.join()


def _load_torch() -> None:
    spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        # This library needs all the others of torch. Where it is missing or does not load, the import says so.
        load_library(str(Path(folder, "lib", "libtorch_python.so")))


@contextmanager
def collection_paused() -> Iterator[None]:
    """Hold the collector off while modules are imported and a model is built: next to nothing of what they make is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not _has_frozen():
                # Move all objects made meanwhile to the oldest generation: the next collection of the youngest would go through them.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


_found_frozen = False


def _has_frozen() -> bool:
    """Return whether the program has frozen objects, which are not ours to unfreeze; once found not asked again, as all are counted.

    Python 3.12 counts its immortal types there too; `gc.freeze` takes everything, and so the table of modules.
    """
    global _found_frozen
    _found_frozen = _found_frozen or (
        gc.get_freeze_count() > 0 and not any(found is sys.modules for found in gc.get_objects())
    )
    return _found_frozen
