"""Logging: key=value or JSON lines on standard error, in which block content cannot appear.

Invariants owned here:
- One line per record (a traceback follows as lines of its own in key=value form): control
  characters are escaped, so nobody can forge a line through a name. A value that holds a space, a
  quote or `=` is quoted, so nobody can forge a field either.
- Fields are found in `kv` messages and in the templates of log calls alike (`log_templates`);
  whatever is not made of fields is written as it stands.
- No bytes over `BYTES_SHOWN_MAX` and no sequence is ever formatted, whether it comes as a field, as
  a logging argument or inside an exception's text; long hex runs are cut; fields whose name says
  secret are blanked. It is a net under the rule "never log payload, keys, salts, token ids", not a
  replacement for it.
- The root logger has our handler, so a library's later `logging.basicConfig()` does nothing
  (pyverbs calls it when imported).
- Whoever logs never waits for whoever reads: lines for standard error are written by a thread, at
  most `LINES_WAITING_MAX` wait for it, and what is dropped beyond them is counted and said.
- A tenant can have a line written for each of its bad requests, a stranger for each connection, and
  a full disk or a dying drive for each block. Of lines that are alike only so many are written, and
  the next one says how many were not; those of other tenants are never held back for it, nor are
  errors for what is less, or for another error.
"""

from __future__ import annotations

import asyncio
import datetime
import enum
import functools
import json
import logging
import queue
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping
from typing import Any, TextIO

from entresol_daemon import log_templates
from entresol_proto import ids

BYTES_SHOWN_MAX = 16
TEXT_SHOWN_MAX = 512  # characters of one field
MESSAGE_SHOWN_MAX = 4_096  # characters of one message
TRACE_SHOWN_MAX = 16_384  # characters of one traceback
TEXT_READ_MAX = 65_536  # characters of anything that are looked at; the rest is dropped
CONTENT_CHARS_MIN = 17  # the shortest text that is judged: a list of eight numbers
ALIKE_AT_ONCE_MAX = 200  # lines of one kind, of one tenant; then
ALIKE_PER_SECOND = 2.0
KINDS_MAX = 4_096  # of lines that are remembered for it
LINES_WAITING_MAX = 8_192  # for a reader of standard error that is slow
LINES_PER_WRITE_MAX = 256
CLOSE_SECONDS_MAX = 1.0  # how long the last lines may take to leave

REDACTED = "<redacted>"
SECRET_FIELDS = frozenset(
    {"secret", "salt", "cache_salt", "dek", "kek", "key", "payload", "rkey", "token_ids", "tokens"}
)

_BARE = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f]+")
# Up to the closing quote or, in a text that was cut, to the end of its line.
_BYTES_LITERAL = re.compile(
    r"\bb(?:'(?:[^'\\\n]|\\.)*(?:'|\\?$)|\"(?:[^\"\\\n]|\\.)*(?:\"|\\?$))", re.MULTILINE
)
_LONG_HEX = re.compile(r"\b(?:0x)?([0-9a-fA-F]{8})[0-9a-fA-F]{24,}\b")
_NUMBERS = re.compile(r"[\[(]\s*+-?\d++(?:\s*+,\s*+-?\d++){7,}+\s*+(?:,\s*+)?+[\])]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class KV:
    """A log message of an event name and fields, formatted only if it is written."""

    __slots__ = ("event", "fields")

    def __init__(self, event: str, fields: Mapping[str, object]) -> None:
        self.event = event
        self.fields = fields

    def __str__(self) -> str:
        parts = [f"event={_quote(self.event)}"]
        parts += [f"{name}={_quote(shown(name, value))}" for name, value in self.fields.items()]
        return " ".join(parts)


def kv(event: str, /, **fields: object) -> KV:
    """The message of a log call: `log.info(kv("lease_expired", tenant=name, blocks=3))`."""
    return KV(event, fields)


def shown(name: str, value: object) -> str:
    """What a log may show of a field: see the module's invariants."""
    if name in SECRET_FIELDS:
        return REDACTED
    return _shown_value(value)[:TEXT_SHOWN_MAX]


def _shown_value(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value) if len(value) <= BYTES_SHOWN_MAX else None
        return ids.short(raw) if raw is not None else f"<{memoryview(value).nbytes} bytes>"
    if isinstance(value, enum.Enum):  # before int: Status and its kin are both
        label = getattr(value, "label", None)
        return label if isinstance(label, str) else value.name.lower()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, Collection):
        return f"<{len(value)} items>"
    if hasattr(value, "nbytes"):  # arrays
        return f"<{value.nbytes} bytes>"
    return scrub(str(value))


