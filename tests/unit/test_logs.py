"""Logging: formats, one line per record, and no way for block content to get in."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entresol_daemon import log_templates, logs
from entresol_daemon.logs import KV, kv, scrub
from entresol_proto.status import Status

CANARY = b"the prompt of somebody, reconstructed from KV"
log = logging.getLogger("entresol.test")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("entresol")
    handlers, level, own = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(own)


@pytest.fixture(params=["kv", "json"])
def lines(request) -> io.StringIO:
    """What was logged, in both forms."""
    stream = io.StringIO()
    logs.configure("debug", request.param, stream=stream)
    return stream


@pytest.fixture
def text() -> io.StringIO:
    stream = io.StringIO()
    logs.configure("info", "kv", stream=stream)
    return stream


@pytest.fixture
def objects() -> io.StringIO:
    stream = io.StringIO()
    logs.configure("info", "json", stream=stream)
    return stream


def test_key_value_lines(text):
    log.info(kv("lease_expired", tenant="a", blocks=3, late_ms=1.5, again=True, who=None))
    line = text.getvalue()
    assert re.fullmatch(
        r"ts=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=info logger=entresol\.test "
        r"event=lease_expired tenant=a blocks=3 late_ms=1\.5 again=true who=null\n",
        line,
    )


def test_values_with_spaces_and_quotes_are_quoted(text):
    log.info(kv("x", path="/a b", quote='say "hi"', equals="a=b", empty=""))
    assert r'path="/a b" quote="say \"hi\"" equals="a=b" empty=""' in text.getvalue()


def test_json_lines_have_the_fields_as_members(objects):
    log.warning(kv("put_refused", tenant="a", status=Status.QUOTA, size_bytes=5, level="odd"))
    line = json.loads(objects.getvalue())
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "entresol.test",
        "event": "put_refused",
        "tenant": "a",
        "status": "quota",
        "size_bytes": 5,
        "level_": "odd",
    }


def test_plain_messages_work_as_ever(lines):
    log.info("%d of them, name %s", 3, "a")
    assert "3 of them, name a" in lines.getvalue()


@pytest.mark.parametrize("form", sorted(logs.FORMATTERS))
def test_arguments_that_do_not_fit_are_no_crash(form):
    # Straight to the handler: pytest's own handler on the root logger raises for such records.
    stream = io.StringIO()
    handler = logs.configure("info", form, stream=stream)
    for message, arguments in (("count=%d", ("three",)), ("nothing", (1, 2))):
        handler.handle(logging.LogRecord("entresol", logging.INFO, "", 0, message, arguments, None))
    assert stream.getvalue().count("<arguments do not fit>") == 2


def test_levels(text):
    log.debug("quiet")
    logging.getLogger("library").info("chatty")
    logging.getLogger("library").warning("important")
    assert "quiet" not in text.getvalue()
    assert "chatty" not in text.getvalue()
    assert "important" in text.getvalue()


def test_a_field_is_only_formatted_if_the_line_is_written(text):
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    log.debug(kv("x", value=Costly()))
    assert text.getvalue() == ""


@pytest.mark.parametrize("level", ["loud", ""])
def test_unknown_settings_are_refused(level):
    with pytest.raises(KeyError):
        logs.configure(level)
    with pytest.raises(KeyError):
        logs.configure("info", "xml")


# A log call is fields too: 141 of them were one string in JSON, and unquoted in key=value.


@pytest.mark.parametrize(
    ("template", "args", "members", "line"),
    [
        ("event=no_checkpoint", (), {}, "event=no_checkpoint"),
        ("event=x effect=writes_pause", (), {"effect": "writes_pause"}, "effect=writes_pause"),
        ("event=x blocks=%d", (3,), {"blocks": 3}, "blocks=3"),
        ("event=x tenant=%s", ("acme",), {"tenant": "acme"}, "tenant=acme"),
        ("event=x tenant=%s", ("3",), {"tenant": "3"}, "tenant=3"),
        ("event=x errno=%s", (28,), {"errno": 28}, "errno=28"),
        ("event=x errno=%s", (None,), {"errno": None}, "errno=None"),
        ("event=x complete=%s", (True,), {"complete": True}, "complete=True"),
        ("event=x status=%s", (Status.QUOTA,), {"status": str(Status.QUOTA)}, "status="),
        ("event=x rate=%.0f", (3.7,), {"rate": 4.0}, "rate=4"),
        ("event=x seconds=%g", (2.5,), {"seconds": 2.5}, "seconds=2.5"),
        ("event=x seconds=%g", (float("nan"),), {"seconds": "nan"}, "seconds=nan"),
        ("event=x id=%08x", (255,), {"id": "000000ff"}, "id=000000ff"),
        ("event=x at=%s:%d", ("::1", 7440), {"at": "::1:7440"}, "at=::1:7440"),
        (
            "event=x reason=%s", ("this system has no RDMA device (/sys)",),
            {"reason": "this system has no RDMA device (/sys)"},
            'reason="this system has no RDMA device (/sys)"',
        ),
        (
            "event=x error=%s", (OSError(28, "No space left on device"),),
            {"error": "[Errno 28] No space left on device"},
            'error="[Errno 28] No space left on device"',
        ),
        ("event=x reason=%r", ("a b",), {"reason": "a b"}, 'reason="a b"'),
        ("event=x reason=%r", ("it's",), {"reason": "it's"}, 'reason="it\'s"'),
        ("event=x name=%s", ('say "hi"',), {"name": 'say "hi"'}, r'name="say \"hi\""'),
        ("event=x name=%s", ("",), {"name": ""}, 'name=""'),
        ("event=x hint='see `a b`' n=%d", (1,), {"hint": "see `a b`", "n": 1}, 'hint="see `a b`"'),
        ("event=x name='%s' n=%d", ("a", 1), {"name": "a", "n": 1}, "name=a n=1"),
        ('event=x what="a b"', (), {"what": "a b"}, 'what="a b"'),
        ("event=x name=%s", ("a effect=none",), {"name": "a effect=none"}, '"a effect=none"'),
        ("event=x ts=%d trace=%d n=%d n=%d", (1, 2, 3, 4),
         {"ts_": 1, "trace_": 2, "n": 3, "n_": 4}, "ts=1 trace=2 n=3 n=4"),
    ],
)  # fmt: skip
def test_a_log_call_is_fields(template, args, members, line):
    for form in ("kv", "json"):
        stream = io.StringIO()
        logs.configure("info", form, stream=stream)
        log.info(template, *args)
        said = stream.getvalue()
        if form == "kv":
            assert line in said
        else:
            found = json.loads(said)
            event = template.split()[0].removeprefix("event=")
            assert list(found)[3] == "event"
            assert {**found} == {
                "ts": found["ts"], "level": "info", "logger": "entresol.test", "event": event,
                **members,
            }  # fmt: skip


def test_the_event_may_be_an_argument(objects):
    log.info("event=%s blocks=%d", "corrupt", 1)
    line = json.loads(objects.getvalue())
    assert (line["event"], line["blocks"]) == ("corrupt", 1)


@pytest.mark.parametrize(
    ("template", "args"),
    [
        ("tenant %s is here", ("a",)),
        ("tenant=%s", ("a",)),
        ("event=x the peer does not answer", ()),
        ("event=x peer=%s went away", ("a",)),
        ("event=x share=50%%", ()),
        ("event=x n=%*d", (5, 1)),
        ("event=x Name=%s", ("a",)),
        ("event=x name=%(name)s", ({"name": "a"},)),
        ("event=x open='a", ()),
    ],
)
def test_what_is_no_fields_is_written_as_it_stands(template, args):
    for form in ("kv", "json"):
        stream = io.StringIO()
        logs.configure("info", form, stream=stream)
        log.info(template, *args)
        plain = logging.LogRecord("x", logging.INFO, "", 0, template, args, None).getMessage()
        said = stream.getvalue()
        assert json.loads(said)["message"] == plain if form == "json" else f" {plain}\n" in said


@pytest.mark.parametrize(
    "content", [CANARY, list(range(2000, 2100)), repr(CANARY), CANARY.hex(), [CANARY]]
)
def test_content_is_no_field_either(lines, content):
    """The net of before holds for values that have a name now."""
    log.info("event=x data=%s", content)
    log.info("event=x data=%r more='%s'", content, content)
    log.info("event=x reason=%s", ValueError(content))
    log.info(f"event=x data={str(content).replace(' ', '')}")
    log.info("event=x number=%d", int.from_bytes(CANARY))
    log.info("event=x number=%s", int.from_bytes(CANARY))
    said = lines.getvalue()
    assert said.count("\n") == 6
    assert "prompt" not in said
    assert CANARY.hex()[:40] not in said
    assert "2010" not in said
    assert str(int.from_bytes(CANARY))[:40] not in said


@pytest.mark.parametrize("name", sorted(logs.SECRET_FIELDS))
def test_fields_of_calls_named_like_secrets_are_blanked(lines, name):
    log.info(f"event=x {name}=%s", "hunter2")
    log.info(f"event=x {name}=%d", 123456)
    log.info(f"event=x {name}='hunter2 123456'")
    assert "hunter2" not in lines.getvalue()
    assert "123456" not in lines.getvalue()
    assert lines.getvalue().count("<redacted>") == 3


@given(st.text(max_size=300))
def test_no_argument_makes_a_field_or_a_line(content):
    record = logging.LogRecord(
        "entresol", logging.INFO, "", 0, "event=x name=%s n=%r", (content, content), None
    )
    line = json.loads(logs.JsonFormatter().format(record))
    assert set(line) == {"ts", "level", "logger", "event", "name", "n"}
    said = logs.KeyValueFormatter().format(record)
    assert len(said.splitlines()) == 1
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "quoted", said)
    assert re.fullmatch(r"ts=\S+ level=info logger=entresol event=x name=\S+ n=\S+", bare), said
    assert bare.count("=") == 6


def test_fields_are_bounded_together(lines):
    log.info("event=x a=%s b=%s c=%s", *["m " * 1_000_000] * 3)
    long = "m " * (logs.MESSAGE_SHOWN_MAX // 2 - 1)
    log.info("event=x a=%s kek=%s c=%s", long, "hunter2", "m " * 1_000_000)
    assert len(lines.getvalue()) < 3 * logs.MESSAGE_SHOWN_MAX


def test_every_log_call_with_an_event_is_fields():
    """In JSON it is one string else, and nobody notices."""
    calls, wrong = 0, []
    for folder in ("daemon/entresol_daemon", "proto/entresol_proto", "client/entresol_client"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                texts = node.args if isinstance(node, ast.Call) else []
                for text in texts:
                    if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
                        continue
                    if not re.match("event=.", text.value):
                        continue
                    calls += 1
                    pairs = log_templates.parse(text.value)
                    if pairs is None or {pair.name for pair in pairs} & logs.SECRET_FIELDS:
                        wrong.append(f"{path.name}:{text.lineno}: {text.value}")
    assert wrong == []
    assert calls > 100


# ------------------------------------------------------------------------------- content


@pytest.mark.parametrize(
    "content",
    [
        CANARY,
        bytearray(CANARY),
        memoryview(CANARY),
        np.frombuffer(CANARY, np.uint8),
        [CANARY],
        (CANARY, 1),
        {"x": CANARY},
        {CANARY},
    ],
    ids=lambda content: type(content).__name__,
)
def test_content_is_never_shown(lines, content):
    log.info(kv("x", data=content))
    log.info("data %s", content)
    log.info("data %r and %s", content, 1)
    log.info("data %(data)r", {"data": content})
    log.info(content)
    log.info(f"data {content!r}")
    try:
        raise ValueError(content)
    except ValueError:
        log.exception("failed")
        log.exception(kv("failed", error=sys.exc_info()[1]))
    shown = lines.getvalue()
    assert "prompt" not in shown
    assert CANARY.hex()[:40] not in shown
    assert ", ".join(str(byte) for byte in CANARY[:12]) not in shown
    assert shown.count("failed") == 2


def test_short_bytes_are_shown_as_ids_are(text):
    log.info(kv("x", block=bytes(range(16)), long=bytes(17)))
    assert "block=00010203 long=" in text.getvalue()
    assert "<17 bytes>" in text.getvalue()


def test_long_hex_is_cut(text):
    log.info("id %s", bytes(range(32)).hex())
    log.info(kv("x", name=bytes(range(16)).hex(), incarnation=f"{2**63:x}"))
    assert "id 00010203..\n" in text.getvalue()
    assert "name=00010203.. incarnation=8000000000000000" in text.getvalue()


def test_lists_of_token_ids_are_not_shown(text):
    tokens = list(range(1000, 1064))
    log.info("tokens %s", tokens)
    log.info(f"tokens {tokens}")
    log.info(f"tokens {tuple(tokens)}")
    log.info(kv("x", error=ValueError(tokens)))
    assert "1010" not in text.getvalue()


@pytest.mark.parametrize("name", sorted(logs.SECRET_FIELDS))
def test_fields_named_like_secrets_are_blanked(lines, name):
    log.info(kv("x", **{name: "hunter2"}))
    log.info(kv("x", **{name: 123456}))
    assert "hunter2" not in lines.getvalue()
    assert "123456" not in lines.getvalue()
    assert lines.getvalue().count("<redacted>") == 2


@given(st.binary(min_size=30, max_size=200))
def test_no_bytes_literal_passes(content):
    for literal in (repr(content), repr(bytearray(content)), f"x={content!r}, y"):
        for cut in (len(literal), len(literal) - 3):
            assert repr(content)[4:24] not in scrub(literal[:cut])


@given(st.text(max_size=300))
def test_any_text_is_one_line(content):
    for message in (str(kv("x", name=content)), content):
        record = logging.LogRecord("entresol", logging.INFO, "", 0, message, None, None)
        for formatter in (logs.KeyValueFormatter(), logs.JsonFormatter()):
            assert len(formatter.format(record).splitlines()) == 1
    record = logging.LogRecord("entresol", logging.INFO, "", 0, kv("x", n=content), None, None)
    assert len(logs.KeyValueFormatter().format(record).splitlines()) == 1
    assert json.loads(logs.JsonFormatter().format(record))["event"] == "x"


def test_a_forged_line_stays_inside_its_field(text):
    log.info(kv("x", tenant="a\nts=2026 level=error event=fake"))
    log.info("tenant %s", "a\r\nts=2026 level=error event=fake\x1b[2J")
    assert len(text.getvalue().splitlines()) == 2
    assert "\x1b" not in text.getvalue()


def test_everything_is_bounded(lines):
    log.info(kv("x", name="n" * 1_000_000))
    log.info("%s", "m" * 1_000_000)
    assert len(lines.getvalue()) < 2 * logs.MESSAGE_SHOWN_MAX


def test_scrubbing_hostile_text_is_quick():
    # Would take minutes with a backtracking expression; the suite's time limit is the judge.
    for piece in ("b'", "[1,", "[ 1 ,  ", "((((", "\\'", "deadbeef", "b'\\"):
        scrub(piece * 200_000)


def test_tracebacks_are_indented_or_a_member(lines):
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        log.exception(kv("failed", n=1))
    shown = lines.getvalue().splitlines()
    if len(shown) == 1:
        assert "RuntimeError: broken" in json.loads(shown[0])["trace"]
    else:
        assert all(line.startswith("    ") for line in shown[1:])
        assert shown[-1] == "    RuntimeError: broken"


def test_messages_are_lazy_objects():
    message = kv("x", a=1)
    assert isinstance(message, KV)
    assert str(message) == "event=x a=1"


# ---------------------------------------------------------------------------- robustness


@pytest.mark.parametrize("order", ["before", "after", "both"])
def test_a_library_calling_basicconfig_changes_nothing(order):
    code = (
        "import logging, sys\n"
        "from entresol_daemon import logs\n"
        f"order = {order!r}\n"
        "def library():\n"
        "    logging.basicConfig(level=logging.DEBUG, format='HIJACKED %(message)s')\n"
        "if order in ('before', 'both'): library()\n"
        "logs.configure('info', 'kv')\n"
        "if order in ('after', 'both'): library()\n"
        "logging.getLogger('entresol.x').info(logs.kv('hello', data=bytes(99)))\n"
        "logging.getLogger('entresol.x').debug('hidden')\n"
        "logging.getLogger('library').info('hidden')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert 'event=hello data="<99 bytes>"' in run.stderr
    assert "HIJACKED" not in run.stderr
    assert "hidden" not in run.stderr


def test_configuring_again_replaces():
    first, second = io.StringIO(), io.StringIO()
    logs.configure("info", "kv", stream=first)
    logs.configure("info", "kv", stream=second)
    log.info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_a_reader_that_stalls_stops_nobody():
    """A pipe that nobody empties: lines wait, then they are lost and counted, and it is said."""
    code = (
        "import logging, sys, time\n"
        "from entresol_daemon import logs\n"
        "handler = logs.configure('info', 'kv')\n"
        "log = logging.getLogger('entresol.x')\n"
        "begun = time.monotonic()\n"
        "for number in range(logs.LINES_WAITING_MAX + 20_000): log.info(f'number={number}')\n"
        "print(time.monotonic() - begun, handler.dropped, logs.lines_dropped(), flush=True)\n"
        "sys.stdin.readline()\n"
        "for number in range(3): handler.flush(); log.info('last=%d', number)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        said = process.stdout.readline().split()  # while nobody reads standard error
        assert float(said[0]) < 30
        assert int(said[1]) > 0
        assert said[1] == said[2]
        _, err = process.communicate("go on\n", timeout=60)
    lines = err.splitlines()
    numbers = [int(line.rpartition("number=")[2]) for line in lines if "number=" in line]
    assert numbers[:1_000] == list(range(1_000))
    dropped = [line for line in lines if "event=log_lines_dropped" in line]
    assert sum(int(line.split("lines=")[1].split()[0]) for line in dropped) == int(said[1])
    assert sum("last=" in line for line in lines) == 3, lines[-5:]


def test_what_was_logged_is_written_before_the_end():
    code = (
        "import logging\n"
        "from entresol_daemon import logs\n"
        "logs.configure('info', 'json')\n"
        "for number in range(2_000): logging.getLogger('entresol.x').info(f'number={number}')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    found = [json.loads(line)["message"] for line in run.stderr.splitlines()]
    assert found == [f"number={number}" for number in range(2_000)]


def test_nobody_reads_any_more():
    """Standard error is closed at the other end: nothing raises, the lines count as lost."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:
        handler = logs.BackgroundHandler(stream)
        handler.setFormatter(logs.KeyValueFormatter())
        for number in range(5):
            handler.handle(logging.makeLogRecord({"msg": "lost", "args": (), "number": number}))
        handler.flush()
        handler.close()
        handler.close()
        assert handler.dropped == 5
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def test_lines_alike_are_held_back_and_counted() -> None:
    """One tenant's flood of bad requests wrote a line for each, and filled journal and disk."""
    stream, kept = io.StringIO(), logging.getLogger("entresol.test")
    logs.configure("info", "kv", stream=stream)
    for _ in range(logs.ALIKE_AT_ONCE_MAX + 50):
        kept.info("event=request_refused tenant=%s type=%s", "flooder", "fetch")
        kept.info(kv("lease_expired", tenant="flooder"))
    for number in range(3):
        kept.info("event=request_refused tenant=%s type=%s", "other", "fetch")
        kept.info(kv("lease_expired", tenant="other"))
        kept.error("event=request_refused tenant=%s type=%s", "flooder", "fetch")
        kept.info("event=attached session=%d tenant=%s", number, "flooder")
    lines = stream.getvalue().splitlines()
    refused = [line for line in lines if "request_refused tenant=flooder" in line]
    assert len([one for one in refused if "level=info" in one]) <= logs.ALIKE_AT_ONCE_MAX + 1
    assert len([one for one in refused if "level=error" in one]) == 3
    assert len([one for one in lines if "tenant=other" in one]) == 6
    assert len([one for one in lines if "event=attached" in one]) == 3


