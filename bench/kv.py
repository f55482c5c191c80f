"""KV as files: where they are, what is accepted, and the blocks that are cut of them.

    python -m bench.codec FILE.npy ...        --kv FOLDER of python -m bench

A file is a .npy array of bf16 bit patterns: uint16, int16 (PyTorch's view) or two raw bytes per
element (how numpy stores a bfloat16 it does not know). Shaped [layers, 2, tokens, heads, head_dim]
it is cut into blocks of so many tokens of all layers; any other shape is taken as one run of
elements, 128 of which are a token. The last block is shorter where it does not come out even.

Invariant: whoever gives another file hears which one it is and what is accepted, in one line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]

SHARED_ENV = "ENTRESOL_SHARED"
SHARED = Path(__file__).resolve().parents[2] / "shared"  # beside the checkout
RUN_ELEMENTS = 128  # a token of a file whose shape says nothing
ACCEPTED = "accepted is a .npy of bf16 bit patterns: uint16, int16 or two raw bytes per element"
GIVE = "--kv DIR with .npy files of bf16 bit patterns"
HOW = {"f": "; floats are no bit patterns: with PyTorch, t.bfloat16().view(torch.int16).numpy()"}


class KvError(Exception):
    """A file holds no KV that can be read; the text names the file."""


def beside(name: str) -> Path | None:
    """A folder of the shared data, in ENTRESOL_SHARED or beside the checkout; None without it."""
    found = Path(os.environ.get(SHARED_ENV) or SHARED) / "data" / name
    return found if found.is_dir() else None


def files_of(folder: Path) -> list[Path]:
    """All .npy files below, in order."""
    return sorted(folder.rglob("*.npy"))


def load(path: str | Path) -> Bits:
    """The array of a file, mapped and not read yet.

    Raises: KvError.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise KvError(f"{path}: {error.strerror or error}; {ACCEPTED}") from None
    except Exception as error:  # numpy lets through whatever a broken header makes Python raise
        said = str(error).strip().split("\n")[0]
        raise KvError(f"{path}: no .npy, or a part of one ({said}); {ACCEPTED}") from None
    if not isinstance(array, np.ndarray):
        raise KvError(f"{path}: an archive of arrays; {ACCEPTED}")
    plain = array.dtype.fields is None and array.dtype.subdtype is None
    if not plain or array.dtype.kind not in "uiV" or array.dtype.itemsize != 2:
        raise KvError(f"{path}: {array.dtype} elements; {ACCEPTED}{HOW.get(array.dtype.kind, '')}")
    if not array.size:
        raise KvError(f"{path}: shaped {array.shape}, no elements; {ACCEPTED}")
    found: Bits = array.view(">u2" if array.dtype.byteorder == ">" else "<u2")
    return found


class Blocks(Sequence[Bits]):
    """The blocks of a file, flat, in token order; each is read when it is asked for.

    Raises: KvError, when it is made.
    """

    def __init__(self, path: str | Path, block_tokens: int) -> None:
        array = load(path)
        self._whole = array.ndim == 5
        self._array = array if self._whole else array.reshape(-1)
        self._step = block_tokens if self._whole else block_tokens * RUN_ELEMENTS
        self._end = self._array.shape[2] if self._whole else self._array.size

    def __len__(self) -> int:
        return -(-self._end // self._step)

    def __getitem__(self, number: int) -> Bits:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        part = slice(number * self._step, (number + 1) * self._step)
        block = self._array[:, :, part] if self._whole else self._array[part]
        return np.ascontiguousarray(block, dtype=np.uint16).reshape(-1)


def all_blocks(paths: Sequence[str | Path], block_tokens: int) -> list[tuple[Blocks, int]]:
    """Every block of every file, none of them read yet: `read` does it.

    Raises: KvError.
    """
    files = [Blocks(path, block_tokens) for path in paths]
    return [(blocks, number) for blocks in files for number in range(len(blocks))]


def spread(found: Sequence[tuple[Blocks, int]], blocks_max: int) -> Sequence[tuple[Blocks, int]]:
    """At most so many of them, evenly."""
    return found[:: max(1, -(-len(found) // blocks_max))]


def read(chosen: Sequence[tuple[Blocks, int]]) -> list[Bits]:
    """The blocks themselves."""
    return [blocks[number] for blocks, number in chosen]


def first(found: Sequence[tuple[Blocks, int]], elements: int) -> Bits:
    """So many elements from the beginning, or all there are, in one piece."""
    pieces, left = [], elements
    for blocks, number in found:
        pieces.append(blocks[number][:left])
        left -= len(pieces[-1])
        if not left:
            break
    return np.concatenate(pieces)


def bytes_of(folder: Path, size: int, block_tokens: int = 64) -> bytes:
    """`size` bytes of the KV below a folder, from the start again where there is less.

    Raises: KvError.
    """
    found = all_blocks(files_of(folder), block_tokens)
    if not found:
        raise KvError(f"{folder}: no .npy files; {ACCEPTED}")
    once = first(found, -(-size // 2)).tobytes()
    return (once * -(-size // len(once)))[:size]
