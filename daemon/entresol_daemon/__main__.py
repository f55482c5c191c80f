"""`entresold`: the command that starts the daemon."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from entresol_daemon import receipt_command, setup_command, slices
from entresol_proto import __version__
from entresol_proto.status import ConfigError, EntresolError

if TYPE_CHECKING:
    from entresol_daemon.config import Config

# What comes with entresol[daemon]; the light core of a GPU host has this command without them.
_EXTRA = ("google", "grpc", "grpc_health", "prometheus_client", "pyarrow", "xxhash")
_USAGE = """\
entresold --config FILE [--check | COMMAND ...]
       entresold --dev [--dir DIR] [--tenant NAME] [--flash SIZE] [--codec NAME]
       entresold --print-config
       entresold keygen FILE | verify-receipt FILE ...
"""
_EPILOG = """\
examples:
  entresold --dev                            try it: temporary folder, own certificates, any tenant
  entresold --dev --dir ~/entresol           the same, kept: a second start is a warm restart
  entresold --print-config > entresold.toml  every setting with its default and meaning
  entresold keygen /etc/entresol/kek         a new key-encryption key
  entresold --config /etc/entresol/entresold.toml
  entresold --check --config FILE            judge configuration, TLS files, data's format, only
  entresold --config FILE prepare            before a first start: keys and certificates, if none
  entresold --config FILE renew              a new certificate of the shard, if prepare made it
  entresold --config FILE certify acme DIR   a tenant's certificate and client configuration
  entresold --config FILE formats            the data's format versions, and those this one reads
  entresold --config FILE rewrap NEW-KEK     change the key-encryption key of a stopped daemon
  entresold verify-receipt FILE --key HEX    check an erasure receipt, offline

