"""Leases end exactly once, in order, and only for the session they were given to."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from entresol_daemon.core import leases as leases_module
from entresol_daemon.core.leases import Lease, LeaseTable
from entresol_proto.status import QuotaError, Status

IDS = itertools.count(1)


def table(limit: int = 4) -> LeaseTable[str]:
    return LeaseTable(leases_per_session_max=limit)


def grant(leases: LeaseTable[Any], session: int, payload: object, expires_ns: int) -> Lease[Any]:
    """Under an id that no session has had."""
    return leases.grant(session, next(IDS), payload, expires_ns)


@pytest.mark.parametrize("limit", [1, 2, 50])
def test_limit_of_a_session_and_one_past(limit: int) -> None:
    leases = table(limit)
    held = [grant(leases, 1, "x", 100) for _ in range(limit)]
    assert not leases.room(1)
    assert leases.held_by(1) == limit
    with pytest.raises(QuotaError) as caught:
        grant(leases, 1, "x", 100)
    assert caught.value.status is Status.BUSY
    assert grant(leases, 2, "y", 100).session == 2, "another session has its own limit"
    assert leases.release(1, held[0].lease_id) is held[0]
    assert leases.room(1)
    grant(leases, 1, "x", 100)


def test_a_limit_of_zero_admits_nothing() -> None:
    assert not table(0).room(1)
    with pytest.raises(QuotaError):
        grant(table(0), 1, "x", 1)


def test_ids_of_another_session_mean_nothing() -> None:
    leases = table()
    mine = grant(leases, 1, "mine", 100)
    for forged in (mine.lease_id, 0, -1, 2**64 - 1):
        assert leases.get(2, forged) is None
        assert leases.release(2, forged) is None
    assert leases.get(1, mine.lease_id) is mine
    assert len(leases) == 1


def test_two_sessions_may_use_one_number() -> None:
    leases = table()
    mine, theirs = leases.grant(1, 7, "mine", 100), leases.grant(2, 7, "theirs", 100)
    assert (leases.get(1, 7), leases.get(2, 7)) == (mine, theirs)
    assert leases.release(1, 7) is mine
    assert leases.get(1, 7) is None
    assert leases.expire(100) == [theirs]


def test_a_lease_ends_once() -> None:
    leases = table()
    one = grant(leases, 1, "x", 100)
    assert leases.release(1, one.lease_id) is one
    assert leases.release(1, one.lease_id) is None
    assert leases.expire(10**18) == []
    assert leases.end_session(1) == []
    assert len(leases) == leases.held_by(1) == 0


def test_expiry_is_in_order_of_time_and_at_the_very_moment() -> None:
    leases = table(10)
    granted = {at: grant(leases, 1, str(at), at) for at in (300, 100, 200, 100, 400)}
    assert leases.next_expiry_ns() == 100
    assert leases.expire(99) == []
    assert [lease.expires_ns for lease in leases.expire(100)] == [100, 100]
    assert leases.get(1, granted[200].lease_id) is granted[200]
    assert [lease.expires_ns for lease in leases.expire(300)] == [200, 300]
    assert leases.next_expiry_ns() == 400
    assert leases.expire(10**18) == [granted[400]]
    assert leases.next_expiry_ns() is None


def test_leases_of_one_moment_expire_in_order_of_grant() -> None:
    leases = table(10)
    granted = [grant(leases, session, "x", 50) for session in (3, 1, 2)]
    assert leases.expire(50) == granted


def test_released_leases_do_not_hold_the_timer() -> None:
    leases = table()
    early, late = grant(leases, 1, "x", 10), grant(leases, 1, "y", 20)
    leases.release(1, early.lease_id)
    assert leases.next_expiry_ns() == 20
    leases.release(1, late.lease_id)
    assert leases.next_expiry_ns() is None


def test_the_end_of_a_session_ends_its_leases_only() -> None:
    leases = table()
    mine = [grant(leases, 1, str(n), 100 - n) for n in range(3)]
    other = grant(leases, 2, "x", 100)
    assert leases.end_session(1) == mine
    assert leases.held_by(1) == 0
    assert len(leases) == 1
    assert leases.expire(1000) == [other]
    assert leases.end_session(99) == []


def test_deadlines_of_ended_leases_do_not_pile_up() -> None:
    """A host that asks for long leases and returns them at once costs no memory."""
    leases = table()
    for _ in range(20 * leases_module.STALE_DEADLINES_MAX):
        leases.release(1, grant(leases, 1, "x", 10**18).lease_id)
        assert len(leases._deadlines) <= leases_module.STALE_DEADLINES_MAX + 2
    keep = grant(leases, 1, "kept", 5)
    for _ in range(2 * leases_module.STALE_DEADLINES_MAX):
        leases.release(1, grant(leases, 1, "x", 10**18).lease_id)
    assert leases.expire(5) == [keep], "sweeping loses no living deadline"


class Model(RuleBasedStateMachine):
    """Against a plain dict."""

    @initialize(limit=st.integers(1, 3))
    def begin(self, limit: int) -> None:
        self.limit = limit
        self.table: LeaseTable[int] = LeaseTable(leases_per_session_max=limit)
        self.living: dict[int, Lease[int]] = {}
        self.ended: Counter[int] = Counter()
        self.now_ns = 0
        self.granted = 0

    def end(self, lease: Lease[int]) -> None:
        assert self.living.pop(lease.lease_id) is lease
        self.ended[lease.payload] += 1

    @rule(session=st.integers(1, 4), for_ns=st.integers(0, 50))
    def grant(self, session: int, for_ns: int) -> None:
        held = sum(lease.session == session for lease in self.living.values())
        assert self.table.room(session) == (held < self.limit)
        if held >= self.limit:
            with pytest.raises(QuotaError):
                self.table.grant(session, self.granted + 1, -1, self.now_ns)
            return
        self.granted += 1
        lease = self.table.grant(session, self.granted, self.granted, self.now_ns + for_ns)
        assert lease.lease_id not in self.living
        self.living[lease.lease_id] = lease

    @rule(session=st.integers(1, 4), lease_id=st.integers(0, 40))
    def release(self, session: int, lease_id: int) -> None:
        lease = self.table.release(session, lease_id)
        known = self.living.get(lease_id)
        if known is None or known.session != session:
            assert lease is None
        else:
            assert lease is known
            self.end(known)

    @rule(step_ns=st.integers(0, 30))
    def expire(self, step_ns: int) -> None:
        self.now_ns += step_ns
        due = [lease for lease in self.living.values() if lease.expires_ns <= self.now_ns]
        ended = self.table.expire(self.now_ns)
        assert ended == sorted(due, key=lambda lease: (lease.expires_ns, lease.lease_id))
        for lease in ended:
            self.end(lease)

    @rule(session=st.integers(1, 4))
    def end_session(self, session: int) -> None:
        mine = [lease for lease in self.living.values() if lease.session == session]
        ended = self.table.end_session(session)
        assert ended == sorted(mine, key=lambda lease: lease.lease_id)
        for lease in ended:
            self.end(lease)

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "table"):
            return
        assert len(self.table) == len(self.living)
        assert set(self.ended.values()) <= {1}, "a lease ended twice"
        assert self.granted == len(self.living) + len(self.ended)
        due = min((lease.expires_ns for lease in self.living.values()), default=None)
        assert self.table.next_expiry_ns() == due


Model.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase
