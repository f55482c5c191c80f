"""Gauges that follow the shard's state, read when the metrics page is asked for.

Invariant: reading metrics changes nothing and never fails the page.
"""

from __future__ import annotations

import asyncio
import functools
import sys

from entresol_daemon import logs
from entresol_daemon.control.identity import ReloadingServerContext
from entresol_daemon.core.residency import ResidentState
from entresol_daemon.events.log import EventLog
from entresol_daemon.events.types import Kind
from entresol_daemon.flash.model import SegmentState
from entresol_daemon.memory.allocator import malloc_bytes
from entresol_daemon.metrics import ROTATION_CAUSES, Metrics
from entresol_daemon.shard.shard import Shard
from entresol_daemon.stalls import StallWatch


def follow_shard(metrics: Metrics, shard: Shard, tls: ReloadingServerContext) -> None:
    """Connect every state gauge and engine counter to its source."""
    parts = shard.parts
    engine, stats, pool = parts.engine, parts.engine.stats, parts.residency.pool
    follow = metrics.follow
    follow(metrics.leases, lambda: len(parts.leases))
    follow(metrics.leased_bytes, lambda: sum(s.held_bytes for s in shard.sessions.values()))
    follow(metrics.tenants, lambda: len(parts.accounts.by_name))
    follow(metrics.flash_capacity_bytes, lambda: engine.capacity_bytes)
    follow(
        metrics.flash_live_bytes,
        lambda: sum(account.flash_bytes for account in parts.accounts.by_name.values()),
    )
    follow(metrics.flash_blocks, lambda: len(engine.index))
    follow(metrics.flash_written_bytes, lambda: stats.written_bytes)
    follow(metrics.flash_read_bytes, lambda: stats.read_bytes)
    follow(metrics.flash_refusals["read"], lambda: stats.refused_reads)
    follow(metrics.flash_refusals["write"], lambda: stats.refused_writes)
    follow(metrics.flash_refusals["flush"], lambda: stats.refused_flushes)
    engine.hooks.on_flush = parts.meters.flushed
    follow(metrics.reinserted_blocks, lambda: stats.copied_blocks)
    follow(metrics.reinserted_bytes, lambda: stats.copied_bytes)
    follow(metrics.scrub_progress, shard.scrubber.share)
    follow(metrics.scrub_began, lambda: shard.scrubber.progress.began_unix_ns / 1e9)
    follow(metrics.scrub_expected, shard.scrubber.expected_s)
    follow_events(metrics, parts.events)
    follow(metrics.tls_reloads, lambda: tls.reloads)
    follow(metrics.tls_reload_failures, lambda: tls.failures)
    follow(metrics.tls_stale, lambda: tls.stale)
    follow(metrics.tls_not_after, tls.not_after_s)
    follow(metrics.queue_depth["put"], lambda: parts.put_budget.used_blocks)
    follow(metrics.queue_depth["flash_write"], lambda: engine.writes_queued)
    turns = parts.turns
    follow(metrics.queue_depth["loop"], lambda: turns.loop.waiting)
    follow(metrics.queue_depth["hello"], lambda: turns.loop.greeting)
    follow(metrics.queue_depth["flash_read"], lambda: turns.flash.waiting)
    follow(metrics.queue_depth["compute"], lambda: turns.compute.waiting)
    follow(metrics.queue_depth["pull"], lambda: turns.pulls.waiting)
    dram = metrics.dram_bytes
    follow(dram["unassigned"], lambda: pool.budget_bytes - pool.mapped_bytes)
    follow(dram["free"], lambda: pool.mapped_bytes - pool.allocated_bytes)
    follow(dram[ResidentState.READY.value], lambda: pool.allocated_bytes)
    follow(metrics.opened_bytes, lambda: shard.gets.opened.memory.mapped_bytes)

    follow(metrics.queue_depth["get"], lambda: shard.gets.door.waiting)
    follow(metrics.queue_depth["stage"], lambda: shard.gets.loading)
    follow(metrics.staging_in_flight, lambda: shard.gets.loading)
    metrics.queue_depth["send"].set(0)  # then the listener counts
    follow_worth(metrics, shard)
    chooser = parts.codecs
    follow(metrics.codecs.bypassed, lambda: chooser.bypass.skipped)
    metrics.on_refresh(lambda: metrics.codecs.show(chooser.in_use()))
    metrics.on_refresh(lambda: _per_tenant(metrics, shard))
    metrics.on_refresh(lambda: _per_key(metrics, shard))
    rotations = shard.keycare.rotations
    for cause in ROTATION_CAUSES:
        follow(metrics.key_rotations[cause], functools.partial(rotations.__getitem__, cause))


