"""The one place that touches pyverbs: thin, typed handles over its objects, versions 44 to 65.

pyverbs is the distribution's (`python3-pyverbs`); PyPI's does not work with any packaged rdma-core.
It is imported when first used, and its absence is a `FabricError` that names the package.

Invariants:
- No constant is read from pyverbs (its modules for them moved twice); they are the kernel's ABI.
- Nothing asks for remote write or atomics: `ACCESS_*` below is all there is.
- Every call holds the GIL until the kernel answers: callers keep regions and batches short.

Each handle closes its own object, once; a handle is closed before what it was made from. The source
read for the differences: linux-rdma/rdma-core, tags v44.0 to v64.0, pyverbs/{cq,mr,wr,qp}.pyx.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

from entresol_proto.status import FabricError, Status

_log = logging.getLogger("entresol.fabric")

PACKAGE = "python3-pyverbs"
# infiniband/verbs.h (rdma-core) and rdma/ib_user_verbs.h (linux): stable numbers.
ACCESS_LOCAL_WRITE = 1  # the device may write what our own reads bring
ACCESS_REMOTE_READ = 4
ACCESS_MW_BIND = 16
_WAYS = (ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_MW_BIND)  # one alone, never two
_LINK_LAYER_INFINIBAND = 1
MTU_CODES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}

_channel_lock = threading.RLock()
os.register_at_fork(after_in_child=_channel_lock._at_fork_reinit)  # type: ignore[attr-defined]
_channel_fds: set[int] = set()  # of the open channels
_loaded: Any = None


class Modules(NamedTuple):
    device: Any
    pd: Any
    mr: Any
    cq: Any
    qp: Any
    wr: Any
    addr: Any
    error: type[Exception]


def load() -> Modules:
    """pyverbs, imported once. Raises: FabricError (UNSUPPORTED) with what to install."""
    global _loaded
    if _loaded is None:
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        try:
            names = ("device", "pd", "mr", "cq", "qp", "wr", "addr")
            found = {name: importlib.import_module(f"pyverbs.{name}") for name in names}
            error = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
        except ImportError as problem:
            raise FabricError(
                f"RDMA needs pyverbs: {problem}",
                hint=f"install the distribution's {PACKAGE}, not PyPI's pyverbs; a virtual "
                "environment sees it if made with --system-site-packages",
                status=Status.UNSUPPORTED,
            ) from None
        finally:  # it configures logging for the whole program; that is ours to do
            for handler in [h for h in root.handlers if h not in handlers]:
                root.removeHandler(handler)
            root.setLevel(level)
        for part in ("MR", "CQ", "QP", "PD", "Context", "CompChannel"):
            logging.getLogger(part).setLevel(logging.WARNING)
        _loaded = Modules(**found, error=error)
    modules_: Modules = _loaded
    return modules_


def failed(what: str, problem: Exception) -> FabricError:
    """A pyverbs error as ours. Out of locked memory is the one everybody meets."""
    number = getattr(problem, "error_code", None) or 0
    text = str(problem)
    hint = ""
    if number == errno.ENOMEM or "Cannot allocate memory" in text:
        hint = "raise the limit of locked memory (ulimit -l, LimitMEMLOCK=infinity)"
        return FabricError(f"{what}: {text}", hint=hint, status=Status.BUSY)
    if number == errno.EFAULT or "Bad address" in text:
        hint = "only anonymous memory and memfds can be registered, not files"
    if number in (errno.EPERM, errno.EACCES):
        hint = "the process may not open /dev/infiniband"
    return FabricError(f"{what}: {text}", hint=hint)


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What a device allows, as far as we use it."""

    rd_atomic_initiator: int  # reads a queue pair of ours may have outstanding
    rd_atomic_responder: int  # reads it answers at a time
    qp_wr_max: int
    cqe_max: int
    mr_max: int
    mw_max: int


@dataclass(frozen=True, slots=True)
class PortState:
    """One port right now."""

    active: bool
    mtu_bytes: int  # of the link as RDMA sees it: 256 to 4096
    infiniband: bool
    lid: int


def device_names() -> list[str]:
    """The RDMA devices of this system. Raises: FabricError."""
    api = load()
    try:
        return sorted(os.fsdecode(found.name) for found in api.device.get_device_list())
    except api.error as problem:
        raise FabricError(f"no RDMA: {problem}", status=Status.UNSUPPORTED) from None


class Device:
    """An open device, shared by all sessions of this process that use it (`open_device`)."""

    def __init__(self, name: str) -> None:
        api = load()
        self.name = name
        self._users = 0
        try:
            self.raw = api.device.Context(name=name)
        except api.error as problem:
            raise failed(f"cannot open RDMA device {name}", problem) from None
        found = self.raw.query_device()
        self.limits = DeviceLimits(
            rd_atomic_initiator=found.max_qp_init_rd_atom,
            rd_atomic_responder=found.max_qp_rd_atom,
            qp_wr_max=found.max_qp_wr,
            cqe_max=found.max_cqe,
            mr_max=found.max_mr,
            mw_max=found.max_mw,
        )

    def port_state(self, port: int) -> PortState:
        """Raises: FabricError when there is no such port."""
        api = load()
        try:
            found = self.raw.query_port(port)
        except api.error as problem:
            raise failed(f"{self.name} port {port}", problem) from None
        return PortState(
            active=found.state == 4,
            mtu_bytes=MTU_CODES.get(int(found.active_mtu), 256),
            infiniband=found.link_layer == _LINK_LAYER_INFINIBAND,
            lid=found.lid,
        )

    def release(self) -> None:
        """End of one use; the last one closes the device."""
        with _channel_lock:
            self._users -= 1
            assert self._users >= 0, "a device was released twice"
            if self._users == 0:
                _devices.pop(self.name, None)
                self.raw.close()

    def acquire(self) -> Device:
        """One more use. Only on what `open_device` gave."""
        with _channel_lock:
            self._users += 1
        return self


