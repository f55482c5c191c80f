"""From an address to an open session with a data path: TCP, TLS, identity, HELLO, fabric.

Invariant: nothing is said to a server before its certificate proved to be the very shard of our
trust domain, and no fabric is used that this host was not offered inside that session.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import ssl
import time
from dataclasses import dataclass, replace

from entresol_client.certificates import own_problem
from entresol_client.config import ClientConfig, ShardAddress
from entresol_client.connection import CLOSED_BY_DAEMON, PROTOCOL_BROKEN, Connection
from entresol_client.results import RequestFailedError
from entresol_client.surroundings import ORDINARY, Surroundings
from entresol_proto.fabric import registry
from entresol_proto.fabric.base import ConnectOptions, Endpoint, Offer
from entresol_proto.identity import IdentityError, check_server_identity
from entresol_proto.status import FabricError, Status
from entresol_proto.wire.opening import (
    NO_FABRIC,
    PROTOCOL_HOST_SEALED,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Attach,
    Hello,
    Welcome,
)

log = logging.getLogger("entresol.client")

_DATES = (
    "compare the clocks of both hosts (timedatectl), then the dates of both certificates: "
    "openssl x509 -noout -dates -in FILE"
)
_ONE_CA = "both sides need certificates of one CA and trust domain; compare [tls] of the daemon"


class _HungUpError(RequestFailedError):
    """A shard of ours ended the session before it began, and we know of no reason."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """What a successful handshake gives. The owner closes both connection and endpoint."""

    connection: Connection
    welcome: Welcome
    endpoint: Endpoint | None  # None: control only
    fabric_reason: str

    @property
    def fabric(self) -> str:
        """Label of the data path, "none" without one."""
        return "none" if self.endpoint is None else self.endpoint.kind.label


async def connect(
    address: ShardAddress,
    config: ClientConfig,
    context: ssl.SSLContext,
    around: Surroundings = ORDINARY,
) -> OpenSession:
    """Open a session within `config.connect_deadline_ns`.

    Raises: RequestFailedError with a message fit for an operator; nothing stays open then.
    """
    deadline_ns = time.monotonic_ns() + config.connect_deadline_ns
    try:
        async with asyncio.timeout(config.connect_deadline_ns / 1e9):
            until = asyncio.get_running_loop().time() + config.connect_deadline_ns / 1e9
            try:
                return await _session(address, config, context, around, deadline_ns, until)
            except _HungUpError:  # as one that dies; one that is there does it again
                return await _session(address, config, context, around, deadline_ns, until)
    except TimeoutError:
        error = RequestFailedError(Status.DEADLINE, "no answer in time")
    except ssl.SSLError as cause:
        text = ": ".join(filter(None, (cause.reason, getattr(cause, "verify_message", ""))))
        dates = "expired" in text or "not yet valid" in text
        hint = _DATES if dates else _ONE_CA
        error = RequestFailedError(Status.FORBIDDEN, f"TLS: {text or cause}", hint=hint)
    except IdentityError as cause:
        error = RequestFailedError(Status.FORBIDDEN, Exception.__str__(cause), hint=cause.hint)
    except UnicodeError:  # what a label of a name may be, the idna codec says
        error = RequestFailedError(Status.DISCONNECTED, f"{address.host!r} is no host name")
    except OSError as cause:
        error = RequestFailedError(Status.DISCONNECTED, _reason(cause))
    except RequestFailedError as cause:
        error = cause
    raise error


async def _session(
    address: ShardAddress,
    config: ClientConfig,
    context: ssl.SSLContext,
    around: Surroundings,
    deadline_ns: int,
    until: float,
) -> OpenSession:
    """One try. Raises: what `_reach` raises; RequestFailedError; IdentityError."""
    where, connection = await _reach(address, context, around, until)
    found = replace(address, host=where)  # the data path goes there too, and asks nobody
    try:
        return await _open(connection, found, config, context, around, deadline_ns)
    except BaseException as error:
        connection.drop(str(error) or "cancelled")
        raise


async def _reach(
    address: ShardAddress, context: ssl.SSLContext, around: Surroundings, until: float
) -> tuple[str, Connection]:
    """A connection to the first address of the shard's host that takes one, and that address. Each
    has its part of the loop's time until `until`: one that never answers is not all there is.

    Raises: OSError; ssl.SSLError of the first that was reached; UnicodeError.
    """
    loop, errors = asyncio.get_running_loop(), dict[str, OSError]()
    found = await around.resolve(address.host, address.port)
    for left, where in zip(range(len(found), 0, -1), found, strict=True):
        try:
            async with asyncio.timeout_at(loop.time() + (until - loop.time()) / left):
                _, connection = await loop.create_connection(
                    Connection, where, address.port, ssl=context, server_hostname=address.host
                )
            return where, connection
        except ssl.SSLError:
            raise
        except TimeoutError:
            if left == 1:
                raise
            errors[where] = OSError(errno.ETIMEDOUT, "no answer in time")
        except OSError as error:
            errors[where] = error
    if len({_reason(error) for error in errors.values()}) == 1:
        raise next(iter(errors.values()))
    told = (f"{where}: {_reason(error)}" for where, error in errors.items())
    raise OSError("; ".join(told) or "the host has no address")


def _reason(error: OSError) -> str:
    number = error.errno or 0  # of a name that does not resolve: negative
    return os.strerror(number) if number > 0 else error.strerror or str(error)


async def _open(
    connection: Connection,
    address: ShardAddress,
    config: ClientConfig,
    context: ssl.SSLContext,
    around: Surroundings,
    deadline_ns: int,
) -> OpenSession:
    tls = connection.ssl_object
    check_server_identity(
        tls.getpeercert(binary_form=True) if tls else None,
        config.tls.trust_domain,
        shard=address.name,
    )
    # A tenant that keeps its keys does not talk to a daemon that knows no such namespaces.
    least = PROTOCOL_MIN if config.tenant_key is None else PROTOCOL_HOST_SEALED
    hello = Hello(least, PROTOCOL_MAX, around.host_id(), config.open_threads, around.process_name())
    try:
        welcome: Welcome = await connection.request(hello, deadline_ns)
    except RequestFailedError as error:
        raise _hung_up(connection, config, error) from None
    if not least <= welcome.protocol <= PROTOCOL_MAX:
        raise RequestFailedError(
            Status.UNSUPPORTED, f"the daemon chose protocol {welcome.protocol}"
        )
    endpoint, reason = await _attach(
        connection, address, config, context, around, welcome, deadline_ns
    )
    return OpenSession(connection, welcome, endpoint, reason)


def _hung_up(
    connection: Connection, config: ClientConfig, error: RequestFailedError
) -> RequestFailedError:
    """Why a shard that has proved to be ours ended the session before it began, as far as this side
    can tell: what it thinks of our certificate it says to its log alone."""
    if error.status is not Status.DISCONNECTED or not connection.lost.done():
        return error
    why = connection.lost.result()
    if why.startswith(PROTOCOL_BROKEN):
        return RequestFailedError(Status.BAD_REQUEST, why, hint="compare the versions of both")
    problem = own_problem(config.tls)
    if problem is not None:
        return RequestFailedError(Status.FORBIDDEN, f"{why}: {problem[0]}", hint=problem[1])
    if why != CLOSED_BY_DAEMON:  # reset, or a goodbye: it goes away
        return error
    return _HungUpError(
        Status.FORBIDDEN,
        f"{why} without a word, as it does with a certificate that it does not take",
        hint=f"{_ONE_CA}; its log says why (event=handshake_failed, event=identity_refused), "
        "and if it says nothing, the port is not that of [listen] control_port",
    )


async def _attach(
    connection: Connection,
    address: ShardAddress,
    config: ClientConfig,
    context: ssl.SSLContext,
    around: Surroundings,
    welcome: Welcome,
    deadline_ns: int,
) -> tuple[Endpoint | None, str]:
    """Take the best offer that works; without any, attach control only. Each step is logged."""
    same_host = welcome.host_id == around.host_id()
    prefer = None if config.fabric == "auto" else config.fabric
    offers = [Offer(offer.kind, offer.params) for offer in welcome.offers]
    choices = registry.rank(offers, same_host=same_host, prefer=prefer)
    options = ConnectOptions(
        ssl=context, host=address.host, resolve=around.resolve, verbs=config.verbs
    )
    refused: list[str] = []
    for choice in choices:
        label = choice.offer.kind.label
        if not choice.usable:
            refused.append(f"{label}: {choice.reason}")
            continue
        if prefer is not None and label != prefer and not config.fallback:
            refused.append(f"{label}: not the one that is set")
            continue
        endpoint: Endpoint | None = None
        try:
            endpoint, reply = await around.connect_fabric(
                choice.offer, deadline_ns, options=options
            )
            await connection.request(Attach(int(choice.offer.kind), reply), deadline_ns)
        except (FabricError, RequestFailedError, OSError) as error:
            if endpoint is not None:
                await endpoint.close()
            refused.append(f"{label}: {error}")
            if connection.lost.done():
                raise RequestFailedError(Status.DISCONNECTED, connection.lost.result()) from None
            continue
        except BaseException:
            if endpoint is not None:
                await endpoint.close()
            raise
        reason = "; ".join([choice.reason, *(f"not {text}" for text in refused)])
        log.info("event=fabric shard=%s fabric=%s reason=%r", address.name, label, reason)
        return endpoint, reason
    await connection.request(Attach(NO_FABRIC), deadline_ns)
    reason = "; ".join(refused) or "the daemon offers none"
    log.warning("event=fabric shard=%s fabric=none reason=%r", address.name, reason)
    return None, reason
