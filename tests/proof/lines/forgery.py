"""S2: nothing forged is accepted, and the genuine thing, shown in the same way, is.

Invariant: an attempt is one forged thing shown once. Sealed blocks are shown to the code that every
host and the daemon open blocks with; numbers, tickets and frames to a running daemon; records to a
daemon that recovers from the drive they were written to; keys and receipts to the keyring's code.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from entresol_daemon.keys.namespaces import open_descriptor, seal_descriptor
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.keys.receipts import RECEIPT_FORMAT, Receipt, sign_receipt, verify_receipt
from entresol_daemon.keys.state import KIND_DEK, KIND_NAMING, KIND_RECEIPT, wrap_aad
from entresol_proto.seal import block
from entresol_proto.status import KeyringError
from tests.proof.forging import FORGERIES, shelf, two_keyed_block
from tests.proof.forging_online import KINDS, Case, Shown, drive
from tests.proof.line import Line, Size, Slice, Tally
from tests.proof.tenancy import chain, room_in, run_on_loop, wire_keys

SHELVES = 60  # of a unit; each kind of forgery is made SHOWN times from each
SHOWN = 6
TWO_KEYED = 24
KEY_KINDS_SHOWN = 48
BLOCKS = 64  # of the owner, in a room


def run(part: Slice) -> Tally:
    """Units with an even seed have plain tcp, the others TLS on it."""
    tally = Tally()
    for seed in part.seeds:
        rng = random.Random(seed)
        _sealed_blocks(rng, seed, tally)
        for name, kind in (("receipts", receipts), ("wrapped_keys", wrapped_keys),
                           ("namespace_records", namespace_records)):  # fmt: skip
            _note(tally, seed, name, kind(rng))
        _note(tally, seed, "drive", run_on_loop(drive(part.folder / f"drive{seed}", seed)))
    for tls in (False, True):
        seeds = [seed for seed in part.seeds if bool(seed % 2) is tls]
        if seeds:
            run_on_loop(_online(part.folder / ("tls" if tls else "tcp"), seeds, tls, tally))
    return tally


def _note(tally: Tally, seed: int, kind: str, shown: Shown) -> None:
    tally.tried += shown.tried
    tally.survived += shown.tried - shown.accepted
    tally.wrong_bytes += shown.accepted
    tally.figure(kind, shown.tried)
    if shown.accepted:
        tally.found(seed, f"{kind}: {shown.accepted} of {shown.tried} were accepted")
    if not shown.genuine:
        tally.found(seed, f"{kind}: the genuine one was refused")


def _sealed_blocks(rng: random.Random, seed: int, tally: Tally) -> None:
    counts = dict.fromkeys(FORGERIES, 0)
    for _ in range(SHELVES):
        on = shelf(rng)
        genuine = bytearray(len(on.target.plain))
        status = block.open_into(
            memoryview(on.target.sealed), memoryview(genuine),
            namespace_id=on.target.home.namespace_id, wire_key=on.target.name,
            engine_key=on.target.engine_key, block_key=on.target.key,
        )  # fmt: skip
        if status.label != "ok" or bytes(genuine) != on.target.plain:
            tally.found(seed, "the genuine block does not open")
        for name, forge in FORGERIES.items():
            for _ in range(SHOWN):
                counts[name] += on.target.accepts(forge(on))
    for name, accepted in counts.items():
        _note(tally, seed, name, Shown(SHELVES * SHOWN, accepted, True))
    accepted = 0
    for _ in range(TWO_KEYED):
        made, reader = two_keyed_block(rng, shelf(rng))
        accepted += reader.accepts(made)
    _note(tally, seed, "two_keys", Shown(TWO_KEYED, accepted, True))


async def _online(folder: Path, seeds: list[int], tls: bool, tally: Tally) -> None:
    async with room_in(folder, tls=tls) as room:
        for seed in seeds:
            blocks = chain(seed, BLOCKS)
            keys = [each.key for each in blocks]
            case = Case(random.Random(seed), seed, keys, wire_keys(room.own.shm.space, keys))
            assert (await room.own.space.put(blocks)).ok
            for name, kind in KINDS.items():
                _note(tally, seed, name, await kind(room, case))
            assert (await room.own.space.forget(keys)).count == BLOCKS


# -- keys and receipts


def receipts(rng: random.Random) -> Shown:
    """A receipt with any field altered, or signed by another daemon."""
    seed, other = rng.randbytes(32), rng.randbytes(32)
    plain = Receipt(
        format=RECEIPT_FORMAT, number=rng.randrange(1, 9), tenant="acme",
        stream=rng.randbytes(16).hex(), erased=[{"version": 1, "fingerprint": "aa" * 8}],
        time_unix_s=rng.randrange(2**31), kek_id="bb" * 8, public_key="", signature="",
    )  # fmt: skip
    good = sign_receipt(plain, seed)
    public = bytes.fromhex(good["public_key"])
    verify_receipt(good, public)
    changes: list[Callable[[Any], Any]] = [
        lambda r: r | {"number": r["number"] + 1},
        lambda r: r | {"tenant": "acne"},
        lambda r: r | {"stream": rng.randbytes(16).hex()},
        lambda r: r | {"erased": [*r["erased"], {"version": 2, "fingerprint": "cc" * 8}]},
        lambda r: r | {"erased": []},
        lambda r: r | {"time_unix_s": r["time_unix_s"] - 1},
        lambda r: r | {"kek_id": rng.randbytes(8).hex()},
        lambda r: r | {"public_key": rng.randbytes(32).hex()},
        lambda r: r | {"signature": rng.randbytes(64).hex()},
        lambda r: r | {"signature": ""},
        lambda r: r | {"format": "entresol-erase-receipt/2"},
        lambda r: r | {"extra": 1},
        lambda r: _without(r, rng.choice(sorted(r))),
        lambda _: sign_receipt(plain, other),
    ]
    accepted = 0
    for number in range(KEY_KINDS_SHOWN):
        try:
            verify_receipt(changes[number % len(changes)](dict(good)), public)
            accepted += 1
        except KeyringError:
            continue
    return Shown(KEY_KINDS_SHOWN, accepted, True)


def _without(table: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != name}


def wrapped_keys(rng: random.Random) -> Shown:
    """Wrapped keys in another's place (tenant, stream, kind, version), altered, of another KEK."""
    keks = [FileKek(rng.randbytes(32)), FileKek(rng.randbytes(32))]
    places = [
        (kind, tenant, stream, version)
        for kind in (KIND_DEK, KIND_NAMING, KIND_RECEIPT)
        for tenant in ("acme", "zeta")
        for stream in (bytes(16), rng.randbytes(16))
        for version in (1, 2)
    ]
    key = rng.randbytes(32)
    here = places[0]
    blob = keks[0].wrap(key, wrap_aad(*here))
    genuine = keks[0].unwrap(blob, wrap_aad(*here)) == key
    accepted = 0
    for number in range(KEY_KINDS_SHOWN):
        kek, place, shown = keks[0], here, blob
        if number % 3 == 0:
            place = rng.choice(places[1:])
        elif number % 3 == 1:
            changed = bytearray(blob)
            changed[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)
            shown = bytes(changed)
        else:
            kek = keks[1]
        try:
            kek.unwrap(shown, wrap_aad(*place))
            accepted += 1
        except KeyringError:
            continue
    return Shown(KEY_KINDS_SHOWN, accepted, genuine)


