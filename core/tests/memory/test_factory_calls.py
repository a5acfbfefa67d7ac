"""Torch's factory calls put into an allocator's memory: which are, what they give, and which are left alone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from hardpoint.interfaces import MemoryCapabilities, Policy, SleepPlan, SleepTier
from hardpoint.interfaces.errors import DeviceOutOfMemory
from hardpoint.memory import VirtualAllocator, factory_call_pool
from hardpoint_cpu.driver import driver_table

Make = Callable[[], torch.Tensor]


@pytest.fixture
def allocator() -> VirtualAllocator:
    claims = MemoryCapabilities(frozenset({1}), frozenset({SleepTier.HOST}))
    driver = driver_table(options={"budget": 256 << 20})
    return VirtualAllocator(driver, device=0, torch_device="cpu", capabilities=claims)


def allocated(allocator: VirtualAllocator, tag: str) -> int:
    books = allocator.stats().tags.get(tag)
    return books.allocated if books else 0


LIKE = torch.arange(12.0).view(3, 4)
FACTORIES: dict[str, Make] = {
    "arange": lambda: torch.arange(5, 50, 3),
    "empty": lambda: torch.empty(7, 3).fill_(2),
    "empty_like": lambda: torch.empty_like(LIKE).fill_(2),
    "empty_strided": lambda: torch.empty_strided((3, 4), (1, 3)).fill_(2),
    "empty_permuted": lambda: torch.empty_permuted((3, 4), (1, 0)).fill_(2),
    "eye": lambda: torch.eye(4, 5),
    "full": lambda: torch.full((3, 3), 1.5, dtype=torch.float64),
    "full_like": lambda: torch.full_like(LIKE, 3),
    "linspace": lambda: torch.linspace(0, 1, 9),
    "logspace": lambda: torch.logspace(0, 1, 9),
    "ones": lambda: torch.ones(4, dtype=torch.bfloat16),
    "ones_like": lambda: torch.ones_like(LIKE.t()),
    "rand": lambda: torch.rand(4, 4),
    "rand_like": lambda: torch.rand_like(LIKE),
    "randint": lambda: torch.randint(0, 100, (5,)),
    "randint_like": lambda: torch.randint_like(LIKE, 9),
    "randn": lambda: torch.randn(3, dtype=torch.complex64),
    "randn_like": lambda: torch.randn_like(LIKE),
    "randperm": lambda: torch.randperm(20),
    "scalar_tensor": lambda: torch.scalar_tensor(3.5),
    "tensor": lambda: torch.tensor([[True, False], [False, True]]),
    "zeros": lambda: torch.zeros(2, 3, 4, dtype=torch.float8_e4m3fn),
    "zeros_like": lambda: torch.zeros_like(LIKE, dtype=torch.int16),
    "channels last": lambda: torch.empty(2, 3, 4, 5, memory_format=torch.channels_last).fill_(1),
    "positional": lambda: torch.zeros((2, 3)),
    "with a generator": lambda: torch.rand(4, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_result_is_in_the_pool_and_as_torch_made_it(allocator: VirtualAllocator, name: str) -> None:
    torch.manual_seed(11)
    expected = FACTORIES[name]()
    torch.manual_seed(11)
    with factory_call_pool(allocator, "weights"):
        made = FACTORIES[name]()
    assert allocated(allocator, "weights") >= made.nbytes
    assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert made.contiguous().view(-1).view(torch.uint8).equal(expected.contiguous().view(-1).view(torch.uint8))
    del made
    gc.collect()
    assert allocated(allocator, "weights") == 0


def test_gradients_are_kept(allocator: VirtualAllocator) -> None:
    with factory_call_pool(allocator, "weights"):
        leaf = torch.ones(3, requires_grad=True)
    assert leaf.requires_grad
    assert leaf.is_leaf
    (leaf * 2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]


def test_module_built_in_the_pool_sleeps_and_wakes(allocator: VirtualAllocator) -> None:
    with factory_call_pool(allocator, "weights"):
        module = torch.nn.Linear(300, 200)
    expected = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    assert allocated(allocator, "weights") == 300 * 200 * 4 + 200 * 4
    report = allocator.sleep(SleepPlan(tier=SleepTier.HOST))
    assert report.preserved >= 300 * 200 * 4
    allocator.wake()
    for name, tensor in module.named_parameters():
        assert tensor.equal(expected[name])


LEFT_ALONE: dict[str, Make] = {
    "another device": lambda: torch.empty(4, device="meta"),
    "an operator": lambda: LIKE + 1,
    "a tensor passed as out": lambda: torch.zeros(12, out=LIKE.clone().view(-1)),
    "no elements": lambda: torch.empty(0, 4),
    "another layout": lambda: torch.zeros(4, 4, layout=torch.sparse_coo),
    "a device context": lambda: _under_meta(),
}


def _under_meta() -> torch.Tensor:
    with torch.device("meta"):
        return torch.ones(4)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_results_are_left_alone(allocator: VirtualAllocator, name: str) -> None:
    with factory_call_pool(allocator, "weights"):
        made = LEFT_ALONE[name]()
    assert made is not None
    assert allocator.stats().allocated == 0


def test_tensor_passed_as_out_is_the_result(allocator: VirtualAllocator) -> None:
    out = torch.ones(3)
    address = out.data_ptr()
    with factory_call_pool(allocator, "weights"):
        assert torch.zeros(3, out=out) is out
    assert (out.data_ptr(), out.tolist()) == (address, [0, 0, 0])


def test_innermost_pool_counts_and_policies_apply(allocator: VirtualAllocator) -> None:
    with factory_call_pool(allocator, "outer"):
        with factory_call_pool(allocator, "inner", Policy.DISCARD):
            inner = torch.ones(1000)
        outer = torch.ones(500)
    assert (allocated(allocator, "outer"), allocated(allocator, "inner")) == (outer.nbytes, inner.nbytes)
    assert allocator.stats().peak_allocated == outer.nbytes + inner.nbytes
    report = allocator.sleep(SleepPlan())
    assert report.discarded > 0
    allocator.wake()
    assert outer.unique().tolist() == [1]


def test_other_threads_are_left_alone(allocator: VirtualAllocator) -> None:
    made: list[torch.Tensor] = []
    with factory_call_pool(allocator, "weights"):
        thread = threading.Thread(target=lambda: made.append(torch.ones(100)))
        thread.start()
        thread.join()
    assert made[0].numel() == 100
    assert allocator.stats().allocated == 0


def test_pool_ends_with_its_block_also_after_an_error(allocator: VirtualAllocator) -> None:
    with pytest.raises(ZeroDivisionError), factory_call_pool(allocator, "weights"):
        raise ZeroDivisionError
    kept = torch.ones(100)
    assert allocator.stats().allocated == 0
    assert kept.numel() == 100


def test_memory_that_is_not_there_is_the_calls_error(allocator: VirtualAllocator) -> None:
    with factory_call_pool(allocator, "kv_cache"), pytest.raises(DeviceOutOfMemory, match="kv_cache"):
        torch.empty(300 << 20, dtype=torch.uint8)
    assert allocator.stats().allocated == 0
