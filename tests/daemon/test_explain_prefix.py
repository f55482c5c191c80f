"""`entresol explain` on whole prompts, and `entresol namespaces`, against the real daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_lab import Cli, process
from daemon_lab import client_of, shape
from harness import DaemonProcess, Running, running_daemon

from entresol_client.cli.main import main
from entresol_client.client import AsyncClient
from entresol_client.engines.kvbm_hash import KeyChain
from entresol_client.engines.vllm_requests import Request
from entresol_client.results import PutBlock
from entresol_client.surroundings import Surroundings
from entresol_client.sync import Client
from entresol_daemon.config import Config
from entresol_daemon.metric_codecs import WHYS
from entresol_proto.ids import NamespaceDescriptor, TenantName
from entresol_proto.limits import KIB
from entresol_proto.status import KeyringError, Status
from entresol_proto.wire.data import Reason

pytestmark = pytest.mark.daemon

TOKENS = list(range(5_000, 5_000 + 32 * 12 + 5))
KVBM = NamespaceDescriptor(model="kvbm-model", dtype="bf16", block_tokens=32, layers=2)
VLLM = NamespaceDescriptor(
    model="vllm-model", model_revision="main+w:abc", lora="tuned", dtype="bf16",
    page_layout="vllm:0123", block_tokens=64, tp_rank=1, tp_world=2,
)  # fmt: skip
SALTED = NamespaceDescriptor(model="salted-model", cache_salt="grain")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("x") / "d", "--flash", "256MiB") as running:
        yield running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], daemon: DaemonProcess) -> Cli:
    return Cli(capsys, daemon.directory)


def store(daemon: DaemonProcess, descriptor: NamespaceDescriptor, keys: list[bytes]) -> None:
    with Client(daemon.client_config()) as client:
        ns = client.namespace(descriptor)
        raw = np.arange(64 * KIB, dtype=np.uint8)
        assert ns.put([PutBlock(key, raw, position=n) for n, key in enumerate(keys)]).ok


def forget(daemon: DaemonProcess, descriptor: NamespaceDescriptor, keys: list[bytes]) -> None:
    with Client(daemon.client_config()) as client:
        assert client.namespace(descriptor).forget(keys).count == len(keys)


def id_of(cli: Cli, model: str) -> str:
    rows = cli("namespaces", "--json").json["namespaces"]
    (found,) = [row for row in rows if row["model"] == model]
    return str(found["namespace_id"])


def test_a_prompt_of_tokens_names_the_block_that_ends_it(
    cli: Cli, daemon: DaemonProcess, tmp_path: Path
) -> None:
    chain = KeyChain(32)
    chain.extend(TOKENS)
    store(daemon, KVBM, chain.keys[:10])
    forget(daemon, KVBM, [chain.keys[4]])
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    short = id_of(cli, "kvbm-model")[:8]
    words = ("explain", "--tokens", str(tokens), "--engine", "kvbm", "--namespace", short)
    found = cli(*words, "--json", code=1).json
    ends = found["prefix"].pop("ends_at")
    assert found["prefix"] == {
        "asked_blocks": 12, "usable_blocks": 4, "missing_blocks": 3, "unused_blocks": 5,
        "block_tokens": 32, "usable_tokens": 128,
    }  # fmt: skip
    assert (ends["block"], ends["key"], ends["reason"]) == (4, chain.keys[4].hex(), "forgotten")
    assert ends["when_unix_ns"] == found["keys"][4]["when_unix_ns"] > 0
    assert [row["usable"] for row in found["keys"]] == [True] * 4 + [False] * 8
    assert found["reasons"] == {"in_memory": 9, "forgotten": 1, "never_stored": 2}
    said = cli(*words, code=1).out.splitlines()
    assert said[0] == "usable prefix: 4 of 12 blocks (128 tokens)"
    assert re.match(r"it ends before block 4 \(\w{16}…\), which was dropped at 20", said[1])
    assert said[2] == "behind it 5 blocks (160 tokens) are here and of no use without it"
    assert said[3] == "blocks 0 to 3 are in the daemon's memory"
    assert said[5] == "blocks 5 to 9 are in the daemon's memory, unused"
    assert said[6].startswith("blocks 10 to 11 were never stored here")
    store(daemon, KVBM, chain.keys)
    assert cli(*words).out.splitlines()[0] == "usable prefix: 12 of 12 blocks (384 tokens)"


def test_hashes_of_vllm_from_a_file_standard_input_and_arguments(
    cli: Cli, daemon: DaemonProcess, tmp_path: Path
) -> None:
    hashes = [bytes([n]) * 32 for n in range(20, 28)]
    request = Request(object(), "user-17")
    store(daemon, VLLM, [request.block_key(one + bytes(4)) for one in hashes[1::2]])
    text = "\n".join(one.hex() for one in hashes)
    path = tmp_path / "hashes"
    path.write_text(text)
    name = id_of(cli, "vllm-model")
    how = ("--engine", "vllm", "--every", "2", "--request-salt", "user-17", "--namespace", name)
    assert cli("explain", "--hashes", str(path), *how, "--json").json["prefix"]["asked_blocks"] == 4
    assert "4 of 4 blocks (256 tokens)" in cli("explain", "--hashes", str(path), *how).out
    done = process(
        "explain", "--hashes", "-", *how, "--json", config=cli.config, stdin=text.encode()
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prefix"]["usable_blocks"] == 4
    keys = [request.block_key(one + bytes(4)).hex() for one in hashes[1::2]]
    assert cli("explain", *keys, "--namespace", name, "--json").json["prefix"]["usable_tokens"]
    # Another salt, or none, is another prompt.
    other = cli("explain", "--hashes", str(path), "--engine", "vllm", "--namespace", name, code=1)
    assert other.out.startswith("usable prefix: 0 of 8 blocks")
    assert "an engine would begin anew at block 0" in other.out


def test_a_namespace_by_its_id(cli: Cli, daemon: DaemonProcess) -> None:
    keys = [bytes([n]) * 16 for n in range(40, 43)]
    store(daemon, SALTED, keys)
    words = [key.hex() for key in keys]
    name = id_of(cli, "salted-model")
    cli.fails("explain", *words, "--namespace", name, code=2, match="has a cache salt")
    cli("explain", *words, "--namespace", name, "--salt", "grain")
    wrong = cli("explain", *words, "--namespace", name, "--salt", "sand", code=1)
    assert "under another model, layout or salt" in wrong.out
    asked = [part for word in words for part in ("--key", word)]
    cli("exists", *asked, "--namespace", name, "--salt", "grain")
    cli("quote", *asked, "--namespace", name, "--salt", "grain")
    cli.fails("explain", *words, "--namespace", "zz", code=2, match="is no id")
    cli.fails("explain", *words, "--namespace", "f" * 32, code=1, match="no namespace")
    cli.fails(
        "explain", *words, "--namespace", name, "--model", "m", code=2, match="says all of --model"
    )
    # Another tenant's ids are not known.
    other = ("--tenant", "other")
    cli.fails("explain", *words, "--namespace", name, *other, code=1, match="no namespace")


def test_namespaces_for_people_scripts_tenants_and_the_operator(
    cli: Cli, daemon: DaemonProcess
) -> None:
    store(daemon, VLLM, [b"a block of nine rows"])
    said = cli("namespaces")
    assert re.search(r"vllm-model \+ tuned +main\+w:abc +bf16 +64 +1 of 2 +- +raw", said.out)
    assert "grain" not in said.out
    rows = {row["model"]: row for row in cli("namespaces", "--json").json["namespaces"]}
    row = rows["vllm-model"]
    assert (row["codec"], row["codec_why"], row["lora"]) == ("raw", "opening", "tuned")
    assert row["plain_bytes"] > 0
    assert row["sealed_bytes"] >= row["plain_bytes"]  # raw: the header comes on top
    admin = ("--admin-socket", str(cli.folder / "run" / "admin.sock"))
    there = cli("namespaces", *admin, "--tenant", "dev", "--json").json["namespaces"]
    assert {row["namespace_id"] for row in there} == {r["namespace_id"] for r in rows.values()}
    cli.fails("namespaces", *admin, code=2, match="needs --tenant")
    assert cli("namespaces", "--tenant", "other").out == "0 namespaces\n"
    store(daemon, NamespaceDescriptor(model="emptied"), [b"0123456789abcdef"])
    forget(daemon, NamespaceDescriptor(model="emptied"), [b"0123456789abcdef"])
    assert "emptied" not in cli("namespaces").out
    assert re.search(r"\d more without a block: --all", cli("namespaces").out)
    assert "emptied" in cli("namespaces", "--all").out


def test_a_tenant_that_keeps_its_keys_is_told_as_well(cli: Cli, tmp_path: Path) -> None:
    """The daemon knows masked keys only; the same hashes lead to them, and not without the file."""
    assert main(["key", "new", str(tmp_path / "tenant.key")]) == 0
    config = tmp_path / "sealed.toml"
    config.write_text(f'tenant_key = "{tmp_path / "tenant.key"}"\n' + cli.config.read_text())
    raw = tmp_path / "in"
    raw.write_bytes(np.random.default_rng(5).bytes(3 * 64 * KIB))
    cli("put", str(raw), "--name", "sealed", "--block", "64KiB", config=config)
    rows = cli("explain", "--name", "sealed", "--json", config=config).json["keys"]
    keys = [row["key"] for row in rows[1:]]
    hashes = tmp_path / "hashes"
    hashes.write_text(" ".join(keys))
    words = ("explain", "--hashes", str(hashes), "--json")
    assert cli(*words, config=config).json["prefix"]["usable_blocks"] == len(keys) == 3
    assert cli(*words, code=1).json["reasons"] == {"never_stored": 3}
    (row,) = [
        row
        for row in cli("namespaces", "--json", config=config).json["namespaces"]
        if row["host_sealed"]
    ]
    assert (row["model"], row["dtype"]) == ("", "")
    assert "sealed by its hosts" in cli("namespaces", config=config).out
    short = row["namespace_id"][:12]
    cli.fails(*words, "--namespace", short, code=2, match="is sealed by its hosts", config=config)


async def test_the_codec_that_auto_chose_is_told(tmp_path: Path) -> None:
    """Over a slow link bf16 goes compressed; noise is stored raw all the same."""
    elsewhere = replace(Surroundings(), host_id=lambda: bytes(16))
    values = np.random.default_rng(7).normal(0, 0.02, 256 * KIB).astype(np.float32)
    smooth = (values.view(np.uint32) >> 16).astype(np.uint16)  # bf16
    noise = np.random.default_rng(8).integers(0, 2**16, 256 * KIB, dtype=np.uint16)

    def slow_link(config: Config) -> Config:
        config = shape(fabrics=["tcp"], tcp_tls=True)(config)  # the daemon seals
        return replace(config, sealing=replace(config.sealing, link_bytes_per_s=10**9))

    async with running_daemon(tmp_path, slow_link) as running:
        config = running.client_config(fabric="tcp", fallback=False)
        async with await AsyncClient.open(config, around=elsewhere) as client:
            for model, raw in (("smooth", smooth), ("noise", noise)):
                namespace = await client.namespace(NamespaceDescriptor(model=model, dtype="bf16"))
                for number in range(8):
                    put = PutBlock(b"%016d" % number, raw, position=number)
                    assert (await namespace.put([put], deadline_ns=30 * 10**9)).ok
        records = {
            row.descriptor.model: row
            for row in await running.daemon.admin.namespaces(TenantName("dev"))
            if isinstance(row.descriptor, NamespaceDescriptor)
        }
        text = page_of(running)
    assert records["smooth"].codec == records["noise"].codec != "raw"
    assert records["smooth"].codec_why in WHYS
    codec = records["smooth"].codec
    assert records["smooth"].plain_bytes > 1.3 * records["smooth"].sealed_bytes > 0
    assert 0 < records["noise"].plain_bytes < records["noise"].sealed_bytes
    why = records["smooth"].codec_why
    assert f'codec_choices_total{{codec="{codec}",why="{why}"}} 2.0' in text
    assert f'codec_namespaces{{codec="{codec}",dtype="bf16"}} 2.0' in text
    assert f'sealed_blocks_total{{codec="{codec}",dtype="bf16"}} 8.0' in text
    assert 'sealed_blocks_total{codec="raw",dtype="bf16"} 8.0' in text
    (skipped,) = re.findall(r"(?m)^entresol_codec_bypassed_blocks_total (\S+)", text)
    assert 0 < float(skipped) < 8


def page_of(running: Running) -> str:
    """The metrics, as Prometheus would see them."""
    metrics = running.daemon.metrics
    metrics.refresh()
    return metrics.render().decode()


async def test_a_question_leaves_no_trace_and_the_first_put_is_written_down_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked under a wrong model or salt, a daemon must not remember it, on its disk least of all;
    what is stored must be known to be whose, even when the power fails right behind it."""
    key, tenant = b"sixteen byte key", TenantName("dev")
    async with running_daemon(tmp_path / "d") as running, client_of(running) as client:
        keyring = running.daemon.shard.parts.keyring
        folder = tmp_path / "d" / "state" / "namespaces"
        ns = await client.namespace(replace(KVBM, model="nobody wrote this"))
        assert not any((await ns.exists([key])).present)
        (row,) = await ns.explain([key])
        assert row.reason is Reason.NEVER_STORED
        assert (await ns.get_into([key], [bytearray(KIB)])).statuses == [Status.MISS]
        assert (await ns.stage([key])).statuses == [Status.MISS]
        assert (await ns.quote([key])).prefix_blocks == 0
        assert (await ns.touch([key])).count == (await ns.forget([key])).count == 0
        assert keyring.namespaces_of(tenant) == []
        assert not folder.exists() or not list(folder.iterdir())

        def refuse(name: str, raw: bytes) -> None:
            raise KeyringError("the disk is full", status=Status.IO_ERROR)

        real = keyring.remember_namespace
        monkeypatch.setattr(keyring, "remember_namespace", refuse)
        refused = await ns.put([PutBlock(key, bytes(64 * KIB), position=0)])
        assert refused.statuses == [Status.IO_ERROR]
        assert not running.daemon.shard.parts.engine.index.namespaces()
        monkeypatch.setattr(keyring, "remember_namespace", real)
        assert (await ns.put([PutBlock(key, bytes(64 * KIB), position=0)], ack="durable")).ok
        assert len(keyring.namespaces_of(tenant)) == len(list(folder.iterdir())) == 1
        written = [path.stat().st_mtime_ns for path in folder.iterdir()]
        assert (await ns.put([PutBlock(key + b"2", bytes(64 * KIB), position=1)])).ok
        assert [path.stat().st_mtime_ns for path in folder.iterdir()] == written
