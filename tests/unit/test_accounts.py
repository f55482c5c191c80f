"""Put budgets: what is charged is refunded exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entresol_daemon.core.accounts import Account, Accounts, PutBudget
from entresol_proto.ids import TenantName
from entresol_proto.status import Status


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
