from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_UNSPECIFIED: _ClassVar[State]
    STATE_STARTING: _ClassVar[State]
    STATE_SERVING: _ClassVar[State]
    STATE_LOCKED: _ClassVar[State]
    STATE_DRAINING: _ClassVar[State]

class GapReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GAP_REASON_UNSPECIFIED: _ClassVar[GapReason]
    GAP_REASON_INCARNATION: _ClassVar[GapReason]
    GAP_REASON_TRIMMED: _ClassVar[GapReason]
    GAP_REASON_AHEAD: _ClassVar[GapReason]
    GAP_REASON_SLOW: _ClassVar[GapReason]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_STORED: _ClassVar[Kind]
    KIND_REMOVED: _ClassVar[Kind]
    KIND_STAGED: _ClassVar[Kind]
    KIND_DEMOTED: _ClassVar[Kind]
    KIND_EXPIRED: _ClassVar[Kind]
    KIND_CORRUPT: _ClassVar[Kind]
    KIND_PINNED: _ClassVar[Kind]
    KIND_TENANT_ERASED: _ClassVar[Kind]
    KIND_CLEARED: _ClassVar[Kind]

class Medium(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIUM_UNSPECIFIED: _ClassVar[Medium]
    MEDIUM_MEMORY: _ClassVar[Medium]
    MEDIUM_FLASH: _ClassVar[Medium]
    MEDIUM_REMOTE: _ClassVar[Medium]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_EVICTED: _ClassVar[Reason]
    REASON_FORGOTTEN: _ClassVar[Reason]
    REASON_CORRUPT: _ClassVar[Reason]
    REASON_ERASED: _ClassVar[Reason]
    REASON_QUOTA: _ClassVar[Reason]
    REASON_LOST: _ClassVar[Reason]
    REASON_SUPERSEDED: _ClassVar[Reason]
    REASON_HEADER: _ClassVar[Reason]
    REASON_FLASH: _ClassVar[Reason]
    REASON_HOST_REPORT: _ClassVar[Reason]
STATE_UNSPECIFIED: State
STATE_STARTING: State
STATE_SERVING: State
STATE_LOCKED: State
STATE_DRAINING: State
GAP_REASON_UNSPECIFIED: GapReason
GAP_REASON_INCARNATION: GapReason
GAP_REASON_TRIMMED: GapReason
GAP_REASON_AHEAD: GapReason
GAP_REASON_SLOW: GapReason
KIND_UNSPECIFIED: Kind
KIND_STORED: Kind
KIND_REMOVED: Kind
KIND_STAGED: Kind
KIND_DEMOTED: Kind
KIND_EXPIRED: Kind
KIND_CORRUPT: Kind
KIND_PINNED: Kind
KIND_TENANT_ERASED: Kind
KIND_CLEARED: Kind
MEDIUM_UNSPECIFIED: Medium
MEDIUM_MEMORY: Medium
MEDIUM_FLASH: Medium
MEDIUM_REMOTE: Medium
REASON_UNSPECIFIED: Reason
REASON_EVICTED: Reason
REASON_FORGOTTEN: Reason
REASON_CORRUPT: Reason
REASON_ERASED: Reason
REASON_QUOTA: Reason
REASON_LOST: Reason
REASON_SUPERSEDED: Reason
REASON_HEADER: Reason
REASON_FLASH: Reason
REASON_HOST_REPORT: Reason

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("version", "shard", "incarnation", "control_address", "data_addresses", "fabrics", "limits", "state", "tenant")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    FABRICS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    version: str
    shard: str
    incarnation: int
    control_address: str
    data_addresses: _containers.RepeatedScalarFieldContainer[str]
    fabrics: _containers.RepeatedScalarFieldContainer[str]
    limits: _containers.RepeatedCompositeFieldContainer[Limit]
    state: State
    tenant: str
    def __init__(self, version: _Optional[str] = ..., shard: _Optional[str] = ..., incarnation: _Optional[int] = ..., control_address: _Optional[str] = ..., data_addresses: _Optional[_Iterable[str]] = ..., fabrics: _Optional[_Iterable[str]] = ..., limits: _Optional[_Iterable[_Union[Limit, _Mapping]]] = ..., state: _Optional[_Union[State, str]] = ..., tenant: _Optional[str] = ...) -> None: ...

class Limit(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatReply(_message.Message):
    __slots__ = ("state", "uptime_ns", "sessions", "leases", "blocks", "dram_capacity_bytes", "dram_used_bytes", "flash_capacity_bytes", "flash_live_bytes", "flash_written_bytes", "blocks_served", "blocks_missed", "blocks_stored", "blocks_corrupt", "plain_bytes", "stored_bytes", "reasons_not_ready", "flash_direct", "scrub_state", "scrub_share", "scrub_cycles", "scrub_cycle_ns", "scrubbed_bytes", "scrub_found")
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_NS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLASH_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLASH_LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLASH_WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SERVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MISSED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    PLAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASONS_NOT_READY_FIELD_NUMBER: _ClassVar[int]
    FLASH_DIRECT_FIELD_NUMBER: _ClassVar[int]
    SCRUB_STATE_FIELD_NUMBER: _ClassVar[int]
    SCRUB_SHARE_FIELD_NUMBER: _ClassVar[int]
    SCRUB_CYCLES_FIELD_NUMBER: _ClassVar[int]
    SCRUB_CYCLE_NS_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FOUND_FIELD_NUMBER: _ClassVar[int]
    state: State
    uptime_ns: int
    sessions: int
    leases: int
    blocks: int
    dram_capacity_bytes: int
    dram_used_bytes: int
    flash_capacity_bytes: int
    flash_live_bytes: int
    flash_written_bytes: int
    blocks_served: int
    blocks_missed: int
    blocks_stored: int
    blocks_corrupt: int
    plain_bytes: int
    stored_bytes: int
    reasons_not_ready: _containers.RepeatedScalarFieldContainer[str]
    flash_direct: bool
    scrub_state: str
    scrub_share: float
    scrub_cycles: int
    scrub_cycle_ns: int
    scrubbed_bytes: int
    scrub_found: int
    def __init__(self, state: _Optional[_Union[State, str]] = ..., uptime_ns: _Optional[int] = ..., sessions: _Optional[int] = ..., leases: _Optional[int] = ..., blocks: _Optional[int] = ..., dram_capacity_bytes: _Optional[int] = ..., dram_used_bytes: _Optional[int] = ..., flash_capacity_bytes: _Optional[int] = ..., flash_live_bytes: _Optional[int] = ..., flash_written_bytes: _Optional[int] = ..., blocks_served: _Optional[int] = ..., blocks_missed: _Optional[int] = ..., blocks_stored: _Optional[int] = ..., blocks_corrupt: _Optional[int] = ..., plain_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., reasons_not_ready: _Optional[_Iterable[str]] = ..., flash_direct: bool = ..., scrub_state: _Optional[str] = ..., scrub_share: _Optional[float] = ..., scrub_cycles: _Optional[int] = ..., scrub_cycle_ns: _Optional[int] = ..., scrubbed_bytes: _Optional[int] = ..., scrub_found: _Optional[int] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("flash_bytes", "dram_bytes", "get_bytes", "index_blocks", "sessions", "leases", "weight", "put_bytes", "watchers")
    FLASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    GET_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    flash_bytes: int
    dram_bytes: int
    get_bytes: int
    index_blocks: int
    sessions: int
    leases: int
    weight: int
    put_bytes: int
    watchers: int
    def __init__(self, flash_bytes: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., get_bytes: _Optional[int] = ..., index_blocks: _Optional[int] = ..., sessions: _Optional[int] = ..., leases: _Optional[int] = ..., weight: _Optional[int] = ..., put_bytes: _Optional[int] = ..., watchers: _Optional[int] = ...) -> None: ...

class TenantInfo(_message.Message):
    __slots__ = ("name", "quota", "dek_version", "blocks", "flash_bytes", "dram_bytes", "sessions", "leases", "key_versions", "blocks_not_counted", "blocks_host_sealed", "get_bytes", "put_bytes", "watchers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    DEK_VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FLASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    KEY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_NOT_COUNTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HOST_SEALED_FIELD_NUMBER: _ClassVar[int]
    GET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    quota: Quota
    dek_version: int
    blocks: int
    flash_bytes: int
    dram_bytes: int
    sessions: int
    leases: int
    key_versions: _containers.RepeatedCompositeFieldContainer[KeyVersion]
    blocks_not_counted: int
    blocks_host_sealed: int
    get_bytes: int
    put_bytes: int
    watchers: int
    def __init__(self, name: _Optional[str] = ..., quota: _Optional[_Union[Quota, _Mapping]] = ..., dek_version: _Optional[int] = ..., blocks: _Optional[int] = ..., flash_bytes: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., sessions: _Optional[int] = ..., leases: _Optional[int] = ..., key_versions: _Optional[_Iterable[_Union[KeyVersion, _Mapping]]] = ..., blocks_not_counted: _Optional[int] = ..., blocks_host_sealed: _Optional[int] = ..., get_bytes: _Optional[int] = ..., put_bytes: _Optional[int] = ..., watchers: _Optional[int] = ...) -> None: ...

class KeyVersion(_message.Message):
    __slots__ = ("version", "fingerprint", "created_unix_s", "blocks", "sealed_blocks")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEALED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    version: int
    fingerprint: str
    created_unix_s: int
    blocks: int
    sealed_blocks: int
    def __init__(self, version: _Optional[int] = ..., fingerprint: _Optional[str] = ..., created_unix_s: _Optional[int] = ..., blocks: _Optional[int] = ..., sealed_blocks: _Optional[int] = ...) -> None: ...

class TenantAddRequest(_message.Message):
    __slots__ = ("name", "quota")
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    name: str
    quota: Quota
    def __init__(self, name: _Optional[str] = ..., quota: _Optional[_Union[Quota, _Mapping]] = ...) -> None: ...

class TenantListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TenantListReply(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantInfo]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantInfo, _Mapping]]] = ...) -> None: ...

