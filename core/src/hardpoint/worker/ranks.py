"""A rank among others: whether it can be one, where ranks meet, the groups that it joins, and collectives over torch's process groups."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import torch
from torch import distributed
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions, PrefixStore

from hardpoint.interfaces.backend import BackendDescriptor, Device
from hardpoint.interfaces.collectives import Collectives
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError, WorkerError
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint.models import ParallelRank, Ranks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

    from hardpoint.interfaces.collectives import Collectives


def parallel_rank_of(config: WorkerConfig) -> ParallelRank:
    """Return the place that a configuration gives its rank."""
    return ParallelRank(config.tensor_rank, config.tensor_parallel_size, config.stage, config.pipeline_parallel_size)


def check_ranks(config: WorkerConfig, descriptor: BackendDescriptor, device: Device) -> None:
    """Refuse what cannot be a rank here, before anything is started.

    Raises:
        ConfigError: sizes, rank and address do not go together.
        CapabilityRefused: the backend does not claim this number of ranks; with all reasons.
    """
    tensor, stages, world = config.tensor_parallel_size, config.pipeline_parallel_size, config.world_size
    if tensor < 1 or stages < 1 or tensor * stages != world or not 0 <= config.rank < world:
        raise ConfigError(
            f"rank {config.rank} of {world} is no place among ranks",
            found=f"tensor_parallel_size={tensor}, pipeline_parallel_size={stages}",
            hint="world_size is tensor_parallel_size * pipeline_parallel_size, and ranks count from 0",
        )
    check_claims(config, descriptor, device)
    if world == 1:
        return
    if not config.init_method:
        raise ConfigError(
            f"rank {config.rank} of {world} does not know where the ranks meet",
            found="an empty init_method",
            hint="Give init_method as tcp://host:port/group",
        )
    RendezvousPoint.parse(config.init_method)


def check_claims(config: WorkerConfig, descriptor: BackendDescriptor, device: Device) -> None:
    """Raise CapabilityRefused, with all reasons, where the backend does not claim as many ranks as the sizes ask for."""
    tensor = config.tensor_parallel_size
    world = tensor * config.pipeline_parallel_size
    if world == 1:
        return
    claims, reasons = descriptor.capabilities(device), []
    if tensor not in claims.tensor_parallel:
        reasons.append(f"{tensor} tensor-parallel ranks are not supported (supported: {claims.tensor_parallel})")
    if not claims.collectives or descriptor.collectives is None:
        reasons.append(f"{world} ranks need collectives, and the backend has none")
    if config.draft_model is not None and config.pipeline_parallel_size > 1:
        reasons.append(
            "a draft model guesses in one stage, and the stages before it would not know its guesses in time"
        )
    if reasons:
        raise CapabilityRefused(
            f"the {descriptor.name} backend cannot run {world} ranks", tuple(reasons), hint="Run with one rank"
        )


def join_ranks(config: WorkerConfig, descriptor: BackendDescriptor, device: Device) -> tuple[Ranks, ExitStack]:
    """Join the groups of a rank: those that share its layers, and those of its place in each stage.

    Rank 0 of all serves the address, unless it is served already; every group has a name of its own there. A rank may come much later than
    others, since what it plans may be compiled and tried first; who ends ranks that never come is the executor.

    Returns:
        The groups, and what leaves them when it is closed.

    Raises:
        WorkerError: not all ranks came, or they did not join within `communication_timeout` seconds.
    """
    rendezvous, place = RendezvousPoint.parse(config.init_method), parallel_rank_of(config)
    with ExitStack() as groups, _all_ranks(rendezvous, config.rank, config.world_size):

        def join(name: str, rank: int, size: int) -> Collectives | None:
            if size == 1:
                return None
            collectives: Collectives = descriptor.make("collectives", device)
            groups.callback(collectives.stop)
            method = rendezvous.subgroup(name, served=config.rank != 0)
            collectives.start(rank, size, method, config.communication_timeout)
            return collectives

        tensor = join(f"stage{place.stage}", place.tensor_rank, place.tensor_size)
        pipeline = join(f"pipeline{place.tensor_rank}", place.stage, place.stages)
        return Ranks(tensor, pipeline), groups.pop_all()


MEETING_SECONDS = 1800.0
"""Most seconds between the first rank that has planned its model and the last one."""


@contextmanager
def _all_ranks(rendezvous: RendezvousPoint, rank: int, size: int) -> Iterator[None]:
    """Wait until all ranks are here; the address stays served until the end of the block. Raises WorkerError."""
    limit, end = timedelta(seconds=MEETING_SECONDS), time.monotonic() + MEETING_SECONDS
    try:
        store = store_at(rendezvous, serve=rank == 0 and not rendezvous.served, timeout=limit)
        _meet(PrefixStore(f"{rendezvous.group}/planned", store), rank, size, end)
    except (RuntimeError, OSError) as error:
        raise WorkerError(
            f"rank {rank} of {size} waited {MEETING_SECONDS:g} s for the others to plan their model",
            found=_first_line(error),
            hint="Look at the other ranks' logs: one has not started, or cannot reach this address",
        ) from error
    yield


_SERVED = "served"
_BACKLOG = 128

_servers: WeakValueDictionary[tuple[str, int], Any] = WeakValueDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class RendezvousPoint:
    """An `init_method`, taken apart.

    Attributes:
        host: of a file, the loopback interface, since the ranks are on one host.
        group: name of the group; empty where none is given.
        served: somebody serves the address already.
        file: that the ranks of one host share; empty for an address.
    """

    host: str
    port: int
    group: str = ""
    served: bool = False
    file: str = ""

    @classmethod
    def parse(cls, init_method: str) -> RendezvousPoint:
        """Read `tcp://host:port[/group][?served]` or `file:///path[#group]`; raises ConfigError."""
        try:
            parts = urlsplit(init_method)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts = urlsplit("")
            host = port = None
        if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc and not parts.query:
            return cls("127.0.0.1", 0, parts.fragment, True, parts.path)
        if not host or not port or parts.scheme != "tcp" or parts.query not in ("", _SERVED) or parts.fragment:
            raise ConfigError(
                "the address where the ranks meet cannot be read",
                found=repr(init_method),
                hint="Give init_method as tcp://host:port/group, with ?served at the end where the address is served already, "
                "or as file:///path#group for ranks of one host",
            )
        return cls(host, port, parts.path.strip("/"), parts.query == _SERVED)

    def subgroup(self, name: str, *, served: bool) -> str:
        """Return the `init_method` of a group whose name goes on with `name`, at the same address."""
        group = f"{self.group}/{name}" if self.group else name
        if self.file:
            return f"file://{self.file}#{group}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{group}" + (f"?{_SERVED}" if self.served or served else "")


def store_at(rendezvous: RendezvousPoint, *, serve: bool, timeout: timedelta) -> Store:
    """Return the store at an address or in a file, which ends when nobody of this process holds it any more.

    Raises RuntimeError, OSError.

    Args:
        serve: this process serves the address, on that interface alone, unless it does already for another group.
    """
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    if rendezvous.file:
        file: Store = FileStore(rendezvous.file, -1)
        file.set_timeout(timeout)
        return file
    if not serve:
        client: Store = TCPStore(rendezvous.host, rendezvous.port, timeout=timeout, wait_for_workers=False)
        return client
    address = (rendezvous.host, rendezvous.port)
    with _lock:
        store = _servers.get(address)
        if store is None:
            family = socket.AF_INET6 if ":" in rendezvous.host else socket.AF_INET
            with socket.create_server(address, family=family, backlog=_BACKLOG) as listening:
                # The store owns the file descriptor from here on.
                store = TCPStore(
                    *address,
                    is_master=True,
                    timeout=timeout,
                    wait_for_workers=False,
                    master_listen_fd=listening.detach(),
                )
            _servers[address] = store
        return store


def local_address(host: str) -> str:
    """Return this machine's address on the network that leads to `host`; raises WorkerError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WorkerError(f"no network leads to {host}, where the ranks meet", found=str(error)) from error


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
        # Registered buffers of captured steps would be mapped by the other ranks, which would still read that memory after a sleep.
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
        options = _in_order(AllreduceOptions())
        self._in_place(tensor, lambda dense: self._joined().allreduce([dense], options), "all_reduce")

    def all_gather(self, tensor: Tensor, axis: int) -> Tensor:
        """Return all ranks' tensors, which have one shape, joined along an axis, in the order of ranks."""
        group, shape = self._joined(), list(tensor.shape)
        joined = tensor.new_empty((self._size * shape[0], *shape[1:]))
        options = _in_order(AllgatherOptions())
        self._wait(lambda: group._allgather_base(joined, tensor.contiguous(), options), "all_gather")
        axis %= tensor.dim()
        if axis == 0:
            return joined
        by_rank = joined.view(self._size, *shape)
        shape[axis] *= self._size
        return by_rank.movedim(0, axis).reshape(shape)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace the tensor by that of rank `source`."""
        options = _in_order(BroadcastOptions())
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

    def suspend(self) -> bool:
        """Give back the device memory of the group's communicators, where the library can; raises WorkerError."""
        if not self._can_suspend(self._joined()):
            return False
        self._change("suspend")
        return True

    def resume(self) -> None:
        """Take back what `suspend` gave; raises WorkerError."""
        self._change("resume")

    def _can_suspend(self, group: Any) -> bool:
        """Return whether a group gives its memory back. What a backend adds is whether its library does; by default none is known to."""
        return False

    def _change(self, name: str) -> None:
        try:
            getattr(self._joined(), name)()
        except RuntimeError as error:
            raise WorkerError(
                f"rank {self._rank} of {self._size} could not {name} its communicators",
                found=_first_line(error),
                hint="Look at the other ranks' logs, and at the free memory of their devices",
            ) from error

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


def _in_order(options: Any) -> Any:
    """Let an operation run on the current stream: on one of the group's, each would take two events and a change of streams."""
    options.asyncOp = False
    return options


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
