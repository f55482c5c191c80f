"""Every setting of the daemon: one TOML file, one frozen tree.

Invariant: a running daemon has only settings that were declared here, checked for type, range and
consistency with each other before anything was opened. An unknown key refuses to start. The doc
line of each field is its documentation everywhere (CONFIG.md, `entresold --print-config`).
"""

# ruff: noqa: RUF009 - `setting` returns dataclasses.field(...), not a shared default.

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from entresol_daemon import config_places
from entresol_daemon.config_memory import TIB, MemoryConfig
from entresol_daemon.config_telling import LogConfig, TracesConfig
from entresol_daemon.config_values import format_size, home_of, nearest, read_section, setting
from entresol_proto import limits as proto_limits
from entresol_proto.identity import check_trust_domain
from entresol_proto.ids import BadKeyError, check_shard_name
from entresol_proto.limits import GIB, KIB, MIB
from entresol_proto.status import ConfigError, EntresolError

CONFIG_FILE_BYTES_MAX = 1 * MIB
BLOCKS_MAX = 2**31 - 1  # of the index
SECOND_NS = 1_000_000_000
MODES = ("auto", "on", "off")
FABRICS = ("shm", "verbs", "tcp")
VERBS_MTUS = ("auto", "256", "512", "1024", "2048", "4096")


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Who this process is and where it keeps what must survive a restart."""

    name: str = setting("shard0", "Name of this shard; part of its SPIFFE id, events and metrics.")
    state_dir: Path = setting(
        Path("/var/lib/entresol"),
        "Folder for the keyring, the index checkpoint and event history; mode 0700.",
    )


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """Addresses. All are loopback by default; name an interface's address to serve a network."""

    control_host: str = setting("127.0.0.1", "Address of the control stream (TCP with mTLS).")
    control_port: int = setting(
        7440, "Port of the control stream; 0 takes any free one.", high=65535, low=0
    )
    grpc_host: str = setting("127.0.0.1", "Address of the gRPC services (mTLS).")
    grpc_port: int = setting(
        7441, "Port of the gRPC services; 0 takes any free one.", low=0, high=65535
    )
    data_host: str = setting("127.0.0.1", "Address of the tcp fabric's data streams.")
    data_port: int = setting(
        7442, "Port of the tcp fabric; 0 takes any free one.", low=0, high=65535
    )
    data_advertise: str = setting(
        "",
        "Address told to hosts for the tcp fabric; empty means the one they reached control at.",
    )
    unix_dir: Path = setting(
        Path("/run/entresol"), "Folder of the UNIX sockets: same-host data path and local admin."
    )
    metrics_host: str = setting(
        "127.0.0.1", "Address of the plain HTTP endpoint for metrics and health."
    )
    metrics_port: int = setting(
        7443, "Port of metrics and health; 0 takes any free one.", low=0, high=65535
    )


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Certificates. Both ends are always verified; the files are followed while running."""

    cert: Path | None = setting(None, "PEM chain with the URI name spiffe://DOMAIN/shard/NAME.")
    key: Path | None = setting(None, "PEM private key of the certificate, not encrypted.")
    ca: Path | None = setting(None, "PEM bundle of the CAs that sign tenants and shards.")
    trust_domain: str = setting("entresol.local", "SPIFFE trust domain every peer must belong to.")
    reload_interval_ns: int = setting(
        30 * SECOND_NS, "How often changed files are looked for.", low=0, high=86_400 * SECOND_NS
    )
    session_age_max_ns: int = setting(
        3600 * SECOND_NS,
        "A session older than this must connect anew, so that a revoked certificate ends.",
        low=SECOND_NS,
        high=30 * 86_400 * SECOND_NS,
    )


@dataclass(frozen=True, slots=True)
class KeysConfig:
    """The key-encryption key. Without one the daemon starts locked: it seals and opens nothing."""

    kek_file: Path | None = setting(
        None,
        "File with the 32-byte key-encryption key; $CREDENTIALS_DIRECTORY/kek is allowed.",
        credential=True,
    )
    rotate_blocks: int = setting(
        2**40,
        "Blocks sealed under one version of a tenant's data key before the next begins by itself.",
        low=1,
        high=2**53,
    )
    rotate_age_ns: int = setting(
        0,
        "Age at which the next version begins by itself; 0 means never.",
        low=0,
        high=3650 * 86_400 * SECOND_NS,
    )


@dataclass(frozen=True, slots=True)
class FlashConfig:
    """The data file or raw device, and how it is written."""

    path: Path | None = setting(
        None, "Data file or block device; left out: flash.data in the state folder."
    )
    size_bytes: int = setting(
        16 * GIB, "Bytes used; 0 means all of an existing device or file.", low=0, high=4096 * TIB
    )
    segment_bytes: int = setting(
        64 * MIB, "Unit of writing and eviction, a multiple of 4KiB.", low=1 * MIB, high=256 * MIB
    )
    blocks_max: int = setting(
        0, "Blocks the index holds; 0 means one per 256KiB of flash.", low=0, high=BLOCKS_MAX
    )
    io_threads: int = setting(8, "Transfers of flash at a time; half are reads.", low=1, high=256)
    eviction: str = setting(
        "worth",
        "What leaves: median, segments used longest ago by their median block; worth, as learned.",
        choices=("median", "worth"),
    )
    group_commit_bytes: int = setting(
        8 * MIB, "Appended bytes that trigger a flush.", low=4 * KIB, high=256 * MIB
    )
    group_commit_ns: int = setting(
        5_000_000,
        "Longest wait of an appended block for others to be flushed with, while more come.",
        low=0,
        high=10 * SECOND_NS,
    )
    direct: str = setting(
        "auto",
        "O_DIRECT: auto uses it where the file system can, on refuses to start without.",
        choices=("auto", "on", "off"),
    )
    checkpoint: Path | None = setting(
        None, "Index checkpoint of a clean stop; left out: index.arrow in the state folder."
    )
    scrub_bytes_per_s: int = setting(
        32 * MIB,
        "Rate at which stored blocks are verified, all once a day (2.9TB at 32MiB); 0 means never.",
        low=0,
    )


@dataclass(frozen=True, slots=True)
class SealingConfig:
    """Compression and encryption of blocks the daemon seals itself."""

    codec: str = setting(
        "auto",
        "One for all, or auto: the one that pays given the link and the namespace.",
        choices=("auto", "raw", "zstd", "plane", "fast", "dense"),
    )
    chunk_bytes: int = setting(
        proto_limits.CHUNK_BYTES_DEFAULT,
        "Plaintext bytes per independently opened chunk: larger ones open sooner, and seal slower.",
        low=proto_limits.CHUNK_BYTES_MIN,
        high=proto_limits.CHUNK_BYTES_MAX,
    )
    link_bytes_per_s: int = setting(
        12_500_000_000, "Speed of the slowest link, for codec auto.", low=1_000_000, high=10**13
    )
    threads: int = setting(0, "Threads that seal and open; 0 means one per CPU.", low=0, high=256)


@dataclass(frozen=True, slots=True)
class FabricConfig:
    """Data paths offered to hosts, the preferred one first."""

    enabled: tuple[str, ...] = setting(
        FABRICS,
        "Fabrics to offer: shm (same host), verbs (RDMA, where there is a device), tcp.",
        choices=FABRICS,
    )
    shm_dir: Path | None = setting(
        None,
        "Folder of the shm socket, mode 2750: its group may connect; left out: [listen] unix_dir.",
    )
    shm_mapped_bytes_max: int = setting(
        proto_limits.SHM_MAPPED_BYTES_MAX,
        "Hosts' memory mapped over shm; no tenant has more of it than is free, also one alone.",
        low=GIB,
    )
    streams: int = setting(
        2, "tcp data streams per session.", low=1, high=proto_limits.DATA_STREAMS_PER_SESSION_MAX
    )
    tcp_tls: bool = setting(
        False, "TLS on tcp data streams as well; what travels there is sealed either way."
    )
    verbs_required: bool = setting(
        False, "Refuse to start when verbs is enabled and cannot be opened."
    )
    verbs_devices: tuple[str, ...] = setting(
        (), 'RDMA devices to use, like "mlx5_0" or "mlx5_0:1" (port); empty means every usable one.'
    )
    verbs_gid_index: int = setting(
        -1, "GID table index on every port; -1 finds the RoCE v2 one.", low=-1, high=255
    )
    verbs_mtu: str = setting("auto", "RDMA path MTU, bytes.", choices=VERBS_MTUS)
    verbs_private: bool = setting(
        True,
        "Nobody else can read the RDMA network: plaintext may travel on it. RoCE does not encrypt.",
    )
    verbs_windows: str = setting(
        "auto",
        "Memory windows as a second fence where the device passes a test of their bounds, or off.",
        choices=("auto", "off"),
    )


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Bounds of every table and queue of the daemon; past a bound the answer is busy or quota."""

    sessions_max: int = setting(4096, "Open sessions.", low=1, high=65_536)
    sessions_per_tenant_max: int = setting(1024, "Open sessions of one tenant.", low=1, high=65_536)
    tenants_max: int = setting(1024, "Tenants in the keyring.", low=1, high=65_536)
    namespaces_per_tenant_max: int = setting(
        1024, "Namespaces of a tenant that have blocks, or are being put to.", low=1, high=65_536
    )
    block_bytes_max: int = setting(
        16 * MIB,
        "Longest block accepted; at most half a slab and a quarter of a segment.",
        low=4 * KIB,
        high=proto_limits.BLOCK_BYTES_MAX,
    )
    leases_max: int = setting(
        262_144,
        "Unreleased leases of all sessions; no tenant of several holds more than are free.",
        low=1,
        high=16_777_216,
    )
    leases_per_session_max: int = setting(
        16_384, "Unreleased leases of one session.", low=1, high=1_048_576
    )
    lease_ns: int = setting(
        proto_limits.LEASE_NS_DEFAULT,
        "How long a host may read what it was granted.",
        low=100_000_000,
        high=600 * SECOND_NS,
    )
    inflight_bytes_per_session_max: int = setting(
        256 * MIB, "Bytes one session may have leased or being staged for it.", low=1 * MIB
    )
    gets_at_once_max: int = setting(
        256, "Gets served at a time; others wait a little, then they are busy.", low=1, high=65_536
    )
    put_queue_bytes_max: int = setting(
        256 * MIB, "Bytes of puts not yet on flash; half of dram_bytes at most.", low=1 * MIB
    )
    put_queue_blocks_max: int = setting(
        65_536, "Puts reserved or accepted and not yet on flash.", low=1, high=1_048_576
    )


