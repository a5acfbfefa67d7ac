"""A class that does not keep to its contract is refused when it is defined, with every difference named."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest

from hardpoint.interfaces import Contract
from hardpoint.interfaces.errors import ContractError


class Engine(Contract, contract=True):
    """A contract with one mandatory method of each shape and an optional one."""

    @abstractmethod
    def start(self, speed: int, gear: int = 1) -> None: ...

    @abstractmethod
    def steer(self, *, angle: float) -> None: ...

    def horn(self, times: int = 1) -> int:
        return times


class Radio(Contract, contract=True):
    """A second contract, for classes that implement two."""

    @abstractmethod
    def tune(self, station: str) -> None: ...


def start(self: Any, speed: int, gear: int = 1) -> None: ...
def steer(self: Any, *, angle: float) -> None: ...


def define(*bases: type, partial: bool = False, **members: Any) -> Any:
    """Define a class that implements Engine soundly, but for the given members; None leaves one out."""
    body = {"start": start, "steer": steer} | members
    return ABCMeta("Car", bases or (Engine,), {k: v for k, v in body.items() if v is not None}, partial=partial)


def test_sound_class_is_accepted_and_may_leave_out_optional_methods() -> None:
    car = define()()
    assert car.horn(3) == 3


def test_missing_method_is_named() -> None:
    with pytest.raises(ContractError, match=r"Car does not implement Engine: steer is missing"):
        define(steer=None)


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(ContractError) as caught:
        define(steer=None, start=lambda self, speed: None, stear=steer)
    text = str(caught.value)
    assert "stear is not in the contract" in text
    assert "start lacks the parameter 'gear'" in text
    assert "steer is missing" in text


def test_error_is_a_type_error_raised_at_definition() -> None:
    with pytest.raises(TypeError, match="is missing"):

        class Broken(Engine):
            pass


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (lambda self, speed: None, "lacks the parameter 'gear'"),
        (lambda self, velocity, gear=1: None, "has 'velocity' where the contract has 'speed'"),
        (lambda self, gear=1, speed=0: None, "has 'gear' where the contract has 'speed'"),
        (lambda self, speed, gear: None, "must give 'gear' a default"),
        (lambda self, speed, gear=2: None, "gives 'gear' the default 2 where the contract has 1"),
        (lambda self, speed, gear=1, *, fuel: None, "requires 'fuel', which no caller passes"),
        (lambda self, speed, gear=1, fuel=0, *, air: None, "requires 'air', which no caller passes"),
        (lambda self, speed, *, gear=1: None, "lacks the parameter 'gear'"),
        (lambda self, speed, gear=1, /: None, "must take 'speed' by name too"),
        (lambda self, *arguments: None, "lacks the parameter 'speed'"),
        (lambda: None, "lacks the parameter 'self'"),
        (staticmethod(start), "must be a plain method, not staticmethod"),
        (classmethod(start), "must be a plain method, not classmethod"),
        (property(lambda self: 1), "must be a plain method, not property"),
        (7, "must be a plain method, not int"),
        (dict.fromkeys, "has"),
    ],
)
def test_signature_that_a_caller_could_not_use_is_named(method: Any, reason: str) -> None:
    with pytest.raises(ContractError, match=r"Car does not implement Engine") as caught:
        define(start=method)
    assert f"start {reason}" in str(caught.value)


def test_coroutine_in_place_of_a_method_is_named() -> None:
    async def late(self: Any, speed: int, gear: int = 1) -> None: ...

    with pytest.raises(ContractError, match="start must not be a coroutine"):
        define(start=late)


@pytest.mark.parametrize(
    "method",
    [
        lambda self, speed, gear=1, fuel=0: None,
        lambda self, speed, gear=1, *rest, **options: None,
        lambda self, *arguments, **options: None,
        lambda this, speed, gear=1: None,
    ],
)
def test_wider_signature_is_accepted(method: Callable[..., None]) -> None:
    assert define(start=method)


@pytest.mark.parametrize("method", [lambda self: None, lambda self, *, degrees: None, lambda self, *angles: None])
def test_keyword_parameter_that_is_not_taken_is_named(method: Callable[..., None]) -> None:
    with pytest.raises(ContractError, match="steer lacks the keyword parameter 'angle'"):
        define(steer=method)


@pytest.mark.parametrize("method", [lambda self, angle: None, lambda self, **options: None])
def test_keyword_parameter_may_be_taken_in_any_way_that_works(method: Callable[..., None]) -> None:
    assert define(steer=method)


@pytest.mark.parametrize(
    "member",
    [
        start,
        staticmethod(start),
        classmethod(start),
        property(lambda self: 1),
        cached_property(lambda self: 1),
        lambda self: None,
    ],
)
def test_unknown_public_method_or_property_is_refused(member: Any) -> None:
    with pytest.raises(ContractError, match=r"brake is not in the contract \(prefix it with '_' or 'vendor_'\)"):
        define(brake=member)


@pytest.mark.parametrize("name", ["_brake", "vendor_brake", "__call__"])
def test_private_and_vendor_names_are_the_vendors_own(name: str) -> None:
    assert define(**dict[str, Any]({name: start}))


def test_public_data_and_nested_classes_are_not_mistaken_for_methods() -> None:
    assert define(wheels=4, Options=type("Options", (), {}))


def test_signature_of_an_optional_method_is_checked_where_it_is_given() -> None:
    with pytest.raises(ContractError, match="horn must give 'times' a default"):
        define(horn=lambda self, times: times)


def test_method_set_to_none_is_missing() -> None:
    with pytest.raises(ContractError, match="start is missing"):
        ABCMeta("Car", (Engine,), {"start": None, "steer": steer})


def test_abstract_override_is_missing() -> None:
    with pytest.raises(ContractError, match="start is missing"):
        define(start=abstractmethod(lambda self, speed, gear=1: None))


def test_partial_base_leaves_methods_to_its_subclasses_and_checks_its_own() -> None:
    base = define(steer=None, partial=True)
    assert define(base, start=None)
    with pytest.raises(ContractError, match="steer is missing"):
        define(base, start=None, steer=None)
    with pytest.raises(ContractError, match="start lacks the parameter 'gear'"):
        define(start=lambda self, speed: None, steer=None, partial=True)


def test_method_of_a_mixin_counts_and_is_checked() -> None:
    class Mixin:
        def start(self, speed: int, gear: int = 1) -> None: ...

    assert define(Mixin, Engine, start=None)
    Mixin.start = lambda self: None  # type: ignore[assignment, misc]
    with pytest.raises(ContractError, match="start lacks the parameter 'speed'"):
        define(Mixin, Engine, start=None)


def test_subclass_of_an_implementation_is_checked_too() -> None:
    with pytest.raises(ContractError, match="brake is not in the contract"):
        define(define(), brake=start)


def test_class_with_two_contracts_must_keep_both() -> None:
    assert define(Engine, Radio, tune=lambda self, station: None)
    with pytest.raises(ContractError, match="Engine and Radio: tune is missing"):
        define(Engine, Radio)


def test_native_function_without_a_signature_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match="start has no signature that can be read"):
        define(start=type)
