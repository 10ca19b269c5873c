"""Versions for receivers that know only SGLang's folders of weights.

    folders = WeightFolders("weights/", base="Qwen3-4B/")
    version = folders.publish(model)  # weights/weight_v000001, then pull_weights with this number

Each folder has the XOR of what changed, compressed with zstd, as SGLang's endpoint `pull_weights`
reads it (its pull request 30366). It has been tested against that description, not with SGLang.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.container import Tensor
from gradwire.errors import requiring
from gradwire.files import replace_file
from gradwire.option_record import explains_arguments
from gradwire.tensor_files import header_of, order_in_file
from gradwire.weights.casting import cast, require_fit, target_named
from gradwire.weights.checkpoint import Checkpoint
from gradwire.weights.errors import WeightsError, listed
from gradwire.weights.folder import local_path
from gradwire.weights.tensors import View, copy_of, tied_names, views_of

with requiring(__name__, "zstandard", "zstandard", "'.[sglang]'"):
    import zstandard

_FILE = "model-00000-of-00001.safetensors"
_INDEX = "model.safetensors.index.json"
_LEVEL = 1  # of zstd; that of the other writers


class WeightFolders:
    """Writes `weight_v{N:06d}` folders, each from the version before it.

    Version 0 is the engines' checkpoint. The index is written last, so a folder that has it is
    whole.

    Args:
        path: Where the folders go; it must have none yet, since a new start has other versions.
        base: The engines' checkpoint: a .safetensors file, or a folder of such files.
        dtype: The dtype in which floats are published; that of the checkpoint.
        rename: Gives a tensor's name in the checkpoint.
    """

    @explains_arguments
    def __init__(
        self,
        path: str | os.PathLike[str],
        base: str | os.PathLike[str],
        *,
        dtype: Any = None,
        rename: Callable[[str], str] = str,
    ) -> None:
        self.version = 0
        self._path = local_path(path, "path")
        self._dtype = None if dtype is None else target_named(dtype)
        self._rename = rename
        there = sorted(self._path.glob("weight_v*"))
        if there:
            raise WeightsError(f"{there[0]} is of an earlier start; take an empty folder")
        found = Checkpoint(local_path(base, "base"), 1).views("c")
        if not found:
            raise WeightsError(f"base {os.fspath(base)}: no .safetensors files are there")
        self._base = {name: copy_of(view) for name, view in found.items()}

    def publish(self, state: Any) -> int:
        """Writes the next version.

        Args:
            state: A dictionary of whole tensors or arrays, or a model with state_dict(), with all
                tensors of the checkpoint.

        Returns:
            Its number, which the engines pull.

        Raises:
            WeightsError: A tensor is not in the checkpoint, has another shape or dtype there, or is
                in the checkpoint alone; or an earlier call was interrupted when its version was
                there.
        """
        folder = self._path / f"weight_v{self.version + 1:06d}"
        if (folder / _INDEX).exists():
            raise WeightsError(
                f"{folder} is there, of another writer or a call that was interrupted, and the "
                "next version would not begin where it ends: take an empty folder"
            )
        views = views_of(state, self._rename)
        require_fit((view, self._dtype) for view in views.values())
        tied = dict(tied_names(views))
        there = {tied.get(name, name) for name in views if name in self._base}
        news = {}
        for name, view in views.items():
            if name not in self._base and tied.get(name, name) in there:
                continue  # programs save one name of tied tensors
            news[name] = self._checked(cast(view, self._dtype)).read()
        absent = sorted(self._base.keys() - news.keys())
        if absent:
            raise WeightsError(
                f"the state lacks {listed(absent)} of the checkpoint, of which the engines would "
                "keep the old values: give all its tensors"
            )
        tensors, checksums = [], {}
        for name, new in news.items():
            base = self._base[name].read()
            difference = new ^ base
            if difference.any():
                data = zstandard.ZstdCompressor(level=_LEVEL).compress(difference.data)
                tensors.append(Tensor(name, "U8", (len(data),), memoryview(data)))
                # Not of `new`, which another thread may be writing.
                checksums[name] = f"{zlib.adler32((base ^ difference).data):08x}"
        self._write(folder, order_in_file(tensors), checksums)
        for tensor in tensors:
            changed = zstandard.ZstdDecompressor().decompress(tensor.data)
            base = self._base[tensor.name].read()
            base ^= np.frombuffer(changed, np.uint8)
        self.version += 1
        return self.version

    def _checked(self, view: View) -> View:
        base = self._base.get(view.name)
        if view.at or base is None or (base.dtype, base.shape) != (view.dtype, view.shape):
            there = "lacks it" if base is None else f"has {base.dtype} {list(base.shape)}"
            part = f", a part of {list(view.whole)}" if view.at else ""
            raise WeightsError(
                f"tensor {view.name!r} is {view.dtype} {list(view.shape)}{part}; the checkpoint "
                f"{there}. These folders change values only: give whole tensors, and dtype= or "
                "rename= where the checkpoint has other ones"
            )
        return view

    def _write(self, folder: Path, tensors: list[Tensor], checksums: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).unlink(missing_ok=True)  # of a call that ended in an error
        if tensors:
            with replace_file(folder / _FILE, durable=True) as file:
                file.write(header_of(tensors, checksums))
                for tensor in tensors:
                    file.write(tensor.data)
        index = {
            "metadata": {
                "version": f"{self.version + 1:06d}",
                "base_version": f"{self.version:06d}",
                "delta_encoding": "xor",
                "compression_format": "zstd",
                "checksum_format": "adler32",
            },
            "weight_map": dict.fromkeys(checksums, _FILE),
        }
        with replace_file(folder / _INDEX, durable=True) as file:
            file.write(json.dumps(index).encode())
