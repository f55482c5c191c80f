"""What the bench promises: names that every whole report has, and budgets.

Invariant: a budget stands in BUDGETS and nowhere else; a number gets its own by its name. What was
measured at another size has another name, hence no budget. A run from which a name of CONTRACT is
missing says so and fails, unless the section that measures it was not asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from bench.results import Line


@dataclass(frozen=True, slots=True)
class Budget:
    """The section that measures a number, and what the number must be, in its own unit."""

    section: str
    at_least: float | None = None
    at_most: float | None = None


BUDGETS: dict[str, Budget] = {
    "get_resident_tcp_vs_loopback": Budget("gets", at_least=0.9),
    "get_resident_shm_sealed_vs_aes": Budget("gets", at_least=0.9),
    "get_resident_shm_plain_vs_memcpy": Budget("gets", at_least=0.9),
    "get_resident_tcp_vs_best_peer": Budget("peers", at_least=1.5),
    "get_flash_vs_fio_read": Budget("flash", at_least=0.9),
    "get_flash_fast_vs_fio_read": Budget("flash", at_least=1.0),
    "first_byte_p99_vs_device": Budget("flash", at_most=3),
    "put_durable_vs_fio_write": Budget("flash", at_least=0.8),
    "exists_8192_p50_ms": Budget("control", at_most=5),
    "get_64k_resident_p50_us": Budget("control", at_most=300),
    "daemon_us_per_block": Budget("cost", at_most=50),
    "daemon_us_per_fetch": Budget("cost", at_most=200),
    "index_bytes_per_block": Budget("index", at_most=128),
    "restart_1m_warm_s": Budget("restart", at_most=5),
    "restart_1m_crash_s": Budget("restart", at_most=20),
    "codec_dense_ratio_bf16": Budget("codec", at_least=1.5),
    "codec_dense_decode_gbps": Budget("codec", at_least=2),
    "codec_fast_ratio_bf16": Budget("codec", at_least=1.42),
    "codec_fast_decode_gbps": Budget("codec", at_least=8),
    "codec_fast_encode_gbps": Budget("codec", at_least=8),
    "codec_ratio_e4m3": Budget("codec", at_least=1.2),
    "codec_ratio_e5m2": Budget("codec", at_least=1.4),
    "codec_ratio_fp16": Budget("codec", at_least=1.17),
    "codec_bypass_cost": Budget("codec", at_most=2),
    "policy_chat_share_of_optimum": Budget("policy", at_least=0.6),
    "policy_agents_below_lru_points": Budget("policy", at_most=0.5),
    "policy_rag_below_lru_points": Budget("policy", at_most=0.5),
    "policy_write_amplification": Budget("policy", at_most=1.15),
    "ttft_auto_vs_always": Budget("quote", at_most=0.95),
    "ttft_auto_vs_never": Budget("quote", at_most=0.8),
    "ttft_auto_vs_oracle": Budget("quote", at_most=1.15),
}

# What scripts read from results.json.
CONTRACT = (
    "get_resident_tcp_vs_loopback", "get_resident_tcp_vs_best_peer",
    "get_resident_shm_sealed_vs_aes", "get_resident_shm_plain_vs_memcpy",
    "get_flash_vs_fio_read", "put_durable_vs_fio_write",
    "codec_dense_ratio_bf16", "codec_dense_decode_gbps",
    "codec_fast_ratio_bf16", "codec_fast_decode_gbps", "codec_fast_encode_gbps",
    "exists_8192_p50_ms", "get_64k_resident_p50_us",
    "index_bytes_per_block", "restart_1m_warm_s", "restart_1m_crash_s",
)  # fmt: skip


def line(name: str, unit: str, values: list[float]) -> Line:
    """A number with its budget, if it has one."""
    budget = BUDGETS.get(name, Budget(""))
    return Line(name, unit, values, at_least=budget.at_least, at_most=budget.at_most)


def missing(lines: Iterable[Line], sections: Collection[str]) -> list[str]:
    """Names of the contract that these sections should have measured and did not."""
    there = {one.name for one in lines}
    return [name for name in CONTRACT if name not in there and BUDGETS[name].section in sections]
