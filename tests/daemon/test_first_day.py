"""What a first day with the client and the command must not do: call a mistake of the user damage,
an outage or nothing at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cli_lab import Cli, content, variant, written
from harness import DaemonProcess

from entresol_client import Client, ClientConfig, PutBlock
from entresol_client.buffers import UsageError
from entresol_client.cli import main as cli_main
from entresol_client.cli import storing
from entresol_daemon.control import devcerts
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.limits import MIB

pytestmark = pytest.mark.daemon

DESCRIPTOR = NamespaceDescriptor(model="first/day")
KEY = b"a key of a day"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("c") / "d", "--flash", "256MiB") as running:
        yield running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], daemon: DaemonProcess) -> Cli:
    return Cli(capsys, daemon.directory)


@pytest.fixture(scope="module")
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(ClientConfig.load(daemon.directory / "client.toml")) as opened:
        yield opened


# -- dtypes


def test_an_unknown_dtype_is_no_damage(cli: Cli, client: Client, tmp_path: Path) -> None:
    file = written(tmp_path / "in", content("dtype", 1000))
    said = cli.fails("put", file, "--name", "dt", "--dtype", "bf17", code=2, match="unknown dtype")
    assert "bf16, fp16" in said.err
    for name in ("bf17", "uint8", "fp8", "torch.uint8"):
        with pytest.raises(UsageError, match="fp8_e4m3"):
            client.namespace(replace(DESCRIPTOR, dtype=name))
    assert client.stats()["corrupt"] == 0


def test_other_names_of_a_dtype_find_the_same_blocks(client: Client) -> None:
    raw = content("other names", 4096)
    assert client.namespace(replace(DESCRIPTOR, dtype="bf16")).put([PutBlock(KEY, raw)]).ok
    for name in ("bfloat16", "torch.bfloat16"):
        ns = client.namespace(replace(DESCRIPTOR, dtype=name))
        assert ns.descriptor.dtype == "bf16"
        assert ns.put([PutBlock(KEY, raw)]).existed == 1
    assert not client.namespace(replace(DESCRIPTOR, dtype="half")).exists([KEY]).present[0]


def test_a_shard_calls_an_unknown_dtype_a_bad_request(client: Client) -> None:
    """Whoever asks it: another client may not look first."""
    ns = client.namespace(DESCRIPTOR)._ns
    unknown = replace(DESCRIPTOR, dtype="bf17")
    ns.canonical, ns._digest = unknown.canonical(), unknown.digest()
    found = client._thread.call(lambda: ns.get_into([KEY], [bytearray(10)]))
    assert [status.label for status in found.statuses] == ["bad_request"]


# -- a daemon that says no


def test_a_refusal_is_no_outage(cli: Cli, tmp_path: Path) -> None:
    """Who is told that nothing runs looks in the wrong place."""
    ask = ("exists", "--name", "x")
    config = variant(cli, tmp_path, name='"another"')
    said = cli.fails(*ask, code=2, match="refuses: the server is shard 'dev'", config=config)
    assert "[[shards]]" in said.err
    config = variant(cli, tmp_path, trust_domain='"elsewhere"')
    said = cli.fails(*ask, code=2, match="refuses: .*trust domain 'entresol.local'", config=config)
    assert "no daemon" not in said.err
    other = cli.folder / "client-other.toml"
    cli("exists", "--name", "x", config=other, code=1)  # known from now on
    cli("tenant", "erase", "other", "--yes")
    said = cli.fails(*ask, code=1, match="refuses: tenant other was erased", config=other)
    hint = re.search(r"fix: `entresol (tenant add .*?)`", said.err)  # the daemon's own words
    assert hint is not None, said.err
    cli(*hint[1].split())
    cli("exists", "--name", "x", config=other, code=1)


@pytest.mark.parametrize(
    ("uris", "days", "match"),
    [
        (["spiffe://entresol.local/tenant/dev"], -1, "expired on"),
        (["spiffe://entresol.local/shard/dev"], 9, "not a tenant's"),
        (["spiffe://entresol.local/tenant/a", "spiffe://entresol.local/tenant/b"], 9, "2 URI"),
    ],
)
def test_a_daemon_that_hangs_up_makes_the_client_look_at_its_certificate(
    cli: Cli, tmp_path: Path, uris: list[str], days: int, match: str
) -> None:
    """TLS 1.3 tells a client nothing of why its certificate is refused."""
    pki = devcerts.load(cli.folder / "pki")
    made = devcerts.issue(pki, f"tenants/bad{days}{len(uris)}", uris=uris, days=days)
    config = variant(cli, tmp_path, cert=f'"{made.cert}"', key=f'"{made.key}"')
    said = cli.fails("exists", "--name", "x", code=2, match=f"refuses: .*{match}", config=config)
    assert ("certify TENANT FOLDER --renew" in said.err) is (days < 0)
    if days < 0:  # over gRPC; of the others the daemon itself speaks there
        cli.fails("events", code=2, match=f"refuses: .*{match}", config=config)
    rows = cli("doctor", code=1, config=config).out
    assert ("certify TENANT FOLDER --renew" in rows) is (days < 0)


def test_a_certificate_of_another_authority(cli: Cli, tmp_path: Path) -> None:
    made = devcerts.create(tmp_path / "foreign", tenants=["dev"]).tenant("dev")
    config = variant(cli, tmp_path, cert=f'"{made.cert}"', key=f'"{made.key}"')
    said = cli.fails("exists", "--name", "x", code=2, match="refuses: closed", config=config)
    assert "event=handshake_failed" in said.err


# -- blocks that are too long


def test_what_is_too_large_names_the_limit(cli: Cli, tmp_path: Path) -> None:
    file = written(tmp_path / "in", content("long", 5 * MIB))
    limit = "the daemon takes blocks of up to 4.0 MiB"
    said = cli.fails("put", file, "--key", "text:one block", code=1, match="too_large")
    assert f"{limit}: use --name instead of --key" in said.err
    said = cli.fails("put", file, "--name", "n", "--block", "5MiB", code=1, match="block 0 was not")
    assert f"{limit}: use --block {4 * MIB} or less" in said.err
    words = ("put", file, "--key", "text:one block", "--block", "1MiB")
    said = cli.fails(*words, code=2, match="does not go with --key")
    assert "use --name instead" in said.err


@pytest.mark.parametrize(
    ("numbers", "said"),
    [([7], "block 7 was"), ([0, 1, 2, 3, 4], "blocks 0 to 4 were"), ([0, 4], "2 of blocks 0 to 4")],
)
def test_refused_blocks_are_counted_in_words(numbers: list[int], said: str) -> None:
    assert storing._blocks_were(numbers).startswith(said)


# -- quotas


class Typed:
    """A person at standard input."""

    def __init__(self, text: str) -> None:
        self._text = text

    def readline(self) -> str:
        return self._text


def test_a_quota_below_what_is_used_asks_first(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten unit dropped everything, and said nothing."""
    file = written(tmp_path / "in", content("quota", 3 * MIB))
    cli("put", file, "--name", "kept", "--ack", "durable")
    small = ("tenant", "quota", "dev", "--flash", "1MiB")
    monkeypatch.setattr("sys.stdin", Typed("\n"))
    said = cli.fails(*small, code=1, match="nothing was done")
    assert "is dropped at once" in said.err
    cli("exists", "--name", "kept")
    cli("tenant", "quota", "dev", "--flash", "200MiB")  # of what is not used nobody is asked
    cli("tenant", "quota", "dev", "--flash", "none")
    assert cli(*small, "--yes", "--json").json["quota"]["flash_bytes"] == MIB
    cli("exists", "--name", "kept", code=1)
    cli("tenant", "quota", "dev", "--flash", "none")