def follow_worth(metrics: Metrics, shard: Shard) -> None:
    """Connect wear and the write budget to their sources."""
    parts, worth = shard.parts, metrics.worth
    engine, stats, admission = parts.engine, parts.engine.stats, parts.admission
    metrics.follow(worth.drive_writes, lambda: stats.written_bytes / engine.capacity_bytes)
    metrics.follow(worth.appended_bytes, lambda: stats.appended_bytes)
    worth.budget_per_day.set(parts.config.admission.drive_writes_per_day)

    def show_budget() -> None:
        level = admission.budget_level(parts.now_ns())
        worth.budget_room.set(level[0] if level else 0)
        worth.budget_burst.set(level[1] if level else 0)

    metrics.on_refresh(show_budget)

    def show_eviction() -> None:
        names: dict[bytes, str] = {
            stream: account.name for stream, account in parts.accounts.by_stream.items()
        }
        rows = {names[row.stream]: row for row in parts.valued.report() if row.stream in names}
        for gauge, values in (
            (worth.eviction_worth, {name: float(row.rules) for name, row in rows.items()}),
            (worth.eviction_gain, {name: row.gain for name, row in rows.items()}),
            (worth.eviction_promise, {name: row.promise for name, row in rows.items()}),
        ):
            metrics.set_tenants(gauge, values)

    if parts.config.flash.eviction == "worth":
        metrics.on_refresh(show_eviction)


def follow_events(metrics: Metrics, events: EventLog) -> None:
    """Connect what is said of the event log."""
    for kind in Kind:
        count = functools.partial(events.published.__getitem__, kind)
        metrics.follow(metrics.events_published[kind], count)
    metrics.follow(metrics.event_subscriptions, lambda: events.subscriptions_count)
    metrics.follow(metrics.event_log_bytes, lambda: events.used_bytes)


def follow_process(metrics: Metrics, watch: StallWatch) -> None:
    """Connect what is said of the process as a whole."""
    metrics.follow(metrics.loop_lag_max_seconds, lambda: watch.longest_ns / 1e9)
    metrics.follow(metrics.tasks, lambda: len(asyncio.all_tasks()))
    metrics.follow(metrics.python_objects, sys.getallocatedblocks)
    metrics.follow(metrics.malloc_bytes, malloc_bytes)
    metrics.follow(metrics.loop_stalls, lambda: watch.stalls)
    metrics.follow(metrics.process_starved, lambda: watch.starved)
    metrics.follow(metrics.log_lines_dropped, logs.lines_dropped)


def _per_key(metrics: Metrics, shard: Shard) -> None:
    infos = shard.parts.keyring.tenants()
    metrics.set_tenants(metrics.key_version, {i.name: i.active_version for i in infos})
    metrics.set_tenants(metrics.key_versions, {i.name: len(i.fingerprints) for i in infos})
    care = shard.keycare
    metrics.set_tenants(metrics.old_key_blocks, {i.name: care.old_blocks(i) for i in infos})
    metrics.set_tenants(metrics.uncounted_key_blocks, {i.name: care.not_counted(i) for i in infos})


def _per_tenant(metrics: Metrics, shard: Shard) -> None:
    pool = shard.parts.residency.pool
    accounts = shard.parts.accounts.by_name.values()
    watchers = shard.parts.events.subscriptions_of
    found: dict[str, dict[str, int]] = {
        "index_blocks": {each.name: each.flash_blocks for each in accounts},
        "get_bytes": {each.name: each.get_bytes for each in accounts},
        "put_bytes": {each.name: each.put_bytes for each in accounts},
        "sessions": {each.name: each.sessions for each in accounts},
        "leases": {each.name: each.leases for each in accounts},
        "event_watchers": {each.name: watchers(each.name) for each in accounts},
    }
    for name, values in found.items():
        metrics.set_tenants(metrics.tenant_holds[name], values)
    metrics.set_tenant_bytes(
        flash={each.name: each.flash_bytes for each in accounts},
        dram={each.name: pool.owned_bytes(each.stream) for each in accounts},
    )
    states = shard.parts.engine.segment_states()  # there may be a hundred thousand: on the loop
    for state in (SegmentState.OPEN, SegmentState.SEALED):
        metrics.flash_segments[state.value].set(states.count(state))
    unread = len(shard.parts.engine.stock.unread)
    metrics.flash_segments["condemned"].set(states.count(SegmentState.CONDEMNED) - unread)
    metrics.flash_segments["unread"].set(unread)
    free = states.count(SegmentState.FREE) + states.count(SegmentState.FREEING)
    metrics.flash_segments["free"].set(free)
