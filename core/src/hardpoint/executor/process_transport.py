"""Ranks as processes of this machine, with a ring of shared memory to and from each."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Sequence

from hardpoint.executor.interrupts import AllowedInterrupts
from hardpoint.executor.limits import RankLimits
from hardpoint.executor.link import Link, LinkFiles
from hardpoint.executor.messages import Buffer
from hardpoint.executor.processes import ChildProcesses
from hardpoint.executor.ranks import RankSpec, rank_specs
from hardpoint.executor.rendezvous import PrivateRendezvous
from hardpoint.executor.transport import Deadline, Frame, Kind, Transport
from hardpoint.interfaces.errors import MalformedMessage, RankFailed
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint.plugins import Resolved

_PATIENCE = 2.0
"""Seconds that an interrupt waits for a rank to take more of a message; from then on it is raised, and the message torn."""


class ProcessTransport(Transport):
    """Starts a process for each rank.

    Args:
        resolved: the backend, and the device of the first rank.
        config: of the whole engine; see `rank_specs`.
    """

    def __init__(self, resolved: Resolved, config: WorkerConfig, limits: RankLimits | None = None) -> None:
        super().__init__(limits)
        self._resolved, self._config = resolved, config
        self._links: list[Link] = []
        self._inbox: deque[tuple[int, Frame]] = deque()
        self._rendezvous: PrivateRendezvous | None = None
        self._processes = ChildProcesses("hardpoint.executor.rank_main", "rank {}", self.limits, self.fail)

    def start(self, deadline: Deadline) -> list[RankSpec]:
        """Start the processes; raises ConfigError where there are not enough devices, OSError."""
        specs = rank_specs(self._resolved, self._config)
        if len(specs) > 1:
            self._rendezvous = PrivateRendezvous()
            specs = rank_specs(self._resolved, self._config, init_method=self._rendezvous.init_method)
        files: list[LinkFiles] = []
        for _ in specs:
            files.append(LinkFiles.make())
            try:
                self._links.append(Link(files[-1], is_rank=False))
            except OSError:
                files[-1].close()
                raise
        self._processes.start(self._links, files, () if self._rendezvous is None else (self._rendezvous.file,))
        failures = [link.failure_event for link in self._links]
        self._arrivals = _poll(self._sources())
        self._arrivals_of = [_poll((self._processes.alarm, link.fileno(), *failures)) for link in self._links]
        return specs

    @property
    def pids(self) -> list[int]:
        """Process ids in the order of ranks."""
        return self._processes.pids

    def send(self, ranks: Sequence[int], kind: Kind, call: int, parts: Sequence[Buffer], deadline: Deadline) -> None:
        """Write one frame into each of these ranks' rings."""
        self._deadline = deadline
        for rank in ranks:
            try:
                self._links[rank].send(kind, call, parts, self._wait_for_room)
            except TimeoutError:
                raise self.fail_hanging(rank, deadline) from None

    def wait(self, seconds: float, first: int | None = None) -> bool:
        """Wait for frames, or for those of one rank and for failures."""
        if self._inbox or any(link.has_unread for link in self._links):
            return True
        arrivals = self._arrivals if first is None else self._arrivals_of[first]
        if not arrivals.poll(seconds * 1000):
            return False
        self.check()
        return True

    def receive(self) -> Sequence[tuple[int, Frame]]:
        """Return what is in the rings, and what was taken from them meanwhile."""
        self._take_frames()
        frames = list(self._inbox)
        self._inbox.clear()
        return frames

    def trace(self, rank: int) -> str:
        """Have a rank write its threads' tracebacks, and return that."""
        return self._processes.trace(rank)

    def kill(self) -> None:
        """End all processes and what they started."""
        self._processes.kill()

    def close(self, patience: float = 0.0) -> None:
        """End all processes, and close what was shared with them."""
        self.expect_end()
        self._processes.stop(patience if self._failure is None else 0.0)
        for link in self._links:
            link.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def is_watcher(self) -> bool:
        """Whether this is the thread that watches the processes."""
        return self._processes.is_keeper()

    def fail(self, rank: int, ended: str, output: str = "", hint: str = "") -> RankFailed:
        """Note a failure, and wake who waits for frames; see `Transport.fail`."""
        failure = super().fail(rank, ended, output, hint)
        self._processes.sound_alarm()
        return failure

    def _take_frames(self) -> None:
        for rank, link in enumerate(self._links):
            try:
                while (frame := link.receive()) is not None:
                    self._inbox.append((rank, frame))
                    if not link.has_unread:
                        break
            except MalformedMessage as error:
                raise self.fail_malformed(rank, error) from error

    def _wait_for_room(self, space: int) -> None:
        """Wait until a ring has room; meanwhile take what ranks send, so that none of them waits for room in turn."""
        room = _poll((space, *self._sources()))
        if not room.poll(min(self._deadline.left(), _PATIENCE) * 1000):
            with AllowedInterrupts():
                has_room = room.poll(self._deadline.left() * 1000)
            if not has_room:
                raise TimeoutError
        self.check()
        self._take_frames()

    def _sources(self) -> tuple[int, ...]:
        """Return the file descriptors that can be read when a rank has sent something or has failed."""
        return (self._processes.alarm, *(link.fileno() for link in self._links))


def _poll(sources: Sequence[int]) -> select.poll:
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    return poll
