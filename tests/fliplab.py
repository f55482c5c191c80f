"""Damage of everything on flash: single bits, whole sectors, records in each other's place.

A world is an image of a data file with real sealed blocks of two tenants in it: two sealed
segments, one that a crash left open, tombstones, and the checkpoint of a clean close. Each function
tries one kind of damage and says how much was tried, detected and served. Invariant: damage is
undone after each try, so every try is of one damage alone.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from entresol_daemon.flash import checkpoint
from entresol_daemon.flash.device import BLOCK, aligned_buffer
from entresol_daemon.flash.engine import RECORD_HEADER_BYTES, Engine, extent_bytes
from entresol_daemon.flash.segment import (
    ROW_BYTES,
    RecordKind,
    Trailer,
    decode_header,
    decode_record_header,
    decode_superblock,
    decode_table,
    decode_trailer,
    encode_record_header,
    payload_hash,
)
from entresol_daemon.flash.sim import SimDevice
from entresol_daemon.flash.superblock import Superblock
from entresol_proto.ids import pack_token_ids
from entresol_proto.limits import CHUNK_BYTES_MIN
from entresol_proto.seal import block, codecs
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import FormatError, SealError, Status
from tests import simloop
from tests.crashlab import ImageDevice
from tests.flashlab import (
    FORGOTTEN,
    NAMESPACES,
    OPTIONS,
    SEGMENT,
    Name,
    device_bytes,
    get_all,
    key_of,
    open_engine,
    put,
)

SEGMENTS = 8
META = block.BlockMeta(b"p" * 16, 512, 16, pack_token_ids(range(16)))
CODECS = (codecs.RAW, codecs.ZSTD, codecs.PLANE)
_AT_ONCE = 48  # damaged records in one read: each carries one flip
_CRC_BYTES = 4
_FIELDS_BYTES = 176  # no structure has fields behind, but its check
_CHECK = range(496, 512)


@dataclass(slots=True)
class Damage:
    """What came of tries. `detected`: refused, or harmless and served exactly."""

    tried: int = 0
    detected: int = 0
    wrong: int = 0
    lost: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def saw(self, kind: str, good: bool, what: object = "") -> None:
        """One try: `good` when it was refused as it must be."""
        self.tried += 1
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        if good:
            self.detected += 1
        else:
            self.wrong += 1
            self.note(f"{kind} went unnoticed: {what}")

    def note(self, text: str) -> None:
        """Keep the first few words."""
        if len(self.notes) < 5:
            self.notes.append(text)


@dataclass(frozen=True, slots=True)
class Block:
    """One stored block and what opens it."""

    name: Name
    plain: bytes
    sealed: bytes
    key: block.BlockKey
    engine_key: bytes
    header: block.SealedHeader
    place: int = 0  # of its record on the device

    def opens(self, raw: bytes | memoryview, **change: object) -> Status:
        """Open `raw` as this block, as a host does. Raises: AssertionError for wrong bytes."""
        into = bytearray(len(self.plain))
        arguments: dict[str, object] = {
            "namespace_id": self.name[0], "wire_key": self.name[1],
            "engine_key": self.engine_key, "block_key": self.key,
        }  # fmt: skip
        arguments.update(change)
        status = block.open_into(memoryview(raw), memoryview(into), **arguments)  # type: ignore[arg-type]
        if status is Status.OK:
            assert into == self.plain, "wrong bytes"
        else:
            assert not any(into), "left bytes behind a failure"
        return status


def kv_bytes(size: int, rng: random.Random) -> bytes:
    """bf16 numbers of a narrow range, so that codecs find something to do."""
    found = bytearray(rng.randbytes(size))
    for at in range(1, size, 2):
        found[at] = 0x3C + (found[at] & 3)
    return bytes(found)


def make_block(rng: random.Random, name: Name, dek: bytes, size: int, codec_id: int) -> Block:
    """Seal some bytes as the daemon does."""
    plain, salt, engine_key = kv_bytes(size, rng), rng.randbytes(32), rng.randbytes(24)
    key = block.derive_block_key(dek, salt)
    identity = block.BlockIdentity(name[0], name[1], engine_key, DType.BF16, 1)
    out = bytearray(block.sealed_bytes_max(size, chunk_bytes=CHUNK_BYTES_MIN, meta_tokens=16))
    header = block.seal_into(
        memoryview(out), memoryview(plain), identity=identity, block_key=key, salt=salt,
        codec_id=codec_id, meta=META, chunk_bytes=CHUNK_BYTES_MIN,
    )  # fmt: skip
    sealed = bytes(out[: header.sealed_bytes])
    return Block(name, plain, sealed, key, engine_key, header)


class World:
    """See the module. `image` is shared; whoever changes it puts it back."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.deks = {namespace: self.rng.randbytes(32) for namespace in NAMESPACES}
        self.blocks: dict[Name, Block] = {}
        self.gone: set[Name] = set()
        self.superblock: Superblock
        self.checkpoint: tuple[Superblock, Path] = simloop.run(self._checkpoint(folder))
        device = SimDevice(device_bytes(SEGMENTS), seed=seed)
        simloop.run(self._fill(device))
        self.image = bytearray(device.image())

    async def _fill(self, device: SimDevice) -> None:
        engine = await open_engine(device, seed=self.seed)
        self.superblock = engine._superblock
        number = 0
        while engine.segment_info(2).blocks < 6:
            name = (NAMESPACES[number % 2], key_of(number))
            size = self.rng.choice((900, 5000, CHUNK_BYTES_MIN + 700))
            made = make_block(
                self.rng, name, self.deks[name[0]], size, CODECS[number % len(CODECS)]
            )
            slot, future = put(engine, name, made.sealed, stream=bytes(16))
            assert await future is Status.OK
            base = self.superblock.segment_at(engine.index.m_segment[slot])
            self.blocks[name] = replace(made, place=base + engine.index.m_offset[slot] * BLOCK)
            number += 1
            if number == 5:  # tombstones in the first segment
                name, _ = self.blocks.popitem()
                engine.remove(engine.index.find(*name), FORGOTTEN)
                self.gone.add(name)
                await engine.barrier()
        await engine._writer.drain()
        await engine.close(clean=False)

    async def _checkpoint(self, folder: Path) -> tuple[Superblock, Path]:
        path = folder / "flips.arrow"
        device = SimDevice(device_bytes(SEGMENTS), seed=self.seed)
        engine = await open_engine(device, replace(OPTIONS, checkpoint_path=path), seed=1)
        for number in range(6):
            _, future = put(engine, (NAMESPACES[0], key_of(number)), b"x" * 900)
            assert await future is Status.OK
        await engine.close(clean=True)
        found = decode_superblock(device.image_at(0, BLOCK), 0)
        assert found is not None
        assert found.clean
        return found, path

    def segment_of(self, made: Block) -> int:
        """Which segment a block's record is in."""
        return (made.place - self.superblock.data_offset) // SEGMENT

    def flip(self, at: int, bit: int) -> None:
        """One bit of the image; the same call undoes it."""
        self.image[at] ^= 1 << bit

    def trailer(self, segment: int) -> Trailer:
        """Of a sealed segment."""
        end = self.superblock.segment_at(segment) + SEGMENT
        found = decode_trailer(self.superblock, segment, bytes(self.image[end - BLOCK : end]))
        assert found is not None
        return found


