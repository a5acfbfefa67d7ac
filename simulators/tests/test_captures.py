"""Streams that are captured: what a capture does not bear, and the graphs, which hold copies and fills here."""

from __future__ import annotations

import ctypes

import pytest

from .drivers import Cuda, G
from .test_contexts import in_thread

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
NONE, ACTIVE, INVALIDATED = range(3)
ILLEGAL_ADDRESS = 700
INVALID_VALUE, ILLEGAL_STATE, NOT_SUPPORTED, UNSUPPORTED, CAPTURE_INVALIDATED, WRONG_THREAD = 1, 401, 801, 900, 901, 908


def begin(cuda: Cuda, mode: int = RELAXED) -> int:
    stream = cuda.stream()
    assert cuda.call("cuStreamBeginCapture_v2", stream, mode) == 0
    return stream


def status(cuda: Cuda, stream: int) -> int:
    found = ctypes.c_int()
    assert cuda.call("cuStreamIsCapturing", stream, ctypes.byref(found)) == 0
    return found.value


def end(cuda: Cuda, stream: int) -> tuple[int, int]:
    graph = ctypes.c_uint64(7)
    return cuda.call("cuStreamEndCapture", stream, ctypes.byref(graph)), graph.value


def test_a_capture_becomes_an_empty_graph_that_can_be_launched_until_it_is_destroyed(cuda: Cuda) -> None:
    stream = begin(cuda)
    assert status(cuda, stream) == ACTIVE
    code, graph = end(cuda, stream)
    assert (code, status(cuda, stream)) == (0, NONE)
    nodes = ctypes.c_size_t(7)
    assert (cuda.call("cuGraphGetNodes", graph, 0, ctypes.byref(nodes)), nodes.value) == (0, 0)
    code, executable = cuda.make("cuGraphInstantiateWithFlags", graph, 0)
    assert code == 0
    assert cuda.call("cuGraphDestroy", graph) == 0
    assert cuda.call("cuGraphLaunch", executable, stream) == 0
    assert cuda.call("cuGraphExecDestroy", executable) == 0
    with cuda.breaking("unknown executable graph"):
        assert cuda.call("cuGraphLaunch", executable, stream) == INVALID_VALUE
    with cuda.breaking("unknown graph"):
        assert cuda.call("cuGraphDestroy", graph) == INVALID_VALUE


def test_captures_have_ids_of_their_own(cuda: Cuda) -> None:
    ids = []
    for _ in range(2):
        stream, state, found = begin(cuda), ctypes.c_int(), ctypes.c_uint64()
        arguments = (ctypes.byref(state), ctypes.byref(found), 0, 0, 0, 0)
        assert cuda.call("cuStreamGetCaptureInfo_v3", stream, *arguments) == 0
        assert state.value == ACTIVE
        ids.append(found.value)
    assert len(set(ids)) == 2
    assert 0 not in ids


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery", "cuCtxSynchronize"])
def test_what_is_captured_cannot_be_waited_for_and_the_attempt_ends_it(cuda: Cuda, call: str) -> None:
    stream = begin(cuda)
    with cuda.breaking("is waited for while"):
        assert cuda.call(call, *([] if call == "cuCtxSynchronize" else [stream])) == UNSUPPORTED
    assert status(cuda, stream) == INVALIDATED
    assert end(cuda, stream) == (CAPTURE_INVALIDATED, 0)
    assert cuda.call("cuCtxSynchronize") == 0


def test_other_streams_are_waited_for_during_a_capture(cuda: Cuda) -> None:
    other, stream = cuda.stream(), begin(cuda)
    assert cuda.synchronize(other) == 0
    assert end(cuda, stream)[0] == 0


def recorded(cuda: Cuda) -> tuple[int, int, int, int]:
    """Return (executable, stream, address, handle): a graph fills the first half of memory with ones, and copies it to the second.

    Before, the memory is zero.
    """
    address, handle = cuda.block(2)
    assert cuda.fill(address, 0, 2 * G) == 0
    stream = begin(cuda)
    assert cuda.fill(address, 1, G, stream) == 0
    assert cuda.copy(address + G, address, G, 3, stream) == 0
    code, graph = end(cuda, stream)
    assert code == 0
    nodes = ctypes.c_size_t()
    assert (cuda.call("cuGraphGetNodes", graph, 0, ctypes.byref(nodes)), nodes.value) == (0, 2)
    code, executable = cuda.make("cuGraphInstantiateWithFlags", graph, 0)
    assert (code, cuda.call("cuGraphDestroy", graph)) == (0, 0)
    return executable, stream, address, handle


