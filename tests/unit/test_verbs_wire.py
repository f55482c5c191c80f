"""Parameters and messages of the verbs fabric: round trips, and refusal of everything else."""

from __future__ import annotations

import dataclasses
import ipaddress
import random
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entresol_proto import limits
from entresol_proto.fabric.base import FabricKind, Offer
from entresol_proto.fabric.verbs_wire import (
    MESSAGE_BYTES,
    Kind,
    Message,
    OfferParams,
    Rail,
    ReplyParams,
)
from entresol_proto.status import FabricError, ProtocolError, Status

SEED = 20_261_121
TICKET = bytes(range(16))


def rail(number: int = 0, **changes: object) -> Rail:
    fields: dict[str, object] = {
        "number": number, "infiniband": False, "mtu_bytes": 4096, "rd_atomic": 16, "lid": 0,
        "qpn": 0x1234, "psn": 0xABCDEF, "gid": ipaddress.ip_address("::ffff:10.7.0.1").packed,
    }  # fmt: skip
    return Rail(**(fields | changes))  # type: ignore[arg-type]


rails = st.builds(
    rail,
    infiniband=st.booleans(),
    mtu_bytes=st.sampled_from([256, 512, 1024, 2048, 4096]),
    rd_atomic=st.integers(1, 255),
    lid=st.integers(0, 0xFFFF),
    qpn=st.integers(2, 2**24 - 1),
    psn=st.integers(0, 2**24 - 1),
    gid=st.integers(1, 2**32 - 1).map(lambda n: ipaddress.IPv6Address(n | 0xFFFF << 32).packed),
)


@given(
    rails_=st.lists(rails, min_size=1, max_size=limits.VERBS_RAILS_MAX),
    private=st.booleans(),
    lifetime_ms=st.integers(1, limits.VERBS_OFFER_LIFETIME_MS_MAX),
    ticket=st.binary(min_size=16, max_size=16),
)
def test_offers_and_replies_survive_the_way(
    rails_: list[Rail], private: bool, lifetime_ms: int, ticket: bytes
) -> None:
    numbered = tuple(dataclasses.replace(one, number=n) for n, one in enumerate(rails_))
    offer = OfferParams(private, lifetime_ms, ticket, numbered)
    assert OfferParams.parse(offer.encode()) == offer
    Offer(FabricKind.VERBS, offer.encode())  # it fits
    reply = ReplyParams(ticket, numbered[::-1])
    assert ReplyParams.parse(reply.encode()) == reply
    assert len(reply.encode()) <= limits.OFFER_PARAMS_BYTES_MAX


def test_secrets_are_not_printed() -> None:
    offer = OfferParams(True, 1, TICKET, (rail(),))
    assert TICKET.hex() not in repr(offer)
    assert str(0xABCDEF) not in repr(offer)
    assert repr(TICKET) not in repr(ReplyParams(TICKET, (rail(),)))


@pytest.mark.parametrize(
    "bad",
    [
        rail(qpn=0), rail(qpn=1), rail(qpn=2**24), rail(psn=2**24), rail(rd_atomic=0),
        rail(gid=bytes(16)), rail(gid=b"\xff" + bytes(15)),
    ],
)  # fmt: skip
def test_impossible_queue_pairs_are_refused(bad: Rail) -> None:
    for raw, parse in (
        (OfferParams(True, 1, TICKET, (bad,)).encode(), OfferParams.parse),
        (ReplyParams(TICKET, (bad,)).encode(), ReplyParams.parse),
    ):
        with pytest.raises(FabricError) as caught:
            parse(raw)
        assert caught.value.status is Status.BAD_REQUEST


def test_rails_are_few_and_numbered() -> None:
    for numbers in ([1], [0, 2], [0, 0], list(range(limits.VERBS_RAILS_MAX + 1)), []):
        raw = OfferParams(True, 1, TICKET, tuple(rail(n) for n in numbers)).encode()
        with pytest.raises(FabricError):
            OfferParams.parse(raw)
    for numbers in ([0, 0], list(range(limits.VERBS_RAILS_MAX + 1)), []):
        with pytest.raises(FabricError):
            ReplyParams.parse(ReplyParams(TICKET, tuple(rail(n) for n in numbers)).encode())
    assert len(ReplyParams.parse(ReplyParams(TICKET, (rail(3), rail(1))).encode()).rails) == 2


