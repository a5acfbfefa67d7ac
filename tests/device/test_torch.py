"""Torch's own allocations and operators in our memory on a real device.

Over simulated drivers, where nothing computes, `make test-torch` has the tests of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest

from hardpoint.interfaces import Device, DeviceAllocator, Policy, SleepPlan, SleepTier, TorchPoolScope
from hardpoint.interfaces.allocator import KV_CACHE, WEIGHTS

from .targets import DEVICE, SIMULATION_EXPECTED

pytestmark = pytest.mark.skipif(
    not DEVICE or SIMULATION_EXPECTED or find_spec("torch") is None,
    reason="needs a real device (HARDPOINT_DEVICE) and torch; `make test-torch` tests torch over simulated drivers",
)


@pytest.fixture
def device() -> Device:
    backend, _, index = DEVICE.partition(":")
    found: Device = import_module(f"hardpoint_{backend}.descriptor").hardpoint_backend().probe().devices[int(index)]
    return found


@pytest.fixture
def allocator(device: Device) -> Iterator[DeviceAllocator]:
    descriptor = import_module(f"hardpoint_{device.backend}.descriptor").hardpoint_backend()
    made: DeviceAllocator = descriptor.make("allocator", device)
    if made.capabilities().torch_pool is not TorchPoolScope.ALL:
        pytest.skip(f"the installed torch cannot allocate on {device.backend} devices")
    yield made
    made.wake()
    made.close()


@pytest.mark.parametrize("tier", [SleepTier.HOST, SleepTier.DISK])
def test_model_computes_the_same_after_sleep_and_wake(
    device: Device, allocator: DeviceAllocator, tier: SleepTier, tmp_path: object
) -> None:
    import torch

    with allocator.pool(WEIGHTS):
        model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.Linear(4096, 4096)).to(device.torch_device)
    with allocator.pool(KV_CACHE, Policy.DISCARD):
        cache = torch.empty(256 << 20, dtype=torch.uint8, device=device.torch_device)
    batch = torch.randn(8, 4096).to(device.torch_device)
    with torch.no_grad():
        expected = model(batch).cpu()
    addresses = [cache.data_ptr(), *(parameter.data_ptr() for parameter in model.parameters())]

    plan = SleepPlan(policies={KV_CACHE: Policy.DISCARD}, tier=tier, disk_directory=str(tmp_path))
    report = allocator.sleep(plan)
    assert report.unmapped >= (256 + 128) << 20
    assert report.free_after - report.free_before > 0.9 * report.unmapped
    allocator.wake()

    assert [cache.data_ptr(), *(parameter.data_ptr() for parameter in model.parameters())] == addresses
    with torch.no_grad():
        assert torch.equal(model(batch).cpu(), expected)
    cache.fill_(7)
    assert cache.unique().tolist() == [7]