def test_copies_and_fills_are_recorded_and_done_at_every_launch(cuda: Cuda) -> None:
    executable, stream, address, _ = recorded(cuda)
    assert cuda.read(address + G, G)[1] == bytes(G), "nothing is done while it is recorded"
    for _ in range(2):
        assert cuda.fill(address, 7, 2 * G) == 0
        assert cuda.call("cuGraphLaunch", executable, stream) == 0
        assert cuda.synchronize(stream) == 0
        assert cuda.read(address, 2 * G)[1] == b"\x01" * 2 * G


@pytest.mark.parametrize("keeps", [False, True])
def test_nodes_follow_what_is_mapped_unless_they_are_to_keep_the_memory_of_their_instantiation(
    cuda: Cuda, keeps: bool
) -> None:
    cuda.simulator.set("graphs_keep_memory", keeps)
    executable, stream, address, handle = recorded(cuda)
    assert (cuda.unmap(address, 2 * G), cuda.release(handle)) == (0, 0)
    code, other = cuda.create(2 * G)
    assert (code, cuda.map(address, 2 * G, other), cuda.access(address, 2 * G)) == (0, 0, 0)
    if keeps:
        with cuda.breaking("uses the memory that was mapped when it was instantiated"):
            assert cuda.call("cuGraphLaunch", executable, stream) == ILLEGAL_ADDRESS
    else:
        assert cuda.call("cuGraphLaunch", executable, stream) == 0
        assert cuda.synchronize(stream) == 0
        assert cuda.read(address, 2 * G)[1] == b"\x01" * 2 * G


def test_copies_of_pageable_memory_are_counted(cuda: Cuda) -> None:
    (address, _), stream = cuda.block(), cuda.stream()
    content = ctypes.create_string_buffer(G)
    before = cuda.simulator.stats().pageable_copies
    assert cuda.copy(address, ctypes.addressof(content), G, 1, stream) == 0
    assert cuda.read(address, 8)[0] == 0
    assert cuda.simulator.stats().pageable_copies == before + 2
    assert cuda.fill(address, 1, G, stream) == 0
    assert cuda.copy(address, address, 0, 3, stream) == 0
    assert cuda.simulator.stats().pageable_copies == before + 2


def test_other_work_of_a_captured_stream_is_refused_since_it_cannot_be_recorded_here(cuda: Cuda) -> None:
    (address, _), event = cuda.block(), cuda.event()
    content = ctypes.create_string_buffer(G)
    stream = begin(cuda)
    assert cuda.copy(address, ctypes.addressof(content), G, 1, stream) == NOT_SUPPORTED, "of pageable memory"
    assert cuda.call("cuEventRecord", event, stream) == NOT_SUPPORTED
    assert cuda.call("cuStreamWaitEvent", stream, event, 0) == NOT_SUPPORTED
    assert end(cuda, stream)[0] == 0


def allocate(cuda: Cuda) -> int:
    code, handle = cuda.create(G)
    return code or cuda.release(handle)


@pytest.mark.parametrize(("mode", "own", "others"), [(GLOBAL, 900, 900), (THREAD_LOCAL, 900, 0), (RELAXED, 0, 0)])
@pytest.mark.parametrize("is_own", [True, False], ids=["own", "other"])
def test_a_capture_bears_allocations_as_its_mode_says(
    cuda: Cuda, mode: int, own: int, others: int, is_own: bool
) -> None:
    stream = begin(cuda, mode)

    def in_context() -> int:
        cuda.use(0)
        return allocate(cuda)

    code = allocate(cuda) if is_own else in_thread(in_context)
    expected = own if is_own else others
    assert code == expected
    assert status(cuda, stream) == (INVALIDATED if expected else ACTIVE)
    assert end(cuda, stream)[0] == (CAPTURE_INVALIDATED if expected else 0)


def test_a_thread_can_take_its_own_calls_out(cuda: Cuda) -> None:
    stream, mode = begin(cuda, GLOBAL), ctypes.c_int(RELAXED)
    assert cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode)) == 0
    assert allocate(cuda) == 0
    assert (cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode)), mode.value) == (0, RELAXED)
    assert end(cuda, stream)[0] == 0


def test_a_capture_begins_once_on_a_stream_of_ones_own_and_ends_where_it_began(cuda: Cuda) -> None:
    stream = begin(cuda, THREAD_LOCAL)
    with cuda.breaking("being captured already"):
        assert cuda.call("cuStreamBeginCapture_v2", stream, RELAXED) == ILLEGAL_STATE
    with cuda.breaking("the default stream"):
        assert cuda.call("cuStreamBeginCapture_v2", 0, RELAXED) == UNSUPPORTED
    with cuda.breaking("not being captured"):
        assert end(cuda, cuda.stream()) == (ILLEGAL_STATE, 0)

    def elsewhere() -> tuple[int, int]:
        cuda.use(0)
        return end(cuda, stream)

    with cuda.breaking("by another thread"):
        assert in_thread(elsewhere) == (WRONG_THREAD, 0)
    assert end(cuda, stream)[0] == 0
