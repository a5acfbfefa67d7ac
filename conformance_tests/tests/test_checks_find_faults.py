"""The checks themselves: each kind of fault is found and named."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from hardpoint.interfaces import (
    API_VERSION,
    BackendDescriptor,
    Capabilities,
    Contract,
    Device,
    DType,
    IntSet,
    ProbeResult,
    Worker,
)
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint_conformance import NotConformant, check_contract, check_descriptor_imports_light
from hardpoint_conformance.packaging import CONTRACTS

DEVICE = Device("alpha", 0, "Acme One", "xpu:0")


def implementation(contract: type[Contract]) -> Callable[[], Any]:
    """Return a factory of a class that implements a contract in name: every method is the contract's own signature."""
    members = {
        name: _concrete(method) for name, method in vars(contract).items() if hasattr(method, "__isabstractmethod__")
    }
    made = ABCMeta(f"Acme{contract.__name__}", (contract,), members)
    return lambda: made


def _concrete(method: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError

    call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return call


def sound() -> BackendDescriptor:
    parts: dict[str, Any] = {part: implementation(CONTRACTS[part]) for part in ("allocator", "attention", "worker")}
    return BackendDescriptor(
        "alpha",
        "Acme",
        (API_VERSION, API_VERSION),
        lambda: ProbeResult((DEVICE,)),
        lambda device: Capabilities.none(),
        **parts,
    )


def refuse() -> Any:
    raise CapabilityRefused("a worker was asked for", ["there is none"])


def claims(**changes: Any) -> Callable[[Device], Capabilities]:
    none = Capabilities.none()
    return lambda device: replace(none, attention=replace(none.attention, **changes), tensor_parallel=IntSet.of(1))


def test_sound_descriptor_passes() -> None:
    check_contract(sound())


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"api": (7, 9)}, "contract versions, 7 to 9"),
        ({"probe": lambda: None}, "probe returned NoneType"),
        ({"worker": refuse}, "worker is refused although its devices can be used"),
        ({"worker": lambda: object}, "does not derive from Worker"),
        (
            {"worker": lambda: Worker},
            "leaves out begin, collect, commit, initialize_kv, load, profile",
        ),
        ({"allocator": implementation(Worker)}, "does not derive from DeviceAllocator"),
        ({"collectives": lambda: 3}, "does not derive from Collectives"),
        ({"capabilities": lambda device: {}}, "returned dict, not Capabilities"),
        ({"capabilities": claims(kv_dtypes={DType.FLOAT32: frozenset({DType.FLOAT32})})}, "KV dtypes for differ"),
        (
            {
                "capabilities": claims(
                    dtypes=frozenset({DType.FLOAT32}),
                    kv_dtypes={DType.FLOAT32: frozenset({DType.FLOAT32})},
                    block_sizes=IntSet.of(16),
                    default_block_size=32,
                    head_dims=IntSet.of(64),
                    group_sizes=IntSet.of(1),
                    max_context=4096,
                )
            },
            "default block size, 32",
        ),
    ],
)
def test_fault_is_named(fault: dict[str, Any], text: str) -> None:
    with pytest.raises(NotConformant) as caught:
        check_contract(replace(sound(), **fault))
    assert len(caught.value.problems) == 1
    assert text in str(caught.value)


def test_backend_that_cannot_be_used_here_may_refuse_its_parts() -> None:
    check_contract(replace(sound(), worker=refuse, probe=lambda: ProbeResult((DEVICE,), reason="too old")))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import torch", "it imports torch"),
        ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
        ("raise SystemExit(4)", "exit code 4"),
        ("print('Acme runtime 3.7')", "printed to standard output: 'Acme runtime 3.7"),
        ("import time; time.sleep(30)", "it took longer than"),
    ],
)
def test_heavy_or_failing_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, text: str
) -> None:
    (tmp_path / "acme_descriptor.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_point = EntryPoint("alpha", "acme_descriptor", "hardpoint.backends")
    with pytest.raises(NotConformant, match=text):
        check_descriptor_imports_light(entry_point, time_limit=1.5 if "sleep" in source else 60)