def namespace_records(rng: random.Random) -> Shown:
    """Remembered descriptors: under another id, of another tenant, altered."""
    secrets = [rng.randbytes(32), rng.randbytes(32)]
    space, canonical = rng.randbytes(16), rng.randbytes(100)
    sealed = seal_descriptor(secrets[0], space, canonical, rng.randbytes(12))
    genuine = open_descriptor(secrets[0], space, sealed) == canonical
    accepted = 0
    for number in range(KEY_KINDS_SHOWN):
        secret, where, shown = secrets[0], space, sealed
        if number % 3 == 0:
            where = rng.randbytes(16)
        elif number % 3 == 1:
            secret = secrets[1]
        else:
            shown = sealed[: rng.randrange(len(sealed))]
        try:
            open_descriptor(secret, where, shown)
            accepted += 1
        except KeyringError:
            continue
    return Shown(KEY_KINDS_SHOWN, accepted, genuine)


@contextmanager
def commitment_ignored() -> Iterator[None]:
    """The bug: readers trust the tag alone, which AES-GCM gives under two keys at once."""
    real = block.check_header

    def check(header: Any, **asked: Any) -> Any:
        return real(header, **(asked | {"commitment": None}))

    with mock.patch.object(block, "check_header", check):
        yield


def canary() -> None:
    """See `commitment_ignored`. Raises: AssertionError when it goes unnoticed."""
    with commitment_ignored(), tempfile.TemporaryDirectory() as folder:
        tally = run(Slice(1, 1, Size.COMMIT, Path(folder)))
    assert any(finding.text.startswith("two_keys:") for finding in tally.findings), tally.findings


LINES = (
    Line(
        id="S2",
        name="forged blocks, numbers, tickets, frames, drives, keys, receipts: accepted 0",
        unit="rounds over all kinds",
        units={Size.COMMIT: 10, Size.NIGHTLY: 40, Size.RELEASE: 100},
        slice_units=5,
        run=run,
        canary=canary,
        slice_deadline_s=900.0,
    ),
)
