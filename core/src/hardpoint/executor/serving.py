"""One rank's side of every executor that has ranks elsewhere: messages in, the worker's methods called, messages out.

Calls come by name from the contract's closed table, and what comes with them is checked against the contract's types before the worker
sees it. How messages travel is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hardpoint.executor.calls import SCHEMAS, Progress
from hardpoint.executor.messages import Buffer, encode
from hardpoint.executor.ranks import RankSpec
from hardpoint.executor.steps import StepDecoder, encode_output
from hardpoint.interfaces.errors import MalformedMessage

if TYPE_CHECKING:
    from torch import Tensor


class RankServer:
    """Serves one worker; made where the rank runs. What a method raises is the worker's own error, or MalformedMessage."""

    def __init__(self, spec: RankSpec) -> None:
        self._worker = spec.make_worker()
        self._steps = StepDecoder()

    def execute(self, message: Buffer) -> list[Buffer]:
        """Run the step that a `StepEncoder` wrote, and return its output as `encode_output` does."""
        self._worker.submit(self._steps.decode(message))
        return encode_output(self._worker.collect())

    def call(
        self,
        name: str,
        message: Buffer,
        *,
        progress: Progress | None = None,
        weights: Iterable[tuple[str, Tensor]] = (),
    ) -> list[Buffer]:
        """Make a call of the table and return its result as a message.

        Args:
            message: the arguments, as `CallSchema.encode` gives them.
            progress: what a plan's progress goes to, where the caller wants to know of it.
            weights: the tensors that follow the message, for a call that takes some.
        """
        schema = SCHEMAS.get(name)
        if schema is None:
            raise MalformedMessage(f"'{name}' is not a call of the worker contract")
        return encode(getattr(self._worker, name)(*schema.decode(message, progress, weights)))
