"""What the demo found: the promises it is held to, the table and the JSON object.

Invariant: pure functions of `Findings`; a promise is judged in one place, `broken_promises`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

FULL_CONTEXT_TOKENS = 8_192  # from here on the gain is promised; shorter prompts recompute fast
TTFT_GAIN_MIN = 20.0
KIB = 1024
MIB = 1024 * KIB
_LABEL_WIDTH = 27
_RULE_WIDTH = 78


@dataclass(frozen=True, slots=True)
class Findings:
    """All measured in one run. Times are in ms; TTFT begins at token ids and ends at a token.

    Attributes:
        durable_blocks_put: blocks host A's put stored, acknowledged durable before the SIGKILL.
        warm_restart_hits: blocks fetched whole, from flash, by the first fetch after it.
        restart_ms: from starting the killed daemon again until it serves.
        recovery_ms: of it, finding the blocks again.
        hits: blocks by tier, over host B's two fetches before the bit flip.
        wrong_bytes: over all fetches of the run; see `hosts.wrong_bytes_in`.
        plain_bytes, wire_bytes: of the first fetch: bytes the model needs, bytes that moved.
        ttft_fetch_ms: first fetch, from flash; its parts are in `ttft_fetch_parts_ms`.
        ttft_fetch_memory_ms: the fetch after it, from the daemon's memory.
        ttft_recompute_ms: host B recomputing the same prompt, last, with everything warm.
        load_ms, connect_ms: host B's set-up; part of neither TTFT.
        corrupt_misses: misses of the fetch after the flip, by status; behind the damage are gaps.
    """

    context_tokens: int
    decode_tokens: int
    blocks: int
    block_bytes: int
    fabric: str
    codec: str
    durable_blocks_put: int
    put_ms: float
    restart_ms: float
    recovery_ms: float
    warm_restart_hits: int
    hits: dict[str, int]
    tokens_identical: bool
    logits_identical: bool
    ttft_recompute_ms: float
    ttft_host_a_ms: float
    ttft_fetch_ms: float
    ttft_fetch_parts_ms: dict[str, float]
    ttft_fetch_memory_ms: float
    plain_bytes: int
    wire_bytes: int
    other_tenant_asked: int
    other_tenant_hits: int
    corrupt_blocks_detected: int
    corrupt_block_index: int
    corrupt_used_blocks: int
    corrupt_misses: dict[str, int]
    corrupt_stored_again: int
    corrupt_prefix_after_put: int
    wrong_bytes: int
    load_ms: float
    connect_ms: float
    seconds: float

    @property
    def ttft_gain(self) -> float:
        """How much sooner the first token comes with a fetch from flash."""
        return self.ttft_recompute_ms / self.ttft_fetch_ms

    @property
    def ratio(self) -> float:
        """Plain over wire bytes; 0 when nothing moved."""
        return self.plain_bytes / self.wire_bytes if self.wire_bytes else 0.0


def broken_promises(found: Findings) -> list[str]:
    """Every promise that did not hold, in words; empty is what the demo is for."""
    promises = [
        (found.wrong_bytes == 0, f"wrong_bytes is {found.wrong_bytes}, not 0"),
        (found.tokens_identical, "tokens after a fetch are not those of recomputing"),
        (
            found.durable_blocks_put == found.blocks,
            f"{found.durable_blocks_put} of {found.blocks} blocks were stored durable",
        ),
        (
            found.warm_restart_hits == found.durable_blocks_put,
            f"{found.warm_restart_hits} of {found.durable_blocks_put} durable blocks "
            "came back from flash after SIGKILL",
        ),
        (found.other_tenant_hits == 0, f"another tenant had {found.other_tenant_hits} hits"),
        (
            found.corrupt_blocks_detected == 1,
            f"{found.corrupt_blocks_detected} corrupt blocks were counted, 1 was damaged",
        ),
        (
            found.corrupt_used_blocks == found.corrupt_block_index,
            f"{found.corrupt_used_blocks} blocks were used with block "
            f"{found.corrupt_block_index} damaged",
        ),
        (
            found.corrupt_stored_again == 1 and found.corrupt_prefix_after_put == found.blocks,
            f"putting again stored {found.corrupt_stored_again} blocks and left a prefix of "
            f"{found.corrupt_prefix_after_put} of {found.blocks}",
        ),
        (
            found.context_tokens < FULL_CONTEXT_TOKENS or found.ttft_gain >= TTFT_GAIN_MIN,
            f"the first token came {found.ttft_gain:.1f}x sooner, not {TTFT_GAIN_MIN:.0f}x",
        ),
    ]
    return [text for held, text in promises if not held]


def as_dict(found: Findings, broken: list[str]) -> dict[str, Any]:
    """The JSON object."""
    fields = asdict(found)
    fields["ttft_gain"] = found.ttft_gain
    fields["ratio"] = found.ratio
    fields["broken_promises"] = broken
    rounded: dict[str, Any] = {}
    for name, value in fields.items():
        rounded[name] = round(value, 3) if isinstance(value, float) else value
    return rounded


def table(found: Findings, broken: list[str]) -> str:
    """What a person reads at the end; at most 80 columns."""
    verdict = f"{len(broken)} broken" if broken else "all promises held"
    parts = found.ttft_fetch_parts_ms
    identical = "identical" if found.tokens_identical else "DIFFERENT"
    rows = [
        (
            "context",
            f"{found.context_tokens:,} tokens, {found.blocks} blocks of "
            f"{found.block_bytes / KIB:.0f} KiB, {found.blocks * found.block_bytes / MIB:.1f} MiB",
        ),
        ("durable before SIGKILL", f"{found.durable_blocks_put} blocks in {found.put_ms:,.0f} ms"),
        (
            "restart",
            f"{found.restart_ms:,.0f} ms to serving, {found.recovery_ms:,.0f} of them recovery",
        ),
        (
            "on flash after it",
            f"{found.warm_restart_hits} of {found.durable_blocks_put} durable blocks",
        ),
        ("", ""),
        ("first token, recomputed", f"{found.ttft_recompute_ms:>9,.1f} ms"),
        ("first token, from flash", _gained(found.ttft_fetch_ms, found)),
        ("first token, from memory", _gained(found.ttft_fetch_memory_ms, found)),
        (
            "  parts, from flash, ms",
            ", ".join(f"{name} {_short(ms)}" for name, ms in parts.items()),
        ),
        (
            "  set-up, in none of them",
            f"model {found.load_ms:,.0f} ms, connection {found.connect_ms:,.0f} ms",
        ),
        (
            "bytes moved",
            f"{found.wire_bytes:,} for {found.plain_bytes:,}: {found.ratio:.2f}x",
        ),
        ("  over, compressed by", f"{found.fabric}, {found.codec}"),
        ("hits by tier", ", ".join(f"{tier} {n}" for tier, n in found.hits.items())),
        ("", ""),
        (
            "answer",
            f"{found.decode_tokens} tokens {identical} in all 5 answers"
            + (", every logit too" if found.logits_identical else ""),
        ),
        (
            "another tenant, same keys",
            f"{found.other_tenant_hits} hits of {found.other_tenant_asked}",
        ),
        (
            "one bit flipped on flash",
            f"{found.corrupt_blocks_detected} corrupt block counted, "
            f"{found.corrupt_used_blocks} used, "
            f"{found.blocks - found.corrupt_used_blocks} recomputed",
        ),
        ("wrong bytes", f"{found.wrong_bytes:,}"),
    ]
    lines = ["", f"entresol demo: {verdict}, {found.seconds:.1f} s", "-" * _RULE_WIDTH]
    lines += [f"{label:<{_LABEL_WIDTH}}{value}".rstrip() for label, value in rows]
    lines.append("-" * _RULE_WIDTH)
    lines += [f"BROKEN: {text}" for text in broken]
    return "\n".join(lines)


def _short(ms: float) -> str:
    return f"{ms:.1f}" if ms < 10 else f"{ms:.0f}"


def _gained(ms: float, found: Findings) -> str:
    return f"{ms:>9,.1f} ms   {found.ttft_recompute_ms / ms:,.1f}x sooner"
