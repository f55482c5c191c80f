"""How the command fails: one line, one fix, one documented exit code.

Invariant: what a person can cause or repair is a `CliError` (or another EntresolError) and never
shows a traceback; a traceback is a bug of ours.
"""

from __future__ import annotations

from typing import ClassVar

from entresol_proto.status import EntresolError, Status

EXIT_OK = 0
EXIT_FAILED = 1  # a miss, a refusal, a check that failed
EXIT_USAGE = 2  # wrong arguments, configuration or identity
EXIT_UNREACHABLE = 3  # no daemon answers
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class CliError(EntresolError):
    """The command cannot do what was asked."""

    exit_code: ClassVar[int] = EXIT_FAILED
    status = Status.MISS


class UsageProblem(CliError):
    """Arguments or configuration are wrong; nothing was sent."""

    exit_code = EXIT_USAGE
    status = Status.BAD_REQUEST


class Unreachable(CliError):
    """No daemon answers where the configuration says."""

    exit_code = EXIT_UNREACHABLE
    status = Status.DISCONNECTED


def exit_code_of(error: EntresolError) -> int:
    """Of any expected error. Outside `CliError`, bad requests and identities are local mistakes."""
    if isinstance(error, CliError):
        return error.exit_code
    return EXIT_USAGE if error.status in (Status.BAD_REQUEST, Status.FORBIDDEN) else EXIT_FAILED


def describe(error: EntresolError) -> list[str]:
    """The lines that a person sees."""
    lines = [f"entresol: {Exception.__str__(error)}"]
    if error.hint:
        lines.append(f"  fix: {error.hint}")
    return lines
