"""What a group does not compress: over Gloo on the CPU, NCCL on CUDA, and from any other device
through the host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.utils._pytree import tree_leaves, tree_map_only

from gradwire.torch.network.loopback import group_here
from gradwire.torch.network.meeting import add_gloo, require_gloo
from gradwire.torch.parameters import ordinary_tensors, writing_to
from gradwire.torch.staging.stage import Stage, stage_for

# Of a call of a group, the first argument is written, and the others are read. These read it, too:
_READ_FIRST = {"broadcast", "allreduce", "allreduce_coalesced", "reduce", "send"}
_WRITE_NOTHING = {"send"}
# PyTorch 2.13 renamed these.
_EARLIER_NAMES = {
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_gather_single": "_allgather_base",
}


class Uncompressed:
    """PyTorch's own group of the same ranks.

    Attributes:
        group: The group. It has backends for the devices `carried` (None: for all).
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.carried: set[str] | None = None
        self._stages: dict[torch.device, Stage] = {}
        if (here := group_here(store, rank, size)) is not None:
            self.group: dist.ProcessGroup = here
            return
        require_gloo()
        self.group = dist.ProcessGroup(store, rank, size)
        add_gloo(self.group, PrefixStore("cpu/", store), timeout)
        self.carried = {"cpu"}
        if torch.cuda.is_available() and dist.is_nccl_available():
            _add_nccl(self.group, PrefixStore("cuda/", store), timeout)
            self.carried.add("cuda")

    def run(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Calls the group. Tensors on a device that it has no backend for are copied to the host,
        for which this waits, and the results back when somebody waits for them."""
        earlier = _EARLIER_NAMES.get(name, name)
        call = getattr(self.group, name if hasattr(self.group, name) else earlier)
        tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        if all(map(self._carries, tensors)):
            return call(*arguments, **options)
        return self._run_on_host(call, name, *arguments, **options)

    def barrier(self, options: dist.BarrierOptions | None = None) -> dist.Work:
        """On the CPU, if the group has no backend for the device of the options."""
        options = dist.BarrierOptions() if options is None else options
        if self.carried is not None and options.device.type not in self.carried:
            options.device = torch.device("cpu")
        return self.group.barrier(options)

    def _carries(self, tensor: torch.Tensor) -> bool:
        return self.carried is None or tensor.device.type in self.carried

    @ordinary_tensors()
    def _run_on_host(
        self, call: Callable[..., dist.Work], name: str, first: Any, *others: Any, **options: Any
    ) -> dist.Work:
        hosts: dict[int, torch.Tensor] = {}

        def copy(tensor: torch.Tensor, is_read: bool = True) -> torch.Tensor:
            if self._carries(tensor):
                return tensor
            if tensor.layout != torch.strided or tensor.is_quantized:
                kind = "quantized" if tensor.is_quantized else "sparse"
                raise TypeError(
                    f"{name} of a {kind} tensor on {tensor.device}: what goes through the host is "
                    "dense, so give a dense tensor"
                )
            stage = self._stage_of(tensor)
            host = stage.beside(tensor)
            if is_read:
                stage.bring(tensor.detach().reshape(-1), host)
            hosts[id(tensor)] = host.view(tensor.shape)
            return hosts[id(tensor)]

        def copy_first(tensor: torch.Tensor) -> torch.Tensor:
            return copy(tensor, name in _READ_FIRST)

        given = tree_map_only(torch.Tensor, copy, others)
        work = call(tree_map_only(torch.Tensor, copy_first, first), *given, **options)
        outputs = [] if name in _WRITE_NOTHING else tree_leaves(first)

        def deliver() -> None:
            for tensor in outputs:
                if id(tensor) in hosts:
                    with writing_to(tensor):
                        self._stage_of(tensor).put(hosts[id(tensor)], tensor.detach())

        return _WorkOnHost(work, deliver, outputs)

    def _stage_of(self, tensor: torch.Tensor) -> Stage:
        if tensor.device not in self._stages:
            self._stages[tensor.device] = stage_for(tensor.device, takes_kernels=False)
        return self._stages[tensor.device]


class _WorkOnHost(dist.Work):
    """Delivers its results once, to whoever asks for them first."""

    def __init__(
        self, work: dist.Work, deliver: Callable[[], None], outputs: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._work, self._outputs = work, outputs
        self._deliver: Callable[[], None] | None = deliver
        self._delivering = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = self._work.wait(timeout)
        self._deliver_once()
        return done

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done:
            with contextlib.suppress(RuntimeError):  # for `wait`
                self.wait()
        return done

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        def finish(finished: torch.futures.Future[Any]) -> list[torch.Tensor]:
            finished.value()  # raises its error
            self._deliver_once()
            return self._outputs

        return self._work.get_future().then(finish)

    @ordinary_tensors()
    def _deliver_once(self) -> None:
        with self._delivering:
            deliver, self._deliver = self._deliver, None
            if deliver is not None:
                deliver()


def _add_nccl(group: dist.ProcessGroup, store: Store, timeout: timedelta) -> None:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = ProcessGroupNCCL(store, group.rank(), group.size(), options)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