signals: TERM or INT drains and stops (a second one at once), HUP re-reads the certificates, and
looks for the key-encryption key when it was missing; --dev in a terminal stops when that closes.
exit status: 0 stopped as asked, 1 could not start or failed, 2 wrong use of this command,
130 Ctrl-C before it served.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="entresold",
        usage=_USAGE,
        description="The Entresol daemon: a pod-shared, sealed KV block store on flash.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"entresold {__version__}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML configuration")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only judge configuration, TLS files and the data's format",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print a complete, commented configuration"
    )
    dev = parser.add_argument_group("trying it")
    dev.add_argument("--dev", action="store_true", help="run with nothing prepared")
    dev.add_argument("--dir", type=Path, metavar="DIR", help="keep the dev folder here")
    dev.add_argument(
        "--tenant",
        action="append",
        metavar="NAME",
        help="tenants that get a certificate (repeatable; default: dev and other)",
    )
    dev.add_argument("--flash", metavar="SIZE", help="bytes of flash, such as 4GiB (default: 1GiB)")
    dev.add_argument(
        "--codec", metavar="NAME", help="raw, fast, dense, plane, zstd or auto (default: auto)"
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", prog="entresold"
    )
    keygen = commands.add_parser("keygen", help="write a new key-encryption key to a file")
    keygen.add_argument("path", type=Path, metavar="FILE", help="a file that does not exist yet")
    rewrap = commands.add_parser(
        "rewrap", help="wrap every key under another key-encryption key; blocks stay as they are"
    )
    rewrap.add_argument("path", type=Path, metavar="FILE", help="the new key, as keygen writes it")
    rewrap.add_argument(
        "--old", type=Path, metavar="FILE", help="the key until now (default: [keys] kek_file)"
    )
    receipt_command.add_parser(commands)
    setup_command.add_parsers(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return _command(parser, arguments)
    except EntresolError as error:
        print(f"entresold: {Exception.__str__(error)}", file=sys.stderr)
        if error.hint:
            print(f"  fix: {error.hint}", file=sys.stderr)
        return 1
    except PermissionError as error:
        print(f"entresold: not allowed to use {error.filename!r}", file=sys.stderr)
        print("  fix: run this as the daemon's user", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRA:
            raise
        print(f"entresold: the package {name} is not installed", file=sys.stderr)
        print("  fix: pip install 'entresol[daemon]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before it serves; then INT drains it
        print("entresold: interrupted", file=sys.stderr)
        return 130


def _command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.command == "verify-receipt":
        return receipt_command.run(arguments)
    if arguments.command == "keygen":
        return _keygen(arguments.path)
    if arguments.print_config:
        return _print_config()
    if arguments.command == "rewrap":
        if arguments.config is None:
            parser.error("rewrap needs the daemon's --config FILE before it")
        return _rewrap(arguments.config, arguments.path, arguments.old)
    if arguments.command in setup_command.COMMANDS:
        if arguments.config is None:
            parser.error(f"{arguments.command} needs the daemon's --config FILE before it")
        return setup_command.run(arguments, _load(arguments.config))
    if arguments.dev == (arguments.config is not None):
        parser.error("give --config FILE, or --dev to try it")
    of_dev = (arguments.dir, arguments.tenant, arguments.flash, arguments.codec)
    if not arguments.dev and any(of_dev):
        parser.error("--dir, --tenant, --flash and --codec belong to --dev")
    return _run(arguments)


def _print_config() -> int:
    from entresol_daemon.config import Config
    from entresol_daemon.config_reference import to_toml

    try:
        print(to_toml(Config()), end="", flush=True)
    except OSError as error:
        # What was not written must not fail again when the interpreter ends.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        if not isinstance(error, BrokenPipeError):  # its reader has enough
            print(f"entresold: standard output: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _load(path: Path) -> Config:
    from entresol_daemon.config import Config

    return Config.load(path)


def _keygen(path: Path) -> int:
    from entresol_daemon.keys.providers import FileKek

    kek = FileKek.generate(path)
    print(f"wrote key-encryption key {kek.kek_id().hex()} to {path} (mode 0600)")
    print("keep a copy where the flash is not: without it every block is lost")
    return 0


def _rewrap(config_path: Path, new: Path, old: Path | None) -> int:
    from entresol_daemon.config import Config
    from entresol_daemon.keys.providers import FileKek, is_credential

    config = Config.load(config_path)
    old = old or config.keys.kek_file
    if old is None:
        raise ConfigError("no [keys] kek_file: which key is the old one?", hint="--old FILE")
    if is_credential(old) and "CREDENTIALS_DIRECTORY" not in os.environ:
        raise ConfigError(
            "[keys] kek_file is a credential that only the unit's process is shown",
            hint="--old FILE, as in LoadCredential= of the unit: --old /etc/entresol/kek",
        )
    kek, before = FileKek.open(new), FileKek.open(old)
    kek.settle()  # as who may read it: the keyring is written as its owner
    setup_command.rewrap(config, before, kek)
    print(
        f"every key is wrapped under KEK {kek.kek_id().hex()} now (it was {before.kek_id().hex()})"
    )
    print(
        f"put {new} where the next start looks for it, start the daemon, then destroy the old one"
    )
    print("where several shards share the key, each of them wants this first")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    # gRPC's C core writes refused handshakes straight to stderr, past our log and its filter.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # numpy's algebra is not used; its threads would begin before the sandbox and stay outside.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from entresol_daemon import logs
    from entresol_daemon.config import Config

    if arguments.dev:
        with _ends_as_by_ctrl_c():
            return _run_dev(arguments)
    config = Config.load(arguments.config)
    setup_command.check_data(config)
    if arguments.check:
        setup_command.check_surroundings(config)
        print(f"{arguments.config}: good")
        return 0
    from entresol_daemon import open_files, sandbox
    from entresol_daemon.keys.sweeping import clear_on_free

    open_files.take()
    # What a manager's watchdog ends says first where each of its threads was: files and lines only.
    faulthandler.enable()
    entered = sandbox.enter(config)  # before the log's thread begins, as the next one
    clear_on_free()
    logs.configure(config.log.level, config.log.format)
    entered.say()
    from entresol_daemon.serving import serve

    _loop_run(serve(config))
    return 0


@contextlib.contextmanager
def _ends_as_by_ctrl_c() -> Iterator[None]:
    """Until it serves, TERM and HUP would leave a temporary folder with keys in it."""
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if _is_default(each)]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _is_default(number: int) -> bool:
    on_main = threading.current_thread() is threading.main_thread()
    return on_main and signal.getsignal(number) is signal.SIG_DFL


def _run_dev(arguments: argparse.Namespace) -> int:
    from entresol_daemon import dev, logs, open_files, sandbox
    from entresol_daemon.config_values import parse_size
    from entresol_daemon.keys.sweeping import clear_on_free
    from entresol_daemon.server import Daemon
    from entresol_daemon.serving import serve

    config, home = dev.prepare(
        arguments.dir, tenants=tuple(arguments.tenant or dev.TENANTS_DEFAULT)
    )
    try:
        if arguments.flash:
            try:
                flash_bytes = parse_size(arguments.flash)
            except ValueError as error:
                raise ConfigError(f"--flash: {error}", hint="such as --flash 4GiB") from None
            config = dev.with_flash_bytes(config, flash_bytes)
            config.check("--flash")
        if arguments.codec:
            config = dev.with_codec(config, arguments.codec)
        for name in ("flash", "codec"):
            if value := getattr(arguments, name):
                home.options += (f"--{name}", value)
        config, note = dev.with_ports_again(config, home)
        if arguments.check:
            print("good")
            return 0
        open_files.take()
        entered = sandbox.enter(config, dev.sandbox_rules(home))
        clear_on_free()
        logs.configure(config.log.level, config.log.format)
        entered.say()

        def ready(daemon: Daemon) -> None:
            needed = dev.write_client_files(home, daemon)
            print(f"entresold {__version__} in {home.directory}", flush=True)
            if note:
                print(f"  note: {note}")
            print(f"  client configuration: {home.client_toml}", flush=True)
            print(f"  metrics: http://127.0.0.1:{daemon.http.port}/metrics", flush=True)
            if needed:
                print(f"  `entresol` uses another configuration; for this one: {needed}")
            print("  try, in another terminal: entresol put, get, exists, events, explain --help")
            print("  stop with Ctrl-C", flush=True)

        hangs_up = dev.of_a_terminal()
        _loop_run(serve(config, on_ready=ready, on_exit=home.remove, hangup_stops=hangs_up))
    finally:
        home.remove()
    return 0


def _loop_run(coroutine: object) -> None:
    import uvloop

    from entresol_daemon import logs

    slices.shorten()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_exception_handler(logs.tell_of_loop)
        runner.run(coroutine)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
