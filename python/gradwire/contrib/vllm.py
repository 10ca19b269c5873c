"""vLLM's workers follow the versions of a store: the weight transfer backend `gradwire`.

    llm = LLM(model=..., weight_transfer_config=WeightTransferConfig(backend="gradwire"))
    llm.init_weight_transfer_engine({"init_info": {"store": "s3://bucket/policy"}})
    ...
    version = publisher.publish(model).version  # in the trainer, with the checkpoint's names
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version}})
    llm.finish_weight_update()

vLLM knows the backend in each of its processes where gradwire is installed, by the entry point
`vllm.general_plugins`. It needs vLLM with checkpoint patches (its pull request 50723). It has been
tested against the interface in vLLM's documentation, not with vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from gradwire.weights import Publisher, Subscriber, WeightsError
from gradwire.weights.checkpoint import Checkpoint
from gradwire.weights.errors import listed
from gradwire.weights.tensors import typed_values

NAME = "gradwire"
_registered = False


def register() -> None:
    """Makes the backend known to vLLM's factory; its plugins call this, perhaps several times."""
    global _registered
    if not _registered:
        WeightTransferEngineFactory.register_engine(NAME, __name__, "GradwireWeightTransferEngine")
    _registered = True


@dataclass
class GradwireInitInfo(WeightTransferInitInfo):
    """What `init_weight_transfer_engine` takes.

    Attributes:
        store: A folder that the worker sees, or a prefix that fsspec opens.
        threads: Threads for checking and applying.
        base: The publisher's `base`, if vLLM has loaded the model from it: a .safetensors file or a
            folder of such files. Without it the first version must be a full one.
    """

    store: str
    threads: int = 1
    base: str = ""


@dataclass
class GradwireUpdateInfo(WeightTransferUpdateInfo):
    """What `update_weights` takes.

    Attributes:
        version: The version that the worker shall reach.
    """

    version: int


class GradwireWeightTransferEngine(WeightTransferEngine[GradwireInitInfo, GradwireUpdateInfo]):
    """Fetches a version and loads what it changes, by the names and shapes of the checkpoint.

    A worker keeps a copy of the checkpoint's tensors in host memory, from the first version or from
    `base`: a delta is checked against it before anything changes. What is sparse goes to vLLM as
    patches of names, indices and values. The whole model is loaded where that is not possible
    (integers, NaN, tensors of another shape), and after an update that failed halfway.
    """

    init_info_cls = GradwireInitInfo
    update_info_cls = GradwireUpdateInfo
    # A store has one model, and the copy is of that.
    supports_draft_weight_update = False
    supports_lora_weight_update = False

    _subscriber: Subscriber | None = None
    _is_whole = True  # whether the model has the tensors of the copy

    def init_transfer_engine(self, init_info: GradwireInitInfo) -> None:
        base = init_info.base
        views = Checkpoint(base, init_info.threads).views("c") if base else {}
        version = 0 if base else None
        self._subscriber = Subscriber(init_info.store, version=version, threads=init_info.threads)
        self._copy: dict[str, torch.Tensor] = {
            name: typed_values(view.dtype, view.read_copy(), True).reshape(view.shape)
            for name, view in views.items()
        }
        self._loaded: set[str] = set()  # names of tensors that the model got from versions

    def start_weight_update(self) -> None:
        """Nothing is left to do: `receive_weights` does all."""

    def finish_weight_update(self) -> None:
        """Nothing is left to do: `receive_weights` does all."""

    def receive_weights(self, update_info: GradwireUpdateInfo) -> None:
        """Brings the model to the version.

        Raises:
            WeightsError: The store has no such version, no way leads there, or it lacks a tensor
                that the model got from an earlier one. The model is as it was.
        """
        if self._subscriber is None:
            raise WeightsError("init_weight_transfer_engine comes first: it names the store")
        fetched = self._subscriber.fetch(update_info.version)
        if fetched is None and self._is_whole:
            return
        patches = None
        if fetched is not None:
            is_sparse = not fetched.is_full and self._is_whole
            changes = list(self._subscriber.changes(self._copy)) if is_sparse else []
            before = _shapes(self._copy)
            self._is_whole = False  # until the model has what the copy gets
            self._subscriber.apply_(self._copy)
            if is_sparse and _shapes(self._copy) == before:
                patches = self._patches(changes)
        absent = sorted(self._loaded - self._copy.keys())
        if absent:
            raise WeightsError(
                f"version {self._subscriber.version} lacks {listed(absent)}, of which the model "
                "would keep the old values: publish all tensors of the checkpoint"
            )
        if patches is None:
            initialize_layerwise_reload(self.model)
            self.model.load_weights((n, t.to(self.device)) for n, t in self._copy.items())
            finalize_layerwise_reload(self.model, self.model_config)
        else:
            load_checkpoint_weight_patches(self.model, patches)
        self._loaded |= self._copy.keys()
        self._is_whole = True

    def shutdown(self) -> None:
        self._subscriber = None

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Publisher
    ) -> None:
        """Publishes the tensors, for versions of vLLM whose trainers call this."""
        trainer_args.publish(dict(iterator))

    def _patches(
        self, changes: Iterable[tuple[str, torch.Tensor, torch.Tensor]]
    ) -> list[CheckpointWeightPatch] | None:
        """Changes as vLLM takes them; None: not all can be patches, in which NaN is an element that
        stays as it is."""
        patches = []
        for name, indices, values in changes:
            if not values.is_floating_point() or bool(values.isnan().any()):
                return None
            patches.append(
                CheckpointWeightPatch(
                    name=name,
                    shape=tuple(self._copy[name].shape),
                    dtype=values.dtype,
                    values=values.to(self.device),
                    indices=indices.to(self.device),
                )
            )
        return patches


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
