"""What holds for every transport (core/tests/executor/test_remote.py), over actors of this cluster."""

from core.tests.executor.test_remote import *  # noqa: F403
