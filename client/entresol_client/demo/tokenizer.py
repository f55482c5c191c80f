"""Byte-level BPE in pure Python, for the demo's 4096-token vocabulary.

Invariant: `decode(encode(text)) == text` for every string; every byte has a token, so nothing is
ever unknown. The scheme is GPT-2's (Radford et al. 2019): bytes are mapped to printable characters,
text is cut into words by a fixed pattern, and inside a word the merge learnt first wins.

File format (compact JSON, version 1): `special` are the first token ids, then the 256 byte tokens
in the order of `alphabet` (bytes), then one token per entry of `merges`, [left id, right id].
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Iterable
from importlib import resources

from entresol_proto.status import FormatError

FORMAT_VERSION = 1
VOCAB_MAX = 65_536
WORD_CACHE_MAX = 65_536
BOS = 0  # "<s>", before the first token of every document the model was trained on

# GPT-2's pre-tokenizer, written over classes: every character outside ASCII is first replaced by
# one of the same class (`_Classes`), because Python's `re` knows no \p{L} and \p{N}.
_WORD = re.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^ \nA-Za-z0-9]+|[ \n]+(?![^ \n])|[ \n]+"
)
_WHITE_SPACE = frozenset(
    (
        *(*range(0x09, 0x0E), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)),
        *(0x2028, 0x2029, 0x202F, 0x205F, 0x3000),
    )
)  # Unicode White_Space without the space itself


class _Classes(dict[int, str]):
    """`str.translate` table: letter -> A, number -> 0, white space -> newline, the rest -> "!".

    ASCII stays as it is, except white space; one character in, one out, so spans keep meaning.
    """

    def __missing__(self, code: int) -> str:
        if code in _WHITE_SPACE:
            kind = "\n"
        elif code < 0x80:
            kind = chr(code) if code >= 0x20 else "!"
        else:
            kind = {"L": "A", "N": "0"}.get(unicodedata.category(chr(code))[0], "!")
        self[code] = kind
        return kind


class Tokenizer:
    """Encodes and decodes text. Not for several threads at once (it remembers words)."""

    def __init__(
        self, special: list[str], alphabet: list[int], merges: list[tuple[int, int]]
    ) -> None:
        """Builds the tables.

        Raises:
            FormatError: the alphabet is not all 256 bytes, or a merge names a later token.
        """
        if sorted(alphabet) != list(range(256)):
            raise FormatError("tokenizer alphabet is not the 256 bytes")
        self.special = tuple(special)
        self._bytes: list[bytes] = [b""] * len(special) + [bytes([b]) for b in alphabet]
        self._byte_id = {byte: len(special) + i for i, byte in enumerate(alphabet)}
        self._merged: dict[tuple[int, int], int] = {}
        for left, right in merges:
            here = len(self._bytes)
            if not (len(special) <= left < here and len(special) <= right < here):
                raise FormatError(f"tokenizer merge of an unknown token at={here}")
            self._merged[left, right] = here
            self._bytes.append(self._bytes[left] + self._bytes[right])
        self._words: dict[str, tuple[int, ...]] = {}
        self._classes = _Classes()

    @classmethod
    def load(cls) -> Tokenizer:
        """The tokenizer shipped with the demo."""
        return cls.from_bytes(
            resources.files(__package__).joinpath("data/tokenizer.json").read_bytes()
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Tokenizer:
        """Reads the compact file.

        Raises:
            FormatError: not this format, another version, or inconsistent.
        """
        try:
            fields = json.loads(data)
            version = fields["version"]
            special = [str(s) for s in fields["special"]]
            alphabet = [int(b) for b in fields["alphabet"]]
            merges = [(int(left), int(right)) for left, right in fields["merges"]]
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"tokenizer file is malformed: {error}") from error
        if version != FORMAT_VERSION or len(merges) > VOCAB_MAX:
            raise FormatError(f"tokenizer file has another version or size version={version}")
        return cls(special, alphabet, merges)

    def __len__(self) -> int:
        return len(self._bytes)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids of `text`, after `BOS` if asked. Text never produces a special token."""
        ids = [BOS] if bos else []
        for match in _WORD.finditer(text.translate(self._classes)):
            word = text[match.start() : match.end()]
            known = self._words.get(word)
            if known is None:
                known = self._merge(word)
                if len(self._words) < WORD_CACHE_MAX:
                    self._words[word] = known
            ids.extend(known)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special tokens are left out, broken UTF-8 becomes U+FFFD."""
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", errors="replace")

    def _merge(self, word: str) -> tuple[int, ...]:
        """BPE of one word: a lower merged id was learnt earlier, so the lowest goes first."""
        parts = [self._byte_id[b] for b in word.encode("utf-8")]
        never = len(self._bytes)
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: self._merged.get(pair, never))
            merged = self._merged.get(best)
            if merged is None:
                break
            out: list[int] = []
            at = 0
            while at < len(parts):
                if at + 1 < len(parts) and (parts[at], parts[at + 1]) == best:
                    out.append(merged)
                    at += 2
                else:
                    out.append(parts[at])
                    at += 1
            parts = out
        return tuple(parts)


def printable_bytes() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes: itself where printable, else 256 upwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    rest = [b for b in range(256) if b not in set(plain)]
    table.update({chr(256 + i): b for i, b in enumerate(rest)})
    return table


def compact_from_hugging_face(data: bytes) -> bytes:
    """Our compact file from a byte-level BPE `tokenizer.json` of Hugging Face `tokenizers`.

    Raises:
        FormatError: ids are not special tokens, then 256 bytes, then merges in order.
    """
    source = json.loads(data)
    vocab: dict[str, int] = source["model"]["vocab"]
    special = [str(t["content"]) for t in sorted(source["added_tokens"], key=lambda t: t["id"])]
    text_of = [text for text, _ in sorted(vocab.items(), key=lambda item: item[1])]
    byte_of = printable_bytes()
    first = len(special)
    if text_of[:first] != special or any(len(t) != 1 for t in text_of[first : first + 256]):
        raise FormatError("tokenizer ids are not in the expected order")
    alphabet = [byte_of[t] for t in text_of[first : first + 256]]
    merges: list[tuple[int, int]] = []
    for rank, pair in enumerate(source["model"]["merges"]):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        if vocab[left + right] != first + 256 + rank:
            raise FormatError(f"merge is out of order rank={rank}")
        merges.append((vocab[left], vocab[right]))
    fields = {"version": FORMAT_VERSION, "special": special, "alphabet": alphabet, "merges": merges}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