class TenantSetQuotaRequest(_message.Message):
    __slots__ = ("name", "quota", "fields")
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    quota: Quota
    fields: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., quota: _Optional[_Union[Quota, _Mapping]] = ..., fields: _Optional[_Iterable[str]] = ...) -> None: ...

class TenantRotateRequest(_message.Message):
    __slots__ = ("name", "force")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    force: bool
    def __init__(self, name: _Optional[str] = ..., force: bool = ...) -> None: ...

class TenantEraseRequest(_message.Message):
    __slots__ = ("name", "confirm")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    name: str
    confirm: str
    def __init__(self, name: _Optional[str] = ..., confirm: _Optional[str] = ...) -> None: ...

class EraseReceipt(_message.Message):
    __slots__ = ("tenant", "erased_unix_ns", "dek_versions_destroyed", "blocks_dropped", "leases_revoked", "sessions_closed", "shard", "incarnation", "digest", "signed_receipt")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ERASED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    DEK_VERSIONS_DESTROYED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    LEASES_REVOKED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_CLOSED_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNED_RECEIPT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    erased_unix_ns: int
    dek_versions_destroyed: _containers.RepeatedScalarFieldContainer[int]
    blocks_dropped: int
    leases_revoked: int
    sessions_closed: int
    shard: str
    incarnation: int
    digest: bytes
    signed_receipt: bytes
    def __init__(self, tenant: _Optional[str] = ..., erased_unix_ns: _Optional[int] = ..., dek_versions_destroyed: _Optional[_Iterable[int]] = ..., blocks_dropped: _Optional[int] = ..., leases_revoked: _Optional[int] = ..., sessions_closed: _Optional[int] = ..., shard: _Optional[str] = ..., incarnation: _Optional[int] = ..., digest: _Optional[bytes] = ..., signed_receipt: _Optional[bytes] = ...) -> None: ...

class ScrubRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScrubReply(_message.Message):
    __slots__ = ("was_running",)
    WAS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    was_running: bool
    def __init__(self, was_running: bool = ...) -> None: ...

class UnlockRequest(_message.Message):
    __slots__ = ("kek_file",)
    KEK_FILE_FIELD_NUMBER: _ClassVar[int]
    kek_file: str
    def __init__(self, kek_file: _Optional[str] = ...) -> None: ...

class UnlockReply(_message.Message):
    __slots__ = ("state", "kek_id")
    STATE_FIELD_NUMBER: _ClassVar[int]
    KEK_ID_FIELD_NUMBER: _ClassVar[int]
    state: State
    kek_id: str
    def __init__(self, state: _Optional[_Union[State, str]] = ..., kek_id: _Optional[str] = ...) -> None: ...

class ChangeKekRequest(_message.Message):
    __slots__ = ("kek_file",)
    KEK_FILE_FIELD_NUMBER: _ClassVar[int]
    kek_file: str
    def __init__(self, kek_file: _Optional[str] = ...) -> None: ...

class ChangeKekReply(_message.Message):
    __slots__ = ("old_kek_id", "new_kek_id")
    OLD_KEK_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_KEK_ID_FIELD_NUMBER: _ClassVar[int]
    old_kek_id: str
    new_kek_id: str
    def __init__(self, old_kek_id: _Optional[str] = ..., new_kek_id: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_ns",)
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    deadline_ns: int
    def __init__(self, deadline_ns: _Optional[int] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("complete", "sessions_left", "leases_left")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_LEFT_FIELD_NUMBER: _ClassVar[int]
    LEASES_LEFT_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    sessions_left: int
    leases_left: int
    def __init__(self, complete: bool = ..., sessions_left: _Optional[int] = ..., leases_left: _Optional[int] = ...) -> None: ...

class SegmentsRequest(_message.Message):
    __slots__ = ("first_segment", "count_max")
    FIRST_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    first_segment: int
    count_max: int
    def __init__(self, first_segment: _Optional[int] = ..., count_max: _Optional[int] = ...) -> None: ...

class SegmentInfo(_message.Message):
    __slots__ = ("segment", "state", "tenant", "records", "live_records", "size_bytes", "used_bytes", "live_bytes", "sequence")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    LIVE_RECORDS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    segment: int
    state: str
    tenant: str
    records: int
    live_records: int
    size_bytes: int
    used_bytes: int
    live_bytes: int
    sequence: int
    def __init__(self, segment: _Optional[int] = ..., state: _Optional[str] = ..., tenant: _Optional[str] = ..., records: _Optional[int] = ..., live_records: _Optional[int] = ..., size_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., live_bytes: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class SegmentsReply(_message.Message):
    __slots__ = ("segments", "next_segment")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentInfo]
    next_segment: int
    def __init__(self, segments: _Optional[_Iterable[_Union[SegmentInfo, _Mapping]]] = ..., next_segment: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("incarnation", "seq")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    seq: int
    def __init__(self, incarnation: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("tenant", "after")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    after: Position
    def __init__(self, tenant: _Optional[str] = ..., after: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("incarnation", "events", "gap", "position")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    events: _containers.RepeatedCompositeFieldContainer[Event]
    gap: Gap
    position: Position
    def __init__(self, incarnation: _Optional[int] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., gap: _Optional[_Union[Gap, _Mapping]] = ..., position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("tenant", "follow")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    follow: bool
    def __init__(self, tenant: _Optional[str] = ..., follow: bool = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("position", "events", "complete", "gap")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    position: Position
    events: _containers.RepeatedCompositeFieldContainer[Event]
    complete: bool
    gap: Gap
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., complete: bool = ..., gap: _Optional[_Union[Gap, _Mapping]] = ...) -> None: ...

class NamespacesRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class NamespacesReply(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ...) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("namespace_id", "blocks", "model", "model_revision", "lora", "salted", "dtype", "layers", "kv_heads", "head_dim", "kv_order", "page_layout", "block_tokens", "tp_rank", "tp_world", "pp_rank", "pp_world", "host_sealed", "codec", "codec_why", "plain_bytes", "sealed_bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    SALTED_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    KV_ORDER_FIELD_NUMBER: _ClassVar[int]
    PAGE_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_WORLD_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_WORLD_FIELD_NUMBER: _ClassVar[int]
    HOST_SEALED_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_WHY_FIELD_NUMBER: _ClassVar[int]
    PLAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEALED_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    blocks: int
    model: str
    model_revision: str
    lora: str
    salted: bool
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    kv_order: str
    page_layout: str
    block_tokens: int
    tp_rank: int
    tp_world: int
    pp_rank: int
    pp_world: int
    host_sealed: bool
    codec: str
    codec_why: str
    plain_bytes: int
    sealed_bytes: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., blocks: _Optional[int] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., lora: _Optional[str] = ..., salted: bool = ..., dtype: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., kv_order: _Optional[str] = ..., page_layout: _Optional[str] = ..., block_tokens: _Optional[int] = ..., tp_rank: _Optional[int] = ..., tp_world: _Optional[int] = ..., pp_rank: _Optional[int] = ..., pp_world: _Optional[int] = ..., host_sealed: bool = ..., codec: _Optional[str] = ..., codec_why: _Optional[str] = ..., plain_bytes: _Optional[int] = ..., sealed_bytes: _Optional[int] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("tenant", "reason", "asked_seq", "first_seq", "last_seq")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ASKED_SEQ_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    reason: GapReason
    asked_seq: int
    first_seq: int
    last_seq: int
    def __init__(self, tenant: _Optional[str] = ..., reason: _Optional[_Union[GapReason, str]] = ..., asked_seq: _Optional[int] = ..., first_seq: _Optional[int] = ..., last_seq: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("seq", "time_unix_ns", "tenant", "kind", "namespace_id", "wire_keys", "engine_keys", "parent", "position", "block_tokens", "token_ids", "medium", "reason", "size_bytes", "until_unix_ns")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TIME_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    WIRE_KEYS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    time_unix_ns: int
    tenant: str
    kind: Kind
    namespace_id: bytes
    wire_keys: _containers.RepeatedScalarFieldContainer[bytes]
    engine_keys: _containers.RepeatedScalarFieldContainer[bytes]
    parent: bytes
    position: int
    block_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    medium: Medium
    reason: Reason
    size_bytes: int
    until_unix_ns: int
    def __init__(self, seq: _Optional[int] = ..., time_unix_ns: _Optional[int] = ..., tenant: _Optional[str] = ..., kind: _Optional[_Union[Kind, str]] = ..., namespace_id: _Optional[bytes] = ..., wire_keys: _Optional[_Iterable[bytes]] = ..., engine_keys: _Optional[_Iterable[bytes]] = ..., parent: _Optional[bytes] = ..., position: _Optional[int] = ..., block_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., medium: _Optional[_Union[Medium, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., size_bytes: _Optional[int] = ..., until_unix_ns: _Optional[int] = ...) -> None: ...
