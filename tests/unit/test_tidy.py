"""The repository's habits, enforced: what a module may import, how long it may be, what is banned.

Every exception is a line in one of the tables below, with its reason. A new one needs a reason too.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREES = ("daemon", "client", "proto", "tests", "bench")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
SOURCES = {
    "entresol_daemon": ROOT / "daemon",
    "entresol_client": ROOT / "client",
    "entresol_proto": ROOT / "proto",
}

MODULE_LINES_MAX = 500
TEST_MODULE_LINES_MAX = 800  # a table of cases is easier to read in one place
FUNCTION_LINES_MAX = 70

LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}

BRAIN_MUST_NOT_IMPORT = {"asyncio", "socket", "time", "random", "os", "threading"}

# Module prefix -> prefixes of ours that it must not import, at any depth of nesting.
MUST_NOT_IMPORT = {
    "entresol_proto": ("entresol_daemon", "entresol_client"),
    "entresol_client": ("entresol_daemon",),
    "entresol_daemon": ("entresol_client",),
    # The engine knows opaque streams and ids: no tenants, no keys, no policy.
    "entresol_daemon.flash": tuple(
        f"entresol_daemon.{part}"
        for part in ("keys", "core", "control", "shard", "events", "memory")
    ),
    "entresol_daemon.core": tuple(
        f"entresol_daemon.{part}" for part in ("flash", "shard", "control", "events", "keys")
    ),
    "entresol_daemon.memory": tuple(
        f"entresol_daemon.{part}"
        for part in ("core", "flash", "shard", "control", "events", "keys")
    ),
    "entresol_daemon.keys": tuple(
        f"entresol_daemon.{part}" for part in ("core", "flash", "shard", "control", "events")
    ),
    "entresol_daemon.events": tuple(
        f"entresol_daemon.{part}" for part in ("core", "flash", "shard", "control", "keys")
    ),
    "entresol_proto.wire": ("entresol_proto.seal", "entresol_proto.v1"),
    "entresol_proto.seal": (
        "entresol_proto.wire", "entresol_proto.fabric", "entresol_proto.v1",
    ),
    "entresol_proto.fabric": ("entresol_proto.wire", "entresol_proto.seal", "entresol_proto.v1"),
}  # fmt: skip
MAY_IMPORT_AFTER_ALL = {
    # (module, module): reason
    ("entresol_client.demo", "entresol_daemon"): "the demo starts a real daemon beside itself",
}

BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
BANNED_CALLS = {"eval", "exec", "torch.load", "yaml.load", "numpy.load", "np.load"}
# In what we ship, tests and benchmarks aside: programs by way of a shell, names that others can
# guess, hashes that others can forge, TLS that checks nobody, readers that follow references.
BANNED_MODULES_SHIPPED = {
    "multiprocessing", "joblib", "jsonpickle", "telnetlib", "ftplib", "xml", "xmlrpc", "cgi",
    "imp", "pty", "code", "commands",
}  # fmt: skip
BANNED_CALLS_SHIPPED = {
    "os.system", "os.popen", "os.execv", "os.execvp", "os.spawnv", "tempfile.mktemp", "hashlib.md5",
    "hashlib.sha1", "hashlib.new", "ssl._create_unverified_context", "ssl.wrap_socket",
    "yaml.unsafe_load", "yaml.full_load", "logging.config.listen", "random.seed", "compile",
    "builtins.eval", "builtins.exec", "pandas.read_pickle", "subprocess.getoutput",
    "subprocess.getstatusoutput",
}  # fmt: skip
MAY_CHECK_NO_NAME = {
    "proto/entresol_proto/identity.py": "the SPIFFE id takes the host name's place",
}
WILDCARD_ADDRESSES = {"0.0.0.0", "::"}
MAY_NAME_WILDCARDS = {
    "proto/entresol_proto/fabric/tcp.py": "recognises them, to offer a real address instead",
    "tests/unit/test_fabric_registry.py": "tests just that",
    "tests/unit/test_tidy.py": "this table",
}

LIGHT_CORE = ("entresol_client", "entresol_proto.wire.session", "entresol_proto.seal.block",
              "entresol_proto.fabric.registry")  # fmt: skip
HEAVY = (
    "grpc", "google.protobuf", "opentelemetry", "pyarrow", "prometheus_client", "xxhash", "torch",
)  # fmt: skip


@functools.cache
def files() -> tuple[Path, ...]:
    """Python files of the repository: tracked ones, or all when this is no checkout."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--", *(f"{tree}/*.py" for tree in TREES)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 0 and done.stdout:
        names = [name for name in done.stdout.split("\0") if name]
        found = [ROOT / name for name in names]
    else:
        found = [path for tree in TREES for path in (ROOT / tree).rglob("*.py")]
    kept = [path for path in found if path.exists() and not GENERATED.search(path.name)]
    assert len(kept) > 50, "the walk finds too little to mean anything"
    return tuple(sorted(kept))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_of(path: Path) -> str:
    """Dotted name of a module of ours, or the empty string."""
    for root in SOURCES.values():
        if root in path.parents:
            parts = path.relative_to(root).with_suffix("").parts
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return ""


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def imports(tree: ast.AST, package: str = "") -> Iterator[str]:
    """Every module a file imports, wherever the statement stands.

    `from a import b` gives both `a` and `a.b`, as b may be a module. Names given to
    `import_module` and `__import__` count when they are literals.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and dotted(node.func).split(".")[-1] in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression, or the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def imports_of(path: Path) -> set[str]:
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return set(imports(tree_of(path), package))


# Brain and hands ----------------------------------------------------------------------------------


def is_brain(path: Path) -> bool:
    module = module_of(path)
    return (
        within(module, "entresol_daemon.core")
        or within(module, "entresol_proto.wire")
        or module in ("entresol_daemon.memory.ranges", "entresol_daemon.memory.slabs")
        or module in ("entresol_proto.ids", "entresol_proto.status", "entresol_proto.limits")
    )


def test_the_brain_has_no_clock_no_chance_and_no_hands() -> None:
    brain = [path for path in files() if is_brain(path)]
    assert len(brain) >= 12
    found = {
        f"{name_of(path)} imports {module}"
        for path in brain
        for module in imports_of(path)
        if module.split(".")[0] in BRAIN_MUST_NOT_IMPORT
    }
    assert not found


def test_the_brain_calls_no_clock_behind_our_back() -> None:
    """Neither does what it imports from us: the whole closure inside our packages is walked."""
    modules = {module_of(path): path for path in files() if module_of(path)}
    seen: set[str] = set()
    todo = [module for module, path in modules.items() if is_brain(path)]
    reached: set[str] = set()
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for name in imports_of(modules[module]):
            parts = name.split(".")
            parents = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
            todo += [parent for parent in parents if parent in modules]
            if name.split(".")[0] in BRAIN_MUST_NOT_IMPORT:
                reached.add(f"{module} imports {name}")
    assert not reached


# Directions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", MUST_NOT_IMPORT)
def test_dependencies_point_one_way(prefix: str) -> None:
    inside = [path for path in files() if within(module_of(path), prefix)]
    assert inside, f"{prefix} is gone; so should its line be"
    found = set()
    for path in inside:
        for name in imports_of(path):
            for banned in MUST_NOT_IMPORT[prefix]:
                excused = any(
                    within(module_of(path), here) and within(name, there)
                    for here, there in MAY_IMPORT_AFTER_ALL
                )
                if within(name, banned) and not excused:
                    found.add(f"{name_of(path)} imports {name}")
    assert not found


@pytest.mark.parametrize("module", LIGHT_CORE)
def test_the_light_core_is_light(module: str) -> None:
    """What a GPU host imports brings none of what engines pin to versions of their own."""
    script = (
        f"import sys; sys.path[:0] = {[str(root) for root in SOURCES.values()]!r}\n"
        f"import {module}\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# Banned -------------------------------------------------------------------------------------------


def test_nothing_unpickles_or_evaluates() -> None:
    found = set()
    for path in files():
        for name in imports_of(path):
            if name.split(".")[0] in BANNED_MODULES:
                found.add(f"{name_of(path)} imports {name}")
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call) or dotted(node.func) not in BANNED_CALLS:
                continue
            if "allow_pickle=False" not in ast.unparse(node):  # numpy's loader with it is safe
                found.add(f"{name_of(path)}:{node.lineno} calls {dotted(node.func)}")
    assert not found


def is_shipped(path: Path) -> bool:
    return name_of(path).split("/")[0] in ("daemon", "client", "proto")


def test_what_we_ship_uses_no_dangerous_call() -> None:
    found = set()
    for path in filter(is_shipped, files()):
        for name in imports_of(path):
            if name.split(".")[0] in BANNED_MODULES_SHIPPED:
                found.add(f"{name_of(path)} imports {name}")
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            if dotted(node.func) in BANNED_CALLS_SHIPPED:
                found.add(f"{name_of(path)}:{node.lineno} calls {dotted(node.func)}")
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                if (keyword.arg, value) in (("shell", True), ("verify", False)):
                    found.add(f"{name_of(path)}:{node.lineno} passes {keyword.arg}={value}")
    assert not found


def test_nothing_shared_is_added_to_across_an_await() -> None:
    """`a.b += await c()` reads `a.b` before the wait, and writes over what others did meanwhile."""
    found = set()
    for path in filter(is_shipped, files()):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.AugAssign) or isinstance(node.target, ast.Name):
                continue
            if any(isinstance(inner, ast.Await) for inner in ast.walk(node.value)):
                found.add(f"{name_of(path)}:{node.lineno} {ast.unparse(node)}")
    assert not found


def test_what_we_ship_verifies_its_peers() -> None:
    found = set()
    for path in filter(is_shipped, files()):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr in ("CERT_NONE", "CERT_OPTIONAL"):
                found.add(f"{name_of(path)}:{node.lineno} names {node.attr}")
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Attribute)
                and node.targets[0].attr == "check_hostname"
                and name_of(path) not in MAY_CHECK_NO_NAME
            ):
                found.add(f"{name_of(path)}:{node.lineno} sets check_hostname")
    assert not found


def test_nothing_binds_every_interface() -> None:
    found = {
        f"{name_of(path)}:{node.lineno}"
        for path in files()
        if name_of(path) not in MAY_NAME_WILDCARDS
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and node.value in WILDCARD_ADDRESSES
    }
    assert not found


# Assembled, so that this file does not find itself.
MACHINE_PATHS = ("/" + "work/", "/" + "root/", "/" + "home/", "/tmp/" + "v/", "/tmp/" + "plan")
MARKERS = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")


def test_no_paths_of_one_machine() -> None:
    found = set()
    for path in files():
        for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if any(re.search(rf"(?<![\w.}}]){re.escape(part)}", line) for part in MACHINE_PATHS):
                found.add(f"{name_of(path)}:{at}: {line.strip()[:80]}")
    assert not found


def test_nothing_is_left_for_later() -> None:
    found = set()
    for path in files():
        with tokenize.open(path) as source:
            for token in tokenize.generate_tokens(source.readline):
                if token.type in (tokenize.COMMENT, tokenize.STRING) and MARKERS.search(
                    token.string
                ):
                    found.add(f"{name_of(path)}:{token.start[0]}")
    assert not found


# Shape --------------------------------------------------------------------------------------------


def test_every_module_says_why_it_exists() -> None:
    found = {
        name_of(path)
        for path in files()
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree_of(path))
    }
    assert not found


def test_modules_stay_short() -> None:
    found = set()
    for path in files():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        is_test = name_of(path).startswith("tests/")
        if lines > (TEST_MODULE_LINES_MAX if is_test else MODULE_LINES_MAX):
            found.add(f"{name_of(path)}: {lines}")
    over = {text.split(":")[0] for text in found}
    assert not {text for text in found if text.split(":")[0] not in LONG_MODULES}
    assert set(LONG_MODULES) <= over, "an exception that is not needed any more"


def test_functions_stay_short() -> None:
    found = set()
    for path in files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    found.add(f"{name_of(path)}:{node.name}")
    assert not found - set(LONG_FUNCTIONS)
    assert set(LONG_FUNCTIONS) <= found, "an exception that is not needed any more"


def test_every_exception_has_a_reason() -> None:
    for table in (LONG_MODULES, LONG_FUNCTIONS, MAY_IMPORT_AFTER_ALL, MAY_NAME_WILDCARDS):
        assert all(len(str(reason)) > 8 for reason in table.values())


def test_every_lint_exception_is_explained() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^ignore = \[\n(.*?)^\]", text, re.M | re.S)
    assert block
    lines = [line for line in block[1].splitlines() if line.strip()]
    assert lines
    assert [line.strip() for line in lines if not line.partition("#")[2].strip()] == []


# The rules themselves -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time", "time"),
        ("def f():\n  if x:\n    import time as t", "time"),
        ("from os import path", "os"),
        ("import importlib\nimportlib.import_module('socket')", "socket"),
        ("x = __import__('random')", "random"),
        ("from ..flash import engine", "pkg.flash.engine"),
        ("from . import engine", "pkg.core.engine"),
        ("try:\n  import asyncio\nexcept ImportError:\n  pass", "asyncio"),
    ],
)
def test_the_walk_finds_imports_wherever_they_hide(source: str, found: str) -> None:
    assert found in set(imports(ast.parse(source), "pkg.core"))


SINS = {
    "test_the_brain_has_no_clock_no_chance_and_no_hands": "def f():\n    import time",
    "test_the_brain_calls_no_clock_behind_our_back": "from entresol_daemon import clock",
    "test_nothing_unpickles_or_evaluates": "import pickle",
    "test_nothing_unpickles_or_evaluates ": "x = eval('1')",
    "test_nothing_unpickles_or_evaluates  ": "import numpy as np\nx = np.load('x')",
    "test_what_we_ship_uses_no_dangerous_call": "import os\nos.system('x')",
    "test_what_we_ship_uses_no_dangerous_call ": "import xml.sax",
    "test_what_we_ship_uses_no_dangerous_call  ": "run('x', shell=True)",
    "test_nothing_shared_is_added_to_across_an_await": "async def f(a):\n    a.b += [await a.c()]",
    "test_what_we_ship_verifies_its_peers": "x.verify_mode = ssl.CERT_NONE",
    "test_what_we_ship_verifies_its_peers ": "x.check_hostname = False",
    "test_nothing_binds_every_interface": "HOST = '0.0.0.0'",
    "test_no_paths_of_one_machine": f"x = '{MACHINE_PATHS[0]}x'",
    "test_nothing_is_left_for_later": "x = 1  # TO" + "DO later",
    "test_modules_stay_short": "x = 1\n" * MODULE_LINES_MAX,
    "test_functions_stay_short": "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX,
}


@pytest.mark.parametrize("rule", SINS)
def test_every_rule_can_fail(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted module breaks each rule; the rule must notice."""
    core = tmp_path / "daemon" / "entresol_daemon" / "core"
    core.mkdir(parents=True)
    (tmp_path / "daemon" / "entresol_daemon" / "clock.py").write_text('"""."""\nimport os\n')
    others = [core / f"good{n}.py" for n in range(12)]
    for path in others:
        path.write_text('"""Good."""\n')
    bad = core / "bad.py"
    bad.write_text('"""Bad."""\n')
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "ROOT", tmp_path)
    monkeypatch.setattr(here, "SOURCES", {"entresol_daemon": tmp_path / "daemon"})
    monkeypatch.setattr(here, "LONG_MODULES", {})
    monkeypatch.setattr(here, "LONG_FUNCTIONS", {})
    planted = (*others, bad, tmp_path / "daemon" / "entresol_daemon" / "clock.py")
    monkeypatch.setattr(here, "files", lambda: planted)
    check = getattr(here, rule.strip())
    check()
    bad.write_text('"""Bad."""\n' + SINS[rule] + "\n")
    tree_of.cache_clear()
    with pytest.raises(AssertionError):
        check()


def test_the_direction_rule_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "client" / "entresol_client" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text('"""Bad."""\nfrom entresol_daemon import server\n')
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "ROOT", tmp_path)
    monkeypatch.setattr(here, "SOURCES", {"entresol_client": tmp_path / "client"})
    monkeypatch.setattr(here, "files", lambda: (bad,))
    with pytest.raises(AssertionError):
        test_dependencies_point_one_way("entresol_client")


def test_the_docstring_rule_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("x = 1\n")
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "ROOT", tmp_path)
    monkeypatch.setattr(here, "files", lambda: (bad,))
    with pytest.raises(AssertionError):
        test_every_module_says_why_it_exists()