def test_a_lifetime_without_end_is_refused() -> None:
    for lifetime_ms in (0, limits.VERBS_OFFER_LIFETIME_MS_MAX + 1):
        with pytest.raises(FabricError):
            OfferParams.parse(OfferParams(True, lifetime_ms, TICKET, (rail(),)).encode())


def test_random_and_mutated_parameters_are_refused_or_canonical() -> None:
    rng = random.Random(SEED)
    good = [OfferParams(True, 5_000, TICKET, (rail(0), rail(1))).encode(),
            ReplyParams(TICKET, (rail(1), rail(0))).encode()]  # fmt: skip
    accepted = 0
    for turn in range(20_000):
        raw = bytearray(rng.choice(good))
        for _ in range(rng.randrange(1, 4)):
            choice = rng.randrange(4)
            if choice == 0 and raw:
                raw[rng.randrange(len(raw))] = rng.getrandbits(8)
            elif choice == 1:
                del raw[rng.randrange(len(raw) + 1) :]
            elif choice == 2:
                raw += rng.randbytes(rng.randrange(40))
            else:
                raw = bytearray(rng.randbytes(rng.randrange(200)))
        for parse in (OfferParams.parse, ReplyParams.parse):
            try:
                found = parse(bytes(raw))
            except FabricError:
                continue
            accepted += 1
            assert found.encode() == raw, f"seed={SEED} turn={turn}"
    assert accepted, "the mutations never leave anything valid: they prove nothing"


@given(
    rkeys=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=limits.VERBS_RAILS_MAX),
    address=st.integers(0, 2**63),
    length=st.integers(1, 2**40),
    taken=st.integers(0, 2**40),
)
def test_announcements_survive_the_way(
    rkeys: list[int], address: int, length: int, taken: int
) -> None:
    message = Message(Kind.EXPOSED, tuple(rkeys), address, length)
    raw = message.encode(taken)
    assert len(raw) == MESSAGE_BYTES == 64
    assert Message.parse(raw, len(rkeys)) == (message, taken % 2**32)
    if len(rkeys) > 1:
        with pytest.raises(ProtocolError):
            Message.parse(raw, len(rkeys) - 1)


def test_other_messages_survive_the_way() -> None:
    for kind, rkeys in (
        (Kind.WELCOME, ()), (Kind.REVOKE, (7,)), (Kind.REVOKED, (7,)), (Kind.TAKEN, ()),
        (Kind.GOODBYE, ()),
    ):  # fmt: skip
        assert Message.parse(Message(kind, rkeys).encode(3), 2) == (Message(kind, rkeys), 3)


def test_impossible_announcements_are_refused() -> None:
    for address, length in ((0, 0), (2**64 - 10, 11), (2**64 - 1, 2)):
        with pytest.raises(ProtocolError):
            Message.parse(Message(Kind.EXPOSED, (1,), address, length).encode(0), 1)
    Message.parse(Message(Kind.EXPOSED, (1,), 2**64 - 10, 10).encode(0), 1)


def test_random_messages_are_refused_or_canonical() -> None:
    rng = random.Random(SEED)
    accepted = 0
    for turn in range(20_000):
        kind = rng.choice(list(Kind))
        rkeys = (5,) if kind in (Kind.EXPOSED, Kind.REVOKE, Kind.REVOKED) else ()
        length = 9 if kind is Kind.EXPOSED else 0
        raw = bytearray(Message(kind, rkeys, 0, length).encode(rng.getrandbits(32)))
        for _ in range(rng.randrange(0, 3)):
            raw[rng.randrange(len(raw))] = rng.getrandbits(8)
        if rng.random() < 0.1:
            raw = bytearray(rng.randbytes(rng.randrange(70)))
        try:
            message, taken = Message.parse(bytes(raw), 1)
        except ProtocolError:
            continue
        accepted += 1
        assert message.encode(taken) == raw, f"seed={SEED} turn={turn}"
    assert accepted


def test_a_gid_is_told_in_eight_groups() -> None:
    assert rail().gid_text == "0000:0000:0000:0000:0000:ffff:0a07:0001"
    assert rail().ipv4 == "10.7.0.1"
    assert rail(gid=bytes.fromhex("fe80") + secrets.token_bytes(14)).ipv4 is None
