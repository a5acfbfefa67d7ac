"""Asynchronous work: when it runs, what waits for it, and what must not happen before."""

from __future__ import annotations

import ctypes

import pytest

from .drivers import DEVICE_TO_DEVICE, DEVICE_TO_HOST, HOST_TO_DEVICE, Ascend, Driver, G

SIZE = 4096


@pytest.fixture(params=[False, True], ids=["at-once", "deferred"])
def deferred(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def subject(driver: Driver, deferred: bool) -> Driver:
    driver.simulator.set("deferred", deferred)
    return driver


def host_bytes(address: int, size: int = SIZE) -> bytes:
    return ctypes.string_at(address, size)


def test_unmap_before_a_pending_copy_is_synchronised_is_refused(subject: Driver) -> None:
    address, _ = subject.block()
    stream, target = subject.stream(), subject.pinned(SIZE)
    assert subject.copy(target, address, SIZE, DEVICE_TO_HOST, stream) == 0
    assert subject.simulator.stats().pending == 1
    with subject.breaking("has not been synchronised"):
        assert subject.unmap(address, G) == subject.codes.illegal_address
    assert subject.synchronize(stream) == 0
    assert subject.simulator.stats().pending == 0
    assert subject.unmap(address, G) == 0


def test_pending_work_elsewhere_does_not_hinder_an_unmap(subject: Driver) -> None:
    (busy, _), (idle, _) = subject.block(), subject.block()
    assert subject.fill(busy, 1, G, subject.stream()) == 0
    assert subject.unmap(idle, G) == 0
    assert subject.simulator.violations() == []


def test_pinned_memory_must_outlive_its_copies(subject: Driver) -> None:
    address, _ = subject.block()
    stream, source = subject.stream(), subject.pinned(SIZE)
    subject.copy(address, source, SIZE, HOST_TO_DEVICE, stream)
    with subject.breaking("has not been synchronised"):
        assert subject.call(subject.host_free, source) != 0
    subject.synchronize(stream)
    assert subject.call(subject.host_free, source) == 0


def test_registered_memory_must_outlive_its_copies(subject: Driver) -> None:
    address, _ = subject.block()
    stream, buffer = subject.stream(), ctypes.create_string_buffer(SIZE)
    source = ctypes.addressof(buffer)
    assert subject.register(source, SIZE) == 0
    subject.copy(address, source, SIZE, HOST_TO_DEVICE, stream)
    with subject.breaking("has not been synchronised"):
        assert subject.call(subject.host_unregister, source) != 0
    subject.synchronize(stream)
    assert subject.call(subject.host_unregister, source) == 0


def test_event_waits_for_the_work_before_it_and_no_more(subject: Driver) -> None:
    (first, _), (second, _) = subject.block(), subject.block()
    stream, event = subject.stream(), subject.event()
    subject.fill(first, 1, SIZE, stream)
    assert subject.call(subject.event_record, event, stream) == 0
    subject.fill(second, 2, SIZE, stream)
    assert subject.call(subject.event_synchronize, event) == 0
    assert subject.simulator.stats().pending == 1
    assert subject.unmap(first, G) == 0
    assert subject.unmap(second, G) == subject.codes.illegal_address


def test_stream_that_waits_for_an_event_carries_the_wait(subject: Driver) -> None:
    address, _ = subject.block()
    producer, consumer, event = subject.stream(), subject.stream(), subject.event()
    target = subject.pinned(SIZE)
    subject.fill(address, 7, SIZE, producer)
    subject.call(subject.event_record, event, producer)
    wait = (consumer, event, 0) if subject.vendor != "ascend" else (consumer, event)
    assert subject.call(subject.stream_wait_event, *wait) == 0
    subject.copy(target, address, SIZE, DEVICE_TO_HOST, consumer)
    assert subject.synchronize(consumer) == 0
    assert host_bytes(target) == b"\x07" * SIZE
    assert subject.unmap(address, G) == 0


def test_work_of_one_stream_runs_in_order(subject: Driver) -> None:
    address, _ = subject.block()
    stream, target = subject.stream(), subject.pinned(SIZE)
    for value in (1, 2, 3):
        subject.fill(address, value, SIZE, stream)
    subject.copy(target, address, SIZE, DEVICE_TO_HOST, stream)
    subject.synchronize(stream)
    assert host_bytes(target) == b"\x03" * SIZE


def test_destroyed_stream_completes_its_work(subject: Driver) -> None:
    address, _ = subject.block()
    stream = subject.stream()
    subject.fill(address, 9, SIZE, stream)
    assert subject.call(subject.stream_destroy, stream) == 0
    assert subject.read(address, SIZE) == (0, b"\x09" * SIZE)
    assert subject.unmap(address, G) == 0


def test_device_copies_work_across_blocks(subject: Driver) -> None:
    (source, _), (target, _) = subject.block(), subject.block()
    stream = subject.stream()
    subject.write(source, b"across")
    assert subject.copy(target, source, G, DEVICE_TO_DEVICE, stream) == 0
    subject.synchronize(stream)
    assert subject.read(target, 6) == (0, b"across")


def test_queue_is_finite_as_a_real_one(subject: Driver) -> None:
    address, _ = subject.block()
    stream = subject.stream()
    for _ in range(1100):
        assert subject.fill(address, 1, 1, stream) == 0
    assert subject.simulator.stats().pending == 1024


def test_deferred_copy_shows_only_after_synchronisation(driver: Driver) -> None:
    driver.simulator.set("deferred", 1)
    address, _ = driver.block()
    stream, target = driver.stream(), driver.pinned(SIZE)
    driver.write(address, b"x" * SIZE)
    driver.copy(target, address, SIZE, DEVICE_TO_HOST, stream)
    assert host_bytes(target) == bytes(SIZE)
    driver.synchronize(stream)
    assert host_bytes(target) == b"x" * SIZE


def test_deferred_copy_reads_pinned_memory_as_it_is_when_it_runs(driver: Driver) -> None:
    driver.simulator.set("deferred", 1)
    address, _ = driver.block()
    stream, source = driver.stream(), driver.pinned(SIZE)
    ctypes.memset(source, 1, SIZE)
    driver.copy(address, source, SIZE, HOST_TO_DEVICE, stream)
    ctypes.memset(source, 2, SIZE)
    driver.synchronize(stream)
    assert driver.read(address, SIZE) == (0, b"\x02" * SIZE)


def test_pageable_memory_is_staged_in_and_copied_out_at_once(driver: Driver) -> None:
    driver.simulator.set("deferred", 1)
    address, _ = driver.block()
    stream = driver.stream()
    source = ctypes.create_string_buffer(b"\x01" * SIZE, SIZE)
    target = ctypes.create_string_buffer(SIZE)
    driver.copy(address, ctypes.addressof(source), SIZE, HOST_TO_DEVICE, stream)
    ctypes.memset(source, 2, SIZE)
    driver.copy(ctypes.addressof(target), address, SIZE, DEVICE_TO_HOST, stream)
    assert target.raw == b"\x01" * SIZE


def test_waiting_copy_waits_for_blocking_streams_only(cuda: Driver) -> None:
    cuda.simulator.set("deferred", 1)
    address, _ = cuda.block()
    for flags, value, seen in ((0, 5, 5), (1, 6, 5)):
        _, stream = cuda.make("cuStreamCreate", flags)
        cuda.fill(address, value, 1, stream)
        assert cuda.read(address, 1) == (0, bytes([seen]))


def test_polling_comes_to_an_end(cuda: Driver) -> None:
    cuda.simulator.set("deferred", 1)
    address, _ = cuda.block()
    stream = cuda.stream()
    for _ in range(3):
        cuda.fill(address, 1, 1, stream)
    assert [cuda.call("cuStreamQuery", stream) for _ in range(5)] == [600, 600, 600, 0, 0]


def test_unknown_streams_and_events_are_refused(driver: Driver) -> None:
    stream, event = driver.stream(), driver.event()
    assert driver.call(driver.stream_destroy, stream) == 0
    with driver.breaking("unknown stream"):
        assert driver.call(driver.stream_destroy, stream) == driver.codes.invalid_handle
    with driver.breaking("unknown stream"):
        assert driver.synchronize(stream) == driver.codes.invalid_handle
    assert driver.call(driver.event_destroy, event) == 0
    with driver.breaking("unknown event"):
        assert driver.call(driver.event_synchronize, event) == driver.codes.invalid_handle


def test_host_registration_rules(driver: Driver) -> None:
    buffer = ctypes.create_string_buffer(4 * SIZE)
    address = ctypes.addressof(buffer)
    assert driver.register(address, 2 * SIZE) == 0
    assert driver.simulator.stats().host_bytes == 2 * SIZE
    with driver.breaking("already registered"):
        assert driver.register(address + SIZE, SIZE) == driver.codes.already_registered
    with driver.breaking("size 0"):
        assert driver.register(address + 3 * SIZE, 0) == driver.codes.invalid
    with driver.breaking("not host memory"):
        assert driver.register(4096, SIZE) == driver.codes.invalid
    with driver.breaking("not the start of such a range"):
        assert driver.call(driver.host_unregister, address + SIZE) == driver.codes.not_registered
    assert driver.call(driver.host_unregister, address) == 0
    with driver.breaking("not the start of such a range"):
        assert driver.call(driver.host_unregister, address) == driver.codes.not_registered
    assert driver.simulator.stats().host_ranges == 0


def test_host_memory_is_pinned_on_ascend_where_that_is_asked_for_and_not_where_it_is_mapped(ascend: Ascend) -> None:
    address, _ = ascend.block()
    buffer = ctypes.create_string_buffer(SIZE)
    source = ctypes.addressof(buffer)
    for register, pageable in ((ascend.map_host, 1), (ascend.register, 0)):
        before = ascend.simulator.stats().pageable_copies
        assert register(source, SIZE) == 0
        assert ascend.copy(address, source, SIZE, HOST_TO_DEVICE) == 0
        assert ascend.simulator.stats().pageable_copies - before == pageable
        assert ascend.call(ascend.host_unregister, source) == 0
    with ascend.breaking("as mapped, as pinned, or as both"):
        assert ascend.call("aclrtHostRegisterV2", source, SIZE, 0) == ascend.codes.invalid


def test_with_an_old_kernel_no_memory_but_canns_own_is_registered(ascend: Ascend) -> None:
    ascend.simulator.set("old_kernel", 1)
    buffer = ctypes.create_string_buffer(SIZE)
    for register in (ascend.map_host, ascend.register):
        with ascend.breaking("only memory of aclrtMallocHost"):
            assert register(ctypes.addressof(buffer), SIZE) == ascend.codes.invalid
    assert ascend.simulator.stats().host_ranges == 0
    assert ascend.call(ascend.host_free, ascend.pinned(SIZE)) == 0


def test_pinned_memory_is_freed_once(driver: Driver) -> None:
    address = driver.pinned(SIZE)
    ctypes.memset(address, 1, SIZE)
    assert driver.call(driver.host_free, address) == 0
    with driver.breaking("not the start of such a range"):
        assert driver.call(driver.host_free, address) == driver.codes.invalid
