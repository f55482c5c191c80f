"""The story `entresol demo` tells: which process does what, in which order.

Invariants: the daemon and every host are processes of their own, the daemon dies by SIGKILL both
times, and what is reported was measured in this run. However the story ends, its processes are gone
and its folder is removed (unless it was asked to stay).
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from entresol_client.demo.media import flip_bit
from entresol_client.demo.processes import Daemon, Processes, StoryError, check_daemon_installed
from entresol_client.demo.progress import Progress
from entresol_client.demo.report import Findings

STEPS = 6
TENANT = "dev"
OTHER_TENANT = "other"
FLASH = "256MiB"
COUNTED_SECONDS_MAX = 5.0  # a host's report of damage reaches the counter within
MIB = 1024 * 1024

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for; see `command`."""

    context_tokens: int
    decode_tokens: int
    block_tokens: int
    fabric: str = "auto"
    codec: str = "plane"
    keep: Path | None = None


class Story:
    """Enter it, `tell` it once, leave it.

    While it is entered, SIGTERM and SIGHUP end it like Ctrl-C does (main thread only).
    """

    def __init__(self, options: Options, progress: Progress) -> None:
        self._options = options
        self._show = progress
        self._processes = Processes()
        self._work: Path | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Story:
        check_daemon_installed()
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # as under nohup
            try:
                self._handlers[number] = signal.signal(number, _interrupt)
            except ValueError:
                break  # not the main thread: whoever owns it minds the signals
        self._work = self._make_folder()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._processes.close()
        finally:
            if self._work is not None and self._options.keep is None:
                shutil.rmtree(self._work, ignore_errors=True)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def tell(self) -> Findings:
        """The whole story. Raises: StoryError when a part of it cannot run at all."""
        options = self._options
        self._show.begin(
            STEPS,
            f"entresol demo: {options.context_tokens:,} tokens of context, "
            f"fabric {options.fabric}, codec {options.codec}",
        )
        daemon = self._start_daemon()
        written = self._write(daemon)
        restart_ms, recovery_ms = self._restart(daemon)
        read = self._read(daemon)
        other = self._other(daemon)
        damage = self._damage(daemon, written["blocks"])
        return self._findings(written, (restart_ms, recovery_ms), read, other, damage)

    # The steps -------------------------------------------------------------------------------

    def _start_daemon(self) -> Daemon:
        self._show.step("a daemon starts")
        began_s = time.monotonic()
        daemon = self._processes.daemon(
            Daemon(
                self._folder / "d",
                self._folder / "daemon.log",
                (TENANT, OTHER_TENANT),
                ("--flash", FLASH, "--codec", self._options.codec),
            )
        )
        daemon.start(self._ticker("starting"))
        self._show.done(f"serving after {_ms_since(began_s):,.0f} ms")
        return daemon

    def _write(self, daemon: Daemon) -> Message:
        """Host A. The daemon is dead when this returns: killed right after the durable ack."""
        self._show.step("host A prefills and puts")
        written = self._play("write", daemon, on_result=daemon.kill)
        plain = written["blocks"] * written["block_bytes"]
        self._show.done(
            f"{written['durable']} blocks, {plain / MIB:.1f} MiB durable "
            f"in {written['put_ms']:,.0f} ms; SIGKILL"
        )
        return written

    def _restart(self, daemon: Daemon) -> tuple[float, float]:
        """ms from start to serving, and of it what finding the blocks again took."""
        self._show.step("the daemon starts again")
        began_s = time.monotonic()
        daemon.start(self._ticker("recovering"))
        restart_ms = _ms_since(began_s)
        recovery_ms = daemon.metric("entresol_recovery_seconds") * 1e3
        blocks = daemon.metric("entresol_recovered_blocks")
        self._show.done(
            f"serving after {restart_ms:,.0f} ms, "
            f"{blocks:.0f} blocks found in {recovery_ms:,.0f} ms"
        )
        return restart_ms, recovery_ms

    def _read(self, daemon: Daemon) -> Message:
        self._show.step("host B fetches, then recomputes")
        read = self._play("read", daemon)
        fetched_ms, recomputed_ms = read["fetches"][0]["ttft_ms"], read["recompute"]["ttft_ms"]
        self._show.done(
            f"first token after {fetched_ms:,.0f} ms fetched, {recomputed_ms:,.0f} ms recomputed"
        )
        return read

    def _other(self, daemon: Daemon) -> Message:
        self._show.step("another tenant asks for the same keys")
        other = self._play("other", daemon, tenant=OTHER_TENANT)
        if not other["complete"] or other["tenant"] != OTHER_TENANT:
            raise StoryError("the other tenant could not ask, so nothing is known about it")
        self._show.done(f"{other['hits']} hits of {other['asked']}")
        return other

    def _damage(self, daemon: Daemon, blocks: int) -> Message:
        """Kill, flip a bit of the block three quarters into the context, start, fetch."""
        self._show.step("one bit of the data file is flipped")
        victim = blocks * 3 // 4
        daemon.kill()
        key = self._facts_key(victim)
        flipped = flip_bit(daemon.data_file, key)
        daemon.start(self._ticker("recovering"))
        repaired = self._play("repair", daemon)
        counted = self._count_corrupt(daemon)
        self._show.done(
            f"{counted} block counted corrupt, {repaired['used_blocks']} of {blocks} used"
        )
        return {
            **repaired,
            "victim": victim,
            "offset": flipped.offset,
            "bit": flipped.bit,
            "counted": counted,
        }

    # Inside ----------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        assert self._work is not None, "the story was not entered"
        return self._work

    @property
    def _facts(self) -> Path:
        return self._folder / "facts.json"

    def _facts_key(self, index: int) -> bytes:
        # Imported here: it loads numpy and the decoder, which this process needs for nothing else.
        from entresol_client.demo.hosts import Facts

        return Facts.read(self._facts).keys[index]

    def _make_folder(self) -> Path:
        keep = self._options.keep
        if keep is None:
            return Path(tempfile.mkdtemp(prefix="entresol-demo-"))
        try:
            keep.mkdir(parents=True, exist_ok=True)
            if any(keep.iterdir()):
                raise StoryError(f"{keep} is not empty", hint="name a folder that is new or empty")
        except OSError as error:
            raise StoryError(f"cannot use {keep}: {error.strerror}") from None
        return keep.resolve()

    def _play(
        self,
        role: str,
        daemon: Daemon,
        *,
        tenant: str = TENANT,
        on_result: Callable[[], None] = lambda: None,
    ) -> Message:
        """Run a host process to its end; `on_result` is called the moment its result is here."""
        options = self._options
        arguments = [
            "--config", str(daemon.client_toml(tenant)),
            "--facts", str(self._facts),
            "--fabric", options.fabric,
            "--context-tokens", str(options.context_tokens),
            "--decode-tokens", str(options.decode_tokens),
            "--block-tokens", str(options.block_tokens),
        ]  # fmt: skip
        result: Message | None = None
        log_path = self._folder / f"{role}.log"
        doing = ["starting"]
        with self._processes.host(role, arguments, log_path) as host:
            for message in host.until_done(lambda: self._show.update(doing[0])):
                if "progress" in message:
                    doing[0] = _progress_text(message)
                    self._show.update(doing[0])
                elif message.get("result") == role:
                    on_result()
                    result = message
        if result is None:
            raise StoryError(f"{role}: ended without a result")
        return result

    def _ticker(self, text: str) -> Callable[[], None]:
        return lambda: self._show.update(text)

    def _count_corrupt(self, daemon: Daemon) -> int:
        until_s = time.monotonic() + COUNTED_SECONDS_MAX
        while True:
            counted = int(daemon.metric("entresol_corrupt_blocks_total"))
            if counted or time.monotonic() > until_s:
                return counted
            time.sleep(0.05)

    def _findings(
        self,
        written: Message,
        restart: tuple[float, float],
        read: Message,
        other: Message,
        damage: Message,
    ) -> Findings:
        cold, warm = read["fetches"]
        recompute = read["recompute"]
        answers = (written, cold, warm, recompute, damage)
        return Findings(
            context_tokens=self._options.context_tokens,
            decode_tokens=self._options.decode_tokens,
            blocks=written["blocks"],
            block_bytes=written["block_bytes"],
            fabric=read["fabric"],
            codec=self._options.codec,
            durable_blocks_put=written["durable"],
            put_ms=written["put_ms"],
            restart_ms=restart[0],
            recovery_ms=restart[1],
            warm_restart_hits=cold["hits"].get("flash", 0),
            hits={
                tier: cold["hits"].get(tier, 0) + warm["hits"].get(tier, 0)
                for tier in ("flash", "memory")
            },
            tokens_identical=all(a["tokens"] == written["tokens"] for a in answers),
            logits_identical=len({a["logits_sha256"] for a in answers}) == 1,
            ttft_recompute_ms=recompute["ttft_ms"],
            ttft_host_a_ms=written["prefill_ms"],
            ttft_fetch_ms=cold["ttft_ms"],
            ttft_fetch_parts_ms=cold["parts_ms"],
            ttft_fetch_memory_ms=warm["ttft_ms"],
            plain_bytes=cold["plain_bytes"],
            wire_bytes=cold["wire_bytes"],
            other_tenant_asked=other["asked"],
            other_tenant_hits=other["hits"],
            corrupt_blocks_detected=damage["counted"],
            corrupt_block_index=damage["victim"],
            corrupt_used_blocks=damage["used_blocks"],
            corrupt_misses=damage["misses"],
            corrupt_stored_again=damage["stored_again"],
            corrupt_prefix_after_put=damage["prefix_after_put"],
            wrong_bytes=sum(p["wrong_bytes"] for p in (cold, warm, damage, other)),
            load_ms=read["load_ms"],
            connect_ms=read["connect_ms"],
            seconds=self._show.elapsed_s,
        )


def _progress_text(message: Message) -> str:
    done, total = message["done"], message["total"]
    return f"{message['progress']} {done:,} of {total:,} tokens" if total else message["progress"]


def _ms_since(began_s: float) -> float:
    return (time.monotonic() - began_s) * 1e3


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
