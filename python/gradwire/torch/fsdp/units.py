"""The units of a sharded model: the parameters that FSDP2 gathers and reduces together.

PyTorch has setters for a unit's communication (`set_custom_reduce_scatter` and others), but does
not say which parameters are in it, and in which order. That stands in its private FSDPParamGroup,
and this is the only file that reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.torch_version import TorchVersion

from gradwire.torch.network.engine import Unused
from gradwire.torch.parameters import (
    EXCHANGED,
    NamedShape,
    NamedTensor,
    clean_name,
    named_parameters,
    uncompiled,
)
from gradwire.torch.tensor_memory import local_of

__all__ = [
    "DefaultAllGather",
    "DefaultReduceScatter",
    "Unit",
    "find_units",
]

# Since PyTorch 2.15 gradients add up in `grad` of the whole parameter, in whatever dtype it allows.
_ADDS_UP_IN_GRAD = isinstance(getattr(FSDPParam, "unsharded_accumulated_grad", None), property)

_TWICE = (
    "{}: the program has called set_custom_reduce_scatter or set_custom_all_gather, and "
    "FullyShardComm takes their place; a model can have one of them"
)


class Unit:
    """A module (or a list of modules) that was given to one call of `fully_shard`.

    Attributes:
        index: Its place in the model, the same on every rank.
        module: Takes the setters of its communication.
        ranks: All ranks of the mesh.
        replicas: The process group of the ranks that have the same shard (HSDP). None: there are
            none.
        after_reduction: What the program gave to `set_all_reduce_hook`.
    """

    after_reduction: Callable[[torch.Tensor], None] | None

    def __init__(self, index: int, module: FSDPModule, group: Any, names: dict[int, str]) -> None:
        """names: of the parameters, by the id of any tensor that stands for one of them."""
        self.index = index
        self.module = module
        self._group = group
        self._names = {}
        for place, p in enumerate(group.fsdp_params):
            # FSDP2 still gathers the parameters of a module that the program has replaced.
            lost = f"{p._module_info.param_name} of a replaced module ({index}.{place})"
            found = (names[id(tensor)] for tensor in _tensors_of(p) if id(tensor) in names)
            self._names[id(p)] = next(found, lost)
        self._reduced: list[Any] = []
        self._accumulates = False  # gradients of a backward pass that was not reduced
        self.after_reduction = None
        mesh = group.mesh_info
        self.ranks: list[int] = mesh.mesh.mesh.flatten().tolist()
        self.replicas = mesh.replicate_process_group if isinstance(mesh, HSDPMeshInfo) else None

    def names(self) -> str:
        """For messages."""
        first, *others = (name for name, _ in self.weights())
        return f"{first} and {len(others)} others" if others else first

    @property
    def shards(self) -> dist.ProcessGroup:
        """The ranks among which the parameters are sharded."""
        return self._group.mesh_info.shard_process_group

    @property
    def device(self) -> torch.device:
        device: torch.device = self._group.device
        return device

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters that require a gradient, in the order of the reduced buffer."""
        return [p.sharded_param for p in self._trainable()]

    def all_shards(self) -> list[NamedTensor]:
        """This rank's shard of each parameter, also of those that require no gradient."""
        return [(self._name(p), local_of(p.sharded_param)) for p in self._group.fsdp_params]

    def gradients(self) -> list[NamedShape]:
        """The whole tensors of the reduce-scatter, which FSDP2 cuts into rows: name and shape. A
        parameter that is sharded along another dimension than the first lies in it transposed."""
        return self._whole(self._trainable())

    def weights(self) -> list[NamedShape]:
        """The same for the all-gather, in which all parameters take part."""
        return self._whole(self._group.fsdp_params)

    def sizes(self) -> dict[str, list[int]]:
        """The shape of each parameter that the shards make up; in tensor parallelism a part."""
        return {self._name(p): list(p._orig_size) for p in self._group.fsdp_params}

    def dims(self) -> dict[str, int]:
        """Along which dimension each parameter is cut."""
        return {self._name(p): p.fsdp_placement.dim for p in self._group.fsdp_params}

    def reduced_pieces(self) -> list[NamedShape]:
        """This rank's part of them, padded as on every rank."""
        return [(self._name(p), list(p.padded_sharded_param_size)) for p in self._reduced]

    def replace_communication(
        self,
        reduce: DefaultReduceScatter,
        gather: DefaultAllGather,
        average: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Gives the unit other collectives; `average` runs in the place of the program's hook.

        Raises ValueError if the program has replaced them, too, now or at a later reduction.
        """
        group = self._group
        replaced = {"_reduce_scatter_comm": reduce, "_all_gather_comm": gather}
        for name in replaced:
            if not type(getattr(group, name)).__module__.startswith(("torch.", "gradwire.")):
                raise ValueError(_TWICE.format(self.names()))
        self.module.set_custom_reduce_scatter(reduce)
        self.module.set_custom_all_gather(gather)
        reduce_unit = group.post_backward

        def post_backward(*args: Any) -> None:
            for name, ours in replaced.items():
                if getattr(group, name) is not ours:
                    raise ValueError(_TWICE.format(self.names()))
            self._put_before_hook(average)
            reduce_unit(*args)

        self._put_before_hook(average)
        group.post_backward = post_backward

    def _put_before_hook(self, average: Callable[[torch.Tensor], None] | None) -> None:
        """`average`, if there is one, takes the place of the hook that the program has now."""
        group = self._group
        if average is None or group._all_reduce_hook is not average:
            self.after_reduction = group._all_reduce_hook
        if average is not None:
            group._all_reduce_hook = average

    def fill_before_reducing(self, on_fill: Callable[[Unused], None]) -> None:
        """From now on zeros stand in a reduction for gradients that this rank lacks and others may
        have; `on_fill` gets the places of these parameters before each reduction.

        (PyTorch's set_reduce_scatter_unused_params does not say which they are. If the program has
        called it, these zeros count as gradients, as without gradwire.)
        """
        group = self._group
        reduce = group.post_backward

        def post_backward(*args: Any) -> None:
            self._reduced = [p for p in self._in_order() if _takes_part(p)]
            if not self._may_have_gradients():
                self._reduced = []
            self._accumulates = bool(self._reduced) and not group.reduce_grads
            if self._reduced and group.reduce_grads:
                on_fill(Unused(self._fill()))
            reduce(*args)

        group.post_backward = post_backward

    def _may_have_gradients(self) -> bool:
        """Whether some rank may have gradients: whether the unit was gathered since the last
        reduction, which all ranks do together."""
        group = self._group
        return (
            self._accumulates
            or group._training_state != TrainingState.IDLE
            or bool(group._post_forward_indices)  # of forward passes without a backward pass
            or group.is_unsharded
            or any(_gradient_of(p) for p in self._reduced)
        )

    def _in_order(self) -> list[Any]:
        """All parameters, in the order of the reduced buffer."""
        parameters: list[Any] = self._group.fsdp_params
        if not _ADDS_UP_IN_GRAD:
            return parameters
        return [parameters[place] for place in self._group._reduce_scatter_param_indices]

    def _fill(self) -> list[int]:
        """Gives the parameters in the next reduction that lack a gradient one of zeros. Returns
        their places."""
        gradients = [gradient for p in self._reduced for gradient in _gradient_of(p)]
        unused = []
        for place, parameter in enumerate(self._reduced):
            if not _gradient_of(parameter) and not self._group.reduce_scatter_unused_params:
                _give_zeros(parameter, gradients[0].dtype if gradients else None)
                unused.append(place)
        return unused

    @property
    def reduced(self) -> list[nn.Parameter]:
        """The sharded parameters in the reduction under way, in the order of its buffer."""
        return [p.sharded_param for p in self._reduced]

    def reduced_tensors(self) -> list[NamedShape]:
        """As `gradients`, in the reduction under way."""
        return self._whole(self._reduced)

    def reduce_inside(self) -> None:
        """From now on PyTorch reduces gradients over `shards` alone, and not over `replicas`."""
        group, info = self._group, self._group.mesh_info
        inside = FSDPMeshInfo(
            **{f.name: getattr(info, f.name) for f in dataclasses.fields(info) if f.init}
        )
        if group.post_forward_mesh_info is info:
            group.post_forward_mesh_info = inside
        group.mesh_info = inside

    def accumulates_shards(self) -> bool:
        """Whether `set_requires_all_reduce(False)` is in effect."""
        return not self._group.all_reduce_grads

    def adds_replicas_up(self) -> bool:
        """Whether replicas are summed and not averaged: the program has set what divides."""
        return self._group.gradient_divide_factor is not None

    def takes_result_later(self, reduced: torch.Tensor) -> bool:
        """Whether `reduced` itself becomes the gradients, and nothing reads it before the end of
        `backward()`: it is neither divided, cast, copied to the CPU nor added to a gradient, and
        neither a hook nor an optimizer runs in `backward()`."""
        if self._group.force_sum_reduction_for_comms or reduced.dtype == torch.float16:
            return False
        if self.after_reduction is not None:
            return False
        return all(
            p.grad is None
            and p.dtype == reduced.dtype
            and getattr(p, "grad_dtype", None) in (None, reduced.dtype)
            and p.device == reduced.device
            and not getattr(p, "_post_accumulate_grad_hooks", None)
            for p in self.reduced
        )

    def require_exchanged(self) -> None:
        """Raises TypeError for a parameter whose gradient is reduced in another dtype than those
        that are exchanged."""
        for p in self._trainable():
            dtype = p.sharded_param.dtype
            if dtype.is_floating_point:
                given = p.sharded_grad_dtype if _ADDS_UP_IN_GRAD else p.mp_policy.param_dtype
                dtype = p.mp_policy.reduce_dtype or given or dtype
            if dtype not in EXCHANGED:
                remedy = (
                    "make torch.view_as_real of it the parameter"
                    if dtype.is_complex
                    else "give fully_shard MixedPrecisionPolicy(reduce_dtype=torch.float32)"
                )
                raise TypeError(
                    "float32, bfloat16 and float16 gradients are exchanged; that of "
                    f"{self._name(p)} is reduced as {dtype}: {remedy}"
                )

    def _trainable(self) -> list[Any]:
        return [p for p in self._group.fsdp_params if p.sharded_param.requires_grad]

    def _name(self, parameter: Any) -> str:
        return self._names[id(parameter)]

    def _whole(self, parameters: list[Any]) -> list[NamedShape]:
        tensors: list[NamedShape] = []
        for p in parameters:
            shape = list(p._orig_size)
            if p.fsdp_placement.dim != 0:
                rows, *rest = p.padded_sharded_param_size
                shape = [rows * self.shards.size(), *rest]
            tensors.append((self._name(p), shape))
        return tensors


def find_units(model: nn.Module) -> list[Unit]:
    """The units of the model, those around others first. Raises TypeError for a model that is not
    sharded as a whole, or has gradients that are not exchanged; ValueError for units with several
    meshes or devices, or without shards; ImportError for a PyTorch whose FSDPParamGroup is another.
    """
    if TorchVersion(torch.__version__) < "2.13":
        raise ImportError(
            "FullyShardComm needs the fully_shard of PyTorch 2.13 or newer; this is "
            f"{torch.__version__}"
        )
    model = uncompiled(model)
    if not isinstance(model, FSDPModule):
        inner = any(isinstance(module, FSDPModule) for module in model.modules())
        raise TypeError(
            f"{type(model).__name__} is not sharded: "
            + (
                "some of its modules are, so shard the whole model last (fully_shard(model))"
                if inner
                else "call fully_shard (torch.distributed.fsdp) for its layers and then for the "
                "model itself, before FullyShardComm(model)"
            )
        )
    names = {id(p): name for name, p in named_parameters(model)}
    units: list[Unit] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if id(state) in seen:
            continue
        seen.add(id(state))
        groups = state._fsdp_param_groups
        if len(groups) > 1:
            raise ValueError(
                f"the parameters of {clean_name(name) or 'the model'} are sharded on "
                f"{len(groups)} meshes (shard_placement_fn), and its communication can be replaced "
                "for one mesh only: call fully_shard for each mesh's modules"
            )
        # A module has no parameters of its own if all are in units below it.
        if not groups or not groups[0].fsdp_params:
            continue
        if not isinstance(groups[0].mesh_info, FSDPMeshInfo):
            raise ValueError(
                f"{clean_name(name) or 'the model'} is replicated and not sharded: DDP with "
                "gradwire_hook compresses that"
            )
        if "post_backward" in vars(groups[0]):
            raise ValueError(
                "the model has a FullyShardComm already, which has replaced its communication for "
                "good: use that one, or shard a new model"
            )
        units.append(Unit(len(units), module, groups[0], names))
    for unit in units:
        unit.require_exchanged()
    meshes = [_describe_mesh(unit) for unit in units]
    for unit, mesh in zip(units, meshes, strict=True):
        if mesh != meshes[0]:
            raise ValueError(
                f"{units[0].names()} have the mesh of {meshes[0]}, and {unit.names()} that of "
                f"{mesh}: give every call of fully_shard the same mesh"
            )
    return units


def _describe_mesh(unit: Unit) -> str:
    shards, replicas = (
        "none" if group is None else str(dist.get_process_group_ranks(group))
        for group in (unit.shards, unit.replicas)
    )
    return f"shards {shards}, replicas {replicas}, on {unit.device}"


def _tensors_of(parameter: Any) -> list[Any]:
    """Those that may stand for it in its module: which of them does depends on what the program did
    last, such as a forward, which leaves the model's own parameters unsharded."""
    places = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    return [getattr(parameter, place, None) for place in places]


def _takes_part(parameter: Any) -> bool:
    """Whether it is in a reduction of its unit."""
    if not hasattr(parameter, "_unsharded_param"):
        return False  # it was never gathered
    return parameter._unsharded_param.requires_grad or bool(_gradient_of(parameter))


def _gradient_of(parameter: Any) -> list[torch.Tensor]:
    """Its whole gradient on this rank; empty if it has none."""
    found = (parameter.unsharded_accumulated_grad, parameter._unsharded_param.grad)
    return [gradient for gradient in found if gradient is not None]


def _give_zeros(parameter: Any, dtype: torch.dtype | None) -> None:
    """As its gradient. dtype: of other gradients of the unit, which must have the same, but where
    each parameter says its own."""
    whole = parameter._unsharded_param
    if _ADDS_UP_IN_GRAD:
        whole.grad = torch.zeros_like(whole, dtype=parameter.unsharded_grad_dtype or dtype)
    else:
        parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype)
