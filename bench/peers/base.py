"""What a peer is: how it is installed, its servers, its client, and the work they do.

Invariant: a peer's client runs in the peer's own interpreter and does the same work as ours: from
the caller's memory into another process, and from there back into the caller's memory. Where a
library only hands out memory of its own, the copy out of it is part of its time, as it is part of
its user's. Servers are reached over loopback only, on ports that nobody had.

Only the standard library: it is imported by the interpreters of peers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from bench.region import Region

Place = Literal["memory", "flash"]


@dataclass(frozen=True, slots=True)
class Work:
    """One size of the work.

    Attributes:
        region: file of the shared memory, see `Region`.
        folder: scratch of this peer, on the file system that flash is measured on.
        generations: how many batches exist at once; a batch is put and got by its generation.
        ports: free loopback ports, by the peer's own names for them.
        programs: folder with what the peer's Debian packages brought; empty without any.
    """

    block_bytes: int
    count: int
    region: str
    folder: str
    generations: int = 2
    ports: Mapping[str, int] = field(default_factory=dict)
    programs: str = ""

    @property
    def plain_bytes(self) -> int:
        return self.block_bytes * self.count

    def open_region(self) -> Region:
        """The caller's memory."""
        return Region(Path(self.region), self.block_bytes, self.count)

    def key(self, generation: int, block: int) -> str:
        """A name of 32 characters, as our keys have 32 bytes."""
        return f"bench-{generation:012d}-block-{block:07d}"

    def keys(self, generation: int) -> list[str]:
        """The names of one batch."""
        return [self.key(generation, block) for block in range(self.count)]


@dataclass(frozen=True, slots=True)
class Server:
    """A process of the peer to start before its client, and the port it then listens on.

    `command[0]` may be `python` (the peer's interpreter), a script of the peer's environment, or a
    program of its Debian packages.
    """

    name: str
    command: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)


class Client:
    """The peer's client, in the peer's own interpreter. Calls are timed from outside."""

    def put(self, generation: int) -> None:
        """Store the region's source blocks under the keys of this generation."""
        raise NotImplementedError

    def get(self, generation: int) -> None:
        """Bring the blocks of this generation into the region's `into`."""
        raise NotImplementedError

    def forget(self, generation: int) -> None:
        """Drop a generation, where putting it again would not replace it. Not timed."""

    def close(self) -> None:
        """Leave the servers."""


class Peer:
    """One peer; a file each, whose `PEER` is one of these.

    Attributes:
        name: also of its module and of its row.
        about: what is measured, for README and report.
        place: where its bytes lie when they are got.
        network: its bytes cross a connection between two processes, as ours over tcp do.
        wheels: pinned, with everything they need, installed without resolving.
        debs: Debian packages whose files are unpacked into the cache; nothing is installed.
        engine: the environment of `tests.engines` it runs in, instead of one of its own.
        environment: variables for its interpreters.
        ports: names of the ports it wants.
        own_network: its servers listen on every interface, so they get a network of their own.
    """

    name = ""
    about = ""
    place: Place = "memory"
    network = True
    wheels: tuple[str, ...] = ()
    debs: tuple[str, ...] = ()
    engine = ""
    environment: ClassVar[Mapping[str, str]] = {}
    ports: tuple[str, ...] = ()
    own_network = False

    def servers(self, work: Work) -> list[Server]:
        """What to start, in this order."""
        return []

    def client(self, work: Work) -> Client:
        """In the peer's interpreter: connect. Raises: whatever its library raises."""
        raise NotImplementedError

    def serve(self, work: Work) -> None:
        """In the peer's interpreter, when a server's command is `driver(...)`: serve for ever."""
        raise NotImplementedError

    def driver(self, role: str) -> list[str]:
        """The command of this peer's own code in its interpreter; `role` is client or serve."""
        return ["python", "-m", "bench.peers.drive", self.name, role]