def single_bits(raw: bytes, places: Sequence[int] | range) -> Iterator[tuple[int, bytes]]:
    """(byte, `raw` with one bit flipped) for every bit of the given bytes."""
    damaged = bytearray(raw)
    for at in places:
        for bit in range(8):
            damaged[at] ^= 1 << bit
            yield at, bytes(damaged)
            damaged[at] ^= 1 << bit


# -- structures at their decoders


def structures(world: World, damage: Damage) -> None:
    """Every bit of every field, and random ones of the rest, of every structure of a block."""
    sb, image = world.superblock, world.image
    start, end = sb.segment_at(0), sb.segment_at(1)
    trailer = world.trailer(0)
    table_at = start + trailer.table_offset
    tombstone = start + tombstone_offset(world) * BLOCK
    whole = record_at(world, tombstone)
    blocks: list[tuple[str, bytes, Callable[[bytes], object]]] = [
        ("superblock", bytes(image[:BLOCK]), lambda b: decode_superblock(b, 0)),
        ("mirror", bytes(image[sb.mirror_offset :][:BLOCK]), lambda b: decode_superblock(b, 1)),
        ("segment header", bytes(image[start:][:BLOCK]), lambda b: decode_header(sb, 0, b)),
        ("trailer", bytes(image[end - BLOCK : end]), lambda b: decode_trailer(sb, 0, b)),
    ]
    for kind, raw, decode in blocks:
        assert decode(raw) is not None
        spare = [world.rng.randrange(_FIELDS_BYTES, 496) for _ in range(8)]
        spare += [world.rng.randrange(512, BLOCK) for _ in range(8)]
        for at, damaged in single_bits(raw, [*range(_FIELDS_BYTES), *_CHECK, *spare]):
            damage.saw(kind, decode(damaged) is None, at)
    table = bytes(image[table_at:][: trailer.rows * ROW_BYTES])
    for at, damaged in single_bits(table, range(len(table))):
        damage.saw("footer table", decode_table(sb, trailer, damaged) is None, at)
    for at, damaged in single_bits(whole, range(RECORD_HEADER_BYTES + 56)):
        damage.saw("tombstone record", not _tombstone_holds(sb, damaged), at)


