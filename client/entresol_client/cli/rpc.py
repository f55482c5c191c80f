"""The gRPC side of the command: the tenant's over mutual TLS, the operator's over the admin socket.

Invariants: grpc is imported here, inside functions, and nowhere else in the client; a shard is
looked at with our own TLS first, because gRPC's Python interface cannot check a SPIFFE id: the
certificate must name the very shard that is configured before anything is asked of it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entresol_client.cli.errors import CliError, Unreachable, UsageProblem
from entresol_proto.status import Status

if TYPE_CHECKING:
    from entresol_client.config import ClientConfig, ShardAddress

CALL_DEADLINE_S = 10.0
CONNECT_DEADLINE_S = 3.0
KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # of one reply; the daemon keeps them near 1 MiB
PACKAGE_HINT = "pip install 'entresol[cli]'"


def modules() -> tuple[Any, Any, Any]:
    """grpc, the messages and the stubs. Raises: CliError naming the package to install."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its failures reach us as errors
    try:
        import grpc

        from entresol_proto.v1 import entresol_pb2, entresol_pb2_grpc
    except ImportError as error:
        raise CliError(
            f"this command needs gRPC, which is not installed ({error.name or error})",
            hint=PACKAGE_HINT,
            status=Status.UNSUPPORTED,
        ) from None
    return grpc, entresol_pb2, entresol_pb2_grpc


@contextlib.contextmanager
def operator_channel(path: Path) -> Iterator[Any]:
    """A channel to the admin socket. Raises: CliError, Unreachable."""
    grpc, _, _ = modules()
    _check_socket(path)
    channel = grpc.insecure_channel(f"unix:{path.absolute()}", options=_options())
    try:
        yield channel
    finally:
        channel.close()


def _check_socket(path: Path) -> None:
    """gRPC says little about why a socket cannot be used, so it is tried first."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_DEADLINE_S)
        try:
            probe.connect(str(path))
        except PermissionError:
            raise CliError(
                f"the admin socket {path} is not open to this user",
                hint="run this as the daemon's user; the socket makes whoever opens it operator",
                status=Status.FORBIDDEN,
            ) from None
        except OSError as error:
            raise Unreachable(
                f"no daemon answers at the admin socket {path}: {error.strerror or error}",
                hint="is it running, on this machine? see --admin-socket",
            ) from None


@contextlib.contextmanager
def tenant_channel(config: ClientConfig, shard: ShardAddress) -> Iterator[Any]:
    """A channel under the tenant's certificate to a shard that proved who it is.

    Raises: CliError, UsageProblem, Unreachable.
    """
    grpc, _, _ = modules()
    if not shard.grpc_port:
        raise UsageProblem(
            f"the configuration has no grpc_port for shard {shard.name}",
            hint="add grpc_port to its [[shards]] table; the daemon logs event=grpc_listening",
        )
    name = server_name(config, shard)
    files = config.tls
    credentials = grpc.ssl_channel_credentials(
        root_certificates=files.ca.read_bytes(),
        private_key=files.key.read_bytes(),
        certificate_chain=files.cert.read_bytes(),
    )
    options = [*_options(), ("grpc.ssl_target_name_override", name)]
    host = f"[{shard.host}]" if ":" in shard.host else shard.host
    channel = grpc.secure_channel(f"{host}:{shard.grpc_port}", credentials, options=options)
    try:
        yield channel
    except Unreachable:
        from entresol_client.certificates import own_problem

        problem = own_problem(files)
        if problem is None:
            raise
        text = f"the daemon at {host}:{shard.grpc_port} refuses: {problem[0]}"
        raise UsageProblem(text, hint=problem[1], status=Status.FORBIDDEN) from None
    finally:
        channel.close()


def server_name(config: ClientConfig, shard: ShardAddress) -> str:
    """A DNS or IP name in the shard's certificate, after its SPIFFE id was checked.

    Raises: Unreachable, CliError, UsageProblem (our own files).
    """
    from entresol_proto.identity import (
        IdentityError,
        check_server_identity,
        client_ssl_context,
        load_certificate,
    )

    where = f"{shard.host}:{shard.grpc_port}"
    try:
        context = client_ssl_context(config.tls.cert, config.tls.key, config.tls.ca)
    except IdentityError as error:
        raise UsageProblem(Exception.__str__(error), hint=error.hint) from None
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((shard.host, shard.grpc_port), CONNECT_DEADLINE_S) as raw,
            context.wrap_socket(raw, server_hostname=shard.host) as tls,
        ):
            peer = tls.getpeercert(binary_form=True)
    except ssl.SSLError as error:
        raise CliError(
            f"TLS with {where} failed: {error.reason or error}",
            hint="`entresol doctor` checks the certificates of both sides",
            status=Status.FORBIDDEN,
        ) from None
    except OSError as error:
        raise Unreachable(
            f"no daemon answers gRPC at {where}: {error.strerror or error}",
            hint="is it running? `entresol doctor` checks every step",
        ) from None
    try:
        check_server_identity(peer, config.tls.trust_domain, shard=shard.name)
    except IdentityError as error:
        raise CliError(
            f"{where}: {Exception.__str__(error)}",
            hint=error.hint or "correct the name or the address of this shard in [[shards]]",
            status=Status.FORBIDDEN,
        ) from None
    name = _host_name(load_certificate(peer or b""), shard.host)
    if not name:
        raise CliError(
            f"the certificate of shard {shard.name} has no DNS or IP name, which gRPC needs",
            hint="issue one with a DNS name beside its SPIFFE id",
            status=Status.FORBIDDEN,
        )
    return name


def _host_name(certificate: Any, host: str) -> str:
    """`host` if the certificate has it, else any of its names."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    found = [str(name) for name in names.get_values_for_type(x509.DNSName)]
    found += [str(name) for name in names.get_values_for_type(x509.IPAddress)]
    found = [name for name in found if "*" not in name]
    return host if host in found else next(iter(found), "")


def _options() -> list[tuple[str, Any]]:
    """gRPC channel arguments (include/grpc/impl/channel_arg_names.h of grpc/grpc)."""
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.enable_http_proxy", 0),  # a proxy cannot see a client certificate
        # Of a host that died nothing comes, and a watch would wait for ever. The daemon allows a
        # ping each 10 s.
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),  # no limit: a quiet watch is all pings
    ]


def call(method: Callable[..., Any], request: Any, *, timeout_s: float = CALL_DEADLINE_S) -> Any:
    """One unary call. Raises: CliError, Unreachable."""
    grpc, _, _ = modules()
    try:
        return method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise translate(error) from None


def translate(error: Any) -> CliError:
    """A gRPC failure as one of ours; the daemon's status travels in the trailing metadata."""
    grpc, _, _ = modules()
    code, text = error.code(), str(error.details() or "")
    label = dict(error.trailing_metadata() or ()).get("entresol-status", "")
    if not label and code is grpc.StatusCode.UNAVAILABLE:
        return Unreachable(f"the daemon cannot be reached: {text}", hint="is it running?")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not label:
        return Unreachable("the daemon did not answer in time", hint="`entresol doctor`")
    status = next((item for item in Status if item.label == label), Status.INTERNAL)
    kind = Unreachable if status is Status.DRAINING else CliError
    message, hint = _split_hint(text)
    return kind(message or code.name.lower(), hint=hint, status=status)


def _split_hint(text: str) -> tuple[str, str]:
    """Our errors end in "(hint)"; see `EntresolError.__str__`."""
    if text.endswith(")") and " (" in text:
        message, _, hint = text[:-1].rpartition(" (")
        return message, hint
    return text, ""
