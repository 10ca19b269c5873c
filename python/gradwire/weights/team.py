"""The ranks that publish a version together: they tell each other by files of the store."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress

from gradwire.strict_json import parse_json
from gradwire.weights.errors import WeightsError
from gradwire.weights.manifest import Manifest, Part, Writer, label_of, part_name
from gradwire.weights.store import Store, wait_for
from gradwire.weights.update import Update, read_head


class Team:
    """The ranks of a publisher, and which of its attempts to publish this is."""

    def __init__(self, store: Store, writer: Writer, rank: int, ranks: int, patience: float):
        self._store, self._token = store, writer.token
        self.rank, self.ranks = rank, ranks
        self._patience = patience
        self._calls = Counter[int | None]()  # of publish(), by step
        self._step: int | None = None
        self._attempt = ""  # ranks must not take a part of one that has failed, or of another step

    def begin(self, step: int | None) -> None:
        """A call of publish(). Ranks find each other by the step, or by the number of calls."""
        self._calls[step] += 1  # also of a step that comes again much later
        self._step, calls = step, self._calls[step]
        self._attempt = f"{calls}" if step is None else f"{step}-{calls}"

    def part(self, label: str, rank: int) -> str:
        return part_name(label, f"{self._token}-{self._attempt}", rank, self.ranks)

    def await_part(self, label: str, rank: int) -> tuple[Update, Part]:
        name = self.part(label, rank)

        def look() -> tuple[Update, Part] | None:
            try:
                update, size = read_head(self._store.folder.read, name)
            except FileNotFoundError:
                self._raise_failure(label)
                return None
            return update, Part(name, size)

        found = wait_for(look, self._patience)
        if found is None:
            raise WeightsError(
                f"{label}: rank {rank} of {self.ranks} has not written its part{self._of_step()} "
                f"in {self._patience:g} s; the version was not published. Look for that rank's "
                f"error, or give a larger patience={self._advice()}"
            )
        return found

    def await_manifest(self, label: str, version: int) -> Manifest:
        """The manifest as rank 0 writes it; of a version it may be that of another publisher."""

        def look() -> Manifest | None:
            found = self._store.reread(label)
            is_own = found is not None and found.writer.token == self._token
            # One of an anchor may be left of another version.
            if found is not None and (is_own or label == label_of(version)):
                return found
            self._raise_failure(label)
            return None

        found = wait_for(look, self._patience)
        if found is None:
            raise WeightsError(
                f"{label}: rank 0 has not committed it{self._of_step()} in {self._patience:g} s. "
                f"Look for that rank's error, or give a larger patience={self._advice()}"
            )
        return found

    def tell_failure(self, error: BaseException) -> None:
        """Ends the waits of the other ranks in this attempt, if the store can be written."""
        told = {"rank": self.rank, "kind": type(error).__name__, "text": str(error)}
        if self.ranks > 1:
            with suppress(Exception):
                pieces = [json.dumps(told).encode()]
                self._store.folder.write(self._failure(), pieces, only_new=True)

    def _raise_failure(self, label: str) -> None:
        """Raises the error of the rank that has told of one."""
        try:
            told = parse_json(self._store.folder.read(self._failure()), 1)
            rank, kind, text = told["rank"], told["kind"], told["text"]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return
        raise WeightsError(f"{label} was not published, because rank {rank} got a {kind}: {text}")

    def _failure(self) -> str:
        """A file of no version, which prune() removes."""
        return f"{label_of(0)}.{self._token}-{self._attempt}.failed.json"

    def _of_step(self) -> str:
        return "" if self._step is None else f" of step {self._step}"

    def _advice(self) -> str:
        if self._step is not None:
            return ""
        return (
            f". This is call {self._calls[None]} of publish() here: a rank that has missed one "
            "stays behind, unless all give publish() a step="
        )