def checkpoints(world: World, damage: Damage, bits: int) -> None:
    """Random bits, cuts and growth of the checkpoint file; it is never parsed then."""
    superblock, path = world.checkpoint
    raw = path.read_bytes()
    assert checkpoint.load(path, superblock)
    forms = [raw[:-1], raw + b"\0", raw[: len(raw) // 2], b""]
    for _ in range(bits):
        damaged = bytearray(raw)
        damaged[world.rng.randrange(len(raw))] ^= 1 << world.rng.randrange(8)
        forms.append(bytes(damaged))
    for form in forms:
        path.write_bytes(form)
        try:
            checkpoint.load(path, superblock)
            damage.saw("checkpoint", False)
        except FormatError:
            damage.saw("checkpoint", True)
    path.write_bytes(raw)


def tombstone_offset(world: World) -> int:
    """In blocks from the start of segment 0."""
    trailer = world.trailer(0)
    at = world.superblock.segment_at(0) + trailer.table_offset
    table = bytes(world.image[at : at + trailer.rows * ROW_BYTES])
    rows = decode_table(world.superblock, trailer, table)
    assert rows is not None
    return int(rows["offset"][rows["kind"] == RecordKind.TOMBSTONES][0])


def record_at(world: World, place: int) -> bytes:
    """A whole record."""
    head = bytes(world.image[place : place + RECORD_HEADER_BYTES])
    header = decode_record_header(head, world.superblock.check_key)
    assert header is not None
    return bytes(world.image[place : place + header.extent_bytes])


def _tombstone_holds(superblock: Superblock, raw: bytes) -> bool:
    header = decode_record_header(raw, superblock.check_key)
    return (
        header is not None
        and header.extent_bytes == len(raw)
        and payload_hash(raw, header.sealed_bytes) == header.payload_hash
    )


# -- records through an opened engine


async def records(world: World, engine: Engine, damage: Damage, payload_flips: int) -> None:
    """Every bit of record headers, and random bits of payloads; one flip per record and read."""
    rng = world.rng
    names = sorted(world.blocks)
    todo = [(at, bit) for at in range(RECORD_HEADER_BYTES) for bit in range(8)]
    reads = engine.stats.corrupt_reads
    before = damage.tried
    while todo or payload_flips > 0:
        batch: list[tuple[Block, int, int]] = []
        for name in rng.sample(names, min(_AT_ONCE, len(names))):
            made = world.blocks[name]
            if todo:
                at, bit = todo.pop()
            else:
                payload_flips -= 1
                at, bit = RECORD_HEADER_BYTES + rng.randrange(len(made.sealed)), rng.randrange(8)
            batch.append((made, at, bit))
        for made, at, bit in batch:
            world.flip(made.place + at, bit)
        statuses = await _read(engine, [made for made, _, _ in batch])
        for (made, at, bit), (status, _) in zip(batch, statuses, strict=True):
            world.flip(made.place + at, bit)
            kind = "record header" if at < RECORD_HEADER_BYTES else "record payload"
            damage.saw(kind, status is Status.CORRUPT, (at, bit, status.label))
    counted = engine.stats.corrupt_reads - reads
    if counted != damage.tried - before:
        damage.note(f"{damage.tried - before} flips, {counted} counted")
        damage.lost += 1


async def _read(engine: Engine, blocks: Sequence[Block]) -> list[tuple[Status, bytes]]:
    sizes = [extent_bytes(len(made.sealed)) for made in blocks]
    memory = aligned_buffer(sum(sizes))
    ops, at = [], 0
    for made, size in zip(blocks, sizes, strict=True):
        ops.append((engine.index.find(*made.name), memory[at : at + size]))
        at += size
    statuses = await engine.read(ops)
    return [
        (status, bytes(view[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + len(made.sealed)]))
        for status, (_, view), made in zip(statuses, ops, blocks, strict=True)
    ]


async def sectors(world: World, engine: Engine, damage: Damage) -> None:
    """Each sector of each record: zeros, ones, another's, half another's, moved by 512 bytes."""
    names = sorted(world.blocks)
    for name in names:
        made = world.blocks[name]
        for at in range(0, extent_bytes(len(made.sealed)), BLOCK):
            place = made.place + at
            original = bytes(world.image[place : place + BLOCK])
            other = world.blocks[world.rng.choice([n for n in names if n != name])].place
            theirs = bytes(world.image[other : other + BLOCK])
            for content in (
                bytes(BLOCK), b"\xff" * BLOCK, theirs, original[512:] + original[:512],
                original[:2048] + theirs[2048:],
            ):  # fmt: skip
                world.image[place : place + BLOCK] = content
                ((status, raw),) = await _read(engine, [made])
                same = status is Status.OK and raw == made.sealed  # the padding of a short record
                damage.saw("sector", status is Status.CORRUPT or same, (name, at))
            world.image[place : place + BLOCK] = original


async def swaps(world: World, engine: Engine, damage: Damage) -> None:
    """Records of two tenants change places: as they are; with record headers that say otherwise,
    as somebody can write who read `check_key` off the drive; and with forged sealed headers."""
    names = sorted(world.blocks)
    for mine in names:
        made = world.blocks[mine]
        others = [
            each for each in world.blocks.values()
            if each.name[0] != mine[0] and len(each.sealed) == len(made.sealed)
        ]  # fmt: skip
        if not others:
            continue
        other = world.rng.choice(others)
        size = extent_bytes(len(made.sealed))
        original = bytes(world.image[made.place : made.place + size])
        theirs = bytes(world.image[other.place : other.place + size])
        world.image[made.place : made.place + size] = theirs
        ((status, _),) = await _read(engine, [made])
        damage.saw("record swapped", status is Status.CORRUPT, (mine, other.name))
        for kind, payload in (
            ("record forged", theirs[RECORD_HEADER_BYTES:]),
            ("sealed header forged", disguised(other, made) + theirs[RECORD_HEADER_BYTES:][
                len(other.sealed) :]),
        ):  # fmt: skip
            forged = reheaded(world.superblock, original, payload)
            world.image[made.place : made.place + size] = forged
            ((status, raw),) = await _read(engine, [made])
            assert status is Status.OK, "the forger did not know the key after all"
            for key in (made.key, other.key):
                opened = _opens(made, raw, key)
                damage.saw(kind, opened is not Status.OK, (mine, opened))
        world.image[made.place : made.place + size] = original


def _opens(made: Block, raw: bytes, key: block.BlockKey) -> Status:
    try:
        return made.opens(raw, block_key=key)
    except AssertionError:
        return Status.OK  # opened, to other bytes


def reheaded(superblock: Superblock, original: bytes, payload: bytes) -> bytes:
    """Another payload under the header of a record, with hash and check made right."""
    header = decode_record_header(original, superblock.check_key)
    assert header is not None
    raw = bytes(RECORD_HEADER_BYTES) + payload
    header = replace(header, payload_hash=payload_hash(raw, header.sealed_bytes))
    return encode_record_header(header, superblock.check_key) + payload


def disguised(other: Block, made: Block) -> bytes:
    """A foreign sealed block whose header claims to be `made`, checksum and all."""
    raw = bytearray(other.sealed)
    for theirs, mine in (
        (other.name[0], made.name[0]), (other.name[1], made.name[1]),
        (other.engine_key, made.engine_key),
        (other.header.commitment, made.header.commitment),
    ):  # fmt: skip
        at = raw.index(theirs)
        raw[at : at + len(theirs)] = mine
    fix_crc(raw, other.header.header_bytes)
    return bytes(raw)


def fix_crc(raw: bytearray, header_bytes: int) -> None:
    """Make a sealed header's checksum right again, as an attacker would."""
    at = header_bytes - _CRC_BYTES
    raw[at:header_bytes] = zlib.crc32(raw[:at]).to_bytes(_CRC_BYTES, "little")


# -- sealed blocks as a host opens them


def hosts(world: World, damage: Damage, payload_flips: int) -> None:
    """Every bit of a sealed header of each codec, as found and with its checksum made right; random
    bits of meta and chunks; chunks cut, swapped and dropped."""
    seen: set[int] = set()
    blocks = [world.blocks[name] for name in sorted(world.blocks)]
    for made in blocks:
        if made.header.codec_id in seen:
            continue
        seen.add(made.header.codec_id)
        size = made.header.header_bytes
        for at, damaged in single_bits(made.sealed[:size], range(size)):
            raw = bytearray(damaged + made.sealed[size:])
            damage.saw("sealed header", made.opens(raw) is not Status.OK, at)
            if at < size - _CRC_BYTES:
                fix_crc(raw, size)
                damage.saw("sealed header, checksum right", made.opens(raw) is not Status.OK, at)
    for _ in range(payload_flips):
        made = world.rng.choice(blocks)
        at = world.rng.randrange(made.header.header_bytes, len(made.sealed))
        raw = bytearray(made.sealed)
        raw[at] ^= 1 << world.rng.randrange(8)
        _judge_payload(made, raw, at, damage)
    for made in blocks:
        body = made.header.header_bytes + made.header.meta_bytes
        for raw_form in (made.sealed[:-1], made.sealed[:body], made.sealed[: body // 2]):
            damage.saw("cut short", made.opens(raw_form) is not Status.OK, len(raw_form))
        if made.header.chunk_count > 1:
            (a, n), (b, m) = made.header.chunk_span(0), made.header.chunk_span(1)
            raw_form = made.sealed[:a] + made.sealed[b : b + m] + made.sealed[a : a + n]
            damage.saw("chunks swapped", made.opens(raw_form + made.sealed[b + m :])
                       is not Status.OK, made.name)  # fmt: skip


def _judge_payload(made: Block, raw: bytearray, at: int, damage: Damage) -> None:
    if at >= made.header.header_bytes + made.header.meta_bytes:
        damage.saw("chunk", made.opens(raw) is not Status.OK, at)
        return
    try:
        block.open_meta(memoryview(raw), made.header, made.key)
        damage.saw("meta", False, at)
    except SealError:
        # The block itself is whole: exact bytes or a failure, `opens` sees to it.
        damage.saw("meta", made.opens(raw) in (Status.OK, Status.CORRUPT), at)


# -- whole openings


async def openings(world: World, damage: Damage, count: int) -> None:
    """Open the file with one bit of a structure, or of a record in the open segment, flipped."""
    sb, rng = world.superblock, world.rng
    trailer = world.trailer(0)
    sealed, crashed = sb.segment_at(0), sb.segment_at(2)
    in_open = {name for name, made in world.blocks.items() if world.segment_of(made) == 2}
    fields = [*range(_FIELDS_BYTES), *_CHECK]
    choices: list[tuple[int, Sequence[int], set[Name], bool]] = [
        (0, fields, set(), False),
        (sb.mirror_offset, fields, set(), False),
        (sealed, fields, set(), False),
        (sealed + SEGMENT - BLOCK, fields, set(), False),
        (sealed + trailer.table_offset, range(trailer.rows * ROW_BYTES), set(), False),
        (sealed + tombstone_offset(world) * BLOCK, range(RECORD_HEADER_BYTES + 56), set(), True),
        (crashed, fields, in_open, False),
    ]
    choices += [
        (world.blocks[n].place, range(RECORD_HEADER_BYTES), {n}, False) for n in sorted(in_open)
    ]
    for number in range(count):
        offset, places, may_miss, may_return = choices[number % len(choices)]
        at, bit = offset + rng.choice(places), rng.randrange(8)
        world.flip(at, bit)
        await _reopen(world, damage, may_miss, may_return, at)
        world.flip(at, bit)


async def _reopen(
    world: World, damage: Damage, may_miss: set[Name], may_return: bool, at: int
) -> None:
    engine = await open_engine(ImageDevice(world.image, {}))
    good = True
    for name, (status, raw) in (await get_all(engine)).items():
        made = world.blocks.get(name)
        if made is None:  # a forgotten block may return if its tombstone is what was destroyed
            good &= may_return and name in world.gone
        elif status is Status.OK and raw != made.sealed:
            good = False
        elif status is not Status.OK and name not in may_miss:
            damage.lost += 1
            damage.note(f"{name} lost by a bit at {at}")
    for name in world.blocks:
        if name not in may_miss and engine.index.find(*name) < 0:
            damage.lost += 1
            damage.note(f"{name} lost by a bit at {at}")
    await engine.close(clean=False)
    damage.saw("opening", good, at)


async def opened(world: World, verify_reads: bool = True) -> Engine:
    """An engine over the image; what it writes at opening stays beside."""
    options = replace(OPTIONS, verify_reads=verify_reads)
    return await open_engine(ImageDevice(world.image, {}), options)