_devices: dict[str, Device] = {}


def open_device(name: str) -> Device:
    """The device, opened at its first use in this process. Release it once. Raises: FabricError."""
    with _channel_lock:
        found = _devices.get(name)
        if found is None:
            found = _devices[name] = Device(name)
        found._users += 1
        return found


class Memory:
    """A registered memory region. Keep what is at `address` alive until `close`."""

    __slots__ = ("_raw", "lkey", "rkey")

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.lkey: int = raw.lkey
        self.rkey: int = raw.rkey

    def close(self) -> None:
        """Deregister: from here on the device refuses its keys. Idempotent.

        Raises: FabricError when the kernel does not do it.
        """
        raw, self._raw = self._raw, None
        if raw is not None:
            try:
                raw.close()
            except load().error as problem:
                raise failed("memory stays registered", problem) from None

    @property
    def raw(self) -> Any:
        return self._raw


class Domain:
    """A protection domain: keys of memory in another one mean nothing here."""

    def __init__(self, device: Device) -> None:
        api = load()
        try:
            self.raw = api.pd.PD(device.raw)
        except api.error as problem:
            raise failed("no protection domain", problem) from None

    def register(self, address: int, length_bytes: int, access: int) -> Memory:
        """Raises: FabricError; BUSY with a hint when the limit of locked memory is reached."""
        assert access in _WAYS
        api = load()
        try:
            return Memory(api.mr.MR(self.raw, length_bytes, access, address=address))
        except api.error as problem:
            raise failed(f"cannot register {length_bytes} bytes", problem) from None

    def register_dmabuf(self, fd: int, offset: int, length_bytes: int, access: int) -> Memory:
        """Device memory behind a dma-buf; its addresses begin at `offset`.

        Raises: FabricError (UNSUPPORTED) where the kernel, device or pyverbs cannot.
        """
        assert access in _WAYS
        api = load()
        if not hasattr(api.mr, "DmaBufMR"):
            raise FabricError("this pyverbs has no dma-buf regions", status=Status.UNSUPPORTED)
        try:
            return Memory(api.mr.DmaBufMR(self.raw, length_bytes, access, fd, offset))
        except (api.error, OSError) as problem:
            raise FabricError(
                f"the device does not take dma-buf memory: {problem}", status=Status.UNSUPPORTED
            ) from None

    def close(self) -> None:
        self.raw.close()


class Completion(NamedTuple):
    """One polled completion. `number` is the work request's."""

    number: int
    status: int
    length_bytes: int


class Completions:
    """A completion queue with its channel: `fd` turns readable, then `rearm`, then `poll` to 0."""

    def __init__(self, device: Device, entries: int) -> None:
        api = load()
        try:
            with _channel_lock:
                guess = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
                os.close(guess)
                self._channel = api.cq.CompChannel(device.raw)
                self.fd = _channel_fd(self._channel, guess)
                _channel_fds.add(self.fd)
            os.set_blocking(self.fd, False)
            size = min(entries, device.limits.cqe_max)
            self.raw = api.cq.CQ(device.raw, size, None, self._channel, 0)
            self.raw.req_notify()
        except api.error as problem:
            if hasattr(self, "_channel"):
                self._close_channel()
            raise failed("no completion queue", problem) from None
        self._error = api.error

    def rearm(self) -> None:
        """Take the event that made `fd` readable (if any) and ask for the next one.

        Raises: FabricError when the device is gone.
        """
        try:
            self._channel.get_cq_event(self.raw)
        except self._error:
            pass  # none was there
        else:
            self.raw.ack_events(1)
        try:
            self.raw.req_notify()
        except self._error as problem:
            raise failed("no completions", problem) from None

    def poll(self, most: int) -> list[Completion]:
        """Up to `most` completions, in order. Raises: FabricError when the device is gone."""
        try:
            _, found = self.raw.poll(most)
        except self._error as problem:
            raise failed("no completions", problem) from None
        return [Completion(wc.wr_id, wc.status, wc.byte_len) for wc in found]

    def close(self) -> None:
        """Close the queue, then the channel with its descriptor. Its queue pairs are gone."""
        self.raw.close()
        self._close_channel()

    def _close_channel(self) -> None:
        with _channel_lock:
            _channel_fds.discard(getattr(self, "fd", -1))
            self._channel.close()


def _channel_fd(channel: Any, guess: int) -> int:
    """The channel's descriptor: told from version 57 on, before that found in /proc.

    `guess` was the lowest free number just before, so it nearly always is the one.
    """
    told = getattr(channel, "fd", None)
    if told is not None:
        return int(told)
    if guess not in _channel_fds and _is_channel(guess):
        return guess
    for fd in sorted((int(name) for name in os.listdir("/proc/self/fd")), reverse=True):
        if fd not in _channel_fds and _is_channel(fd):
            return fd
    raise FabricError("cannot find the completion channel's descriptor")


def _is_channel(fd: int) -> bool:
    try:
        return "infinibandevent" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
