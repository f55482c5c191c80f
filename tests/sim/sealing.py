"""Every seal of a run: no (key, nonce) pair twice, and no key used beyond its limit.

While it is entered, the cipher that seals blocks is wrapped: each call notes its key and nonce, as
a hash, so that a long run stays small. Random bytes come from the seed meanwhile, so a pair that
comes twice was used twice; chance has no part in it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from entresol_daemon.keys.keyring import Keyring
from entresol_daemon.shard import reserving
from entresol_proto import limits
from entresol_proto.seal import block, keys

SEALS_PER_KEY_MAX = limits.CHUNKS_PER_BLOCK_MAX + 1  # its chunks and its meta
BLOCKS_PER_DEK_MAX = 1 << 48  # fresh 32-byte salts: beyond, collisions are still below 2**-160


class Sealings:
    """Notes what is sealed while it is entered."""

    def __init__(self) -> None:
        self.seals = 0
        self.reused = 0
        self.keys: dict[bytes, int] = {}  # seals by key
        self.blocks_by_dek: dict[bytes, int] = {}
        self._seen: set[int] = set()
        self._saved: tuple[Any, Any] = (None, None)

    def __enter__(self) -> Sealings:
        self._saved = (vars(block)["AESGCM"], vars(reserving)["derive_block_key"])
        vars(block)["AESGCM"] = self._cipher
        vars(reserving)["derive_block_key"] = self._derive
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        vars(block)["AESGCM"], vars(reserving)["derive_block_key"] = self._saved

    @property
    def seals_per_key_max(self) -> int:
        """The most that one key sealed."""
        return max(self.keys.values(), default=0)

    @property
    def blocks_per_dek_max(self) -> int:
        """The most blocks whose keys came from one data key."""
        return max(self.blocks_by_dek.values(), default=0)

    def wrong(self) -> list[str]:
        """What must not be."""
        found = []
        if self.reused:
            found.append(f"{self.reused} seals used a (key, nonce) pair again")
        if self.seals_per_key_max > SEALS_PER_KEY_MAX:
            found.append(f"one key sealed {self.seals_per_key_max} times")
        if self.blocks_per_dek_max > BLOCKS_PER_DEK_MAX:
            found.append(f"one data key made {self.blocks_per_dek_max} block keys")
        return found

    def uncounted(self, keyring: Keyring) -> list[str]:
        """Data keys the keyring believes to be used less than they are: no limit would hold."""
        wrong = []
        for info in keyring.tenants():
            for version, dek in keyring.get(info.name).deks.items():
                made = self.blocks_by_dek.get(dek, 0)
                counted = keyring.sealed_blocks(info.name, version)
                if counted < made:
                    wrong.append(f"{info.name} version {version}: {made} keys, {counted} counted")
        return wrong

    def _derive(self, dek: bytes, salt: bytes, *label: bytes) -> keys.BlockKey:
        self.blocks_by_dek[dek] = self.blocks_by_dek.get(dek, 0) + 1
        return keys.derive_block_key(dek, salt, *label)

    def _cipher(self, key: bytes) -> _Cipher:
        return _Cipher(self, key)

    def note(self, key: bytes, nonce: bytes) -> None:
        """One call of the cipher."""
        self.seals += 1
        pair = hash((key, nonce))
        if pair in self._seen:
            self.reused += 1
        self._seen.add(pair)
        self.keys[key] = self.keys.get(key, 0) + 1


class _Cipher:
    """AESGCM, watched where it seals."""

    __slots__ = ("_real", "_sealings", "decrypt", "decrypt_into", "key")

    def __init__(self, sealings: Sealings, key: bytes) -> None:
        self._real = AESGCM(key)
        self._sealings = sealings
        self.key = key
        self.decrypt = self._real.decrypt
        self.decrypt_into = self._real.decrypt_into

    def encrypt_into(self, nonce: bytes, data: Any, aad: Any, out: Any) -> Any:
        """As AESGCM does."""
        self._sealings.note(self.key, bytes(nonce))
        return self._real.encrypt_into(nonce, data, aad, out)
