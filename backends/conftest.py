"""For the backends' tests: what they share explains its failures like a test module."""

from __future__ import annotations

import pytest

for suite in ("claims", "driver", "probe"):
    pytest.register_assert_rewrite(f"backends.testing.{suite}_suite")