@dataclass(frozen=True, slots=True)
class TenantsConfig:
    """Who may become a tenant and with which quota. 0 means none of its own: the shard's limits
    hold, of which one tenant of several may hold only so many times what is free."""

    auto_add: bool = setting(
        False, "Add a tenant on its first connection; an erased one is never added by itself."
    )
    flash_bytes: int = setting(0, "Flash quota of a new tenant; 0 means no own limit.", low=0)
    dram_bytes: int = setting(0, "Memory quota of a new tenant; 0 means no own limit.", low=0)
    index_blocks: int = setting(0, "Blocks a new tenant may have in the index.", low=0)
    get_bytes: int = setting(0, "Bytes its hosts may have leased or being staged.", low=0)
    put_bytes: int = setting(0, "Bytes of its puts reserved and not yet on flash.", low=0)
    sessions: int = setting(0, "Its sessions; 0: [limits] sessions_per_tenant_max.", low=0)
    leases: int = setting(0, "Its unreleased leases.", low=0)
    watchers: int = setting(0, "Its event consumers; 0: [events] watchers_per_tenant_max.", low=0)
    weight: int = setting(1, "A new tenant's share: of turns, of writes.", low=1, high=1000)


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """The event log."""

    history_events_max: int = setting(
        65_536,
        "Events of one tenant kept for replay; older consumers take a snapshot.",
        low=1,
        high=10_000_000,
    )
    watchers_per_tenant_max: int = setting(
        16, "Consumers that follow one tenant's events.", low=1, high=1024
    )


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Which puts reach flash."""

    policy: str = setting(
        "auto",
        "all, second_touch, or auto: all while the tenant's budget holds, then second_touch.",
        choices=("auto", "all", "second_touch"),
    )
    drive_writes_per_day: float = setting(
        0.0, "Write budget in flash sizes per day, shared by weight; 0: none.", low=0.0, high=100.0
    )


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """The daemon writes only its own files, starts no program, connects to nobody by TCP."""

    mode: str = setting(
        "auto", "Landlock: auto uses it where the kernel can, on insists.", choices=MODES
    )
    writable: tuple[str, ...] = setting((), "Further folders it may write to.", paths=True)


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree. `Config()` has every default; `check` says whether a daemon can start."""

    shard: ShardConfig = field(default_factory=ShardConfig)
    listen: ListenConfig = field(default_factory=ListenConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    keys: KeysConfig = field(default_factory=KeysConfig)
    flash: FlashConfig = field(default_factory=FlashConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    sealing: SealingConfig = field(default_factory=SealingConfig)
    fabric: FabricConfig = field(default_factory=FabricConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    tenants: TenantsConfig = field(default_factory=TenantsConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    log: LogConfig = field(default_factory=LogConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)

    @property
    def flash_path(self) -> Path:
        """The data file or device."""
        return self.flash.path or self.shard.state_dir / "flash.data"

    @property
    def checkpoint_path(self) -> Path:
        """The index checkpoint of a clean stop."""
        return self.flash.checkpoint or self.shard.state_dir / "index.arrow"

    @property
    def sealing_threads(self) -> int:
        """Threads that seal and open."""
        return self.sealing.threads or max(1, len(os.sched_getaffinity(0)))

    def blocks_max(self, flash_bytes: int) -> int:
        """Blocks the index holds when `flash_bytes` of flash are used."""
        return self.flash.blocks_max or min(BLOCKS_MAX, max(1024, flash_bytes // (256 * KIB)))

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read and check a TOML file.

        Raises: ConfigError naming the file, section and key, with what to write instead.
        """
        source = Path(path)
        try:
            raw = source.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"cannot read {source}: {error.strerror}",
                hint="`entresold --print-config` prints a complete one",
            ) from None
        if len(raw) > CONFIG_FILE_BYTES_MAX:
            raise ConfigError(
                f"{source}: longer than {CONFIG_FILE_BYTES_MAX} bytes", hint="is it the right file?"
            )
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{source}: not UTF-8 text at byte {error.start}", hint="is it the right file?"
            ) from None
        config = cls.parse(text, source)
        config.check(source)
        return config

    @classmethod
    def parse(cls, text: str, source: Path) -> Config:
        """Read TOML text without judging whether the whole can start; `source` is for messages
        and relative paths. Raises: ConfigError."""
        try:
            tables = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
            raise ConfigError(
                f"{source}: not valid TOML: {error}",
                hint="`entresold --print-config` shows the form",
            ) from None
        sections = {item.name: item for item in fields(cls)}
        values: dict[str, object] = {}
        for name, table in tables.items():
            if name not in sections:
                what = f"section [{name}]" if isinstance(table, dict) else f"setting {name!r}"
                hint = home_of(name, _SECTIONS) or nearest(name, sections)
                raise ConfigError(f"{source}: unknown {what}", hint=hint)
            values[name] = read_section(_SECTIONS[name], name, table, source, _SECTIONS)
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def dev(cls, directory: str | Path) -> Config:
        """Settings of `entresold --dev`: everything under `directory`, any free port, any tenant.

        The certificates and the key are the dev PKI's (`control.devcerts`) and `kek` in there;
        creating them is the caller's part.
        """
        root = Path(directory)
        pki = root / "pki"
        return replace(
            cls(),
            shard=ShardConfig(name="dev", state_dir=root / "state"),
            listen=ListenConfig(
                control_port=0, grpc_port=0, data_port=0, metrics_port=0, unix_dir=root / "run"
            ),
            tls=TlsConfig(
                cert=pki / "shard.pem",
                key=pki / "shard.key",
                ca=pki / "ca.pem",
                reload_interval_ns=SECOND_NS,
            ),
            keys=KeysConfig(kek_file=root / "kek"),
            flash=FlashConfig(size_bytes=1 * GIB, segment_bytes=16 * MIB, io_threads=4),
            memory=MemoryConfig(dram_bytes=256 * MIB, slab_bytes=16 * MIB),
            limits=LimitsConfig(
                block_bytes_max=4 * MIB,
                inflight_bytes_per_session_max=128 * MIB,
                put_queue_bytes_max=64 * MIB,
            ),
            tenants=TenantsConfig(auto_add=True),
        )

    def check(self, source: Path | str = "configuration") -> None:
        """Judge the settings together. Raises: ConfigError for the first contradiction."""
        for problem, hint in self._problems():
            raise ConfigError(f"{source}: {problem}", hint=hint)

    def _problems(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        missing = [name for name in ("cert", "key", "ca") if getattr(self.tls, name) is None]
        if missing:
            hint = "name your PEM files, or where `entresold --config FILE prepare` makes them: "
            hint += 'cert = "pki/shard.pem", key = "pki/shard.key", ca = "pki/ca.pem"; '
            hint += "`entresold --dev`, to try it, needs none"
            verb = "is" if len(missing) == 1 else "are"
            found.append((f"[tls] {', '.join(missing)} {verb} not set", hint))
        try:
            check_shard_name(self.shard.name)
        except BadKeyError as error:
            found.append((f"[shard] name: {Exception.__str__(error)}", error.hint))
        try:
            check_trust_domain(self.tls.trust_domain)
        except EntresolError as error:
            found.append((f"[tls] trust_domain: {Exception.__str__(error)}", error.hint))
        segment, slab, flash = self.flash.segment_bytes, self.memory.slab_bytes, self.flash
        if segment % proto_limits.ALIGN_BYTES:
            found.append(("[flash] segment_bytes is not a multiple of 4KiB", "try 64MiB"))
        if flash.size_bytes and flash.size_bytes < 5 * segment:  # 4, and the superblocks
            what = f"[flash] size_bytes is less than 5 segments of {format_size(segment)}"
            found.append((what, f"{format_size(5 * segment)} or more, or a lower segment_bytes"))
        found += self.memory.problems()
        block = self.limits.block_bytes_max
        if block * 2 > slab or block * 4 > segment:
            hint = "lower it, or raise [memory] slab_bytes and [flash] segment_bytes"
            found.append(
                ("[limits] block_bytes_max is over half a slab or a quarter of a segment", hint)
            )
        if self.limits.inflight_bytes_per_session_max < block:
            found.append(
                ("[limits] inflight_bytes_per_session_max is below block_bytes_max", "raise it")
            )
        if not self.fabric.enabled:
            found.append(("[fabric] enabled is empty", f"offer one of {', '.join(FABRICS)}"))
        return found + config_places.problems(self)


_SECTIONS: dict[str, type] = {
    item.name: type(getattr(Config(), item.name)) for item in fields(Config)
}