def test_a_forgotten_unit_is_refused(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("quota", "add"):
        assert cli_main.main(["tenant", verb, "dev", "--flash", "3"]) == 2
        assert "such as 3GiB, or 3B" in capsys.readouterr().err


# -- failures that a script reads, and small ones


@pytest.mark.parametrize(
    ("words", "code", "status"),
    [
        (("get", "--name", "nope", "-o", "never"), 1, "miss"),
        (("quote", "--name", "nope"), 1, "miss"),
        (("put", __file__, "--name", "n", "--dtype", "bf17"), 2, "bad_request"),
    ],
)
def test_a_failure_is_json_where_the_answer_would_have_been(
    cli: Cli, words: tuple[str, ...], code: int, status: str
) -> None:
    said = cli(*words, "--json", code=code)
    assert said.json["status"] == status
    assert said.json["error"] in said.err
    assert said.json["fix"] in said.err
    assert set(said.json) == {"error", "status", "fix"}


def test_standard_output_that_holds_the_bytes_gets_no_json(cli: Cli) -> None:
    said = cli("get", "--name", "nope", "-o", "-", "--json", code=1)
    assert said.out == ""
    assert json.loads(said.err.splitlines()[-1])["status"] == "miss"


def test_small_things_are_called_what_they_are(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.main(["replay", "/no/such"]) == 2
    assert "there is no file '/no/such'" in capsys.readouterr().err
    said = cli.fails("events", "--tenant", "nobody", code=1, match="no tenant 'nobody'")
    assert "known are " in said.err
    config = variant(cli, tmp_path, metrics='"http://127.0.0.1:1"')
    text = cli("doctor", config=config).out
    assert "no metrics at http://127.0.0.1:1/metrics: Connection refused\n" in text
