"""What the daemon is given and should not have been: settings, keys, files, frames, bytes.

A start that cannot work ends with status 1, one line and what to do about it; nothing is lost by
it. A running daemon survives whatever a peer sends, and its other sessions notice nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import ssl
import struct
import subprocess
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import certs
import pytest
from daemon_lab import (
    DESCRIPTOR,
    Site,
    Starter,
    all_are,
    assert_idle,
    client_of,
    get,
    key_of,
    keys_of,
    put,
    raw_of,
    rss_bytes,
    seed_of,
)
from harness import DaemonProcess, eventually

from entresol_client.results import RequestFailedError
from entresol_daemon.flash import superblock
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.keys.providers import FileKek
from entresol_proto import limits
from entresol_proto.fabric.registry import same_host_id
from entresol_proto.identity import client_ssl_context
from entresol_proto.ids import BadKeyError
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import Status
from entresol_proto.wire.data import Explain
from entresol_proto.wire.frames import FrameType, encode_frame
from entresol_proto.wire.opening import Attach, Hello

pytestmark = pytest.mark.daemon

KEYS = keys_of(12)


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    found = Starter(tmp_path_factory.mktemp("starter"))
    yield found
    found.close()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """A site with blocks in it. After the test, put right again, it still serves them."""
    found = Site.prepare(tmp_path / "d")
    async with found.running() as running, client_of(running) as client:
        stored = await put(await client.namespace(DESCRIPTOR), KEYS, 64 * KIB, ack="durable")
        assert all_are(stored, Status.OK)
    yield found
    await still_serves(found)


async def still_serves(site: Site) -> None:
    async with site.running() as running, client_of(running) as client:
        namespace = await client.namespace(DESCRIPTOR)
        assert all_are(await get(namespace, KEYS, 64 * KIB), Status.OK)


# -- settings


@pytest.mark.parametrize(
    ("extra", "named", "fix"),
    [
        ("[flash]\nsise_bytes = 1\n", "sise_bytes", "size_bytes"),
        ("[flush]\nsize_bytes = 1\n", "[flush]", "flash"),
        ('[flash]\nsize_bytes = "many"\n', "size_bytes", ""),
        ('[flash]\nsize_bytes = "1MiB"\n', "size_bytes", ""),
        ("[limits]\nlease_ns = 1\n", "lease_ns", ""),
        ('[limits]\nblock_bytes_max = "32MiB"\n', "block_bytes_max", ""),
        (
            '[tls]\ncert = "c"\nkey = "k"\nca = "a"\ntrust_domain = "NOT A DOMAIN"\n',
            "trust_domain",
            "spiffe",
        ),
        ('[fabric]\nenabled = ["rfc1149"]\n', "rfc1149", ""),
        ("this is not TOML", "TOML", ""),
    ],
)
def test_settings_that_cannot_be(
    tmp_path: Path, starter: Starter, extra: str, named: str, fix: str
) -> None:
    config = tmp_path / "e.toml"
    tls = '[tls]\ncert = "c"\nkey = "k"\nca = "a"\n'
    config.write_text(extra if "[tls]" in extra else tls + extra)
    said = starter.refuses("--config", str(config))
    assert named in said, said
    assert fix in said.splitlines()[1], said
    assert "e.toml" in said


def test_config_files_that_cannot_be_read(tmp_path: Path, starter: Starter) -> None:
    assert "no such" in starter.refuses("--config", str(tmp_path / "none")).lower()
    assert "directory" in starter.refuses("--config", str(tmp_path)).lower()
    (tmp_path / "bin").write_bytes(b"\xff\xfe\x00")
    starter.refuses("--config", str(tmp_path / "bin"))
    starter.refuses("--dev", "--dir", str(tmp_path / "a"), "--flash", "plenty")
    starter.refuses("--dev", "--dir", str(tmp_path / "b"), "--flash", "1KiB")
    starter.refuses("--dev", "--dir", str(tmp_path / "c"), "--codec", "mp3")
    starter.refuses("--dev", "--dir", str(tmp_path / "d"), "--tenant", "Not/A/Name")
    starter.refuses("--dev", "--dir", str(tmp_path / ("long" * 30)))
    (tmp_path / "file").write_text("")
    starter.refuses("--dev", "--dir", str(tmp_path / "file"))


# -- keys, certificates, state


async def test_key_files(site: Site, starter: Starter) -> None:
    kek = site.directory / "kek"
    good = kek.read_bytes()
    config = ("--config", str(site.toml))
    os.chmod(kek, 0o644)
    assert "chmod 600" in starter.refuses(*config)
    os.chmod(kek, 0o600)
    for bad in (b"", b"short", b"z" * 64, bytes(32), os.urandom(33), b"x" * 100_000):
        kek.write_bytes(bad)
        assert "KEK" in starter.refuses(*config)
    kek.unlink()  # without one it starts, locked: test_key_life
    kek.mkdir()
    starter.refuses(*config)
    kek.rmdir()
    FileKek.generate(kek)
    said = starter.refuses(*config)
    assert "key-encryption key" in said or "KEK" in said, said
    kek.write_bytes(good)


async def test_certificate_files(site: Site, starter: Starter, tmp_path: Path) -> None:
    config = ("--config", str(site.toml))
    other = certs.make_ca().issue("other").write(tmp_path)
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for values in (
        {"cert": tmp_path / "none.pem"}, {"key": tmp_path / "none.key"}, {"ca": tmp_path},
        {"key": other.key}, {"cert": garbage}, {"ca": garbage}, {"cert": None},
    ):  # fmt: skip
        site.change("tls", **values)
        starter.refuses(*config)


async def test_state_that_cannot_be_used(site: Site, starter: Starter, tmp_path: Path) -> None:
    config = ("--config", str(site.toml))
    (tmp_path / "file").write_text("")
    site.change("shard", state_dir=tmp_path / "file")
    starter.refuses(*config)
    site.change("shard", state_dir=tmp_path / "file" / "deeper")
    starter.refuses(*config)
    site.change("flash", path=tmp_path)
    starter.refuses(*config)
    site.change("flash", path=tmp_path / "no" / "such" / "folder")
    starter.refuses(*config)
    site.change("flash", path=Path("/dev/null"))
    starter.refuses(*config)
    site.change("listen", unix_dir=tmp_path / ("x" * 120))
    starter.refuses(*config)
    site.change("listen", unix_dir=tmp_path / "file")
    starter.refuses(*config)


async def test_data_files_of_other_kinds(
    site: Site, starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ("--config", str(site.toml))
    data = site.config.flash_path
    good = data.read_bytes()
    first = superblock.decode_superblock(good[:BLOCK], 0)
    assert first is not None
    size = len(good)
    with data.open("r+b") as file:
        os.truncate(data, size // 2)
        assert "cut short" in starter.refuses(*config)
        os.truncate(data, 5000)
        starter.refuses(*config)
        file.write(good)
        file.flush()
        # Both copies as a later version would write them, wherever this version keeps them.
        places = [at for at in range(0, size, BLOCK) if good[at : at + 8] == good[:8]]
        assert len(places) == 2, places
        monkeypatch.setattr(superblock, "FORMAT_VERSION", superblock.FORMAT_VERSION + 1)
        for copy, at in enumerate(places):
            file.seek(at)
            file.write(superblock.encode_superblock(first, copy))
        file.flush()
        monkeypatch.undo()
        assert "version" in starter.refuses(*config)
        for at in places:
            file.seek(at)
            file.write(os.urandom(BLOCK))
        file.flush()
        said = starter.refuses(*config)
        assert "not an Entresol data file" in said or "damaged" in said, said
        file.seek(0)
        file.write(good)


async def test_one_damaged_superblock_copy_is_not_the_end(site: Site) -> None:
    data = site.config.flash_path
    for copy in (0, 1):
        good = data.read_bytes()
        places = [at for at in range(0, len(good), 4096) if good[at : at + 8] == good[:8]]
        with data.open("r+b") as file:
            file.seek(places[copy])
            file.write(os.urandom(BLOCK))
        await still_serves(site)


# -- places that are taken, full or read-only


async def test_ports_and_sockets_in_use(site: Site, starter: Starter) -> None:
    config = ("--config", str(site.toml))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name in ("control_port", "data_port", "grpc_port", "metrics_port"):
            site.change("listen", **{name: port})
            said = starter.refuses(*config)
            assert str(port) in said, said
            assert f"{name.removesuffix('_port')}_host and {name}" in said, said
        site.change("listen", control_host="192.0.2.1")
        starter.refuses(*config)


def test_what_it_cannot_listen_at_formats_nothing(tmp_path: Path, starter: Starter) -> None:
    site = Site.prepare(tmp_path / "new")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        site.change("listen", metrics_port=port)
        starter.refuses("--config", str(site.toml))
    site.change("listen", control_port=port, control_host="no.such.host.invalid")
    said = starter.refuses("--config", str(site.toml))
    assert "[listen] control_host is an address of this host" in said
    assert not site.config.flash_path.exists()


async def test_a_second_daemon_on_the_same_data(site: Site, starter: Starter) -> None:
    async with site.running() as running, client_of(running) as client:
        namespace = await client.namespace(DESCRIPTOR)
        loop = asyncio.get_running_loop()
        for changes in ({}, {"state_dir": site.directory / "state2"}):
            site.change("shard", **changes)
            if changes:
                config = replace(site.config, shard=replace(site.config.shard, **changes))
                flash = replace(config.flash, path=site.config.flash_path)
                site.write(replace(config, flash=flash))
            said = await loop.run_in_executor(None, starter.refuses, "--config", str(site.toml))
            assert "daemon" in said or "use" in said, said
            assert all_are(await get(namespace, KEYS, 64 * KIB), Status.OK)
        more = keys_of(4, "more")
        assert all_are(await put(namespace, more, 64 * KIB, ack="durable"), Status.OK)
        assert all_are(await get(namespace, more, 64 * KIB), Status.OK)


def test_no_room_for_the_data_file(tmp_path: Path, starter: Starter) -> None:
    site = Site.prepare(tmp_path / "d")
    said = starter.refuses("--config", str(site.toml), file_bytes_max=8 * MIB)
    assert "reserve" in said, said
    assert not site.config.flash_path.exists(), "a file of another size was left behind"
    code, text = starter.run("--check", "--config", str(site.toml))
    assert code == 0, text


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of its own; skips where it cannot be had."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "entresol-test", str(folder)]
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("not run here: mounting a small file system needs root")
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("not run here: no tmpfs can be mounted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb") as file:
        while file.write(bytes(64 * KIB)):
            pass


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


async def test_full_and_read_only_file_systems(tmp_path: Path, starter: Starter) -> None:
    site = Site.prepare(tmp_path / "d")
    with small_disk(tmp_path / "disk", 80 * MIB) as disk:
        state = replace(site.config.shard, state_dir=disk / "state")
        site.config = replace(site.config, shard=state)
        site.write(site.config)
        filler = disk / "filler"
        filler.write_bytes(bytes(40 * MIB))
        said = starter.refuses("--config", str(site.toml))
        assert "reserve" in said or "space" in said, said
        assert not site.config.flash_path.exists()
        filler.unlink()
        async with site.running() as running, client_of(running) as client:
            namespace = await client.namespace(DESCRIPTOR)
            assert all_are(await put(namespace, KEYS, 64 * KIB, ack="durable"), Status.OK)
            # Now the disk fills under the running daemon: what needs new files fails, alone.
            fill(filler)
            other = await client.namespace(replace(DESCRIPTOR, model="lab/no-room"))
            refused = await put(other, keys_of(2, "full"), 4 * KIB, ack="durable")
            assert not refused.stored, "a namespace that was not written down took blocks"
            more = keys_of(8, "more")
            assert all_are(await put(namespace, more, 64 * KIB, ack="durable"), Status.OK)
            assert all_are(await get(namespace, KEYS + more, 64 * KIB), Status.OK)
        filler.unlink()
        async with site.running() as running, client_of(running) as client:
            namespace = await client.namespace(DESCRIPTOR)
            assert all_are(await get(namespace, KEYS + more, 64 * KIB), Status.OK)
        remount(disk, "ro")
        try:
            said = starter.refuses("--config", str(site.toml))
            assert "read-only" in said.lower(), said
        finally:
            remount(disk, "rw")
        async with site.running() as running, client_of(running) as client:
            namespace = await client.namespace(DESCRIPTOR)
            assert all_are(await get(namespace, KEYS + more, 64 * KIB), Status.OK)


# -- what peers send


def hello() -> bytes:
    return encode_frame(FrameType.HELLO, 1, Hello(1, 1, same_host_id(), 1, "fuzz").encode())


def opened() -> bytes:
    return hello() + encode_frame(FrameType.ATTACH, 2, Attach(0).encode())


def a_frame(kind: int, length: int, *, request_id: int = 7, version: int = 1) -> bytes:
    """A header with a good checksum, whatever it announces."""
    head = struct.pack("<HBBII", 0x5345, version, kind, request_id, length)
    return head + struct.pack("<I", zlib.crc32(head))


def nonsense(rng: random.Random) -> bytes:
    """What one hostile connection says."""
    size = rng.choice([1, 15, 16, 17, 100, 4096, 70_000])
    body = rng.randbytes(rng.choice([0, 1, 4, 16, 20, 36, 400]))
    kind = rng.choice(list(FrameType))
    return rng.choice(
        [
            rng.randbytes(size),
            hello()[: rng.randrange(1, 40)],
            a_frame(kind, limits.FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX + 1),
            a_frame(kind, 2**32 - 1),
            a_frame(99, 0),
            a_frame(kind, 0, version=9),
            hello() + hello(),
            hello() + rng.randbytes(size),
            opened() + rng.randbytes(size),
            opened() + a_frame(kind, len(body)) + body,
            opened() + a_frame(kind, len(body), request_id=0) + body,
            opened() + a_frame(kind, limits.FRAME_PAYLOAD_BYTES_MAX) + bytes(size),
            opened() + a_frame(kind, limits.FRAME_PAYLOAD_BYTES_MAX + 1),
            opened() + b"".join(a_frame(13, 8, request_id=n) + bytes(8) for n in range(1, 600)),
            opened() + a_frame(FrameType.GOODBYE, 5) + b"\x00\x00\x00\x00\x00" + hello(),
        ]
    )


async def say(
    host: str, port: int, context: ssl.SSLContext | None, raw: bytes, wait: float
) -> None:
    """Connect, send, listen for a moment, go."""
    with contextlib.suppress(OSError, ssl.SSLError, asyncio.IncompleteReadError):
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            writer.write(raw)
            await writer.drain()
            async with asyncio.timeout(wait):
                while await reader.read(65_536):
                    pass
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError, ssl.SSLError):
                await writer.wait_closed()


async def test_hostile_peers_reach_nothing_but_themselves(tmp_path: Path) -> None:
    seed = seed_of("hostile_peers")
    rng = random.Random(seed)
    process = DaemonProcess(tmp_path / "d", "--flash", "128MiB")
    with process:
        assert process.process is not None
        pid = process.process.pid
        async with client_of(process, deadline_ns=60_000_000_000) as client:
            namespace = await client.namespace(DESCRIPTOR)
            assert all_are(await put(namespace, KEYS, 64 * KIB, ack="durable"), Status.OK)
            shard = client.config.shards[0]
            tls = client.config.tls
            context = client_ssl_context(tls.cert, tls.key, tls.ca)
            before = rss_bytes(pid)
            for _ in range(12):
                await asyncio.gather(
                    *(say(shard.host, shard.port, context, nonsense(rng), 0.1) for _ in range(12))
                )
                assert all_are(await get(namespace, KEYS, 64 * KIB), Status.OK), seed
            ports = listening_ports(pid) - {shard.port}
            assert len(ports) >= 3, "data, gRPC and metrics listen too"
            for port in sorted(ports | {shard.port}):
                for raw in (b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(5000), b"", bytes(70_000)):
                    await asyncio.gather(
                        *(say(shard.host, port, None, raw, 0.05) for _ in range(4))
                    )
            for path in (tmp_path / "d" / "run").iterdir():
                if path.is_socket():
                    await asyncio.gather(*(poke(path, rng.randbytes(4096)) for _ in range(20)))
            assert all_are(await get(namespace, KEYS, 64 * KIB), Status.OK), seed
            assert client.stats()["disconnects"] == 0, "an innocent session was cut"
            await asyncio.sleep(0.5)
            grown = rss_bytes(pid) - before
            assert grown < 48 * MIB, f"grew by {grown >> 20} MiB, seed {seed}"
        assert process.process.poll() is None
        assert process.stop() == 0
    assert "Traceback" not in process.log_path.read_text(), "a peer got an exception out"


def listening_ports(pid: int) -> set[int]:
    """TCP ports a process listens at."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found = set()
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    with contextlib.suppress(OSError):
        lines += Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]
    for line in lines:
        row = line.split()
        if row[3] == "0A" and f"socket:[{row[9]}]" in inodes:
            found.add(int(row[1].split(":")[1], 16))
    return found


