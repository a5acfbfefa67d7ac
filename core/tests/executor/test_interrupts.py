"""SIGINT kept back in the midst of a change, and let through where it may come."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from hardpoint.executor.interrupts import AllowedInterrupts, DeferredInterrupts, allow_between


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """A job in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_comes_at_the_end_of_the_outermost_body() -> None:
    reached = []

    def call() -> None:
        with DeferredInterrupts():
            with DeferredInterrupts():
                interrupt()
                reached.append("inner")
            reached.append("outer")
        pytest.fail("it did not come")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert reached == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_error_of_the_body_is_the_interrupts_context() -> None:
    def call(does: Callable[[], None]) -> None:
        with DeferredInterrupts():
            does()
            raise OSError("in the body")

    with pytest.raises(KeyboardInterrupt) as raised:
        call(interrupt)
    assert isinstance(raised.value.__context__, OSError)
    with pytest.raises(OSError, match="in the body"):
        call(lambda: None)


@pytest.mark.parametrize("comes", ["before", "inside"])
def test_where_it_is_allowed_an_interrupt_comes_at_once_and_a_second_one_is_deferred_again(comes: str) -> None:
    undone = []

    def call() -> None:
        with DeferredInterrupts():
            if comes == "before":
                interrupt()
            try:
                with AllowedInterrupts():
                    if comes == "inside":
                        interrupt()
                    pytest.fail("it was kept back")
            except KeyboardInterrupt:
                interrupt()
                undone.append("all")
                raise

    with pytest.raises(KeyboardInterrupt):
        call()
    assert undone == ["all"]


def test_in_what_is_allowed_it_can_be_deferred_again() -> None:
    reached = []

    def innermost() -> None:
        with AllowedInterrupts(), DeferredInterrupts():
            interrupt()
            reached.append("innermost")

    with DeferredInterrupts():
        with pytest.raises(KeyboardInterrupt):
            innermost()
        is_deferred = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert reached == ["innermost"]
    assert is_deferred


def test_a_handler_that_does_not_raise_is_called_as_often_as_signals_came() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    with DeferredInterrupts():
        interrupt()
        interrupt()
        assert calls == []
        with AllowedInterrupts():
            assert calls == [signal.SIGINT] * 2
            interrupt()
            assert calls == [signal.SIGINT] * 3
    assert calls == [signal.SIGINT] * 3
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_is_left_as_it_is(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with DeferredInterrupts(), AllowedInterrupts():
        assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_neither_defer_nor_allow_it() -> None:
    seen = []

    def other() -> None:
        with DeferredInterrupts():
            seen.append(signal.getsignal(signal.SIGINT))
            with AllowedInterrupts():
                seen.append(signal.getsignal(signal.SIGINT))

    def run() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    run()
    assert seen == [signal.default_int_handler] * 2
    with DeferredInterrupts():
        mine = signal.getsignal(signal.SIGINT)
        run()
    assert seen[2:] == [mine] * 2


def test_items_are_waited_for_with_interrupts_allowed_and_used_without() -> None:
    used = []

    def items() -> Iterator[int]:
        yield 1
        interrupt()
        pytest.fail("it was kept back")

    def use() -> None:
        with DeferredInterrupts():
            for item in allow_between(items()):
                used.append(item)

    with pytest.raises(KeyboardInterrupt):
        use()
    assert used == [1]
    assert list(allow_between(range(3))) == [0, 1, 2]
