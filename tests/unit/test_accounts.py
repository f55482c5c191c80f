"""Put budgets: what is charged is refunded exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entresol_daemon.core.accounts import (
    HELD_OF_FREE,
    SESSIONS_OF_FREE,
    SESSIONS_OPENING_MAX,
    Account,
    Accounts,
    Held,
    PutBudget,
    Shared,
)
from entresol_proto.ids import TenantName
from entresol_proto.status import QuotaError, Status


def account(name: str = "a", **fields: int) -> Account:
    return Account(TenantName(name), name.encode().ljust(16), **fields)


def test_bytes_at_the_limit_and_one_past() -> None:
    budget, mine = PutBudget(bytes_max=100, blocks_max=10), account()
    assert budget.admit(mine, 60) is Status.OK
    assert budget.admit(mine, 41) is Status.BUSY
    assert budget.admit(mine, 40) is Status.OK
    assert (budget.used_bytes, mine.put_bytes, mine.put_blocks) == (100, 100, 2)
    budget.refund(mine, 60)
    assert budget.admit(mine, 60) is Status.OK


def test_blocks_at_the_limit_and_one_past() -> None:
    budget, mine = PutBudget(bytes_max=100, blocks_max=2), account()
    assert [budget.admit(mine, 1) for _ in range(3)] == [Status.OK, Status.OK, Status.BUSY]


def test_the_budget_is_shared() -> None:
    budget = PutBudget(bytes_max=100, blocks_max=10)
    assert budget.admit(account("a"), 100) is Status.OK
    assert budget.admit(account("b"), 1) is Status.BUSY


@pytest.mark.parametrize(
    ("budget", "mine", "size"),
    [
        (PutBudget(1000, 10), account(flash_quota_bytes=100), 101),
        (PutBudget(1000, 10), account(), 1001),
        (PutBudget(1000, 0), account(), 1),
    ],
)
def test_what_never_fits_is_quota_and_not_busy(budget: PutBudget, mine: Account, size: int) -> None:
    assert budget.admit(mine, size) is Status.QUOTA
    assert budget.used_bytes == mine.put_bytes == mine.put_blocks == 0


def test_a_quota_of_zero_is_no_quota() -> None:
    assert PutBudget(1000, 10).admit(account(flash_quota_bytes=0), 1000) is Status.OK
    assert PutBudget(1000, 10).admit(account(flash_quota_bytes=100), 100) is Status.OK


def test_refunding_twice_is_asserted() -> None:
    budget, mine = PutBudget(1000, 10), account()
    budget.admit(mine, 10)
    budget.refund(mine, 10)
    with pytest.raises(AssertionError):
        budget.refund(mine, 10)


def test_refunding_another_tenant_is_asserted() -> None:
    budget, mine, other = PutBudget(1000, 10), account("a"), account("b")
    budget.admit(mine, 10)
    with pytest.raises(AssertionError):
        budget.refund(other, 10)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(1, 60)), max_size=60))
def test_books_balance(steps: list[tuple[bool, str, int]]) -> None:
    budget = PutBudget(bytes_max=100, blocks_max=4)
    accounts = {name: account(name) for name in "ab"}
    open_puts: list[tuple[str, int]] = []
    for admit, name, size in steps:
        if admit:
            fits = len(open_puts) < 4 and sum(s for _, s in open_puts) + size <= 100
            assert (budget.admit(accounts[name], size) is Status.OK) == fits
            if fits:
                open_puts.append((name, size))
        elif open_puts:
            who, much = open_puts.pop(size % len(open_puts))
            budget.refund(accounts[who], much)
        assert budget.used_blocks == len(open_puts)
        assert budget.used_bytes == sum(s for _, s in open_puts)
        for one, mine in accounts.items():
            assert mine.put_bytes == sum(s for n, s in open_puts if n == one)
            assert mine.put_blocks == sum(n == one for n, _ in open_puts)


def test_accounts_are_found_by_name_and_by_stream() -> None:
    accounts, mine = Accounts(), account("a")
    accounts.add(mine)
    assert accounts.by_name[mine.name] is accounts.by_stream[mine.stream] is mine
    with pytest.raises(AssertionError):
        accounts.add(account("a"))
    with pytest.raises(AssertionError):
        accounts.add(Account(TenantName("b"), mine.stream))
    accounts.remove(mine.name)
    accounts.remove(mine.name)
    assert not accounts.by_name
    assert not accounts.by_stream


# What hosts hold at their own pace ----------------------------------------------------------------


def held(*, sessions: int = 8, leases: int = 8, get_bytes: int = 1_000) -> Held:
    return Held(Shared(sessions), Shared(leases), Shared(get_bytes), sessions_per_tenant_max=4)


def open_session(books: Held, mine: Account, *, alone: bool = False) -> None:
    books.may_open_session(mine, alone=alone)
    mine.sessions += 1
    books.sessions.take(1)


def test_sessions_at_a_tenants_own_limit_and_one_past() -> None:
    books, mine = held(), account(sessions_quota=2)
    for _ in range(2):
        open_session(books, mine, alone=True)
    with pytest.raises(QuotaError) as caught:
        books.may_open_session(mine, alone=True)
    assert caught.value.status is Status.QUOTA
    assert caught.value.hint


def test_sessions_at_the_named_default_and_one_past() -> None:
    books, mine = held(), account()
    for _ in range(4):
        open_session(books, mine, alone=True)
    with pytest.raises(QuotaError) as caught:
        books.may_open_session(mine, alone=True)
    assert caught.value.status is Status.QUOTA


def test_the_last_sessions_are_kept_for_others() -> None:
    books, greedy, late = held(sessions=8), account("a", sessions_quota=100), account("b")
    for _ in range(7):
        open_session(books, greedy)
    with pytest.raises(QuotaError) as caught:
        open_session(books, greedy)
    assert caught.value.status is Status.BUSY
    assert greedy.sessions == 7
    open_session(books, late)


def test_a_refusal_does_not_tell_how_many_sessions_others_have() -> None:
    told = set()
    for others in (80, 85):
        books, mine = held(sessions=100), account(sessions_quota=100)
        books.sessions.take(others)
        while books.sessions.admits(mine.sessions, 1, 0, SESSIONS_OF_FREE):
            open_session(books, mine)
        with pytest.raises(QuotaError) as caught:
            open_session(books, mine)
        assert caught.value.status is Status.BUSY
        told.add(str(caught.value))
    assert len(told) == 1, told


def test_sessions_that_never_get_a_data_path_are_few() -> None:
    books, mine = held(sessions=4_096), account(sessions_quota=4_096)
    mine.sessions_opening = SESSIONS_OPENING_MAX - 1
    books.may_open_session(mine, alone=True)
    mine.sessions_opening += 1
    with pytest.raises(QuotaError) as caught:
        books.may_open_session(mine, alone=True)
    assert caught.value.status is Status.BUSY


def test_of_several_no_tenant_leases_more_than_is_free() -> None:
    books, greedy, late = held(leases=8), account("a"), account("b")
    for mine in (greedy, late):
        while books.may_lease(mine, HELD_OF_FREE):
            mine.leases += 1
            books.leases.take(1)
    assert (greedy.leases, late.leases) == (4, 2)
    assert books.may_lease(account("c"), HELD_OF_FREE)
    assert books.may_lease(greedy, 0), "one that is alone may take what is there"


def test_leases_at_a_tenants_own_limit_and_one_past() -> None:
    books, mine = held(leases=100), account(leases_quota=3)
    for _ in range(3):
        assert books.may_lease(mine, 0)
        mine.leases += 1
        books.leases.take(1)
    assert not books.may_lease(mine, 0)


def test_memory_of_hosts_is_shared_by_what_is_free() -> None:
    books, first, second = held(get_bytes=900), account("a"), account("b")
    for mine, expected in ((first, 450), (second, 225)):
        while (room := books.get_room(mine, 1)) > 1 or (not mine.get_bytes and room > 0):
            books.hold(mine, min(room, 25))
        assert abs(mine.get_bytes - expected) <= 25
    assert books.get_room(first, 1) <= 1
    books.let_go(first, 300)
    assert books.get_room(second, 1) > 0


def test_one_block_gets_through_whatever_its_length() -> None:
    books, mine = held(get_bytes=1_000), account(get_quota_bytes=10)
    assert books.get_room(mine, 1) >= 1
    books.hold(mine, 600)
    assert books.get_room(mine, 1) <= 0
    books.let_go(mine, 600)
    with pytest.raises(AssertionError):
        books.let_go(mine, 1)


def test_puts_at_a_tenants_own_limit_and_one_past() -> None:
    budget, mine = PutBudget(1_000, 10), account(put_quota_bytes=100)
    assert budget.admit(mine, 60) is Status.OK
    assert budget.admit(mine, 41) is Status.BUSY
    assert budget.admit(mine, 40) is Status.OK


def test_weights_say_how_much_of_what_is_free() -> None:
    books = Accounts()
    one, three = account("a"), account("b", weight=3)
    books.add(one)
    assert books.of_free(one) == 0, "alone: without bound"
    books.add(three)
    assert (books.of_free(one), books.of_free(three)) == (HELD_OF_FREE, 3 * HELD_OF_FREE)
    assert (books.weight_of(three.stream), books.weight_of(b"nobody's")) == (3, 1)
    one.weight, three.weight = 2, 8
    books.reweigh()
    assert (books.of_free(one), books.of_free(three)) == (HELD_OF_FREE, 4 * HELD_OF_FREE)
    books.remove(three.name)
    assert books.of_free(one) == 0
