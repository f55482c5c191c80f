"""What a failed work completion means for us. Numbers: enum ibv_wc_status, infiniband/verbs.h."""

from __future__ import annotations

from entresol_proto.status import Status

WR_FLUSH_ERR = 5
_NAMES = {
    0: "SUCCESS", 1: "LOC_LEN_ERR", 2: "LOC_QP_OP_ERR", 3: "LOC_EEC_OP_ERR", 4: "LOC_PROT_ERR",
    5: "WR_FLUSH_ERR", 6: "MW_BIND_ERR", 7: "BAD_RESP_ERR", 8: "LOC_ACCESS_ERR",
    9: "REM_INV_REQ_ERR", 10: "REM_ACCESS_ERR", 11: "REM_OP_ERR", 12: "RETRY_EXC_ERR",
    13: "RNR_RETRY_EXC_ERR", 14: "LOC_RDD_VIOL_ERR", 15: "REM_INV_RD_REQ_ERR", 16: "REM_ABORT_ERR",
    17: "INV_EECN_ERR", 18: "INV_EEC_STATE_ERR", 19: "FATAL_ERR", 20: "RESP_TIMEOUT_ERR",
    21: "GENERAL_ERR", 22: "TM_ERR", 23: "TM_RNDV_INCOMPLETE",
}  # fmt: skip
_STATUSES = {
    0: Status.OK,
    WR_FLUSH_ERR: Status.DISCONNECTED,  # the queue pair had failed or was closed before
    10: Status.LEASE_EXPIRED,  # the peer's device refused: the memory is no longer exposed
    12: Status.DISCONNECTED,  # no answer in all retries: the peer or the link is gone
    13: Status.DISCONNECTED,  # the peer's process takes no messages any more
    20: Status.DISCONNECTED,
}


def status_of(code: int) -> Status:
    """The status of the one operation that completed with `code`."""
    return _STATUSES.get(code, Status.FABRIC_ERROR)


def name_of(code: int) -> str:
    """For logs."""
    return _NAMES.get(code, f"status {code}")
