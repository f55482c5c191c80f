"""Queue pairs: what a peer may do through ours, and posting to them. The rest of `verbs_api`.

Invariants:
- A queue pair of ours lets its peer read, nothing else (`QP_ACCESS`).
- Work requests are templates, filled and posted within one call and used again: in the packaged
  versions of pyverbs each one leaks unless closed, and making one costs more than posting it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from entresol_proto import limits
from entresol_proto.fabric.verbs_api import (
    ACCESS_REMOTE_READ,
    MTU_CODES,
    Completions,
    Device,
    Domain,
    Modules,
    failed,
    load,
)
from entresol_proto.status import FabricError, Status

_log = logging.getLogger("entresol.fabric")

QP_ACCESS = ACCESS_REMOTE_READ
RECV_FLAG = 1 << 63  # in a work request's number: it was posted to receive
# infiniband/verbs.h
_QPT_RC = 2
_WR_SEND = 2
_WR_RDMA_READ = 4
_SEND_SIGNALED = 2
_QPS_RESET = 0
_QP_STATE = 1
_GONE = (errno.EIO, errno.ENODEV)  # the kernel took it away with its device
_CHAIN_MAX = 32  # work requests of one post


class _Sge(ctypes.Structure):
    """struct ibv_sge, infiniband/verbs.h."""

    _fields_ = (("addr", ctypes.c_uint64), ("length", ctypes.c_uint32), ("lkey", ctypes.c_uint32))


class _Templates(threading.local):
    """Reused work requests, one set per thread: filled and posted within one call.

    `chain[n]` is linked to `chain[n + 1]`; `last` is linked to nothing (a link cannot be taken away
    again), so a post of k uses k - 1 of the chain and `last`.
    """

    def __init__(self) -> None:
        self.wrs: list[Any] = []
        self.sges: list[Any] = []
        self.last: tuple[Any, Any] = (None, None)
        self.linked_to_last = -1  # index of the chain's member that points at `last`

    def prepare(self) -> None:
        if self.wrs:
            return
        api = load()
        made = [_template(api) for _ in range(_CHAIN_MAX)]
        self.last = made.pop()
        self.wrs = [wr for wr, _ in made]
        self.sges = [sge for _, sge in made]
        for first, second in zip(self.wrs, self.wrs[1:], strict=False):
            first.next_wr = second

    def link(self, count: int) -> Any:
        """Make the first `count - 1` of the chain and `last` one list; its head."""
        if count == 1:
            return self.last[0]
        before = count - 2
        if self.linked_to_last != before:
            at = self.linked_to_last
            if 0 <= at < len(self.wrs) - 1:
                self.wrs[at].next_wr = self.wrs[at + 1]
            self.wrs[before].next_wr = self.last[0]
            self.linked_to_last = before
        return self.wrs[0]


def _template(api: Modules) -> tuple[Any, Any]:
    """A send work request and what its scatter list's one element is set through."""
    sge = api.wr.SGE(0, 0, 0)
    wr = api.wr.SendWR(wr_id=0, opcode=_WR_RDMA_READ, num_sge=1, sg=[sge], send_flags=0)
    try:
        place = wr.sg_list  # newer: the element's address
    except AttributeError:
        # Older: only settable, and never freed behind our back there. What it pointed at before
        # (16 bytes) is lost once per template.
        wr.sg_list = sge
        return wr, sge
    sge.close()
    return wr, _Sge.from_address(place)


_templates = _Templates()


@dataclass(frozen=True, slots=True)
class Route:
    """Where a queue pair's peer is, and how to get there."""

    port: int
    gid_index: int
    infiniband: bool
    peer_gid: str  # textual IPv6 form
    peer_lid: int
    peer_qpn: int
    peer_psn: int
    mtu_bytes: int
    rd_atomic: int


class ReadRequest(Protocol):
    """One RDMA READ: local memory in the device's terms, and the peer's memory."""

    local_address: int
    lkey: int
    length_bytes: int
    remote_address: int
    rkey: int