async def poke(path: Path, raw: bytes) -> None:
    """Random bytes at a UNIX socket, of whichever type it is."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sock:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, str(path))
            await asyncio.get_running_loop().sock_sendall(sock, raw)
            await asyncio.sleep(0.02)


async def test_keys_of_the_wrong_length_and_forged_handles(tmp_path: Path) -> None:
    site = Site.prepare(tmp_path / "d")
    async with site.running() as running:
        async with client_of(running) as client:
            namespace = await client.namespace(DESCRIPTOR)
            for key in (b"", b"1234567", bytes(65)):
                with pytest.raises(BadKeyError):
                    await namespace.exists([key])
        for frame in (
            encode_frame(FrameType.EXISTS, 9, struct.pack("<I", 1) + bytes(15)),
            encode_frame(FrameType.FETCH, 9, bytes(30)),
            encode_frame(FrameType.EXPLAIN, 9, struct.pack("<IIB", 1, 1, 7) + bytes(7)),
        ):
            async with raw_of(running) as raw:
                await raw.namespace()
                raw.connection._write(frame)
                await eventually(
                    raw.connection.lost.done, seconds=20, what="the end of the session"
                )
        async with raw_of(running) as raw:
            for handle in (0, 2, 99, 2**32 - 1):
                with pytest.raises(RequestFailedError) as caught:
                    await raw.ask(Explain(handle, (key_of(1),)))
                assert caught.value.status is Status.BAD_REQUEST
            opened_here = await raw.namespace()
            assert (await raw.ask(Explain(opened_here.handle, (key_of(1),)))).rows
        await assert_idle(running.daemon)
