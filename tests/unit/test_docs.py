"""Documents say what the code does, or this fails: tables of the formats, links, commands.

Settings, metrics and events have their own checks beside their code.
"""

from __future__ import annotations

import dataclasses
import io
import re
import shlex
import struct
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest

from entresol_proto import limits
from entresol_proto.fabric.base import FabricKind
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import Status
from entresol_proto.wire import data, frames, opening, quote, session
from entresol_proto.wire.frames import FrameType

ROOT = Path(__file__).resolve().parents[2]
FORMAT = ROOT / "proto" / "FORMAT.md"
README = ROOT / "README.md"
NOT_OURS = {".venv", ".git", "node_modules", "dist", "build", ".pytest_cache", ".hypothesis"}


def chapter(title: str, level: int = 2) -> str:
    """The text under a heading, up to the next of its level or above."""
    text = FORMAT.read_text(encoding="utf-8")
    found = re.search(
        rf"^{'#' * level} {re.escape(title)}\n(.*?)(?=^#{{1,{level}}} |\Z)", text, re.M | re.S
    )
    assert found, f"FORMAT.md has no chapter {title!r}"
    return found[1]


def tables(text: str) -> list[list[list[str]]]:
    """Markdown tables as rows of cells, without head and rule."""
    found: list[list[list[str]]] = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
        found.append(rows[2:])
    return found


def number(text: str) -> int:
    return int(text.replace(",", ""))


# Numbers ------------------------------------------------------------------------------------------


def test_every_status_is_in_the_table() -> None:
    (table,) = tables(chapter("Status", 3))
    assert {(number(row[0]), row[1]) for row in table} == {(int(s), s.label) for s in Status}
    assert all(row[2] for row in table)


def test_every_frame_type_is_in_the_table() -> None:
    (table,) = tables(chapter("Types", 3))
    assert {(number(row[0]), row[1]) for row in table} == {(int(t), t.name) for t in FrameType}
    answers = {row[1]: re.match(r"[A-Z_]*", row[3])[0] for row in table}  # type: ignore[index]
    for request, answer in session.ANSWERS.items():
        assert answers[request.name] == answer.name
    assert {name for name, answer in answers.items() if answer} == {
        kind.name for kind in session.ANSWERS
    }


def test_every_reason_is_in_the_table() -> None:
    table = tables(chapter("EXPLAINED", 4))[1]
    assert {(number(row[0]), row[1]) for row in table} == {
        (int(reason), reason.label) for reason in data.Reason
    }


def test_fabrics_tiers_and_places_have_their_numbers() -> None:
    welcome, grant = chapter("WELCOME", 4), chapter("GRANT", 4)
    for kind in FabricKind:
        assert f"{int(kind)} {kind.label}" in welcome
    for tier in data.Tier:
        assert f"{int(tier)} {tier.label}" in grant
    assert (data.OpenAt.HOST, data.OpenAt.DAEMON) == (0, 1)
    assert (data.Ack.ACCEPTED, data.Ack.DURABLE) == (0, 1)


def test_every_state_change_is_in_the_table() -> None:
    """Each row names the frames of each side; `all` rows are spelled out in the text."""
    (table,) = tables(chapter("States", 3))
    rows = {row[0]: row[1:] for row in table}
    assert set(rows) == {state.value for state in session.State}
    for state in (session.State.START, session.State.GREETED, session.State.WELCOMED,
                  session.State.ATTACHING, session.State.CLOSED):  # fmt: skip
        for cell, code in zip(
            rows[state.value], (session.HOST_FRAMES, session.DAEMON_FRAMES), strict=True
        ):
            said = {(name, after) for name, after in re.findall(r"([A-Z_]+)[^→]*→ (\w+)", cell)}
            done = {(k.name, after.value) for (at, k), after in code.items() if at is state}
            assert said == done, state


# Layouts ------------------------------------------------------------------------------------------

