"""The job key: a secret that the processes of a job share, and that shows who belongs to it.

PyTorch's store and Gloo know no authentication. With a key, what ranks write into the store has a
message authentication code, and ranks that connect prove to each other that they have the key
(torch/network/sealed_store.py). The key itself is never sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradwire.files import give_name

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
        return _checked((text or "").strip().encode(), source)

    @staticmethod
    def of_user() -> JobKey | None:
        """The key of all jobs of this user on this machine that have no other; None: there is no
        place for it.

        The first process makes it, in a file that no other user may read (~/.config/gradwire, or
        under XDG_CONFIG_HOME). Raises ValueError if others can read or replace it.
        """
        try:
            folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gradwire"
            file = folder / "job_key"
            if not file.exists():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write_key(file)
            for path in (folder, file):
                found = path.stat()
                shared = stat.S_IWGRP | stat.S_IWOTH | (0o077 if path is file else 0)
                if found.st_uid != os.geteuid() or found.st_mode & shared:
                    raise ValueError(
                        f"{path}, which holds this user's key of jobs, may be used by others: take "
                        f"it away, or export {VARIABLE}"
                    )
            return _checked(file.read_bytes(), str(file))
        except (OSError, RuntimeError):  # no home, or one that can't be written
            return None

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


def _checked(key: bytes, source: str) -> JobKey:
    if len(key) < _LEAST_CHARACTERS:
        raise ValueError(
            f"{source} has {len(key)} characters, and a job key at least {_LEAST_CHARACTERS}: "
            f"export {VARIABLE}=$(openssl rand -hex 32)"
        )
    return JobKey(key)


def _write_key(file: Path) -> None:
    """Makes the file, whole, unless another process has made it."""
    draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as opened:
        opened.write(secrets.token_hex(32))
        opened.flush()
        os.fsync(opened.fileno())  # or a crash of the machine may leave a file without a key
    with contextlib.suppress(FileExistsError):
        give_name(draft, file)
