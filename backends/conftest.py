"""For the backends' tests: what they share explains its failures like a test module."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("backends.testing.driver_suite", "backends.testing.probe_suite")
