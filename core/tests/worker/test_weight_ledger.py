"""Which weights hold valid values."""

from __future__ import annotations

import pytest

from hardpoint.worker.weights import WeightLedger

NAMES = frozenset({"a", "b", "c"})


def test_loaded_weights_are_valid_until_they_are_discarded() -> None:
    ledger = WeightLedger(NAMES)
    assert ledger.missing == frozenset()
    ledger.discard_all()
    assert ledger.missing == NAMES
    ledger.declare_valid()
    assert ledger.missing == frozenset()


def test_writes_fill_what_was_discarded() -> None:
    ledger = WeightLedger(NAMES)
    ledger.discard_all()
    for name, left in (("a", {"b", "c"}), ("a", {"b", "c"}), ("c", {"b"}), ("b", set())):
        written: set[str] = set()
        with ledger.writing(written):
            written.add(name)
        assert ledger.missing == left


@pytest.mark.parametrize(("written_before", "missing"), [({"a"}, NAMES), (set(), frozenset())])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_write_that_breaks_off_makes_everything_missing_if_it_wrote_anything(
    written_before: set[str], missing: frozenset[str], error: type[BaseException]
) -> None:
    ledger = WeightLedger(NAMES)

    def write() -> None:
        written: set[str] = set()
        with ledger.writing(written):
            written |= written_before
            raise error

    with pytest.raises(error):
        write()
    assert ledger.missing == missing
