"""The state folder: keyring.json, namespace files, receipts, wrapped keys, the KEK file.

`fix` puts checksums right, so that what is read is not only refused for them.
"""

from __future__ import annotations

import functools
import json
import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast
from unittest.mock import patch

from entresol_daemon.keys import files, namespaces, providers, receipts, state
from entresol_daemon.keys.namespaces import NamespaceRegistry
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.keys.receipts import RECEIPT_FORMAT, Receipt
from entresol_daemon.keys.state import (
    DamagedError,
    State,
    StoredDek,
    StoredReceipt,
    StoredTenant,
    TenantQuota,
    UnknownVersionError,
)
from entresol_proto.ids import TenantName
from entresol_proto.status import KeyringError
from tests.fuzz.mutate import mutate_tree, nested, to_json
from tests.fuzz.target import Parser, Scratch, Target

SEED = b"r" * 32
STREAM = b"s" * 16
WORDS = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"1e999", b"-1", b"NaN", b"\\ud800",
         b"[" * 200, b'"version"', b'"body"', b'"checksum"')  # fmt: skip


def a_receipt() -> Receipt:
    """Signed."""
    unsigned = Receipt(
        format=RECEIPT_FORMAT, number=1, tenant="gone", stream=STREAM.hex(),
        erased=[{"version": 1, "fingerprint": "00" * 8}], time_unix_s=9, kek_id="11" * 8,
        public_key="", signature="",
    )  # fmt: skip
    return receipts.sign_receipt(unsigned, SEED)


@functools.cache
def a_state() -> State:
    """Two tenants, one with two keys, and an erased one."""
    deks = tuple(StoredDek(n, 5, b"f" * 8, b"w" * 61) for n in (1, 2))
    tenant = StoredTenant(TenantName("a"), STREAM, 5, TenantQuota(1, 2, 3), b"n" * 61, deks, 2)
    other = replace(tenant, name=TenantName("b"), stream=b"o" * 16, deks=deks[:1], active=1)
    return State(
        generation=4, kek_id=b"k" * 8, receipt_wrapped=b"w" * 61,
        receipt_public=receipts.public_key_of(SEED), receipts_issued=1,
        tenants={"a": tenant, "b": other}, erased=(StoredReceipt.of(a_receipt()),),
    )  # fmt: skip


def keyring_seeds() -> list[bytes]:
    """Empty and full, of this version and of the next."""
    full = state.encode(a_state())
    body = state.open_envelope(full, state.KEYRING_FORMAT, state.KEYRING_VERSION)
    return [state.encode(State()), full, state.envelope(state.KEYRING_FORMAT, 2, body)]


def a_keyring(rng: Random) -> bytes:
    """A body that is wrong somewhere, under a right checksum."""
    raw = state.encode(a_state())
    body = state.open_envelope(raw, state.KEYRING_FORMAT, state.KEYRING_VERSION)
    return enveloped(state.KEYRING_FORMAT, damaged(rng, body))


def damaged(rng: Random, body: Any) -> Any:
    """One to three damages."""
    for _ in range(rng.randint(1, 3)):
        body = mutate_tree(rng, body)
    return body


def enveloped(format_name: str, body: Any) -> bytes:
    """An envelope around anything, also what `envelope` could not write."""
    try:
        return state.envelope(format_name, 1, body)
    except (RecursionError, ValueError, TypeError):
        head = f'{{"checksum":"00","format":"{format_name}","version":1,"body":{{"x":'
        return head.encode() + to_json(body) + b"}}\n"


def fix_envelope(_: Random, raw: bytes) -> bytes:
    """The checksum of whatever body still parses."""
    try:
        outer = json.loads(raw)
        body, name, version = outer["body"], outer["format"], outer["version"]
        if isinstance(name, str) and type(version) is int:
            return state.envelope(name, version, body)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return raw


def keyring_parser() -> Parser:
    """Refused whole, or exactly what this daemon would write."""

    def parse(raw: bytes) -> str:
        try:
            found = state.decode(raw)
        except UnknownVersionError:
            return "version"
        except DamagedError as error:
            return f"damaged {str(error)[:12]}"
        assert state.encode(found) == raw
        return f"ok {len(found.tenants)} {len(found.erased)}"

    return parse


def _any_form() -> AbstractContextManager[object]:
    """Accepts what it would not have written."""

    def decode(raw: bytes) -> State:
        body = state.open_envelope(raw, state.KEYRING_FORMAT, state.KEYRING_VERSION)
        return State(generation=body.get("generation", 0))

    return patch.object(state, "decode", decode)


# Namespace files ----------------------------------------------------------------------------------


def namespace_seeds() -> list[bytes]:
    """None, two, and one more than a length allows."""
    pairs = [[bytes([n]).hex() * 16, "aa" * 60] for n in range(2)]
    name = namespaces.NAMESPACES_FORMAT
    return [
        state.envelope(name, 1, {"namespaces": listed})
        for listed in ([], pairs, [["00" * 17, "aa"]], [["00" * 16, "aa" * 5_000]])
    ]


def a_namespace_file(rng: Random) -> bytes:
    """Wrong somewhere, under a right checksum."""
    pairs = [[bytes([n]).hex() * 16, "aa" * 60] for n in range(2)]
    return enveloped(namespaces.NAMESPACES_FORMAT, damaged(rng, {"namespaces": pairs}))


