"""The `vllm.general_plugins` entry point: makes "entresol" a name that vLLM knows.

Invariant: nothing here can keep vLLM from starting. vLLM calls this in each of its processes,
whether or not anyone configured the tier; what is missing costs a line in the log.
"""

from __future__ import annotations

import logging

from entresol_client.engines.vllm_versions import TESTED

log = logging.getLogger("entresol.engine")

TIER_TYPE = "entresol"
TIER = ("entresol_client.engines.vllm", "EntresolTier")
CONNECTOR_NAME = "EntresolConnector"
CONNECTOR = ("entresol_client.engines.vllm_connector", "EntresolConnector")


def register() -> None:
    """Register the tier and the connector by name; imports neither. May be called again."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        _quietly(SecondaryTierFactory.register_tier, TIER_TYPE, *TIER)
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        _quietly(KVConnectorFactory.register_connector, CONNECTOR_NAME, *CONNECTOR)
    except Exception as error:  # whatever a vLLM we do not know may do
        log.warning("event=engine_not_registered reason=%r tested=%s", str(error), ",".join(TESTED))


def _quietly(register: object, *arguments: str) -> None:
    """Call a register function; a name that is there already is ours, from an earlier call."""
    assert callable(register)
    try:
        register(*arguments)
    except ValueError as error:
        log.debug("event=engine_registered_before name=%s reason=%r", arguments[0], str(error))