def scrub(text: str) -> str:
    """`text` without what looks like content: bytes literals, long hex, lists of numbers."""
    if len(text) < CONTENT_CHARS_MIN:
        return text
    text = text[:TEXT_READ_MAX]
    text = _BYTES_LITERAL.sub(_hidden_literal, text)
    text = _LONG_HEX.sub(r"\1..", text)
    return _NUMBERS.sub("<numbers>", text)


def _hidden_literal(match: re.Match[str]) -> str:
    # An escape is at most 4 characters per byte: what is short in text is short in bytes.
    return match[0] if len(match[0]) <= BYTES_SHOWN_MAX + 3 else "<bytes>"


def _quote(text: str) -> str:
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _one_line(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class ContentFilter(logging.Filter):
    """Replaces bytes, arrays and sequences among a record's arguments before any formatting."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always keeps the record."""
        if isinstance(record.args, tuple):
            record.args = tuple(_safe_argument(value) for value in record.args)
        elif isinstance(record.args, Mapping):
            record.args = {name: _safe_argument(value) for name, value in record.args.items()}
        if not isinstance(record.msg, str | KV):
            record.msg = (
                _shown_value(record.msg)
                if not isinstance(record.msg, BaseException)
                else (scrub(str(record.msg)))
            )
        return True


def _safe_argument(value: object) -> object:
    if isinstance(value, str):
        return scrub(value)
    if value is None or isinstance(value, int | float):
        return value  # %d and %x need the number itself
    return _shown_value(value)


class _Kind:
    """A bucket of lines that may be written."""

    __slots__ = ("left", "unsaid", "when_s")

    def __init__(self, when_s: float) -> None:
        self.left = float(ALIKE_AT_ONCE_MAX)
        self.when_s = when_s
        self.unsaid = 0

    def take(self, now_s: float) -> bool:
        """Whether one may be written now. A clock that goes back stands still."""
        passed_s = max(0.0, now_s - self.when_s)
        self.when_s = now_s
        self.left = min(float(ALIKE_AT_ONCE_MAX), self.left + passed_s * ALIKE_PER_SECOND)
        if self.left < 1.0:
            self.unsaid += 1
            return False
        self.left -= 1.0
        return True


class FloodFilter(logging.Filter):
    """Holds back what comes too often. Lines are of one kind when their logger, their text and the
    first text among their arguments, the tenant as a rule, are the same; of errors there is also
    what was raised, and where."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._lock = threading.Lock()  # filters run outside their handler's

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a line that is held back; one that is not says how many were before it."""
        place = (_kind_of(record), _raised(record) if record.levelno >= logging.ERROR else None)
        with self._lock:
            kind = self._kinds.get(place)
            if kind is None:
                kind = self._kinds[place] = _Kind(record.created)
                if len(self._kinds) > KINDS_MAX:
                    self._kinds.popitem(last=False)
            self._kinds.move_to_end(place)
            if not kind.take(record.created):
                return False
            unsaid, kind.unsaid = kind.unsaid, 0
        if unsaid:
            _say(record, unsaid)
        return True


def _kind_of(record: logging.LogRecord) -> Hashable:
    message = record.msg
    if isinstance(message, KV):
        of = message.fields.get("tenant")
        return record.name, message.event, of if isinstance(of, str) else None
    args = record.args if isinstance(record.args, tuple) else ()
    of = next((each for each in args if isinstance(each, str)), None)
    return record.name, message if isinstance(message, str) else None, of


def _raised(record: logging.LogRecord) -> Hashable:
    """Which error a record is of: the type and place of what was raised, if it shows that."""
    if not record.exc_info or record.exc_info[0] is None:
        return ()
    kind, _, trace = record.exc_info
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return kind, trace and (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


def _say(record: logging.LogRecord, unsaid: int) -> None:
    if isinstance(record.msg, KV):
        record.msg = KV(record.msg.event, {**record.msg.fields, "unsaid": unsaid})
    elif isinstance(record.msg, str) and (record.args is None or isinstance(record.args, tuple)):
        record.msg, record.args = record.msg + " unsaid=%d", (*(record.args or ()), unsaid)


@functools.lru_cache(log_templates.TEMPLATES_KEPT)
def _has_fields(template: str) -> bool:
    """Not where content was written into the template itself."""
    return log_templates.parse(template) is not None and scrub(template) == template


class _Formatter(logging.Formatter):
    def fields(self, record: logging.LogRecord) -> list[tuple[str, log_templates.Value, str]]:
        """Name, value and text of each field of a template, as they may be shown; empty where the
        record is no such thing."""
        template, args = record.msg, record.args or ()
        if not isinstance(template, str) or not isinstance(args, tuple):
            return []
        if not template.startswith("event=") or len(template) > log_templates.TEMPLATE_CHARS_MAX:
            return []  # and it is remembered nowhere: it may be anybody's text
        if not _has_fields(template):
            return []
        found = log_templates.fields(template, [_safe_argument(value) for value in args])
        shown_fields, left = [], MESSAGE_SHOWN_MAX
        for name, value, text in found or ():
            if name in SECRET_FIELDS:
                value = text = REDACTED
            else:
                safe = scrub(text)
                if isinstance(value, str) or safe != text:  # also a number as long as a key
                    value = safe[:left]
                text = safe[:left]
            left = max(0, left - len(text))
            shown_fields.append((name, value, text))
        return shown_fields

    def message(self, record: logging.LogRecord) -> str:
        if isinstance(record.msg, KV):
            return _one_line(str(record.msg))
        if found := self.fields(record):
            return _one_line(" ".join(f"{name}={_quote(text)}" for name, _, text in found))
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # a wrong number or kind of arguments
            text = f"{record.msg} <arguments do not fit>"
        return _one_line(scrub(text)[:MESSAGE_SHOWN_MAX])

    def trace(self, record: logging.LogRecord) -> str:
        parts = []
        if record.exc_info and record.exc_info[0] is not None:
            parts.append(self.formatException(record.exc_info))
        if record.stack_info:
            parts.append(self.formatStack(record.stack_info))
        return scrub("\n".join(parts))[-TRACE_SHOWN_MAX:]

    def time(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class KeyValueFormatter(_Formatter):
    """`ts=... level=info logger=entresol.shard event=...`; a traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        message = self.message(record)
        level = record.levelname.lower()
        line = f"ts={self.time(record)} level={level} logger={record.name} {message}"
        trace = self.trace(record)
        if trace:
            line += "".join(f"\n    {_one_line(part)}" for part in trace.splitlines())
        return line


class JsonFormatter(_Formatter):
    """One JSON object per line; fields become members beside ts, level, logger. What has none is
    the member `message`."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        line: dict[str, object] = {
            "ts": self.time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        trace = self.trace(record)
        if isinstance(record.msg, KV):
            line["event"] = record.msg.event
            for name, value in record.msg.fields.items():
                plain = type(value) in (int, float, bool, type(None)) and name not in SECRET_FIELDS
                _add(line, name, value if plain else shown(name, value))
        elif found := self.fields(record):
            for name, value, _ in found:
                _add(line, name, value)
        else:
            line["message"] = self.message(record)
        if trace:
            line["trace"] = trace
        return json.dumps(line)


def _add(line: dict[str, object], name: str, value: object) -> None:
    """A member, under a name that is free."""
    while name in line or name == "trace":
        name += "_"
    line[name] = value


FORMATTERS: dict[str, type[_Formatter]] = {"kv": KeyValueFormatter, "json": JsonFormatter}


def _dropped_record(lines: int) -> logging.LogRecord:
    message = kv("log_lines_dropped", lines=lines, hint="standard error is read too slowly")
    return logging.LogRecord(
        "entresol.log",
        logging.WARNING,
        __file__,
        0,
        message,
        None,
        None,
    )


class BackgroundHandler(logging.Handler):
    """Writes to a stream from a thread of its own.

    A pipe that nobody empties, a terminal that is held, a file system that throttles its writers:
    each of them would otherwise stop the event loop in the middle of a log call.

    Attributes:
        dropped: lines that found no room.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped = 0
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(LINES_WAITING_MAX)
        self._ending = False
        self._thread = threading.Thread(target=self._write, name="entresol-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Format now, as arguments may change; write soon."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self.dropped += 1
        except Exception:
            self.handleError(record)

    def _write(self) -> None:
        said = 0
        while True:
            line = self._lines.get()
            batch = [] if line is None else [line]
            while len(batch) < LINES_PER_WRITE_MAX and not self._lines.empty():
                more = self._lines.get()
                batch += [] if more is None else [more]
            if self.dropped > said:
                said, before = self.dropped, said
                batch.append(self.format(_dropped_record(said - before)))
            try:
                self._stream.write("".join(f"{each}\n" for each in batch))
                self._stream.flush()
            except (OSError, ValueError):  # nobody reads it any more, and nobody would hear of it
                self.dropped += len(batch)
                said = self.dropped
            if self._ending and self._lines.empty():
                return

    def flush(self) -> None:
        """Wait a bounded moment until what was logged is written."""
        until = time.monotonic() + CLOSE_SECONDS_MAX
        while not self._lines.empty() and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.001)

    def close(self) -> None:
        """Write what is left, for a bounded moment; end the thread. Idempotent."""
        self._ending = True
        try:
            self._lines.put(None, timeout=CLOSE_SECONDS_MAX)
        except queue.Full:
            pass  # it is stuck in a write: a daemon thread, it ends with the process
        else:
            self._thread.join(CLOSE_SECONDS_MAX)
        super().close()


def lines_dropped() -> int:
    """Lines that the present handlers lost."""
    handlers = logging.getLogger().handlers
    return sum(each.dropped for each in handlers if isinstance(each, BackgroundHandler))


def configure(
    level: str = "info", form: str = "kv", *, stream: TextIO | None = None
) -> logging.Handler:
    """Send all logging to `stream` at once, or without one to standard error from a thread;
    replaces what was configured.

    `level` is of our own loggers (`entresol.*`); libraries are heard from warning on. `form` is a
    key of FORMATTERS. Safe to call again, and before or after a library's `basicConfig`. Returns
    the handler.

    Raises: KeyError for an unknown level or form (the configuration checks both).
    """
    numeric = logging.getLevelNamesMapping()[level.upper()]
    handler: logging.Handler
    handler = BackgroundHandler(sys.stderr) if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(FORMATTERS[form]())
    handler.addFilter(FloodFilter())
    handler.addFilter(ContentFilter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(max(numeric, logging.WARNING))
    logging.getLogger("entresol").setLevel(numeric)
    return handler


def tell_of_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The exception handler of the daemon's loop. That there was no memory for a connection, or for
    a call, is no bug of ours: it is said in a line."""
    error = context.get("exception")
    if isinstance(error, MemoryError):
        what = context.get("message")
        logging.getLogger("entresol.loop").error("event=out_of_memory what=%r", what)
    else:
        loop.default_exception_handler(context)
