"""What executors have in common whose ranks run elsewhere: steps and answers as messages, and when calls are refused."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hardpoint.executor.base import Executor
from hardpoint.executor.calls import CallSchema
from hardpoint.executor.limits import RankLimits
from hardpoint.executor.messages import Buffer
from hardpoint.executor.rounds import results
from hardpoint.executor.steps import StepEncoder, decode_output
from hardpoint.interfaces.batch import StepInput, StepOutput
from hardpoint.interfaces.errors import EngineDead, ForkedProcess, NothingToCollect
from hardpoint.interfaces.worker import ModelInfo, WorkerConfig


class RemoteExecutor(Executor):
    """Ranks that are reached by messages, and belong to the process that made the executor."""

    def __init__(self, config: WorkerConfig, limits: RankLimits | None) -> None:
        self._limits = limits or RankLimits()
        self._driver = config.driver_rank
        self._steps = StepEncoder()
        self._last_call = 0
        self._pid = os.getpid()
        self._is_shut_down = False
        self._outcomes: deque[Callable[[], list[Any]]] = deque()

    def submit(self, step: StepInput) -> None:
        """Send one step to every rank; raises RankFailed, EngineDead, ForkedProcess."""
        self._check()
        self._outcomes.append(self._send_step(self._steps.encode(step)))

    def collect(self) -> StepOutput:
        """Return the driver rank's output of the oldest step that was submitted.

        When all ranks raise the same error, or the driver alone OutputFailed, that error is raised and the ranks go on; otherwise they
        are out of step, and RankFailed is raised.
        """
        self._check()
        if not self._outcomes:
            raise NothingToCollect("there is no step whose output could be collected", hint="Submit one first")
        outcomes = self._outcomes.popleft()()
        if any(isinstance(outcome, BaseException) for outcome in outcomes):
            raise self._failed_step(outcomes)
        return decode_output(outcomes[self._driver])

    @abstractmethod
    def _send_step(self, parts: list[Buffer]) -> Callable[[], list[Any]]:
        """Send every rank the step that a `StepEncoder` wrote.

        Returns what waits for the outcomes: each rank's output as a message, or its exception.
        """

    @abstractmethod
    def _failed_step(self, outcomes: Sequence[Any]) -> BaseException:
        """Return what a step raises of which these are the outcomes, an exception among them."""

    @abstractmethod
    def _check_ranks(self) -> None:
        """Raise RankFailed where a rank has failed."""

    def _check(self) -> None:
        """Raise ForkedProcess, EngineDead or RankFailed where the ranks cannot be called from here any more."""
        if os.getpid() != self._pid:
            raise ForkedProcess("the ranks belong to the process that started them", hint="Make an engine in this one")
        if self._is_shut_down:
            raise EngineDead("the ranks were shut down", hint="Make a new engine")
        self._check_ranks()

    def _next_call(self) -> int:
        self._last_call += 1
        return self._last_call

    def _results(self, schema: CallSchema, outcomes: Sequence[Any]) -> list[Any]:
        """Return what the ranks answered to a call; see `rounds.results`."""
        answers = results(schema, outcomes)
        if schema.name == "load" and isinstance(answers[0], ModelInfo):
            self._steps.block_size = answers[0].attention.block_size
        return answers
