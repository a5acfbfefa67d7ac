"""What can become of a test, and of a whole run."""

from __future__ import annotations

from enum import StrEnum

OWN_ALLOCATOR = "not called for: this backend has no memory driver, and its allocator is all its own"
"""The message of a test that is about a driver, where there is none: it is not testable, and nothing is missing."""


class Outcome(StrEnum):
    """What became of one test.

    PASSED, FAILED, ERROR (in set-up or tear-down): as pytest says. CRASHED: its process ended. HUNG: its process was ended at the time
    limit. NOT_CLAIMED: it proves what the backend does not claim. CLAIMED: it proves a refusal, and the backend claims what would be
    refused. NOT_TESTABLE: skipped for another reason. WAIVED: failed, and a waiver says why that is accepted. NOT_RUN: the run ended
    before it.
    """

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    CRASHED = "crashed"
    HUNG = "hung"
    NOT_CLAIMED = "not_claimed"
    CLAIMED = "claimed"
    NOT_TESTABLE = "not_testable"
    WAIVED = "waived"
    NOT_RUN = "not_run"

    @property
    def is_failure(self) -> bool:
        """The backend does not do what the test asks."""
        return self in FAILURES

    @property
    def applies(self) -> bool:
        """The claims call for the test."""
        return self not in (Outcome.NOT_CLAIMED, Outcome.CLAIMED)


FAILURES = frozenset({Outcome.FAILED, Outcome.ERROR, Outcome.CRASHED, Outcome.HUNG})

WAIVABLE = frozenset({Outcome.FAILED, Outcome.ERROR})
"""A process that dies or never ends cannot be waived: nothing is known of what else it did."""


class Verdict(StrEnum):
    """What a run says of a backend.

    SIMULATED is the best that a run on a simulated driver can say: clauses that need a device which computes are not shown there.
    A PARTIAL run, of chosen clauses, says nothing of conformance.
    """

    CONFORMANT = "conformant"
    SIMULATED = "conformant on a simulated driver"
    WITH_WAIVERS = "conformant with waivers"
    NOT_CONFORMANT = "not conformant"
    PARTIAL = "partial"
