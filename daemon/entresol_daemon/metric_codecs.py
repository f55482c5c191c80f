"""What the metrics say of codecs: which one is chosen and why, and what blocks became of it.

Invariant: like all others, these series have labels of closed domains: which namespace is which is
told to its tenant and the operator (`entresol namespaces`), never by a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from entresol_daemon.metric_families import Domain
from entresol_daemon.metric_makers import Makers
from entresol_proto.seal import codecs
from entresol_proto.seal.dtypes import DType

OTHER = "other"
CODECS = (*codecs.names(), OTHER)
DTYPES = (*(dtype.label for dtype in DType), OTHER)
# Why a codec was chosen: a configured policy, a host that shares the daemon's memory, or `auto`,
# and then what is slowest with it (`seal.meter.plain_rates`).
WHYS = (
    "policy", "link", "opening", "flash_reads", "flash_writes", "sealing",
)  # fmt: skip
_NAMES = {codecs.by_name(name).codec_id: name for name in codecs.names()}


def name_of(codec_id: int) -> str:
    """A codec's name; `OTHER` for one that this build does not know."""
    return _NAMES.get(codec_id, OTHER)


class CodecMetrics:
    """`chosen` when a session opens a namespace, `sealed` when a block is stored."""

    def __init__(self, make: Makers) -> None:
        domain, dtypes = Domain(CODECS, fallback=OTHER), Domain(DTYPES, fallback=OTHER)
        self._choices = make.counters(
            "codec_choices_total",
            "Choices of a codec, one when a session opens a namespace: `policy` is configured, "
            "else `auto` chose, and why is what is slowest with it.",
            codec=domain,
            why=Domain(WHYS),
        )
        self._namespaces = make.gauges(
            "codec_namespaces",
            "Namespaces by the codec chosen last, of 1,024 that stored blocks at most.",
            dtype=dtypes,
            codec=domain,
        )
        self._sealed = make.counters(
            "sealed_blocks_total",
            "Blocks stored, by what they are sealed with: raw also where nothing was saved.",
            dtype=dtypes,
            codec=domain,
        )
        self.bypassed = make.counter(
            "codec_bypassed_blocks_total",
            "Blocks sealed here raw without a look: others of their namespace did not shrink.",
        )

    def chosen(self, codec_id: int, why: str) -> None:
        """A session opened a namespace."""
        self._choices[name_of(codec_id), why].inc()

    def sealed(self, dtype: DType, codec_id: int, count: int = 1) -> None:
        """Blocks were stored."""
        self._sealed[dtype.label, name_of(codec_id)].inc(count)

    def show(self, latest: Iterable[tuple[DType, int]]) -> None:
        """Set what is chosen now: a (dtype, codec id) per namespace."""
        found = Counter((dtype.label, name_of(codec_id)) for dtype, codec_id in latest)
        for gone in self._namespaces.keys() - found.keys():
            self._namespaces[gone].set(0)
        for place, count in found.items():
            self._namespaces[place].set(count)