class QueuePair:
    """A reliable connection that allows its peer to read and nothing else."""

    def __init__(
        self, device: Device, domain: Domain, completions: Completions, *, sends: int, receives: int
    ) -> None:
        api = load()
        self._api = api
        cap = api.qp.QPCap(max_send_wr=min(sends, device.limits.qp_wr_max),
                           max_recv_wr=min(receives, device.limits.qp_wr_max),
                           max_send_sge=1, max_recv_sge=1, max_inline_data=0)  # fmt: skip
        init = api.qp.QPInitAttr(qp_type=_QPT_RC, scq=completions.raw, rcq=completions.raw,
                                 cap=cap, sq_sig_all=0)  # fmt: skip
        try:
            self.raw = api.qp.QP(domain.raw, init)
        except api.error as problem:
            raise failed("no queue pair", problem) from None
        self.number: int = self.raw.qp_num
        self._closed = False

    def initialize(self, port: int) -> None:
        """RESET to INIT, so that receives can be posted. Raises: FabricError."""
        attributes = self._api.qp.QPAttr(port_num=port)
        attributes.qp_access_flags = QP_ACCESS
        try:
            self.raw.to_init(attributes)
        except self._api.error as problem:
            raise failed("queue pair to INIT", problem) from None

    def connect(self, route: Route, psn: int) -> None:
        """INIT to RTR to RTS. Raises: FabricError, also when the peer cannot be reached."""
        api = self._api
        code = next(code for code, size in MTU_CODES.items() if size == route.mtu_bytes)
        attributes = api.qp.QPAttr(port_num=route.port)
        attributes.qp_access_flags = QP_ACCESS
        attributes.path_mtu = code
        attributes.dest_qp_num = route.peer_qpn
        attributes.rq_psn = route.peer_psn
        attributes.max_dest_rd_atomic = route.rd_atomic
        attributes.max_rd_atomic = route.rd_atomic
        attributes.min_rnr_timer = limits.VERBS_RNR_TIMER
        attributes.sq_psn = psn
        attributes.timeout = limits.VERBS_TIMEOUT
        attributes.retry_cnt = limits.VERBS_RETRIES
        attributes.rnr_retry = limits.VERBS_RNR_RETRIES
        if route.infiniband:
            attributes.ah_attr = api.addr.AHAttr(dlid=route.peer_lid, port_num=route.port)
        else:
            path = api.addr.GlobalRoute(dgid=api.addr.GID(route.peer_gid),
                                        sgid_index=route.gid_index, hop_limit=64)  # fmt: skip
            attributes.ah_attr = api.addr.AHAttr(gr=path, is_global=1, port_num=route.port)
        try:
            self.raw.to_rtr(attributes)
            self.raw.to_rts(attributes)
        except api.error as problem:
            raise failed(f"cannot reach {route.peer_gid}", problem) from None

    def post_reads(
        self, first_number: int, reads: Sequence[ReadRequest], signaled: Sequence[bool]
    ) -> None:
        """Chain and post at most READS_PER_POST_MAX reads, numbered on from `first_number`.

        Raises: FabricError.
        """
        templates = _templates
        templates.prepare()
        last = len(reads) - 1
        for index, read in enumerate(reads):
            if index == last:
                wr, sge = templates.last
                wr.opcode = _WR_RDMA_READ
            else:
                wr, sge = templates.wrs[index], templates.sges[index]
            wr.wr_id = first_number + index
            wr.send_flags = _SEND_SIGNALED if signaled[index] else 0
            wr.set_wr_rdma(read.rkey, read.remote_address)
            sge.addr = read.local_address
            sge.length = read.length_bytes
            sge.lkey = read.lkey
        self.post(templates.link(last + 1))

    def post_send(self, number: int, address: int, lkey: int, length_bytes: int) -> None:
        """Send a message out of registered memory, signaled. Raises: FabricError."""
        templates = _templates
        templates.prepare()
        wr, sge = templates.last
        wr.wr_id = number
        wr.opcode = _WR_SEND
        wr.send_flags = _SEND_SIGNALED
        sge.addr = address
        sge.length = length_bytes
        sge.lkey = lkey
        self.post(wr)

    def post_receive(self, receive: Receive) -> None:
        """Let the next message land in its slot. Raises: FabricError."""
        self._check_open()
        try:
            self.raw.post_recv(receive.raw)
        except self._api.error as problem:
            raise failed("cannot post a receive", problem) from None

    def _check_open(self) -> None:
        if self._closed:  # pyverbs would not notice, and crash
            raise FabricError("the queue pair is closed", status=Status.DISCONNECTED)

    def post(self, head: Any) -> None:
        """Post a pyverbs send work request and what is linked to it. Raises: FabricError."""
        self._check_open()
        try:
            self.raw.post_send(head)
        except self._api.error as problem:
            raise failed("cannot post", problem) from None

    def close(self) -> None:
        """Destroy it: once this returned the device touches no memory on its behalf. Idempotent.

        Raises: FabricError when the device neither destroys nor resets it.
        """
        self._closed = True
        try:
            self.raw.close()
        except self._api.error as problem:
            if abs(getattr(problem, "error_code", None) or 0) not in _GONE:
                self._reset(problem)

    def _reset(self, problem: Exception) -> None:
        """What cannot be destroyed can be stopped: it leaks, but moves no byte any more."""
        attributes = self._api.qp.QPAttr(qp_state=_QPS_RESET)
        try:
            self.raw.modify(attributes, _QP_STATE)
        except self._api.error:
            raise failed("queue pair not destroyed", problem) from None
        _log.error("event=queue_pair_not_destroyed error=%s", problem)


READS_PER_POST_MAX = _CHAIN_MAX


class Receive:
    """A receive request bound to one slot of memory, posted again and again."""

    __slots__ = ("raw",)

    def __init__(self, number: int, address: int, lkey: int, length_bytes: int) -> None:
        api = load()
        sge = api.wr.SGE(address, length_bytes, lkey)
        self.raw: Any = api.wr.RecvWR(wr_id=RECV_FLAG | number, num_sge=1, sg=[sge])
        sge.close()

    def close(self) -> None:
        """Free it, once its queue pair is gone. Idempotent."""
        raw, self.raw = self.raw, None
        if raw is not None:
            raw.close()
