"""Operators are called as the table has them, or not at all; their schemas are compared with torch_npu's in tests/real_torch."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

from hardpoint.interfaces.errors import BackendBroken, CapabilityRefused
from hardpoint_ascend.operators import OPERATORS, WRITE_KV, Operator

_numbers = itertools.count()
EXPECTED = '(Tensor x, int size, *, Tensor? mask=None, str mode="a") -> (Tensor, Tensor)'


@pytest.fixture
def library() -> torch.library.Library:
    return torch.library.Library("hardpoint_ascend_tests", "FRAGMENT")


def define(library: torch.library.Library, installed: str) -> Operator:
    """Install an operator under a new name, and return what is expected there."""
    name = f"operator{next(_numbers)}"
    library.define(name + installed)
    return Operator(f"hardpoint_ascend_tests::{name}", EXPECTED)


@pytest.mark.parametrize(
    "installed",
    [
        EXPECTED,
        '(Tensor x, int size, *, Tensor? mask=None, str mode="a", int more=0) -> (Tensor, Tensor)',
        '(Tensor x, int size, *, bool more=False, str mode="a", Tensor? mask=None) -> (Tensor, Tensor)',
        # Older and newer ones may have other defaults: the calls pass these arguments.
        '(Tensor x, int size, *, Tensor? mask, str mode="b") -> (Tensor, Tensor)',
    ],
)
def test_operator_that_takes_the_calls_is_bound(library: torch.library.Library, installed: str) -> None:
    operator = define(library, installed)
    assert operator.bind().name() == operator.name


@pytest.mark.parametrize(
    ("installed", "difference"),
    [
        ('(Tensor x, int size, *, str mode="a") -> (Tensor, Tensor)', "it has no argument mask"),
        (
            "(Tensor x, int size, *, Tensor? mask=None, int mode=0) -> (Tensor, Tensor)",
            "argument mode is `keyword int` and not `keyword str`",
        ),
        (
            '(int size, Tensor x, *, Tensor? mask=None, str mode="a") -> (Tensor, Tensor)',
            "argument x is number 1 and not 0",
        ),
        (
            '(Tensor x, int size, Tensor? mask=None, *, str mode="a") -> (Tensor, Tensor)',
            "mask is `Optional[Tensor]` and not `keyword Optional[Tensor]`",
        ),
        ('(Tensor(a!) x, int size, *, Tensor? mask=None, str mode="a") -> (Tensor, Tensor)', "x is `Tensor, written`"),
        (
            '(Tensor x, int size, *, int more, Tensor? mask=None, str mode="a") -> (Tensor, Tensor)',
            "without a default, more",
        ),
        ('(Tensor x, int size, *, Tensor? mask=None, str mode="a") -> Tensor', "it returns ['Tensor'] and not"),
    ],
)
def test_other_operator_is_an_error_that_names_expected_and_found(
    library: torch.library.Library, installed: str, difference: str
) -> None:
    operator = define(library, installed)
    with pytest.raises(BackendBroken) as caught:
        operator.bind()
    text = str(caught.value)
    assert difference in text
    assert f"Expected: {operator.schema}" in text
    assert f"Found: {operator.installed()}" in text
    assert "Install torch_npu 2.13" in text


def test_missing_operator_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", object())
    with pytest.raises(BackendBroken, match="there is no operator hardpoint_ascend_tests::none") as caught:
        Operator("hardpoint_ascend_tests::none", EXPECTED).bind()
    assert "Found: nothing" in str(caught.value)


def test_missing_torch_npu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(CapabilityRefused, match="torch_npu cannot be imported"):
        Operator("hardpoint_ascend_tests::none", EXPECTED).bind()


def test_table_is_of_schemas_that_torch_reads() -> None:
    assert [operator.schema.name for operator in OPERATORS] == [operator.name for operator in OPERATORS]
    assert str(WRITE_KV.schema) == WRITE_KV.name + WRITE_KV.signature
