"""Real signals to this very process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from vbm_ptm.engine.interruption import StopRequest
from vbm_ptm.errors import TrainingInterrupted

ORDERS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
WARNINGS = [(signal.SIGHUP, 129), (signal.SIGUSR1, 138), (signal.SIGUSR2, 140)]
SIGNALS = [*ORDERS, *WARNINGS]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


class Stopped(BaseException):
    """What the handler of before raises in place of ending the tests."""


@pytest.fixture(autouse=True)
def _handlers_of_before() -> Iterator[None]:
    """Let a signal that nobody turns into a request raise, so that it cannot end the tests."""

    def handler(number: int, frame: object) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, handler) for number, _ in SIGNALS}
    yield
    for number, original in before.items():
        signal.signal(number, original)


@pytest.mark.parametrize(("number", "exit_code"), SIGNALS)
def test_stop_request__turns_a_signal_into_an_orderly_stop(number: int, exit_code: int) -> None:
    stop = StopRequest()
    with stop.listening():
        stop.check()
        send(number)  # returns: the step in progress is finished
        with pytest.raises(TrainingInterrupted, match=signal.Signals(number).name) as caught:
            stop.check()
        assert caught.value.exit_code == exit_code
        assert stop.signal == number
        stop.check(0)  # all ranks are asked, and this one's signal came too late for that


@pytest.mark.parametrize(("number", "exit_code"), ORDERS)
def test_stop_request__second_signal_acts_at_once(number: int, exit_code: int) -> None:
    stop = StopRequest()
    with stop.listening():
        send(number)
        with pytest.raises(Stopped):
            send(number)


def test_stop_request__first_sigterm_after_sigint_is_still_a_request() -> None:
    stop = StopRequest()
    with stop.listening():
        send(signal.SIGINT)
        send(signal.SIGTERM)
        with pytest.raises(TrainingInterrupted):
            stop.check()


@pytest.mark.parametrize(("number", "exit_code"), WARNINGS)
def test_stop_request__warning_may_be_repeated(number: int, exit_code: int) -> None:
    stop = StopRequest()
    with stop.listening():
        send(number)
        send(number)
        send(signal.SIGTERM)
        with pytest.raises(TrainingInterrupted, match=signal.Signals(number).name):
            stop.check()


def test_stop_request__hears_only_the_warnings_that_are_chosen() -> None:
    stop = StopRequest(signals=["SIGUSR2"])
    with stop.listening():
        with pytest.raises(Stopped):
            send(signal.SIGUSR1)
        send(signal.SIGUSR2)
        assert stop.signal == signal.SIGUSR2


def test_stop_request__leaves_ignored_what_nohup_ignores() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest()
    with stop.listening():
        send(signal.SIGHUP)
        assert stop.signal == 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_stop_request__gives_the_handlers_back(is_interrupted: bool) -> None:
    before = [signal.getsignal(number) for number, _ in SIGNALS]
    stop = StopRequest()
    try:
        with stop.listening():
            assert [signal.getsignal(number) for number, _ in SIGNALS] != before
            if is_interrupted:
                send(signal.SIGTERM)
                stop.check()
    except TrainingInterrupted:
        assert is_interrupted
    assert [signal.getsignal(number) for number, _ in SIGNALS] == before


def test_stop_request__stops_after_the_planned_task() -> None:
    stop = StopRequest(2)
    stop.check()
    stop.check_after_task(0)
    with pytest.raises(TrainingInterrupted, match="after task 2 as planned") as caught:
        stop.check_after_task(1)
    assert caught.value.exit_code == 0
    StopRequest().check_after_task(1)


def test_stop_request__listens_to_nothing_outside_the_main_thread() -> None:
    """Python allows handlers in the main thread only; a run elsewhere must still start."""
    entered: list[bool] = []

    def in_thread() -> None:
        with StopRequest().listening():
            entered.append(True)

    before = [signal.getsignal(number) for number, _ in SIGNALS]
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert entered == [True]
    assert [signal.getsignal(number) for number, _ in SIGNALS] == before
