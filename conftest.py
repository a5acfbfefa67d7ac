"""For all tests and the processes that they start: one torch thread, because OpenMP's fork-join collapses when tests share two cores with
anything else; and no model hub is asked, but one of a test's own.

No example of a property has a deadline: how long one takes is the machine's business.

And what collecting the tests has made (modules, most of all) is left out of garbage collection, which otherwise goes through all of it
wherever a test asks for a collection to see memory given back: half of the time of such tests.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
settings.register_profile("hardpoint", deadline=None)
settings.load_profile("hardpoint")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what there is before the first test."""
    gc.collect()
    gc.freeze()
