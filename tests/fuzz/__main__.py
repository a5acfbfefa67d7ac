"""Runs cases of a corpus, and ends with status 1 where one fails."""

from __future__ import annotations

import gc
import sys

gc.disable()  # what the corpora import stays
try:
    from .batches import run
    from .corpora import CORPORA
finally:
    gc.enable()


def main(kinds: list[str], first: int, count: int) -> int:
    """Print how the cases ended: the failures, and a line for each kind."""
    failed = False
    for kind in kinds:
        outcome = run(kind, CORPORA[kind], first, count)
        for failure in outcome.failures:
            print(failure, end="\n\n")
        print(
            f"{kind}:",
            ", ".join(f"{name} {number}" for name, number in outcome.counts.most_common()),
            f"; {len(outcome.failures)} failures",
            flush=True,  # or forks would have it too
        )
        failed = failed or bool(outcome.failures)
    return 1 if failed else 0


if __name__ == "__main__":
    kinds = sys.argv[1].split(",") if len(sys.argv) in (3, 4) else []
    if not kinds or not CORPORA.keys() >= set(kinds):
        raise SystemExit(f"python -m tests.fuzz {'|'.join(CORPORA)}[,...] SEED [COUNT]")
    raise SystemExit(main(kinds, *(int(text) for text in [*sys.argv[2:], "1"][:2])))