@pytest.mark.parametrize("form", ["kv", "json"])
def test_the_next_line_says_how_many_were_held_back(form: str) -> None:
    stream = io.StringIO()
    handler = logs.configure("info", form, stream=stream)
    for message, args in (("event=no name=%s", ("a",)), (kv("no", tenant="a"), ())):
        for at_s in [0.0] * (logs.ALIKE_AT_ONCE_MAX + 5) + [100.0, 100.0, 50.0]:
            record = logging.LogRecord("entresol.t", logging.INFO, "f", 1, message, args, None)
            record.created = at_s
            handler.handle(record)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 * (logs.ALIKE_AT_ONCE_MAX + 3)
    said = [line for line in lines if "unsaid" in line]
    assert len(said) == 2, "once each"
    assert all("unsaid=5" in line or '"unsaid": 5' in line for line in said)


def test_errors_alike_are_held_back_too() -> None:
    """A full disk wrote an error for each put, a damaged drive for each block: thousands a second,
    onto the same disk."""
    stream, kept = io.StringIO(), logging.getLogger("entresol.test")
    logs.configure("info", "kv", stream=stream)

    def raising(what: Exception) -> None:
        try:
            raise what
        except Exception:
            kept.exception("event=request_failed type=%s", "fetch")

    for number in range(logs.ALIKE_AT_ONCE_MAX + 50):
        kept.error("event=state_file_failed file=%s reason=%r", Path("/x"), "no space left")
        kept.error("event=put_lost status=%s block=%s", "io_error", f"{number:08x}..")
        raising(ValueError("often"))
    kept.error("event=state_file_failed file=%s reason=%r", Path("/x"), "read-only")
    raising(RuntimeError("rare"))
    text = stream.getvalue()
    for often in ("no space left", "put_lost", "ValueError: often"):
        assert 0 < text.count(often) <= logs.ALIKE_AT_ONCE_MAX + 1, often
    assert text.count("read-only") == text.count("RuntimeError: rare") == 1