def namespaces_parser() -> Parser:
    """Records of a possible shape, none and a count, or refused as another version's."""
    file = Scratch(f"{STREAM.hex()}.json")
    logging.getLogger("entresol.keys").setLevel(logging.CRITICAL)

    def parse(raw: bytes) -> str:
        folder = file.holds(raw).parent
        registry = NamespaceRegistry(files.OsCalls(), folder, 8, lambda n: bytes(n))
        try:
            registry.load({STREAM: TenantName("a")})
        except UnknownVersionError:
            return "version"
        found = registry.of(STREAM)
        assert all(len(one) == 16 for one in found)
        assert not (found and registry.damaged_files), "half a damaged file was believed"
        return f"{min(len(found), 3)} {registry.damaged_files}"

    return parse


def _half_believed() -> AbstractContextManager[object]:
    """Skips the length of what it reads."""

    def load_one(self: NamespaceRegistry, stream: bytes, tenant: TenantName) -> dict[bytes, Any]:
        raw = files.read(self._calls, self._path(stream)) or b""
        try:
            body = state.open_envelope(raw, namespaces.NAMESPACES_FORMAT, 1)
        except KeyringError:
            return {}
        return {
            bytes.fromhex(name): namespaces.NamespaceRecord(bytes.fromhex(name), tenant, b"")  # type: ignore[arg-type]
            for name, _ in body["namespaces"]
        }

    return patch.object(NamespaceRegistry, "_load_one", load_one)


# Receipts, wrapped keys, KEK files ----------------------------------------------------------------


def receipt_seeds() -> list[bytes]:
    """Signed, unsigned, of another format."""
    signed: dict[str, Any] = dict(a_receipt())
    return [
        to_json(one) for one in (signed, {**signed, "signature": ""}, {**signed, "format": "x"})
    ]


def a_bad_receipt(rng: Random) -> bytes:
    """Wrong somewhere."""
    if rng.random() < 0.01:
        return to_json({**a_receipt(), "erased": nested(900)})
    return to_json(damaged(rng, dict(a_receipt())))


def receipts_parser() -> Parser:
    """Verified means: every field as it was signed."""
    good = {**a_receipt(), "signature": ""}
    public = receipts.public_key_of(SEED)

    def parse(raw: bytes) -> str:
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            return "no JSON"  # the reader of the file says so; see entresol tenant
        try:
            receipts.verify_receipt(found, public)
        except KeyringError as error:
            return f"refused {error.status.label}"
        assert {**found, "signature": ""} == good, "a forged receipt verifies"
        return "ok"

    return parse


def _signs_less() -> AbstractContextManager[object]:
    """A signature that leaves out who was erased."""
    whole = receipts._signed_bytes
    return patch.object(
        receipts,
        "_signed_bytes",
        lambda receipt: whole(cast(Receipt, {**receipt, "tenant": "gone"})),
    )


@functools.cache
def _kek() -> FileKek:
    return FileKek(bytes(range(32)))


def key_seeds() -> list[bytes]:
    """`u8 which`: a KEK file in each form, or a wrapped key."""
    raw = bytes(range(32))
    keks = [raw, raw.hex().encode() + b"\n", raw[:16].hex().encode(), bytes(32), raw * 9]
    blob = bytes([1]) + b"n" * 12 + _kek()._aead.encrypt(b"n" * 12, b"d" * 32, b"aad")
    return [*(b"\0" + one for one in keks), b"\1" + blob]


def keys_parser() -> Parser:
    """A KEK of 32 random-looking bytes, the key that was wrapped, or a refusal."""

    def parse(raw: bytes) -> str:
        try:
            if raw[:1] == b"\1":
                assert _kek().unwrap(raw[1:], b"aad") == b"d" * 32, "a forged key opens"
                return "unwrapped"
            found = providers._parse_key(raw[1:], Path("kek"))
        except KeyringError:
            return "refused"
        assert len(found) == providers.KEK_BYTES
        assert len(set(found)) >= 8
        return f"kek {found == raw[1:]}"

    return parse


def _short_keys() -> AbstractContextManager[object]:
    return patch.object(providers, "_parse_key", lambda raw, file: raw)


TARGETS = (
    Target(
        name="keyring", share=20, seeds=keyring_seeds, make=keyring_parser, generate=a_keyring,
        fix=fix_envelope, words=WORDS, alloc_bytes_max=1024 * 1024,
        canaries=(_any_form,), modules=("entresol_daemon.keys.state",),
    ),
    Target(
        name="namespace_file", share=15, seeds=namespace_seeds, make=namespaces_parser,
        generate=a_namespace_file, fix=fix_envelope, words=WORDS, alloc_bytes_max=4 << 20,
        canaries=(_half_believed,), modules=("entresol_daemon.keys.namespaces",),
    ),
    Target(
        name="receipt", share=20, seeds=receipt_seeds, make=receipts_parser,
        generate=a_bad_receipt, words=WORDS, alloc_bytes_max=1024 * 1024,
        canaries=(_signs_less,), modules=("entresol_daemon.keys.receipts",),
    ),
    Target(
        name="keys", share=30, seeds=key_seeds, make=keys_parser, canaries=(_short_keys,),
        modules=("entresol_daemon.keys.providers",),
    ),
)  # fmt: skip