# The fixed part of each payload and of the rows in it, in the order of the tables.
LAYOUTS: dict[FrameType, tuple[struct.Struct, ...]] = {
    FrameType.HELLO: (struct.Struct("<BBHH16s"),),
    FrameType.WELCOME: (opening.Welcome._FIXED, struct.Struct("<BH")),
    FrameType.ATTACH: (struct.Struct("<BH"),),
    FrameType.ATTACHED: (struct.Struct("<B"),),
    FrameType.NAMESPACE_OPENED: (opening.NamespaceOpened._FIXED,),
    FrameType.FETCH: (data.Fetch._FIXED,),
    FrameType.GRANT: (data.Grant._FIXED, data.Grant._ITEM, data.Grant._MISS),
    FrameType.RELEASE: (data.Release._FIXED, data.Release._REPORT),
    FrameType.RESERVE: (data.Reserve._FIXED, data.Reserve._ITEM),
    FrameType.RESERVED: (struct.Struct("<I"), data.Reserved._ITEM),
    FrameType.COMMIT: (struct.Struct("<I"), data.Commit._ITEM),
    FrameType.EXISTS: (data.Keyed._FIXED,),
    FrameType.EXISTS_REPLY: (struct.Struct("<I"),),
    FrameType.STAGE: (data.Stage._FIXED,),
    FrameType.DONE: (struct.Struct("<I"),),
    FrameType.EXPLAIN: (data.Explain._FIXED, struct.Struct("<B")),
    FrameType.EXPLAINED: (data.Explained._ITEM,),
    FrameType.QUOTE: (quote.Quote._FIXED,),
    FrameType.QUOTED: (quote.Quoted._FIXED,),
    FrameType.GOODBYE: (struct.Struct("<B"),),
    FrameType.ERROR: (struct.Struct("<B"),),
}


@pytest.mark.parametrize("kind", FrameType, ids=lambda kind: kind.name.lower())
def test_layouts_add_up(kind: FrameType) -> None:
    """Offsets follow from lengths, and the fixed parts are as long as the code's."""
    found = [t for t in tables(chapter(kind.name, 4)) if t and len(t[0]) == 3]
    found = [t for t in found if t[0][0] == "0" and t[0][1].isdigit()]
    layouts = LAYOUTS.get(kind, ())
    assert len(found) == len(layouts)
    for table, layout in zip(found, layouts, strict=True):
        at = 0
        for offset, size, _ in table:
            if offset == "" or not size.isdigit():
                assert offset in ("", str(at))
                break
            assert number(offset) == at, f"{kind.name}: {offset}, {at} expected"
            at += int(size)
        assert at == layout.size


def test_the_frame_header_adds_up() -> None:
    (table,) = tables(chapter("Frame header", 3))
    at = 0
    for offset, size, *_ in table[:-1]:
        assert int(offset) == at
        at += int(size)
    assert at == limits.FRAME_HEADER_BYTES == int(table[-1][0])


def test_the_example_frame_is_one() -> None:
    example = re.search(r"`((?:[0-9a-f]{2} ?){24})`", chapter("Frame header", 3))
    assert example
    raw = bytes.fromhex(example[1])
    assert raw == frames.encode_frame(FrameType.PING, 0x01020304, b"12345678")


def test_the_descriptor_table_is_the_descriptor() -> None:
    (table,) = tables(chapter("Descriptor", 3))
    fields = dataclasses.fields(NamespaceDescriptor)
    assert [(int(row[0]), row[1]) for row in table] == [
        (n, field.name) for n, field in enumerate(fields, start=1)
    ]
    for row, field in zip(table, fields, strict=True):
        default = row[3].split(";")[0].strip("`")
        expected = "" if field.default is dataclasses.MISSING else field.default
        assert default == ("absent" if expected is None else str(expected)), field.name
        assert int(row[2]) == (1 if isinstance(field.default, int) else 2), field.name


# Limits -------------------------------------------------------------------------------------------


def commented_limits() -> set[str]:
    """Names in limits.py with a comment on their line."""
    source = Path(limits.__file__).read_text(encoding="utf-8")
    lines = source.splitlines()
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            name = re.match(r"([A-Z][A-Z0-9_]*) = ", lines[token.start[0] - 1])
            found |= {name[1]} if name else set()
    return found


def all_limits() -> dict[str, int]:
    return {
        name: value
        for name, value in vars(limits).items()
        if name.isupper() and isinstance(value, int) and name not in ("KIB", "MIB", "GIB")
    }


