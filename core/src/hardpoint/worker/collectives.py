"""Collective operations over torch's process groups."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import BroadcastOptions, PrefixStore

from hardpoint.interfaces.backend import Device
from hardpoint.interfaces.collectives import Collectives
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError, WorkerError
from hardpoint.worker.rendezvous import RendezvousPoint, store_at

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store


class TorchCollectives(Collectives):
    """One rank of a process group of its own: torch's global group is left alone, so that engines can share a process.

    The group is of the library that torch registers for the type of the device. Groups are torch's `Backend` objects, the same calls for
    every library. Operations may return before the device has done them, in the order of the device's current stream.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._group: Any = None
        self._store: Store | None = None
        self._rank, self._size = 0, 1

    def _make_group(self, store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Any:
        """Return a process group, one of the classes that torch derives from `torch.distributed.Backend`.

        Args:
            timeout: of joining, where the class joins when it is made, and of each operation.
            host: where the ranks meet, for classes that choose a network interface by it.
        """
        device = torch.device(self._device.torch_device)
        library = distributed.Backend.default_device_backend_map.get(device.type, "")
        group_class = getattr(distributed, f"ProcessGroup{library.upper()}", None)
        if group_class is None:
            raise CapabilityRefused(
                f"{size} ranks of backend '{self._device.backend}' cannot be joined",
                [
                    f"torch {torch.__version__} is built without its library of collectives, {library or 'of which it knows none'}"
                ],
                hint="Install torch's build for this device, or run one rank",
            )
        # What captured steps reduce would be mapped into the other ranks' processes, which would still read that memory after a sleep.
        require_env(
            f"{library.upper()}_GRAPH_REGISTER",
            "0",
            because=f"{library} would go on reading memory of captured steps that a sleep has given back",
        )
        options = group_class.Options()
        options._timeout = timeout
        group = group_class(store, rank, size, options)
        group.bound_device_id = device
        return group

    def start(self, rank: int, world_size: int, init_method: str, timeout: float) -> None:
        """Join the group; raises WorkerError when not all ranks are there within `timeout` seconds."""
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not one of {world_size}", hint="Ranks count from 0")
        address = RendezvousPoint.parse(init_method)
        self.stop()
        end = time.monotonic() + timeout
        try:
            serve = rank == 0 and not address.served
            self._store = store_at(address, serve=serve, timeout=timedelta(seconds=timeout))
            store = PrefixStore(address.group, self._store)
            self._group = self._make_group(store, rank, world_size, timedelta(seconds=timeout), address.host)
            self._rank, self._size = rank, world_size
            _meet(store, rank, world_size, end)
        except (RuntimeError, OSError) as error:
            self.stop()
            raise WorkerError(
                f"rank {rank} of {world_size} cannot join the others at {init_method} within {timeout:g} s",
                found=_first_line(error),
                hint="Look at the other ranks' logs: one has not started, or cannot reach this address",
            ) from error

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by the sum over all ranks."""
        self._in_place(tensor, lambda dense: self._joined().allreduce([dense]), "all_reduce")

    def all_gather(self, tensor: Tensor, axis: int) -> Tensor:
        """Return all ranks' tensors, which have one shape, joined along an axis, in the order of ranks."""
        group, shape = self._joined(), list(tensor.shape)
        joined = tensor.new_empty((self._size * shape[0], *shape[1:]))
        self._wait(lambda: group._allgather_base(joined, tensor.contiguous()), "all_gather")
        axis %= tensor.dim()
        if axis == 0:
            return joined
        by_rank = joined.view(self._size, *shape)
        shape[axis] *= self._size
        return by_rank.movedim(0, axis).reshape(shape)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace the tensor by that of rank `source`."""
        options = BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        self._in_place(tensor, lambda dense: self._joined().broadcast([dense], options), "broadcast")

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send to another rank."""
        self._wait(lambda: self._joined().send([tensor.contiguous()], rank, 0), "send")

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Receive from another rank into the tensor."""
        self._in_place(tensor, lambda dense: self._joined().recv([dense], rank, 0), "receive")

    def barrier(self) -> None:
        """Wait for all ranks."""
        flag = torch.zeros(1, device=self._device.torch_device)
        self.all_reduce(flag)
        # Reading the sum waits for the device as well.
        flag.item()

    def stop(self) -> None:
        """Leave the group; callable in any state."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            self._end_group(group)

    def _end_group(self, group: Any) -> None:
        """End a group, whose other ranks may be gone. Default: its own `shutdown`."""
        group.shutdown()

    def _joined(self) -> Any:
        if self._group is None:
            raise WorkerError("this rank is in no group of ranks", hint="Call start first")
        return self._group

    def _in_place(self, tensor: Tensor, begin: Callable[[Tensor], Any], name: str) -> None:
        dense = tensor.contiguous()
        self._wait(lambda: begin(dense), name)
        if dense is not tensor:
            tensor.copy_(dense)

    def _wait(self, begin: Callable[[], Any], name: str) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise WorkerError(
                f"rank {self._rank} of {self._size} failed in {name} with the other ranks",
                found=_first_line(error),
                hint="Another rank has died, hangs, or is in another operation; its own log says more",
            ) from error


def require_env(variable: str, value: str, *, because: str) -> None:
    """Set an environment variable that a library reads at its first use; raises ConfigError where it has another value already."""
    found = os.environ.setdefault(variable, value)
    if found != value:
        raise ConfigError(
            f"ranks cannot be joined with {variable}={found}",
            found=because,
            hint=f"Unset {variable}, or set it to {value}",
        )


def _meet(store: Store, rank: int, size: int, end: float) -> None:
    """Wait until every rank is here, and on rank 0, which may serve the store, until no other rank needs it any more."""

    def wait(names: list[str]) -> None:
        if names:
            store.wait(names, timedelta(seconds=max(end - time.monotonic(), 0.001)))

    others = range(1, size)
    if rank == 0:
        wait([f"here/{other}" for other in others])
        store.set("complete", "")
        wait([f"done/{other}" for other in others])
    else:
        store.set(f"here/{rank}", "")
        wait(["complete"])
        store.set(f"done/{rank}", "")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
