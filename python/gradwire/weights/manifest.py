"""Manifests: what makes a version exist. JSON, written after all parts, never changed.

A store has for version 7 the manifest `v000007.json`, and beside it perhaps `v000007.anchor.json`,
the same version from nothing, and `v000007.from.v000003.json`, a folded delta. Each names its
parts, files such as `v000007.TOKEN.0of1.safetensors` (`update.py`). `newest.json` is a hint.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any

from gradwire.strict_json import parse_json
from gradwire.weights.errors import DamagedVersionError
from gradwire.weights.update import Entry, Update, parse_entries

FORMAT = 1
_NESTING = 5
_LABEL = re.compile(r"v(\d{6,})(\.anchor|\.from\.v(\d{6,}))?")
_FILE = re.compile(rf"\.?{_LABEL.pattern}\..+")
_KEYS = {"format", "version", "base", "anchor", "origin", "writer", "parts", "tensors"}


@dataclass(frozen=True)
class Writer:
    """Who wrote a version. token: of one start of a publisher; its ranks share it."""

    host: str
    process: int
    started: str
    token: str

    @staticmethod
    def here(run: str = "") -> Writer:
        token = sha256(run.encode()).hexdigest()[:16] if run else secrets.token_hex(8)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return Writer(platform.node(), os.getpid(), now, token)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, started {self.started}"


@dataclass(frozen=True)
class Part:
    """A file of a version."""

    name: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """The description of a version, or of another way to it.

    base: the version that it starts from; 0: the checkpoint that the publisher started from,
    which `origin` names; None: nothing. anchor: a full version is there, too.
    """

    version: int
    base: int | None
    writer: Writer
    parts: tuple[Part, ...]
    entries: Mapping[str, Entry] = field(repr=False)
    anchor: bool = False
    origin: str = ""

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def leads_where(self, other: Manifest) -> bool:
        """Whether the tensors of both versions are the same, whichever way leads there."""
        return self.version == other.version and _results(self.entries) == _results(other.entries)

    def unchanged(self) -> Update:
        """The version as an update of itself, which `check` compares with tensors."""
        found = Update(self.version, self.version)
        for entry in self.entries.values():
            same = replace(entry, kind="same", base=entry.digest, changed=0, size=0)
            found.add(entry if entry.kind == "tied" else same)
        return found

    def write(self) -> bytes:
        described = {
            "format": FORMAT,
            "version": self.version,
            "base": self.base,
            "anchor": self.anchor,
            "writer": asdict(self.writer),  # in the head, by which a reader knows the manifest
            "origin": self.origin,
            "parts": [asdict(part) for part in self.parts],
            "tensors": [entry.describe() for entry in self.entries.values()],
        }
        return json.dumps(described, separators=(",", ":")).encode() + b"\n"

    @staticmethod
    def parse(data: bytes, where: str) -> Manifest:
        """Raises DamagedVersionError, which begins with `where`."""
        try:
            found = parse_json(data, _NESTING)
            if not isinstance(found, dict) or found.keys() != _KEYS:
                raise ValueError(f"it must have {', '.join(sorted(_KEYS))}, and nothing else")
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}; this program reads {FORMAT}")
            version, base = found["version"], found["base"]
            parts = tuple(Part(**part) for part in found["parts"])
            sound = (
                type(version) is int
                and (base is None or (type(base) is int and 0 <= base < version))
                and isinstance(found["origin"], str)
                and all(type(part.size) is int and _is_plain(part.name) for part in parts)
            )
            if not sound:
                raise ValueError("its version, base, origin or parts are of the wrong kind")
            writer = Writer(**found["writer"])
            entries = parse_entries(found["tensors"])
            return Manifest(
                version, base, writer, parts, entries, found["anchor"] is True, found["origin"]
            )
        except (TypeError, ValueError) as error:
            raise DamagedVersionError(f"{where}: {error}") from None


def label_of(version: int, base: int | None = None, is_anchor: bool = False) -> str:
    """base: of a folded delta."""
    label = f"v{version:06}"
    if is_anchor:
        return f"{label}.anchor"
    return label if base is None else f"{label}.from.{label_of(base)}"


def version_of(name: str) -> int | None:
    """The version that a file belongs to; None: it is no file of a version."""
    found = _FILE.fullmatch(name)
    return int(found[1]) if found else None


def is_manifest(name: str) -> bool:
    """Whether it is the manifest of a version, an anchor or a folded delta."""
    return name.endswith(".json") and _LABEL.fullmatch(name.removesuffix(".json")) is not None


def folded_from(name: str) -> int | None:
    """The base of a folded delta, by the name of its manifest."""
    found = _LABEL.fullmatch(name.removesuffix(".json"))
    return int(found[3]) if found and found[3] else None


def part_name(label: str, token: str, rank: int = 0, ranks: int = 1) -> str:
    return f"{label}.{token}.{rank}of{ranks}.safetensors"


def _results(entries: Mapping[str, Entry]) -> dict[str, tuple[object, ...]]:
    return {key: entry.result for key, entry in entries.items()}


def _is_plain(name: Any) -> bool:
    """Whether it names a file in the folder itself."""
    return isinstance(name, str) and "/" not in name and name.endswith(".safetensors")
