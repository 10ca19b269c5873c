"""The job key: a secret that the processes of a job share, and that shows who belongs to it.

PyTorch's store and Gloo know no authentication. With a key, what ranks write into the store has a
message authentication code (torch/link/sealed_store.py), and ranks that connect prove to each other
that they have the key (torch/link/proof.py). The key itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "GRADWIRE_JOB_KEY"
FILE_VARIABLE = "GRADWIRE_JOB_KEY_FILE"
TAG_BYTES = 32
_LEAST_CHARACTERS = 32  # 128 bits in hexadecimal


def with_new_key(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for the processes of a new job."""
    others = {name: value for name, value in environment.items() if name != FILE_VARIABLE}
    return others | {VARIABLE: secrets.token_hex(32)}


@dataclass(frozen=True)
class JobKey:
    secret: bytes = field(repr=False)

    @staticmethod
    def of_environment() -> JobKey | None:
        """The key of this process's job; None: it has none. Raises ValueError for what can't be a
        key."""
        text, file = os.environ.get(VARIABLE), os.environ.get(FILE_VARIABLE)
        if text is not None and file is not None:
            raise ValueError(f"{VARIABLE} and {FILE_VARIABLE} are both set: leave one of them out")
        if text is None and file is None:
            return None
        source = VARIABLE
        if file is not None:
            source = f"{file} ({FILE_VARIABLE})"
            try:
                text = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"the job key in {source} can't be read: {error}") from error
        key = (text or "").strip()
        if len(key) < _LEAST_CHARACTERS:
            raise ValueError(
                f"{source} has {len(key)} characters, and a job key at least {_LEAST_CHARACTERS}: "
                f"export {VARIABLE}=$(openssl rand -hex 32)"
            )
        return JobKey(key.encode())

    def derive(self, *words: str) -> JobKey:
        """Another key. Nobody who knows it can find this one."""
        return JobKey(self.tag(b"derive", *(word.encode() for word in words)))

    def tag(self, *words: bytes) -> bytes:
        """Shows that who made it has the key, and these words."""
        tag = hmac.new(self.secret, digestmod=hashlib.sha256)
        for word in words:
            tag.update(len(word).to_bytes(8, "little") + word)
        return tag.digest()

    def made(self, tag: bytes, *words: bytes) -> bool:
        """Whether the tag was made with this key, of these words."""
        return hmac.compare_digest(tag, self.tag(*words))
