"""What the engine asks of an executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hardpoint.interfaces.batch import StepInput, StepOutput
from hardpoint.interfaces.errors import ConfigError
from hardpoint.interfaces.worker import WORKER_CALLS


class Executor(ABC):
    """Drives all ranks of one model as if they were one worker."""

    @abstractmethod
    def execute(self, step: StepInput) -> StepOutput:
        """Run one step on every rank and return the driver rank's output; raises whatever a worker raised."""

    @abstractmethod
    def shutdown(self) -> None:
        """End all workers; legal in any state and more than once."""

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a worker method by name on every rank; returns the results in the order of ranks."""
        if name not in WORKER_CALLS:
            raise ConfigError(
                f"'{name}' is not a call of the worker contract",
                hint=f"The calls are {', '.join(sorted(WORKER_CALLS))}",
            )
        return self._call(name, args)

    @abstractmethod
    def _call(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        """Call a checked method name on every rank."""
