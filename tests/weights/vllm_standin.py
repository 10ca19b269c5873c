"""What gradwire.contrib.vllm takes from vLLM, with the names and signatures of its documentation:
https://docs.vllm.ai/en/v0.25.0/training/weight_transfer/base/, pull request 50723 for patches, and
what was added since: which models besides its own an engine can update.

A patch is a whole tensor in which NaN is an element that stays. Nothing is sharded or packed.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

I = TypeVar("I")  # noqa: E741
U = TypeVar("U")
calls: list[str] = []  # how the weights were loaded


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


class WeightTransferEngine(ABC, Generic[I, U]):
    init_info_cls: type[I]
    update_info_cls: type[U]
    supports_draft_weight_update = True
    supports_lora_weight_update = True

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        self.config, self.vllm_config = config, vllm_config
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.device, self.model = device, model

    def parse_init_info(self, init_dict: dict[str, Any]) -> I:
        try:
            return self.init_info_cls(**init_dict)
        except TypeError as error:
            raise ValueError(f"Invalid init_info: {error}") from error

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            typed = self.update_info_cls(**update_info)
        except TypeError as error:
            raise ValueError(f"Invalid update_info: {error}") from error
        self.receive_weights(typed)

    @abstractmethod
    def init_transfer_engine(self, init_info: I) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: U) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


class WeightTransferEngineFactory:
    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_engine(
        cls, name: str, module_path_or_cls: str, class_name: str | None = None
    ) -> None:
        if name in cls._registry or class_name is None:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls._registry[name] = module_path_or_cls, class_name

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        module, name = cls._registry[config.backend]
        return getattr(import_module(module), name)(config, vllm_config, device, model)


class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None = None


@torch.no_grad()
def load_checkpoint_weight_patches(
    model: torch.nn.Module,
    patches: Iterable[CheckpointWeightPatch],
    *,
    max_chunk_bytes: int = 512 << 20,
    validate_unique_indices: bool = True,
) -> set[str]:
    calls.append("patches")
    for patch in patches:
        if patch.indices is None or not patch.dtype.is_floating_point:
            raise TypeError(f"{patch.name}: sparse patches require a floating dtype")
        if len(patch.indices.unique()) != len(patch.indices):
            raise ValueError(f"{patch.name}: indices are not unique")
        whole = torch.full(patch.shape, float("nan"), dtype=patch.dtype, device=patch.values.device)
        whole.view(-1)[patch.indices] = patch.values
        own = model.get_parameter(patch.name)
        own.copy_(torch.where(whole.isnan(), own, whole))
    return set()


def initialize_layerwise_reload(model: torch.nn.Module) -> None:
    calls.append("begin")


def finalize_layerwise_reload(model: torch.nn.Module, model_config: Any) -> None:
    calls.append("end")


def install() -> None:
    """Puts the names where vLLM has them."""
    here = sys.modules[__name__]
    homes = {
        "vllm.distributed.weight_transfer.base": (
            "WeightTransferEngine",
            "WeightTransferInitInfo",
            "WeightTransferUpdateInfo",
        ),
        "vllm.distributed.weight_transfer.factory": ("WeightTransferEngineFactory",),
        "vllm.model_executor.model_loader.checkpoint_weight_patch": (
            "CheckpointWeightPatch",
            "load_checkpoint_weight_patches",
        ),
        "vllm.model_executor.model_loader.reload": (
            "finalize_layerwise_reload",
            "initialize_layerwise_reload",
        ),
    }
    for home, names in homes.items():
        parts = home.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[home]).update({name: getattr(here, name) for name in names})
