"""The optional contract of communication between the ranks of one model."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from hardpoint.interfaces.contract import Contract

if TYPE_CHECKING:
    from torch import Tensor


class Collectives(Contract, contract=True):
    """Collective operations of one rank; made by the descriptor's factory with the device as its only argument.

    All ranks call the same operations in the same order (a `receive` for a `send`), with tensors of one shape and dtype, on their own
    devices and of any strides. An operation sees what was queued on the device before it, and what is queued after it sees its result;
    only `barrier` has the host wait for the device. With a rank that died, or that does not come within the timeout of `start`, an
    operation raises WorkerError, or the next wait for the device fails; it does not hang.
    """

    @abstractmethod
    def start(self, rank: int, world_size: int, init_method: str, timeout: float) -> None:
        """Join the group; raises WorkerError when not all ranks are there within `timeout` seconds.

        Args:
            init_method: `tcp://host:port/group`, with one name for all ranks of a group; several groups may share an address. Rank 0
                serves the address, unless it ends in `?served`: then somebody else does already. Or `file:///path#group`, for ranks of one
                host: a file that all of them can open, which several groups share, and which is not removed.
            timeout: of each later operation, too, in seconds.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor, of any shape, by the sum over all ranks."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, axis: int) -> Tensor:
        """Return all ranks' tensors joined along an axis, in the order of ranks: a new tensor with that axis `world_size` times as long.

        Args:
            tensor: of at least one axis.
            axis: of the tensor; a negative one counts from the last.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace the tensor, of any shape, by that of rank `source`, which keeps its own."""

    @abstractmethod
    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor of any shape to another rank, which calls `receive`; it may be written to once this returns."""

    @abstractmethod
    def receive(self, tensor: Tensor, rank: int) -> None:
        """Receive into the tensor what rank `rank` sends, of the same shape and dtype."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called it; the host waits for the device too."""

    def suspend(self) -> bool:
        """Give back the device memory of what the library keeps for the group; return whether that was done. Default: it is not.

        All ranks call it alike, with no operation under way, and call nothing but `resume` and `stop` after it. What it raises leaves the
        memory as it was, and the group usable.
        """
        return False

    def resume(self) -> None:
        """Take back what `suspend` gave, at the same addresses, so that captured steps hold; all ranks call it alike. Default: nothing.

        Raises WorkerError: the group is suspended still.
        """

    @abstractmethod
    def stop(self) -> None:
        """Leave the group; callable in any state."""