def test_every_limit_is_explained() -> None:
    documents = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "proto").glob("*.md"))
    told = commented_limits() | {name for name in all_limits() if f"`{name}`" in documents}
    assert set(all_limits()) - told == set()


def test_limits_in_the_table_have_their_values() -> None:
    (table,) = tables(chapter("Limits", 3))
    said: dict[str, int] = {}
    for names, values, _ in table:
        many = [name.strip("` ") for name in names.split(", ")]
        said |= dict(zip(many, map(number, re.split(r", (?=\d+(?:,|$))", values)), strict=True))
    known = all_limits()
    assert {name: known.get(name) for name in said} == said


# Links and commands -------------------------------------------------------------------------------


@cache
def documents() -> tuple[Path, ...]:
    found = [
        path
        for path in ROOT.rglob("*.md")
        if not any(
            part in NOT_OURS or part.startswith(".") for part in path.parts[len(ROOT.parts) :]
        )
    ]
    assert FORMAT in found
    return tuple(sorted(found))


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), f"{path.name} links to {target}"
        assert ROOT in (place, *place.parents), f"{path.name} links out of the repository"
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place), f"{path.name} links to {target}"


def code_lines(path: Path) -> list[str]:
    """Lines of the code blocks of a document, without comments and languages that are no shell."""
    found = []
    for language, block in re.findall(
        r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S
    ):
        if language in ("", "sh", "bash", "shell", "console"):
            found += [line.split(" #")[0].strip() for line in block.splitlines()]
    return [line for line in found if line and not line.startswith("#")]


def commands(path: Path, program: str) -> list[str]:
    """Every use of a program in the code blocks, also behind && or a pipe."""
    parts = [part.strip() for line in code_lines(path) for part in re.split(r"&&|\|\||[|;]", line)]
    return [part for part in parts if part.split()[:1] == [program]]


def test_make_verbs_exist() -> None:
    makefile = ROOT / "Makefile"
    if not makefile.exists():
        pytest.skip("not run here: there is no Makefile yet")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile.read_text(encoding="utf-8"), re.M))
    used = [(path, part) for path in documents() for part in commands(path, "make")]
    assert used, "no document tells a make verb"
    for path, part in used:
        for word in shlex.split(part)[1:]:
            if "=" not in word and not word.startswith("-") and word != "...":
                assert word in targets, f"{path.name}: make {word}"


def run_help(module: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / part) for part in ("daemon", "client", "proto")]
    script = (
        f"import sys; sys.path[:0] = {paths!r}; from {module} import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *words, "--help"], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("program", "module"),
    [("entresol", "entresol_client.cli.main"), ("entresold", "entresol_daemon.__main__")],
)
def test_commands_in_documents_parse(program: str, module: str) -> None:
    file = ROOT / ("client" if program == "entresol" else "daemon") / (
        module.replace(".", "/") + ".py"
    )  # fmt: skip
    if not file.exists():
        pytest.skip(f"not run here: there is no {program} yet")
    used = {part for path in documents() for part in commands(path, program)}
    if not used and not README.exists():
        pytest.skip("not run here: there is no README.md yet")
    assert used, f"README.md shows no use of {program}"
    helps: dict[tuple[str, ...], str] = {}
    for part in sorted(used):
        words = shlex.split(part)[1:]
        verbs = tuple(
            word for word in words[:2] if re.fullmatch(r"[a-z][a-z-]*", word)
        ) if program == "entresol" else ()  # fmt: skip
        done = run_help(module, list(verbs))
        if done.returncode and len(verbs) == 2:  # the second word was an argument
            verbs = verbs[:1]
            done = run_help(module, list(verbs))
        assert done.returncode == 0, f"{part}: {done.stderr[-500:]}"
        helps[verbs] = done.stdout
        for option in (word.split("=")[0] for word in words if word.startswith("-")):
            assert re.search(rf"(?<![\w-]){re.escape(option)}\b", done.stdout), (
                f"`{part}`: {option} is not in the help of {' '.join((program, *verbs))}"
            )
    assert all("usage" in text.lower() for text in helps.values())
