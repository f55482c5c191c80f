"""The client's settings: one TOML file, one frozen tree.

Invariant: a client runs only with settings declared here, checked for type and range before
anything is opened; an unknown key is refused with the nearest known one. The format is documented
in client/README.md, because `entresold --dev` writes such a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entresol_proto import limits
from entresol_proto.fabric.base import VerbsSettings
from entresol_proto.identity import check_trust_domain
from entresol_proto.ids import check_shard_name
from entresol_proto.status import ConfigError, EntresolError
from entresol_proto.units import parse_size

CONFIG_ENV = "ENTRESOL_CONFIG"
CONFIG_FILE_BYTES_MAX = 1024 * 1024
SHARDS_MAX = 1024
FABRICS = ("auto", "shm", "tcp", "verbs")
VERBS_MTUS = (0, 256, 512, 1024, 2048, 4096)
NUMBER_LIMIT = 2**63  # TOML's integers
MS_NS = 1_000_000
SECOND_NS = 1_000_000_000

_TIMES = {"ns": 1, "us": 1_000, "ms": MS_NS, "s": SECOND_NS, "min": 60 * SECOND_NS}
_READ_HINTS = {
    errno.ENOENT: f"`entresold --dev` writes one, and `entresold --config FILE certify` one for a "
    f"tenant; then --config FILE or {CONFIG_ENV} names it",
    errno.EACCES: "let this user read it, and the key that it names",
}
# Declared type of a field -> what a value may be.
_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "Path": (Path,),
    "tuple[str, ...]": (tuple, list),
}  # fmt: skip
_QUANTITY = re.compile(r"(\d+)\s*([A-Za-z]+)")


def _ranged(default: Any, low: float, high: float) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """One shard: the name its certificate carries, where its control stream is, its weight.

    The last three are for people's tools, the data path does not use them.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = _ranged(7440, 1, 65535)
    weight: float = _ranged(1.0, 0.001, 1000.0)  # share of the keys, relative to the others
    grpc_port: int = _ranged(0, 0, 65535)  # on the same host; 0: not known
    admin_socket: Path | None = None  # of a daemon on this machine
    metrics: str = ""  # base URL of metrics and health


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of the tenant's certificate, and the trust domain both sides belong to."""

    cert: Path
    key: Path
    ca: Path
    trust_domain: str = "entresol.local"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a shard is taken out of use and when it is tried again."""

    failures_to_open: int = _ranged(3, 1, 1000)  # consecutive outage failures
    cooldown_ns_min: int = _ranged(250 * MS_NS, MS_NS, 600 * SECOND_NS)
    cooldown_ns_max: int = _ranged(10 * SECOND_NS, MS_NS, 3600 * SECOND_NS)


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Everything a client needs to know. Build it by hand, `load` it, or `find` it."""

    shards: tuple[ShardAddress, ...]
    tls: TlsFiles
    fabric: str = "auto"  # auto | shm | tcp | verbs; the others stay as what to fall back to
    fallback: bool = True  # False: only the fabric named above
    verbs_devices: tuple[str, ...] = ()  # "mlx5_0" or "mlx5_0:1" (port); empty: all that reach it
    verbs_gid_index: int = _ranged(-1, -1, 255)  # -1: find the RoCE v2 one
    verbs_mtu_bytes: int = _ranged(0, 0, 4096)  # 0: what both ports and the network allow
    deadline_ns: int = _ranged(limits.DEADLINE_NS_DEFAULT, MS_NS // 1000, limits.DEADLINE_NS_MAX)
    connect_deadline_ns: int = _ranged(3 * SECOND_NS, MS_NS, limits.HANDSHAKE_DEADLINE_NS)
    ping_interval_ns: int = _ranged(SECOND_NS, 10 * MS_NS, 600 * SECOND_NS)
    ping_deadline_ns: int = _ranged(SECOND_NS, MS_NS, 60 * SECOND_NS)
    open_threads: int = _ranged(2, 1, 64)  # threads that open and seal blocks
    staging_bytes_max: int = _ranged(96 * limits.MIB, 4 * limits.MIB, 64 * limits.GIB)  # per shard
    traces: str = ""  # OpenTelemetry: "global" (this process's provider) or an OTLP endpoint
    tenant_key: Path | None = None  # file with keys that the tenant keeps: no daemon opens a block
    breaker: BreakerSettings = BreakerSettings()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def verbs(self) -> VerbsSettings:
        """The overrides of what the verbs fabric finds by itself."""
        gid_index = self.verbs_gid_index if self.verbs_gid_index >= 0 else None
        return VerbsSettings(self.verbs_devices, gid_index, self.verbs_mtu_bytes or None)

    @classmethod
    def load(cls, path: str | Path) -> ClientConfig:
        """Read a TOML file; paths in it are relative to its folder. Raises: ConfigError."""
        source = Path(path)
        try:
            raw = _read_file(source)
        except OSError as error:
            raise ConfigError(
                f"cannot read client config {str(source)!r}: {error.strerror}",
                hint=_READ_HINTS.get(error.errno or 0, ""),
            ) from None
        except ValueError as error:  # of a path with a NUL
            raise ConfigError(f"cannot read client config {str(source)!r}: {error}") from None
        if len(raw) > CONFIG_FILE_BYTES_MAX:
            raise ConfigError(f"{source}: larger than {CONFIG_FILE_BYTES_MAX} bytes")
        try:
            return cls.from_mapping(tomllib.loads(raw.decode()), source)
        except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
            raise ConfigError(
                f"{source}: not TOML: {error}",
                hint='lines are like name = "text" or name = 12; `entresold --dev` writes one',
            ) from None

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], source: Path) -> ClientConfig:
        """Build from parsed TOML: settings and TLS files at the top, [breaker], [[shards]].

        Raises: ConfigError.
        """
        rows = raw.get("shards", [])
        if not isinstance(rows, list):
            raise ConfigError(f"{source}: shards are written as [[shards]], one table for each")
        known = {item.name for c in (cls, TlsFiles) for item in dataclasses.fields(c)} - {"tls"}
        for key in raw:
            if key not in known:
                raise ConfigError(f"{source}: unknown setting {key!r}", hint=_nearest(key, known))
        of_tls = {item.name for item in dataclasses.fields(TlsFiles)}
        tls = {key: value for key, value in raw.items() if key in of_tls}
        own = {k: v for k, v in raw.items() if k not in of_tls | {"shards", "breaker"}}
        shards = tuple(_build(ShardAddress, "[[shards]]", row, source) for row in rows)
        files = _build(TlsFiles, "", tls, source)
        breaker = _build(BreakerSettings, "[breaker]", raw.get("breaker", {}), source)
        values = _table(cls, "", own, source)
        try:
            return cls(shards=shards, tls=files, breaker=breaker, **values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {Exception.__str__(error)}", hint=error.hint) from None

    @classmethod
    def find(cls, path: str | Path | None = None) -> ClientConfig:
        """The config at `path`, else of $ENTRESOL_CONFIG, else of the first of `default_paths()`.

        Raises: ConfigError, naming every place that was looked at, when there is none.
        """
        named = path or os.environ.get(CONFIG_ENV)
        if named:
            return cls.load(named)
        candidate = default_path()
        if candidate is not None:
            return cls.load(candidate)
        raise ConfigError(
            "no client config found; looked at " + ", ".join(map(str, default_paths())),
            hint=f"start `entresold --dev`, which writes one, or set {CONFIG_ENV} to its path",
        )


def _read_file(source: Path) -> bytes:
    """At most CONFIG_FILE_BYTES_MAX and one more; of a file only: a pipe may never end, nor begin.

    Raises: OSError, ValueError.
    """
    fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return file.read(CONFIG_FILE_BYTES_MAX + 1)


def default_paths() -> list[Path]:
    """Where a client config is looked for, in order: runtime folder, user's config, /etc."""
    places = []
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        places.append(Path(runtime))
    home = os.environ.get("XDG_CONFIG_HOME")
    with contextlib.suppress(RuntimeError):  # a user without a home, as in many containers
        places.append(Path(home) if home else Path.home() / ".config")
    places.append(Path("/etc"))
    return [place / "entresol" / "client.toml" for place in places]


def default_path() -> Path | None:
    """The first of `default_paths()` that is there. A folder that this user may not look into
    (XDG_RUNTIME_DIR is another's after `su`) has none."""
    return next((path for path in default_paths() if os.path.isfile(path)), None)


def _check(config: ClientConfig) -> None:
    """Types, ranges and consistency. Raises: ConfigError."""
    _check_types(config)
    if not 1 <= len(config.shards) <= SHARDS_MAX:
        raise ConfigError(
            f"{len(config.shards)} shards are configured, 1 to {SHARDS_MAX} are allowed",
            hint="name each shard in a [[shards]] table",
        )
    parts: list[Any] = [config, config.breaker, *config.shards]
    for part in parts:
        for item in dataclasses.fields(part):
            low, high = item.metadata.get("low"), item.metadata.get("high")
            value = getattr(part, item.name)
            if low is not None and not low <= value <= high:
                raise ConfigError(f"{item.name} is {value}, allowed are {low} to {high}")
    names = [shard.name for shard in config.shards]
    try:
        check_trust_domain(config.tls.trust_domain)
        for name in names:
            check_shard_name(name)
        for shard in config.shards:
            _check_host(shard)
    except UnicodeError as error:
        hosts = ", ".join(repr(shard.host) for shard in config.shards)
        raise ConfigError(f"no host name, one of {hosts}: {error}") from None
    except ConfigError:
        raise
    except EntresolError as error:
        raise ConfigError(Exception.__str__(error), hint=error.hint) from None
    if len(set(names)) != len(names):
        raise ConfigError("two shards have the same name", hint="names place the keys: keep unique")
    if config.fabric not in FABRICS:
        raise ConfigError(
            f"fabric {config.fabric!r} is not known", hint=_nearest(config.fabric, FABRICS)
        )
    if config.verbs_mtu_bytes not in VERBS_MTUS:
        allowed = ", ".join(map(str, VERBS_MTUS[1:]))
        raise ConfigError(f"verbs_mtu_bytes is {config.verbs_mtu_bytes}, RDMA has {allowed}")
    if config.breaker.cooldown_ns_min > config.breaker.cooldown_ns_max:
        raise ConfigError("cooldown_ns_min is above cooldown_ns_max")


def _check_host(shard: ShardAddress) -> None:
    """Raises: ConfigError, UnicodeError."""
    host = shard.host
    if not host or any(char.isspace() or not char.isprintable() for char in host):
        raise ConfigError(
            f"host {host!r} of shard {shard.name!r} is no host name or address",
            hint='host = "10.0.0.5" or "kv-1.example.com"; the port is a setting of its own',
        )
    host.encode("idna")


def _check_types(config: ClientConfig) -> None:
    """Of a configuration built by hand; a file's values are checked as they are converted.

    Raises: ConfigError.
    """
    if not isinstance(config.shards, (tuple, list)):
        raise ConfigError("shards is not a tuple of ShardAddress")
    parts: list[tuple[Any, type]] = [(config.tls, TlsFiles), (config.breaker, BreakerSettings)]
    parts += [(shard, ShardAddress) for shard in config.shards]
    for part, wanted in parts:
        if not isinstance(part, wanted):
            raise ConfigError(f"{part!r} is no {wanted.__name__}")
    for part, _ in [(config, None), *parts]:
        for item in dataclasses.fields(part):
            value = getattr(part, item.name)
            kind = str(item.type)
            allowed = _TYPES.get(kind.removesuffix(" | None"))
            fits = value is None and kind.endswith(" | None")
            if allowed is None or fits:
                continue
            if not isinstance(value, allowed) or (isinstance(value, bool) and kind != "bool"):
                raise ConfigError(f"{item.name} is {value!r}, which is not of type {kind}")
            if isinstance(value, Path) and "\0" in str(value):
                raise ConfigError(f"{item.name} is {str(value)!r}, which is no path")


def _build(cls: Any, name: str, table: object, source: Path) -> Any:
    values = _table(cls, name, table, source)
    missing = [
        item.name
        for item in dataclasses.fields(cls)
        if item.default is dataclasses.MISSING and item.name not in values
    ]
    if missing:
        raise ConfigError(
            f"{source}: {', '.join(missing)} must be given{_inside(name)}",
            hint="`entresold --config FILE certify` makes a tenant's PEM files, with a client.toml"
            if cls is TlsFiles
            else 'name = "shard0", as its certificate has it',
        )
    return cls(**values)


def _inside(name: str) -> str:
    return f" in {name}" if name else ""


def _table(cls: Any, name: str, table: object, source: Path) -> dict[str, Any]:
    """One TOML table as keyword arguments of `cls`."""
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: {name} is not a table")
    known = {item.name: item for item in dataclasses.fields(cls)}
    base = source.resolve().parent  # `source` may be a pointer to the file that was written
    values = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(
                f"{source}: unknown setting {key!r}{_inside(name)}", hint=_nearest(key, known)
            )
        try:
            values[key] = _convert(key, str(known[key].type), value, base)
        except ValueError as error:
            raise ConfigError(f"{source}: {key}{_inside(name)}: {error}") from None
    return values


def _convert(name: str, kind: str, value: object, base: Path) -> object:
    """One TOML value in its declared type. Raises: ValueError."""
    if kind == "bool":
        if isinstance(value, bool):
            return value
        raise ValueError(f"{value!r} is not true or false")
    if kind.startswith("tuple"):
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ValueError(f"{value!r} is not a list of texts in quotes")
        return tuple(value)
    if kind in ("int", "float"):
        if isinstance(value, str) and kind == "int":
            value = _quantity(name, value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{value!r} is not a number")
        if isinstance(value, int) and not -NUMBER_LIMIT <= value < NUMBER_LIMIT:
            raise ValueError("the number has more than 64 bits")
        if kind == "int" and not isinstance(value, int):
            raise ValueError(f"{value!r} is not a whole number")
        return float(value) if kind == "float" else value
    if not isinstance(value, str) or (kind != "str" and not value):
        raise ValueError(f"{value!r} is not text in quotes")
    if kind.startswith("Path") and value[0] in "~$":  # nobody expands it: a folder of that name
        raise ValueError(
            f"{value!r} begins with {value[0]}, which only a shell reads: write it out"
        )
    return base / value if kind.startswith("Path") else value


def _quantity(name: str, text: str) -> int:
    """`"256MiB"` or `"250ms"`, as the unit in the setting's name asks. Raises: ValueError."""
    if "_bytes" in name:
        return parse_size(text)
    units = _TIMES if "_ns" in name else {}
    match = _QUANTITY.fullmatch(text.strip())
    if not match or match[2] not in units:
        wanted = f"a number with one of {', '.join(units)}" if units else "a number"
        raise ValueError(f"{text!r} is not {wanted}")
    return int(match[1]) * units[match[2]]


def _nearest(name: str, known: Iterable[str]) -> str:
    words = sorted(known)
    close = difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(words)}"
