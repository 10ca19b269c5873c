"""The hook of DistributedDataParallel, and its state: configuration, counters and checkpoint.

Annotations are not postponed here, because DDP compares those of the hook with its own types.
"""

import time
import weakref
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from gradwire.option_record import explains_arguments
from gradwire.torch import checkpoint
from gradwire.torch.buckets.bucket import BucketJob
from gradwire.torch.buckets.ledger import Ledger
from gradwire.torch.buckets.session import Session, SessionOwner
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.hook.ddp_module import (
    BucketOrders,
    ThawWatch,
    averaged,
    check_bucket,
    check_ranks,
    find_module,
    module_in,
    shape_of,
)
from gradwire.torch.hook.overlap import NEEDS_ALL_GRADIENTS, LateAverages, Overlap, terms_of
from gradwire.torch.network.engine import Unused
from gradwire.torch.optimizer_list import Optimizers
from gradwire.torch.options import Compression, Execution, Members
from gradwire.torch.parameters import NamedShape, device_of, named_parameters, require_dense
from gradwire.torch.stats import Stats, StepCounters, Totals, summarize
from gradwire.torch.wrapping_optimizer import OptimizerWatch, finer_codec, usual_push_codec

_COPY = (
    "this is a copy that has not averaged yet. DDP's own copies have no hook: give them one, with "
    "copy.register_comm_hook(state, gradwire_hook)"
)


@runtime_checkable
class LossScaler(Protocol):
    """The part of `torch.amp.GradScaler` that the hook needs."""

    def get_scale(self) -> float: ...


