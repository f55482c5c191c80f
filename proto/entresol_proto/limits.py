"""Every named limit that both sides share, in one place.

Invariant: a queue, message, table or retry loop of the protocol has its bound here, with its unit
last in the name. Daemon-only limits live in `entresol_daemon.config`, where an operator can set
them.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# Blocks.
BLOCK_BYTES_MIN = 1
BLOCK_BYTES_MAX = 64 * MIB
ALIGN_BYTES = 4 * KIB  # O_DIRECT and NVMe alignment of everything on flash
CHUNK_BYTES_DEFAULT = 512 * KIB  # plaintext bytes per independently opened chunk
CHUNK_BYTES_MIN = 4 * KIB  # one flash page
CHUNK_BYTES_MAX = 1 * MIB  # the most that is decoded at a time
CHUNKS_PER_BLOCK_MAX = 1024  # bounds the header, which is read before anything is verified

# Keys.
WIRE_KEY_BYTES = 16
NAMESPACE_ID_BYTES = 16
ENGINE_KEY_BYTES_MIN = 8
ENGINE_KEY_BYTES_MAX = 64
TOKENS_PER_BLOCK_MAX = 2048

# Frames (the control stream).
FRAME_HEADER_BYTES = 16
FRAME_PAYLOAD_BYTES_MAX = 4 * MIB  # checked before allocation
FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX = 16 * KIB  # until the session is open
KEYS_PER_FRAME_MAX = 65_536  # exists, touch, explain
BLOCKS_PER_FETCH_MAX = 4_096
CARRIED_BYTES_MAX = 256 * KIB  # of sealed blocks in a GRANT
BLOCKS_PER_PUT_MAX = 4_096
REQUESTS_IN_FLIGHT_MAX = 256  # per session
NAMESPACES_PER_SESSION_MAX = 64
DESCRIPTOR_BYTES_MAX = 4 * KIB
DESCRIPTOR_TEXT_BYTES_MAX = 512

# Fabrics (the data path).
SPANS_PER_READ_MAX = 4_096  # of one batched read
DATA_STREAMS_PER_SESSION_MAX = 8  # tcp connections
REGIONS_PER_SESSION_MAX = 1_024  # exposures at a time
OFFER_PARAMS_BYTES_MAX = 1 * KIB
TICKET_BYTES = 16  # one-time, random, names one fabric offer
OFFERS_OPEN_MAX = 1_024  # unanswered fabric offers per server
DATA_STREAMS_DEFAULT = 2  # tcp connections per session
DATA_STREAMS_PENDING_MAX = 256  # data connections that have not shown a ticket yet, per server
DATA_PIECE_BYTES_MAX = 1 * MIB  # of one span handed to the transport at a time
DATA_QUEUE_BYTES_MAX = 2 * MIB  # per stream: above it no further piece is handed to the transport
READS_PER_STREAM_MAX = 256  # read requests outstanding on one data stream
SPANS_PER_STREAM_MAX = 16_384  # their spans
MAPPED_BYTES_PER_SESSION_MAX = 256 * GIB  # peer memory mapped by shm; a daemon passes less
SHM_MAPPED_BYTES_MAX = 64 * GIB  # of all sessions of a daemon: their page tables take 1/512 of it
SHM_REGIONS_PER_HOST_MAX = 4  # of one session mapped by a daemon, whose mappings have an end
SHM_MESSAGES_QUEUED_MAX = 4_096  # unsent shm messages, then the session ends
SHM_UNANSWERED_MAX = 8  # exposures whose deadline passed unanswered, then the session ends
SHM_CLOSERS_MAX = 16  # threads that close what peers passed, and may be stuck with it
SHM_CLOSING_MAX = 4_096  # descriptors that wait to be closed, then none is received
EXPOSE_DEADLINE_NS = 5_000_000_000  # the peer's acknowledgement of an exposure (shm)
REVOKE_DEADLINE_NS = 1_000_000_000  # bytes of a revoked exposure still queued, then the stream ends

# The verbs fabric. A queue pair gives up after (retries + 1) x 4.096 us x 2^timeout, 0.5 s here.
VERBS_RAILS_MAX = 4  # ports (or devices) that one session is spread over
VERBS_TIMEOUT = 14  # exponent, see above
VERBS_RETRIES = 6  # 7 means for ever on soft-RoCE
VERBS_RNR_TIMER = 12  # code for 0.64 ms: how long a sender waits when no receive is posted
VERBS_RNR_RETRIES = 6  # then the reader gives up; here, too, 7 means for ever
VERBS_RD_ATOMIC_MAX = 16  # reads one queue pair has on the wire; less where a device has less
VERBS_READS_POSTED_MAX = 64  # read requests handed to the device and not completed, per rail
VERBS_WINDOW_BYTES = 8 * MIB  # of those; less while they take longer than VERBS_WINDOW_NS
VERBS_WINDOW_BYTES_MIN = 1 * MIB  # however slow the wire
VERBS_WINDOW_BYTES_START = 2 * MIB  # before anything was measured
VERBS_WINDOW_NS = 100_000_000  # how long what is on the wire should take to arrive
VERBS_READS_SIGNALED_EVERY = 16  # at the latest; also the last one of a chain
VERBS_SIGNALED_BYTES = 2 * MIB  # or after so many bytes
VERBS_PIECE_BYTES_MAX = 1 * MIB  # one read request
VERBS_READS_QUEUED_MAX = 65_536  # read requests waiting for the device, per session
VERBS_MESSAGES_IN_FLIGHT_MAX = 32  # sent and not known to be taken
VERBS_MESSAGES_QUEUED_MAX = 8_192  # waiting to be sent, then the session ends
VERBS_OFFER_LIFETIME_MS_MAX = 60_000  # what a host believes
VERBS_GRANULE_BYTES = 16 * MIB  # long-lived memory is registered in pieces of this, when used
VERBS_REGISTRATIONS_MAX = 64  # long-lived buffers per session
VERBS_BOUNCE_BYTES = 4 * MIB  # per rail; reads into small foreign memory land there first
VERBS_BOUNCE_OP_BYTES_MAX = 256 * KIB  # larger foreign memory is registered for the one read
VERBS_ANNOUNCE_NS = 200_000_000  # a read of an unknown rkey waits so long for its announcement
VERBS_DRAIN_NS = 1_000_000_000  # reads past their deadline may still land, then the session ends
VERBS_GOODBYE_NS = 50_000_000  # how long closing waits for its last message to leave

# Time.
HANDSHAKE_DEADLINE_NS = 5_000_000_000
LEASE_NS_DEFAULT = 10_000_000_000
DEADLINE_NS_DEFAULT = 5_000_000_000  # of a client call, unless it is set otherwise
DEADLINE_NS_MAX = 600_000_000_000