def test_lines_of_several_threads_are_filtered_one_after_the_other() -> None:
    """Filters run outside their handler's lock."""
    held = logs.FloodFilter()
    inside = 0

    class Kinds(OrderedDict[Any, Any]):
        def get(self, *args: Any) -> Any:
            nonlocal inside
            inside += held._lock.locked()
            return super().get(*args)

    held._kinds = Kinds()
    record = logging.LogRecord("e", logging.INFO, "f", 1, "x", (), None)
    assert held.filter(record)
    assert inside == 1


def test_kinds_of_lines_are_bounded() -> None:
    held = logs.FloodFilter()
    for number in range(logs.KINDS_MAX + 10):
        record = logging.LogRecord("e", logging.INFO, "f", 1, "x=%s", (str(number),), None)
        assert held.filter(record)
    assert len(held._kinds) == logs.KINDS_MAX


def test_a_loop_without_memory_says_so_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(logs.tell_of_loop)
        for error in (MemoryError(), ValueError("a bug")):
            loop.call_exception_handler({"message": "Fatal error on SSL", "exception": error})

    asyncio.run(story())
    short, long = caplog.records
    assert short.getMessage() == "event=out_of_memory what='Fatal error on SSL'"
    assert not short.exc_info
    assert long.name == "asyncio"
    assert long.exc_info is not None