class GradwireState(SessionOwner):
    """State of `gradwire_hook` for one DistributedDataParallel model.

        state = GradwireState(codec="3lc:s=1.00,coder=rice")
        model.register_comm_hook(state, gradwire_hook)

    Every rank must be given the same arguments; the ranks compare what decides about bytes and
    values before the first exchange. Only threads, target, timeout, memory, and ON and OFF of
    overlap may differ.

    A state belongs to the parameters of the first bucket. It goes on where they are put into
    another DistributedDataParallel, and refuses a bucket of others. A copy (`copy.deepcopy`,
    pickle) has settings, counters and residuals, and connects in its first step. DDP's own copies
    have no hook: register it again, with the copy of the state.

    Gradients are dense, and float32, bfloat16 or float16; a complex one counts as pairs of real
    values. Gradients of 16 bits are widened for the
    exchange, their residuals are kept as the codec says, and the average is rounded half to even
    into the bucket. Tensors that go raw are sent in their own 16 bits, as codec bf16 or fp16:
    pushes are exact, and pulls are rounded as the bucket would be. An average outside the range of
    float16 is infinite: see `scaler`.

    Gradients on another device than the CPU are copied to the host, encoded and decoded there, and
    copied back, while `backward()` goes on. In a build with CUDA, a GPU encodes and decodes itself,
    to the same packets and the same result; `threads` and `target` have no effect then.

    If no rank used a parameter in an iteration (find_unused_parameters), DDP does not change its
    gradient, and its residual stays for the next one that uses it. With
    `zero_grad(set_to_none=False)` nothing tells such a parameter from a used one: its residual is
    sent, and not applied.

    Args:
        codec: As text. None: the default of the exchange, such as "small"; "safe" in its place
            unless `optimizer` is one that does not divide by squares of gradients.
        exchange: As in Compression. None: "sharded".
        optimizer: For the default of `codec`; None: any, because the hook does not see it.
        start_iter: Number of first iterations that go raw, because gradients change fastest then.
        scaler: The GradScaler, if gradients are scaled: residuals follow its scale.
        overlap: See Overlap. With Overlap.NEXT_STEP (double buffering: QSGD, section 5) a step
            takes the longer time of computation and exchange instead of their sum, but steps the
            model by the average of the step before; the first compressed step by zeros. The last
            average is applied by nobody. Every parameter needs a gradient in each step.
        model: The DistributedDataParallel module. None: it is found by the parameters of the first
            bucket.
        process_group: The group given to DDP, or one of the same ranks. None: the default group.
        compression: Further options of what is sent.
        members: `ranks_per_machine`; the ranks of DDP stay the same.
        execution: Threads, seed, timeout.

    Raises:
        GradwireError: A codec is unknown, or a parameter of it is not valid.
        ValueError: Another argument is not valid.
    """

    @explains_arguments
    def __init__(
        self,
        codec: str | None = None,
        *,
        exchange: str | None = None,
        optimizer: Optimizers | None = None,
        start_iter: int = 2,
        scaler: LossScaler | None = None,
        overlap: Overlap = Overlap.ON,
        model: nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        compression: Compression = Compression(),
        members: Members = Members(),
        execution: Execution = Execution(),
    ) -> None:
        if start_iter < 0:
            raise ValueError(f"start_iter is {start_iter}; it must not be negative")
        if members.goes_on:
            raise ValueError(
                "the ranks of GradwireState stay the same: on_lost='continue' is for LocalSteps "
                "and ServerOptimizer"
            )
        settings = ExchangeSettings.of(
            compression.given(codec=codec, exchange=exchange),
            members.given(process_group=process_group),
            execution,
            finer=partial(finer_codec, optimizer),
        )
        terms = f"start_iter {start_iter}{terms_of(overlap, has_scaler=scaler is not None)}"
        self._settings = replace(settings, terms=terms)
        self._start_iter = start_iter
        self._scaler = scaler
        self._overlap = overlap
        self._late = LateAverages()
        self._device: torch.device | None = None  # of the gradients
        # Weak: the module refers to the state where Python's garbage collector cannot see it.
        self._model = None if model is None else weakref.ref(module_in(model))
        self._names: dict[torch.Tensor, str] = {}
        self._orders = BucketOrders()
        self._optimizer_watch: OptimizerWatch | None = None
        self._thaw_watch: ThawWatch | None = None
        self._iterations = 0
        self._loss_scale: float | None = None  # of the iteration
        self._loaded: checkpoint.StateDict | None = None
        self._before = Ledger()  # of the state of which this is a copy

    def __getstate__(self) -> dict[str, Any]:
        """For copy.deepcopy and pickle. Waits for the step under way.

        Raises TypeError for a state of another process group than the default one, which can't be
        copied; DDP then refuses it, too.
        """
        if self._settings.process_group not in (None, dist.group.WORLD):
            raise TypeError(
                "a GradwireState of another process group than the default one can't be copied or "
                "pickled: save its state_dict(), and load that into a new GradwireState"
            )
        is_new = self._session is None and self._loaded is None
        before = self._session.runner.counted() if self._session else self._before
        return vars(self) | {
            "_settings": replace(self._settings, process_group=None),
            "_loaded": None if is_new else self.state_dict(),
            "_before": deepcopy(before),
            "_session": None,
            "_late": LateAverages(),
            "_writer": None,
            "_device": None,
            "_model": None,
            "_names": {},
            "_orders": BucketOrders(),
            "_optimizer_watch": None,
            "_thaw_watch": None,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The copy shares the GradScaler, which the program goes on to update."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self._scaler)] = self._scaler
        vars(copied).update(deepcopy(self.__getstate__(), memo))
        return copied

    # The hook ----------------------------------------------------------------------------------

    def average(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined] # PyTorch hides it from checkers
    ) -> Future[torch.Tensor]:
        """Starts averaging the bucket over all ranks; the future holds its own buffer.

        Raises TypeError for gradients that are sparse, that are not float32, bfloat16 or float16,
        or that are neither on the CPU nor on one GPU; ValueError for an exchange that a GPU does
        not have, and for parameters of another model; RuntimeError for a GPU in a build without
        CUDA, in the capture of a CUDA graph, if the module is not found, if a parameter's strides
        have changed, or if it was thawed; and the first error of the communication again.
        """
        queued, cpu = time.perf_counter(), time.thread_time()
        self._check_session()
        values = bucket.buffer()
        check_bucket(values)
        parameters = bucket.parameters()
        if any(parameter not in self._names for parameter in parameters):
            self._name_parameters(parameters)
        assert self._thaw_watch is not None, "it is made with the names"
        self._thaw_watch.look(bucket.index(), parameters, bucket.is_last())
        names = [self._names[parameter] for parameter in parameters]
        require_dense(names[0], values)  # DDP gives a sparse gradient a bucket of its own
        self._check_device(values)
        orders = self._orders.find(bucket.index(), names, parameters, values)
        if self._session is None:
            self._session = self._connect(values.device)
            queued, cpu = time.perf_counter(), time.thread_time()
        if bucket.index() == 0:
            self._log(self._last_counters().step)  # DDP has waited for all of its buckets
            self._iterations += 1
            # On a GPU this waits for all work that is queued there, so it is done once a step.
            self._loss_scale = None if self._scaler is None else self._scaler.get_scale()
        step = self._iterations - 1
        job = BucketJob(
            step=step,
            index=bucket.index(),
            last=bucket.is_last(),
            raw=step < self._start_iter,
            unused=Unused(i for i, p in enumerate(parameters) if p.grad is None),
            tensors=[(name, shape_of(p)) for name, p in zip(names, parameters, strict=True)],
            values=values,
            orders=orders,
            loss_scale=self._loss_scale,
            queued=queued,
            hook_seconds=time.perf_counter() - queued,
            hook_cpu_seconds=time.thread_time() - cpu,
        )
        if self._overlap is Overlap.NEXT_STEP and not job.raw:
            return self._late.exchange(job, self._session)
        future = self._session.submit_for_torch(job)
        if self._overlap is Overlap.OFF:
            self._session.drain()
        # DDP takes an exception only from a future's callback.
        return future.then(Future.value)

    # Statistics --------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Sums over all complete steps of this rank, and which tensors go raw and why."""
        if self._session is None:
            before = self._before
            return summarize(
                before.totals,
                codec=self._settings.text(),
                world_size=self._place()[1],
                raw_tensors=before.raw_tensors,
                tensors=before.traffic,
                remarks=(_COPY,) if before.totals.steps else (),
            )
        stats = self._session.stats()
        watch = self._optimizer_watch
        return stats if watch is None else replace(stats, remarks=stats.remarks + watch.remarks)

    def close(self) -> None:
        super().close()
        self._log(self._last_counters().step)  # the next backward pass would have

    # Checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> checkpoint.StateDict:
        """This rank's residuals and its count of iterations; every rank saves its own."""
        if self._session is not None:
            state = self._session.state_dict(self._identity(), self._iterations)
            late = self._late.state_dict()
            return state | ({"late": late} if late else {})
        return self._loaded or self._identity().make_state(
            (), iterations=self._iterations, ranks_per_machine=None, loss_scale=None
        )

    def load_state_dict(self, state: checkpoint.StateDict) -> None:
        """Goes on from a saved state; every rank must load its own, at the same iteration.

        The result is that of the uninterrupted run, bit for bit, if DDP puts the gradients into the
        same buckets. (DDP makes new buckets after the first iteration, unless
        find_unused_parameters is on.) With other buckets nothing is lost, but other values share a
        scale.
        Raises ValueError for a state of another rank, world size, codec or exchange. A state of
        another model or for other machines is refused, too, but perhaps only in the first step.
        `reshard` converts states to another world size, codec or exchange, and to other machines.
        """
        state = checkpoint.with_clean_names(state)
        self._identity().check(state)
        if state.get("late") and self._overlap is not Overlap.NEXT_STEP:
            raise ValueError("the state has late averages: give overlap=Overlap.NEXT_STEP, too")
        if self._session is None:
            self._loaded = state
        else:
            self._session.load_state_dict(state)
            self._late.load_state_dict(state.get("late", {}))
        self._iterations = int(state["iterations"])

    # -------------------------------------------------------------------------------------------

    def _last_counters(self) -> StepCounters:
        return super()._last_counters() if self._session else self._before.last_step

    def _totals(self) -> Totals:
        return super()._totals() if self._session else self._before.totals

    def _name_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Finds the module of the first bucket's parameters. Raises ValueError if this state has
        averaged others: their residuals and counters are not those of this model."""
        if self._names:
            shapes = [list(p.shape) for p in parameters if p not in self._names]
            raise ValueError(
                f"this GradwireState averages another model, which does not have a parameter "
                f"{shapes[0]} of this bucket: give each model a GradwireState of its own. "
                "(load_state_dict(state.state_dict()) hands over residuals and iterations)"
            )
        module = self._model() if self._model is not None else None
        if module is None:
            module = find_module(self, parameters)
        check_ranks(module, self._settings.process_group)
        if self._overlap is Overlap.NEXT_STEP and module.find_unused_parameters:
            raise ValueError(f"find_unused_parameters=True: {NEEDS_ALL_GRADIENTS}")
        names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in named_parameters(module)
        }
        if any(parameter not in names for parameter in parameters):
            raise ValueError(
                "the module that GradwireState(model=) was given does not have the parameters of "
                "this bucket: give the one that the hook is registered with"
            )
        device_of(averaged(module))
        self._names, self._thaw_watch = names, ThawWatch(module)
        self._settings = self._settings.with_last_excluded(self._shapes(trainable=True))
        if self._loaded is not None:
            self._identity().check(self._loaded)
        self._watch_optimizer()

    def _shapes(self, trainable: bool = False) -> list[NamedShape]:
        named = self._names.items()
        return [(name, list(p.shape)) for p, name in named if p.requires_grad or not trainable]

    def _identity(self) -> checkpoint.Identity:
        return self._settings.identity("GradwireState", *self._place(), self._shapes() or None)

    def _place(self) -> tuple[int, int]:
        if self._session is not None:
            return self._session.rank, self._session.world_size
        if not dist.is_initialized():
            return 0, 1
        group = self._settings.process_group
        if isinstance(group, dist.ProcessGroup):  # also one that torch.distributed does not know
            return group.rank(), group.size()
        return dist.get_rank(group), dist.get_world_size(group)

    def _watch_optimizer(self) -> None:
        """Warns if an optimizer cannot do well with gradients that a coarse codec has sent."""
        if self._optimizer_watch is not None:
            return
        sent = {p: name for p, name in self._names.items() if p.requires_grad}
        layout = self._settings.layout(self._shapes(trainable=True), world_size=1)
        codec = usual_push_codec(layout)
        self._optimizer_watch = OptimizerWatch(sent, codec, self._place()[0])

    def _check_device(self, values: torch.Tensor) -> None:
        if values.device == self._device:
            return
        if self._device is not None:
            raise TypeError(
                f"gradwire_hook averages gradients of one device; this bucket is on "
                f"{values.device}, the first one was on {self._device}"
            )
        self._device = values.device

    def _connect(self, device: torch.device) -> Session:
        """Called in the first bucket, which comes in the same order on every rank."""
        session = Session(self._settings, device)
        session.close_with(self)
        session.runner.ledger.go_on_from(self._before)
        if self._loaded is not None:
            session.load_state_dict(self._loaded)
            self._late.load_state_dict(self._loaded.get("late", {}))
            self._loaded = None
        return session


def gradwire_hook(
    state: GradwireState,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # PyTorch hides it from checkers
    *shard: object,
) -> Future[torch.Tensor]:
    """Averages a gradient bucket over all ranks, compressed both ways.

        model.register_comm_hook(state, gradwire_hook)

    Returns at once. The future completes when the bucket holds the average, which has the same bits
    on every rank.
    """
    if isinstance(bucket, tuple):
        raise TypeError(
            "torch._dynamo.config.optimize_ddp='python_reducer' gives hooks single gradients, and "
            "gradwire_hook averages DDP's buckets: leave it at 'ddp_optimizer', the default"
        )
    if isinstance(bucket, torch.Tensor):
        raise TypeError(
            "FullyShardedDataParallel gives hooks its own flat gradients, and gradwire_hook "
            "averages DDP's buckets: take fully_shard (FSDP2) and FullyShardComm"
        )
    return state.average(bucket)
