"""S7: what a tenant stores is seen nowhere but where it must be.

Every block, token id, salt and engine key of one tenant is a marker. A real daemon that logs at
debug level is used in every way, with mistakes and with damage among it, by the tenant, by another
one and by its operator; then everything that any of them or the machine can see is searched: logs,
metrics, events, statistics, the command's words, every file, the memory of the daemon once nobody
holds anything, and a core file of it. The tenant's keys are searched for as well, in files.

Invariant: what is searched is counted in bytes, and each place was seen not to be empty; the
markers are found by the same search where they may be (engine keys and token ids in the tenant's
own events).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import shutil
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import grpc

from entresol_client.cli.main import main as entresol
from entresol_client.results import PutBlock
from entresol_proto.identity import client_ssl_context
from entresol_proto.seal.block import SealedHeader
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc as pbg
from entresol_proto.wire.frames import FrameType, encode_frame
from tests.daemon.canary_lab import (
    ENGINE_KEY,
    IN_EVENTS,
    PAYLOAD,
    SALT,
    SALTED,
    TOKENS,
    busy,
    files_under,
    found_in,
    payload,
    search,
)
from tests.daemon.daemon_lab import client_of
from tests.harness import DaemonProcess
from tests.proof.line import Line, Size, Slice, Tally
from tests.proof.lines.erase import (
    BLOCK_KEY,
    harvest,
    headers_on,
    no_memory_of_others,
    program_of,
)
from tests.proof.memory_scan import Search, cores_of, no_core, regions_of
from tests.proof.tenancy import OTHER, OWN, run_on_loop

BLOCKS = 120  # of each of three rounds
DAMAGED = 12
LOUD = """
from entresol_daemon import logs
real = logs.configure
logs.configure = lambda level, form, **more: real("debug", form, **more)
"""


@dataclass
class Look:
    """Searches, and notes what was found where."""

    seed: int
    tally: Tally
    found: int = 0

    def text(self, where: str, raw: bytes, *allowed: str) -> None:
        """Something that was said."""
        self.note(where, len(raw), found_in(raw, *allowed))

    def note(self, where: str, size_bytes: int, markers: Sequence[str]) -> None:
        """The result of a search."""
        self.tally.figure(f"bytes_{where.partition(' ')[0]}", size_bytes)
        if not size_bytes:
            self.tally.found(self.seed, f"{where} is empty: nothing was searched")
        for marker in markers:
            self.found += 1
            self.tally.found(self.seed, f"{where} shows {marker}")


def run(part: Slice) -> Tally:
    """A unit is one daemon, stopped once and started again over damaged flash."""
    tally = Tally()
    for seed in part.seeds:
        folder = part.folder / f"c{seed}"
        folder.mkdir()
        look = Look(seed, tally)
        with contextlib.chdir(folder):  # where a core file goes
            _life(folder, look)
        tally.tried += 3 * BLOCKS
        tally.survived += 3 * BLOCKS if not look.found else 0
        shutil.rmtree(folder)
    return tally


def _life(folder: Path, look: Look) -> None:
    process = DaemonProcess(folder / "d", "--flash", "512MiB", "--codec", "raw",
                            program=program_of(look.seed, LOUD))  # fmt: skip
    with process:
        run_on_loop(_used(process, look))
        _commands(process, folder, look)
        _stop(process, look)
    _damage(next(folder.rglob("flash.data")), random.Random(look.seed))
    with process:
        run_on_loop(_damaged_are_asked_for(process, look))
        run_on_loop(_told(process, look))
        child = process.process
        assert child is not None
        secrets = harvest(folder / "d", (SALTED,))
        _memory(child.pid, look)
        _core(process, folder, look)
    _files(folder, secrets.needles, look)
    look.text("log", process.log_path.read_bytes())


async def _used(process: DaemonProcess, look: Look) -> None:
    async with (
        client_of(process, OWN) as mine,
        client_of(process, OWN, "tcp") as far,
        client_of(process, OTHER) as theirs,
    ):
        for number, (client, ack) in enumerate(
            ((mine, "durable"), (far, "accepted"), (mine, "accepted"))
        ):
            await busy(client, ack, BLOCKS, f"{look.seed}/{number}")
        space = await theirs.namespace(SALTED)
        await space.put([PutBlock(b"an-innocent-key", b"innocent" * 100)])
        await _nonsense(process)
        await _told(process, look)


async def _nonsense(process: DaemonProcess) -> None:
    """Frames with markers in them that the daemon must refuse, and may say why, but not what."""
    tls = process.client_config(OWN).tls
    shard = process.client_config(OWN).shards[0]
    context = client_ssl_context(tls.cert, tls.key, tls.ca)
    for raw in (
        payload(1, 4096),
        encode_frame(FrameType.HELLO, 1, payload(2, 200)),
        encode_frame(FrameType.FETCH, 1, payload(3, 200)),
        encode_frame(FrameType.HELLO, 1, b"\1\1\1\0\0\0" + bytes(16) + b"\xff\xff" + PAYLOAD),
    ):
        with contextlib.suppress(OSError, ssl.SSLError):
            reader, writer = await asyncio.open_connection(shard.host, shard.port, ssl=context)
            writer.write(raw)
            await asyncio.wait_for(reader.read(100), 10)
            writer.close()


async def _told(process: DaemonProcess, look: Look) -> None:
    """What the daemon says to its tenants, its operator and whoever reads its metrics."""
    for tenant, allowed in ((OWN, IN_EVENTS), (OTHER, ())):
        config = process.client_config(tenant)
        credentials = grpc.ssl_channel_credentials(
            config.tls.ca.read_bytes(), config.tls.key.read_bytes(), config.tls.cert.read_bytes()
        )
        address = f"localhost:{config.shards[0].grpc_port}"
        async with grpc.aio.secure_channel(address, credentials) as channel:
            events, describe = pbg.EventsStub(channel), pbg.DescribeStub(channel)
            replies: list[Any] = [r async for r in events.Snapshot(pb.SnapshotRequest())]
            told = [event for reply in replies for event in reply.events]
            if tenant == OWN and not any(tuple(event.token_ids) == TOKENS for event in told):
                look.tally.found(look.seed, "the tenant's own events lack its token ids")
            replies.append(await events.Namespaces(pb.NamespacesRequest()))
            replies.append(await describe.Describe(pb.DescribeRequest()))
            raw = b"".join(reply.SerializeToString() for reply in replies)
            look.text(f"events of {tenant}", raw, *allowed)
    shard = process.client_config(OWN).shards[0]
    async with grpc.aio.insecure_channel(f"unix:{shard.admin_socket}") as channel:
        admin = pbg.AdminStub(channel)
        replies = [
            await admin.Stat(pb.StatRequest()),
            await admin.TenantList(pb.TenantListRequest()),
            await admin.Segments(pb.SegmentsRequest()),
        ]
        look.text("stat", b"".join(map(_as_bytes, replies)))
    for path in ("/metrics", "/healthz", "/readyz", "/nothing"):
        page = await asyncio.to_thread(_fetch, f"{shard.metrics}{path}")
        look.text("metrics", page)


def _as_bytes(reply: Any) -> bytes:
    return bytes(reply.SerializeToString())


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=20) as reply:
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.read()


def _commands(process: DaemonProcess, folder: Path, look: Look) -> None:
    """The command, in use and in error: no answer shows content, salt or token ids."""
    source, short = folder / "marked", folder / "short"
    source.write_bytes(payload(1, 300_000))
    short.write_bytes(payload(2, 100))
    config = ["--config", str(process.directory / "client.toml")]
    salt = ["--salt", SALT]
    key = ["--key", f"text:{ENGINE_KEY.decode()}"]
    for words in (
        ["put", str(source), "--name", "n", *salt],
        ["put", str(source), "--name", "n", *salt, "--json", "--verbose"],
        ["put", str(short), *key, *salt],
        ["put", str(source), *key, *salt],  # another length
        ["put", str(source), *key, "--block", "100"],
        ["exists", "--name", "n", *salt],
        ["explain", "--name", "n", "--blocks", *salt, "--json"],
        ["explain", *key, "--salt", "another"],
        ["get", "--name", "n", *salt, "-o", str(folder / "out")],
        ["get", *key, "--length", "7", *salt, "-o", str(folder / "out2")],
        ["get", "--name", "none", *salt, "-o", str(folder / "out3")],
        ["quote", "--name", "n", *salt],
        ["stat"], ["stat", "--json"], ["tenant", "list"], ["doctor"], ["inspect"],
    ):  # fmt: skip
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            entresol([*words, *config])
        text = said.getvalue()
        if "Traceback" in text:
            look.tally.found(look.seed, f"entresol {words[0]}: {text[-500:]}")
        # The key is what the person typed, or asked to have explained.
        look.text(f"cli {words[0]}", text.encode() or b"-", "engine key", "engine key in hex")
    for path in (source, short, *folder.glob("out*")):
        path.unlink()  # the tenant's own copies


def _stop(process: DaemonProcess, look: Look) -> None:
    status = process.stop()
    if status:
        look.tally.found(look.seed, f"the daemon ended with {status}")


def _damage(path: Path, rng: random.Random) -> None:
    """Flip bits in the payload of some records, so that their corruption is told."""
    spots = []
    with path.open("rb") as file:
        at = 0
        while page := file.read(4096):
            with contextlib.suppress(Exception):
                header = SealedHeader.parse(page[96:])
                spots.append(at + 96 + header.header_bytes + header.meta_bytes + 1000)
            at += 4096
    assert len(spots) > DAMAGED, "records were found"
    with path.open("r+b") as file:
        for spot in rng.sample(spots, DAMAGED):
            file.seek(spot)
            byte = file.read(1)[0] ^ 1 << rng.randrange(8)
            file.seek(spot)
            file.write(bytes([byte]))


async def _damaged_are_asked_for(process: DaemonProcess, look: Look) -> None:
    async with client_of(process, OWN) as mine:
        space = await mine.namespace(SALTED)
        corrupt = 0
        for number in range(3):
            keys = [ENGINE_KEY + key[:8] for key in _keys(f"{look.seed}/{number}")]
            buffers = [bytearray(64 * 1024) for _ in keys]
            found = await space.get_into(keys, buffers, prefix=False)
            corrupt += sum(status.label == "corrupt" for status in found.statuses)
        look.tally.figure("damage_told", corrupt)
        if not corrupt:
            look.tally.found(look.seed, "no damage was told of: nothing to search in the log")


def _keys(salt: str) -> list[bytes]:
    from tests.daemon.daemon_lab import keys_of

    return keys_of(BLOCKS, salt)


def _memory(pid: int, look: Look) -> None:
    """Nobody is connected any more: no plaintext of a block is left, in use or freed."""
    search_for = Search({PAYLOAD: "payload"})
    found = search_for.in_process(pid)
    look.tally.figure("payload_in_memory", found[PAYLOAD].total() if found else 0)
    size_bytes = sum(region.end - region.start for region in regions_of(pid))
    look.note("memory of the daemon", size_bytes, ["payload"] if found else [])
    if not search_for.in_process(os.getpid()):
        look.tally.found(look.seed, "the search does not find what this process holds")


def _core(process: DaemonProcess, folder: Path, look: Look) -> None:
    assert process.process is not None
    cores, why = cores_of(process.process, folder)
    look.tally.lacks(no_core(cores, why, written=bool(look.seed % 2)))
    for core in cores:
        markers = [m for m in search(core) if m.startswith("payload")]
        look.note("core file", core.stat().st_size, markers)
        look.tally.figure("cores", 1)
        core.unlink()


def _files(folder: Path, secrets: dict[bytes, str], look: Look) -> None:
    """Every file, the log among them; keys are nowhere in them, but for the KEK's own file."""
    keys = Search(secrets)
    assert BLOCK_KEY in secrets.values()
    for path in files_under(folder):
        # The plain header of a sealed block holds the engine key, as the format says.
        allowed = ("engine key",) if path.name == "flash.data" else ()
        markers = search(path, *allowed)
        markers += [keys.label(needle) for needle in keys.in_file(path)]
        look.note(f"files ({path.name})", path.stat().st_size + 1, markers)
    assert any(True for _ in headers_on(next(folder.rglob("flash.data")))), "the data file was read"


