"""The ring: every frame arrives as it was sent, whatever its size and whatever pieces it goes in."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.executor.link import Link, LinkFiles
from hardpoint.executor.ring import RingReader, RingWriter, make_counters
from hardpoint.executor.transport import Kind
from hardpoint.interfaces.errors import MalformedMessage


@contextmanager
def ring(capacity: int) -> Iterator[tuple[RingWriter, RingReader, memoryview]]:
    memory = memoryview(bytearray(capacity))
    counters = make_counters(capacity)
    try:
        yield RingWriter(memory, *counters), RingReader(memory, *counters), memory
    finally:
        for fd in counters:
            os.close(fd)


frames = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.lists(st.binary(max_size=200), max_size=4)), max_size=25)


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 256), sent=frames, together=st.integers(1, 4))
def test_frames_arrive_in_order_and_whole(capacity: int, sent: list[tuple[int, list[bytes]]], together: int) -> None:
    """Also where a frame is many times the ring, and where it ends at every place of it."""
    with ring(capacity) as (writer, reader, _):
        arrived: list[tuple[int, int, bytes]] = []

        def take(_: int = 0) -> None:
            while (frame := reader.read()) is not None:
                arrived.append((frame.kind, frame.call, bytes(frame.payload)))

        for call, (kind, parts) in enumerate(sent):
            writer.write(kind, call, parts, take)
            if call % together == 0:
                take()
        take()
        assert arrived == [(kind, call, b"".join(parts)) for call, (kind, parts) in enumerate(sent)]


def test_a_frame_of_many_rings_crosses_between_threads() -> None:
    payload = os.urandom(3 << 20)
    with ring(1 << 16) as (writer, reader, _):

        def wait(fd: int) -> None:
            assert select.select([fd], [], [], 20)[0]

        thread = threading.Thread(target=writer.write, args=(1, 2, [payload[:7], payload[7:]], wait))
        thread.start()
        while (frame := reader.read()) is None:
            wait(reader.fileno())
        thread.join()
        assert frame.payload == payload


@pytest.mark.parametrize("place", [0, 8])
def test_a_frame_without_its_mark_or_number_is_malformed(place: int) -> None:
    with ring(256) as (writer, reader, memory):
        writer.write(1, 1, [b"x"], lambda fd: None)
        memory[place] ^= 1
        with pytest.raises(MalformedMessage, match="frame 0 was expected"):
            reader.read()


def test_a_repeated_frame_is_malformed() -> None:
    with ring(32) as (writer, reader, _):
        writer.write(1, 1, [], lambda fd: None)
        assert reader.read() is not None
        # The same bytes once more: the counter says that there is a frame, the ring holds the one that was taken.
        os.eventfd_write(reader.fileno(), 32)
        with pytest.raises(MalformedMessage, match="frame 1 was expected"):
            reader.read()


def test_both_sides_of_a_link_agree_on_directions_and_heartbeat() -> None:
    files = LinkFiles.make(4096)
    assert LinkFiles.parse(files.to_text()) == files
    inherited = LinkFiles.parse(",".join(map(str, (*map(os.dup, files.all), 4096))))
    engine, rank = Link(files, is_rank=False), Link(inherited, is_rank=True)
    engine.send(Kind.CALL, 1, [b"question"], lambda fd: None)
    rank.send(Kind.RESULT, 1, [b"answer"], lambda fd: None)
    question, answer = rank.receive(), engine.receive()
    assert question is not None
    assert answer is not None
    assert (question.kind, bytes(question.payload)) == (Kind.CALL, b"question")
    assert (answer.kind, bytes(answer.payload)) == (Kind.RESULT, b"answer")
    assert not select.select([engine.failure_event], [], [], 0)[0]
    rank.send(Kind.FAILURE, 1, [], lambda fd: None)
    assert select.select([engine.failure_event], [], [], 0)[0]
    assert engine.receive() is not None
    assert not select.select([engine.failure_event], [], [], 0)[0]
    rank.beat()
    rank.beat()
    assert engine.heartbeat == 2
    engine.close()
    rank.close()
    engine.close()
