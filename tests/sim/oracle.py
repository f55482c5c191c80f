"""What must hold in a simulation, kept outside of everything under test.

The content of a block is a function of its name, so any other byte is a wrong byte. Of every block
the oracle knows what hosts were told: stored for good, gone for good, or nothing certain, because
an answer was lost or two operations met. Only certain knowledge is held against the tier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from entresol_proto.status import Status

Name = tuple[str, bytes]  # space (tenant, with its salt if it has one), engine key

SALTS = ("s", "t")  # every tenant has a namespace with each
FILL = 0xEE  # what a destination holds before
_FILLED = bytes((FILL,))
OVERLAPS = -1  # no epoch: the other kind of call was under way when this one began
# A put that ended so stored nothing and will not.
REFUSED = frozenset({
    Status.BUSY, Status.NO_SPACE, Status.QUOTA, Status.TOO_LARGE, Status.NOT_ADMITTED,
    Status.BREAKER_OPEN, Status.BAD_REQUEST, Status.UNSUPPORTED,
})  # fmt: skip
STORED = frozenset({Status.OK, Status.EXISTS})


def space_of(tenant: str, salt: str) -> str:
    """How the oracle names a namespace."""
    return tenant if salt == SALTS[0] else f"{tenant}/{salt}"


def salt_of(space: str) -> str:
    """The salt of a namespace, from its name."""
    return space.partition("/")[2] or SALTS[0]


@dataclass(slots=True)
class Story:
    """What is known of one block."""

    durable: bool = False  # acknowledged, and nobody asked to forget it since
    forgotten: bool = False  # acknowledged, and nobody began to store it since
    put_epoch: int = 0  # puts begun
    forget_epoch: int = 0  # forgets begun
    puts: int = 0  # under way
    forgets: int = 0
    haunted: bool = False  # a put without an answer may still store it
    cursed: bool = False  # a forget without an answer may still drop it


@dataclass(frozen=True, slots=True)
class Look:
    """What binds the daemon at a moment. A read that two of them enclose is judged by what held in
    between: not by what was true, was not, and became true again."""

    must_be: bool
    must_not_be: bool
    put_epoch: int
    forget_epoch: int


_NEVER_OFFERED = Look(False, True, 0, 0)


@dataclass(slots=True)
class Oracle:
    """`honest`: the media lose and invent nothing by themselves, so durable and forgotten bind."""

    seed: int
    honest: bool = True
    sizes: Sequence[int] = (1, 700, 3000, 4096, 9000)
    tried: int = 0
    served: int = 0
    wrong_bytes: int = 0
    lost: int = 0
    resurrected: int = 0
    corrupt_seen: int = 0  # statuses CORRUPT or CONFLICT that a host got
    notes: list[str] = field(default_factory=list)
    stories: dict[Name, Story] = field(default_factory=dict)
    excuse: Callable[[Name], bool] = lambda _name: False  # events told that it is gone
    trace: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    lines: list[str] | None = None  # of the trace, when somebody wants to read it
    _contents: dict[Name, bytes] = field(default_factory=dict)

    # What blocks are.

    def content(self, space: str, key: bytes) -> bytes:
        """The one content a block can have: half of it compresses."""
        found = self._contents.get((space, key))
        if found is None:
            seed = hashlib.blake2b(space.encode() + b"\0" + key, digest_size=32).digest()
            size = self.sizes[seed[0] % len(self.sizes)] + seed[1] % 5
            noise = hashlib.shake_128(seed).digest(-(-size // 2))
            found = (noise + seed * (size // 64 + 1))[:size]
            self._contents[(space, key)] = found
        return found

    def note(self, *what: object) -> None:
        """One line of the run's trace; equal seeds give equal traces."""
        text = " ".join(map(str, what))
        self.trace.update(text.encode() + b"\n")
        if self.lines is not None:
            self.lines.append(text)

    def accuse(self, text: str) -> None:
        """Something that must not be."""
        self.note("!!", text)
        if len(self.notes) < 20:
            self.notes.append(text)

    # What hosts were told.

    def story(self, name: Name) -> Story:
        """Of one block."""
        found = self.stories.get(name)
        if found is None:
            found = self.stories[name] = Story()
        return found

    def put_begins(self, names: Iterable[Name]) -> list[int]:
        """Returns what `put_ended` wants to know."""
        epochs = []
        for name in names:
            story = self.story(name)
            story.put_epoch += 1
            story.puts += 1
            story.forgotten = False
            epochs.append(OVERLAPS if story.forgets else story.forget_epoch)
        return epochs

    def put_ended(
        self, names: Sequence[Name], epochs: Sequence[int], statuses: Sequence[Status | None],
        *, durable: bool,
    ) -> None:  # fmt: skip
        """`None`: the call was cancelled."""
        for name, epoch, status in zip(names, epochs, statuses, strict=True):
            story = self.stories[name]
            story.puts -= 1
            if status in STORED:
                alone = story.forget_epoch == epoch and not story.forgets and not story.cursed
                if durable and alone:
                    story.durable = True
            elif status not in REFUSED:
                story.haunted = True

    def forget_begins(self, names: Iterable[Name]) -> list[int]:
        """Returns what `forget_ended` wants to know."""
        epochs = []
        for name in names:
            story = self.story(name)
            story.forget_epoch += 1
            story.forgets += 1
            story.durable = False
            epochs.append(OVERLAPS if story.puts else story.put_epoch)
        return epochs

    def forget_ended(self, names: Sequence[Name], epochs: Sequence[int], *, complete: bool) -> None:
        """`complete`: every shard said that they are gone."""
        for name, epoch in zip(names, epochs, strict=True):
            story = self.stories[name]
            story.forgets -= 1
            if not complete:
                story.cursed = True
            elif not story.puts and not story.haunted and story.put_epoch == epoch:
                story.forgotten = True

    def quiet(self) -> None:
        """Nothing is under way anywhere: what had no answer has happened or never will."""
        for story in self.stories.values():
            story.haunted = story.cursed = False

    # What hosts saw.

    def look(self, name: Name) -> Look:
        """What must be there, or must not, before a read."""
        story = self.stories.get(name)
        if story is None:
            return _NEVER_OFFERED
        return Look(story.durable, story.forgotten, story.put_epoch, story.forget_epoch)

    def saw(self, space: str, key: bytes, raw: bytes | memoryview | bytearray) -> None:
        """A read was answered OK with these bytes."""
        self.served += 1
        if bytes(raw) != self.content(space, key):  # comparing views is slow
            self.wrong_bytes += 1
            self.accuse(f"wrong bytes of {space} {key.decode()}")

    def judge(self, name: Name, before: Look, present: bool | None) -> None:
        """A read or look-up ended; `present` is None when the answer says nothing about it."""
        if not self.honest or present is None:
            return
        after = self.look(name)
        forgot = after.forget_epoch != before.forget_epoch
        put = after.put_epoch != before.put_epoch
        if present and before.must_not_be and after.must_not_be and not put:
            self.resurrected += 1
            self.accuse(f"{name[0]} {name[1].decode()} is back")
        if not present and before.must_be and after.must_be and not forgot:
            if self.excuse(name):
                self.stories[name].durable = False
                return
            self.lost += 1
            self.accuse(f"durable {name[0]} {name[1].decode()} is lost")

    def untouched(self, view: memoryview | bytearray | bytes) -> bool:
        """True when a destination holds what it held before, or zeros."""
        raw = bytes(view)
        return not raw.strip(b"\0") or not raw.strip(_FILLED)
