"""Which files take the place of the certificate that a client runs with."""

from __future__ import annotations

from pathlib import Path

import certs
import pytest

from entresol_client import TlsFiles
from entresol_client.certificates import OwnTls
from entresol_proto.identity import client_ssl_context, shard_uri, tenant_uri

TRUST = "test"
ACME = tenant_uri(TRUST, "acme")


def written(ca: certs.TestCA, folder: Path, uri: str | None = ACME, days: float = 1) -> TlsFiles:
    """Always to the same places."""
    paths = ca.issue("host", spiffe_uri=uri, days=days, start_days_ago=5).write(folder)
    return TlsFiles(paths.cert, paths.key, paths.ca, TRUST)


@pytest.mark.parametrize(
    ("uri", "days", "reason"),
    [
        (tenant_uri(TRUST, "rival"), 1, "tenant rival's now"),
        (shard_uri(TRUST, "shard0"), 1, "not a tenant's"),
        (tenant_uri("elsewhere", "acme"), 1, "trust domain"),
        (None, 1, "URI"),
        (ACME, -1, "expired on"),
    ],
)
def test_what_shards_would_refuse_or_is_anothers_takes_no_good_ones_place(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    uri: str | None,
    days: float,
    reason: str,
) -> None:
    """Of another tenant would be what an engine stores from then on, and what it finds."""
    ca = certs.make_ca()
    tls = OwnTls(written(ca, tmp_path), client_ssl_context)
    before = tls.context()
    written(ca, tmp_path, uri, days)
    assert [tls.context(), tls.context()] == [before, before]
    (told,) = [text for text in caplog.messages if "tls_reload_failed" in text]
    assert reason in told
    assert reason in tls.refused
    written(ca, tmp_path)
    assert tls.context() is not before
    assert not tls.refused


def test_files_that_were_put_back_are_refused_no_more(tmp_path: Path) -> None:
    tls = OwnTls(files := written(certs.make_ca(), tmp_path), client_ssl_context)
    before = tls.context()
    files.key.rename(tmp_path / "aside")
    assert tls.context() is before
    assert str(files.key) in tls.refused
    (tmp_path / "aside").rename(files.key)
    assert tls.context() is before
    assert not tls.refused


def test_what_is_no_good_gives_way_to_anything_of_its_tenant(tmp_path: Path) -> None:
    """A clock that is wrong must not keep the certificate that shards would take from them."""
    ca = certs.make_ca()
    tls = OwnTls(written(ca, tmp_path, days=-1), client_ssl_context)
    before = tls.context()
    written(ca, tmp_path, tenant_uri(TRUST, "rival"))
    assert tls.context() is before
    written(ca, tmp_path, days=-2)
    assert tls.context() is not before


def test_who_was_no_tenant_may_become_one(tmp_path: Path) -> None:
    ca = certs.make_ca()
    tls = OwnTls(written(ca, tmp_path, None), client_ssl_context)
    before = tls.context()
    written(ca, tmp_path)
    assert tls.context() is not before


def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path) -> None:
    ca = certs.make_ca()
    renewals = [1, 1]

    def make(*paths: Path) -> object:
        found = client_ssl_context(*paths)
        if made and renewals:
            renewals.pop()
            written(ca, tmp_path)
        made.append(found)
        return found

    made: list[object] = []
    tls = OwnTls(written(ca, tmp_path), make)  # type: ignore[arg-type]
    written(ca, tmp_path)
    assert tls.context() is made[0]
    assert tls.context() is made[0]
    assert tls.context() is made[3]
    assert tls.context() is made[3]
