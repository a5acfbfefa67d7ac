"""`materialise` and `adopt`: modules move into an allocator's memory with their ties, views and values."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from core.tests.reference import PlainAllocator
from hardpoint.interfaces import BUFFERS, WEIGHTS
from hardpoint.memory import Accounting


def numbers(count: int) -> torch.Tensor:
    return torch.tensor([number + 0.5 for number in range(count)])


class Tied(nn.Module):
    """An embedding tied to a head, a buffer, a non-persistent buffer, and a parameter that is a view of another's memory."""

    def __init__(self) -> None:
        super().__init__()
        # Of given numbers: to draw some on the meta device, or a range, torch imports hundreds of modules, a second's work.
        self.embed = nn.Embedding.from_pretrained(numbers(40).view(10, 4), freeze=False)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        both = numbers(12)
        self.first = nn.Parameter(both[:6].view(2, 3))
        self.second = nn.Parameter(both[6:].view(3, 2).t())
        self.register_buffer("steps", torch.tensor([3, 1, 2]))
        self.register_buffer("inv_freq", numbers(5), persistent=False)


@pytest.fixture
def allocator() -> PlainAllocator:
    return PlainAllocator()


def test_adopt_keeps_values_ties_and_views(allocator: PlainAllocator) -> None:
    module = Tied()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    identity = module.embed.weight
    allocator.adopt(module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert module.embed.weight is identity
    assert module.head.weight is module.embed.weight
    assert module.first.untyped_storage().data_ptr() == module.second.untyped_storage().data_ptr()
    assert module.second.stride() == (1, 2)


def test_adopt_puts_every_tensor_into_tagged_memory(allocator: PlainAllocator) -> None:
    module = Tied()
    allocator.adopt(module, WEIGHTS)
    tags = {name: allocator.vendor_tag_of(t) for name, t in [*module.named_parameters(), *module.named_buffers()]}
    assert tags.pop("inv_freq") == BUFFERS
    assert set(tags.values()) == {WEIGHTS}


def test_materialise_fills_meta_tensors_only_and_keeps_ties(allocator: PlainAllocator) -> None:
    with torch.device("meta"):
        module = Tied()
    real = torch.ones(3)
    module.register_buffer("real", real)
    allocator.materialise(module)
    assert module.real is real
    assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    assert module.head.weight is module.embed.weight
    assert isinstance(module.head.weight, nn.Parameter)
    with torch.no_grad():
        module.embed.weight.fill_(2.0)
    assert torch.equal(module.head.weight, torch.full((10, 4), 2.0))


def test_books_count_by_tag_and_remember_the_peak() -> None:
    books = Accounting()
    books.add("weights", 100)
    books.add("kv_cache", 50)
    books.remove("weights", 100)
    books.add("kv_cache", 10)
    stats = books.stats()
    assert stats.allocated == 60
    assert stats.peak_allocated == 150
    assert (stats.tags["kv_cache"].allocated, stats.tags["kv_cache"].allocations) == (60, 2)
    assert (stats.tags["weights"].allocated, stats.tags["weights"].allocations) == (0, 0)


def test_memory_returns_when_the_module_is_gone(allocator: PlainAllocator) -> None:
    module = nn.Linear(8, 8)
    allocator.adopt(module)
    assert allocator.stats().tags[WEIGHTS].allocated == 8 * 8 * 4 + 8 * 4
    del module
    gc.collect()
    assert allocator.stats().tags[WEIGHTS].allocated == 0
