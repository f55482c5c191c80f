"""Built images on disk: one builder at a time, nothing half-written ever found.

An image is a folder named by its request's key and by the versions it was built from. A pointer
file, replaced atomically, says which folder is current. What a running guest may still use stays: a
replaced folder goes when it is replaced again, an image nobody asked for goes after UNUSED_DAYS.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.rdma.progress import say
from tests.rdma.spec import Request, versions_digest

CACHE_ENV = "ENTRESOL_GUEST_CACHE"
UNUSED_DAYS = 14

# Given an empty folder, fill it; return the exact versions of what went in.
Builder = Callable[[Path], list[str]]


def cache_root() -> Path:
    """Where images are kept; created when missing."""
    named = os.environ.get(CACHE_ENV)
    root = Path(named) if named else Path.home() / ".cache" / "entresol" / "guests"
    root.mkdir(parents=True, exist_ok=True)
    return root


@contextlib.contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    with open(root / f".{name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{name}: another process is building it, waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def find(root: Path, request: Request) -> Path | None:
    """The current image of a request, or None."""
    path = root / f"{request.key()}.json"
    try:
        image = root / str(json.loads(path.read_text(encoding="utf-8"))["image"])
        os.utime(path)  # it is in use
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return image if image.is_dir() else None


def ensure(request: Request, build: Builder, *, refresh: bool = False) -> Path:
    """The image of a request, built when there is none (or when `refresh` asks for newer versions).

    Raises: whatever `build` raises; then nothing has changed.
    """
    root = cache_root()
    before = find(root, request)
    if before and not refresh:
        return before
    with _locked(root, request.key()):
        found = find(root, request)
        if found and (found != before or not refresh):
            return found  # someone else built it while we waited
        for left in root.glob(f".{request.key()}-*"):  # by a builder that was killed
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{request.key()}-", dir=root))
        try:
            versions = build(scratch)
            manifest = {"request": request.key(), "versions": sorted(versions)}
            (scratch / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
            scratch.chmod(0o755)
            image = root / f"{request.key()}-{versions_digest(versions)}"
            if not image.exists():
                scratch.rename(image)
            _point(root, request, image)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        _forget_older(root, request, keep={image, found or image})
        _forget_unused(root)
    return image


def _point(root: Path, request: Request, image: Path) -> None:
    text = json.dumps({"image": image.name}) + "\n"
    handle, name = tempfile.mkstemp(dir=root, prefix=f".{request.key()}-")
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(name, root / f"{request.key()}.json")


def _forget_older(root: Path, request: Request, keep: set[Path]) -> None:
    for path in root.glob(f"{request.key()}-*"):
        if path.is_dir() and path not in keep:
            shutil.rmtree(path, ignore_errors=True)


def _forget_unused(root: Path) -> None:
    """Images of keys that no run has looked up for a while: older recipes, mostly."""
    oldest = time.time() - UNUSED_DAYS * 86400
    for pointer in root.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            if pointer.stat().st_mtime < oldest:
                pointer.unlink()
                for path in root.glob(f"{pointer.stem}-*"):
                    shutil.rmtree(path, ignore_errors=True)
