"""Runs cases of a corpus, and ends with status 1 where one fails."""

from __future__ import annotations

import sys

from .batches import run
from .corpora import CORPORA


def main(kind: str, first: int, count: int) -> int:
    """Print how the cases ended."""
    outcome = run(kind, CORPORA[kind], first, count)
    for failure in outcome.failures:
        print(failure, end="\n\n")
    print(
        ", ".join(f"{name} {number}" for name, number in outcome.counts.most_common()),
        f"; {len(outcome.failures)} failures",
    )
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in CORPORA:
        raise SystemExit(f"python -m tests.fuzz {'|'.join(CORPORA)} SEED [COUNT]")
    raise SystemExit(main(sys.argv[1], *(int(text) for text in [*sys.argv[2:], "1"][:2])))