# -- the bug

CHATTY = (
    LOUD
    + """
import logging
from entresol_daemon.shard import pulls, puts
real_sealing = pulls.sealing
def sealing(pull, chunk_bytes):
    job = real_sealing(pull, chunk_bytes)
    logging.getLogger("entresol.put").debug("event=sealing head=%s", str(job.plain[:40], "latin1"))
    return job
pulls.sealing = puts.sealing = sealing
"""
)


@contextlib.contextmanager
def a_talkative_log() -> Iterator[None]:
    """The bug: a debug line shows the beginning of what is sealed, as text, past the log's net."""
    with mock.patch(f"{__name__}.LOUD", CHATTY):
        yield


def canary() -> None:
    """See `a_talkative_log`. Raises: AssertionError when it goes unnoticed."""
    with (
        a_talkative_log(), tempfile.TemporaryDirectory() as folder,
        mock.patch(f"{__name__}.BLOCKS", 40),
    ):  # fmt: skip
        tally = run(Slice(1, 1, Size.COMMIT, Path(folder)))
    assert any(f.text == "log shows payload" for f in tally.findings), tally.findings


LINES = (
    Line(
        id="S7",
        name="markers in payloads, tokens, salts, keys: seen nowhere they should not be",
        unit="daemons used in every way",
        units={Size.COMMIT: 1, Size.NIGHTLY: 4, Size.RELEASE: 10},
        slice_units=2,
        run=run,
        canary=canary,
        slice_deadline_s=900.0,
        not_run=no_memory_of_others,
    ),
)
