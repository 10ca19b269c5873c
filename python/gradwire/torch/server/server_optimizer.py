"""`ServerOptimizer`: an optimizer whose model and state live on dedicated server ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradwire.option_record import explains_arguments
from gradwire.torch import checkpoint
from gradwire.torch.members.places import Places
from gradwire.torch.options import Compression, Execution, Members
from gradwire.torch.parameters import NamedTensor, refuse_wrapped, shapes_of
from gradwire.torch.server.barrier import TensorBarrier
from gradwire.torch.server.buffers import make_buffers
from gradwire.torch.server.server_link import ServerLink
from gradwire.torch.server.server_loop import Serving
from gradwire.torch.server.server_plan import make_plan
from gradwire.torch.server.server_settings import (
    UPDATES,
    BackupWorkers,
    ServerSettings,
    exchange_text,
)
from gradwire.torch.server.server_stats import ServerStats, scalars_between, summarize
from gradwire.torch.server.worker_loop import Working
from gradwire.torch.shared_parameters import SharedParameters
from gradwire.torch.state_kinds import own_part_of
from gradwire.torch.wrapping_optimizer import (
    OptimizerWatch,
    WrappingOptimizer,
    is_of_get_state_dict,
    note_step,
    refuse_get_state_dict,
    refuse_modes,
    refuse_several_gradients,
    require_optimizer,
    runs_hooks_of_loading,
    runs_hooks_of_saving,
    usual_push_codec,
)


class ServerOptimizer(WrappingOptimizer):
    """Wraps a local optimizer of the same parameters on every rank (3LC, section 4.1).

        optimizer = ServerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                                    named_parameters=model.named_parameters())
        optimizer.connect()
        if optimizer.is_server:
            optimizer.serve()
        else:
            while optimizer.version < steps:
                optimizer.zero_grad()
                loss(...).backward()
                optimizer.step()
            optimizer.close()

    The last `servers` ranks are servers, and the others are workers. Each parameter, with its
    optimizer state, is on one server as a whole. A worker's `step()` pushes its gradient and
    applies the changes of the model that come back. `zero_grad`, `param_groups`, schedulers and
    hooks of the optimizer work as before; options that a worker sets in `param_groups` reach the
    servers with its next push. The optimizer must step each parameter by itself, as SGD with
    momentum and Adam do.

    Parameters of bfloat16 and float16 are float32 on the servers, and the workers sum their changes
    in float32. A torch.amp.GradScaler works as with any optimizer; each worker has its own.

    Every rank must be given the same arguments. These are compared, by `connect` or, with a store,
    here: the tensors and their codecs, which follow from codec, rules, exclude and min_numel; the
    number of workers and servers, barrier, backup_workers, turns, staleness, pulls, on_lost, seed,
    and what concerns buffers. history, threads, target, timeout and lost_after are not.

    Args:
        optimizer: Of the same parameters on every rank.
        codec: As text. None: "safe" for an optimizer that divides by squares of gradients, "small"
            for any other.
        servers: Number of server ranks.
        named_parameters: The names of the parameters, which rules and errors mention. None: those
            of `model`; without a model a name is "group.place".
        backup_workers: Each version is finished without this number of pushes; late ones are
            dropped. BackupWorkers says whose pushes count.
        staleness: How many of its own pushes a worker may have outstanding before it waits.
        history: Finished versions that a server keeps for workers that lack them; a worker that
            lacks more gets the model itself.
        pulls: "updates": the servers step the model, and send its changes. "gradients": they send
            the average gradients, and every worker steps a replica with the wrapped optimizer
            (TernGrad, section 3.1); with codec="terngrad" the workers share a scale for each
            tensor, and the average is that of the trits, exactly. It needs backup_workers=0,
            staleness=0 and barrier="step".
        barrier: "step": step() pushes all gradients and waits for all pulls. "tensor": backward()
            pushes each tensor when its gradient is there, and the next forward pass of `model`
            waits for it where it needs it, with the same result; see no_sync and synchronize.
        model: The module whose forward pass uses the parameters, for barrier="tensor" and
            buffers_from.
        buffers_from: The worker from which the first server takes the model's buffers, such as the
            statistics of batch normalisation; all workers get them in `connect` and `close`. None:
            every rank keeps its own.
        buffers_every: Versions after which that worker sends them; it also does before it leaves.
        process_group: Workers and servers. None: the default group. Ranks are counted in this
            group, also in error messages.
        compression: Further options of what is sent; no exchange but "sharded".
        members: on_lost="continue": versions no longer wait for a worker that is lost, until no
            worker is left; it needs pulls="updates". With `store`, `ranks` (of workers and
            servers) and `role`, other processes can take the places of lost workers
            (docs/reference/servers.md); no init_process_group is needed. A worker that comes later
            waits here for a free place, at most `timeout` seconds (PeerSilentError).
        execution: Threads, seed, timeout.

    Raises:
        GradwireError: A codec is unknown, or a parameter of it is not valid.
        ValueError, TypeError: Another argument is not valid.
    """

    @explains_arguments
    def __init__(
        self,
        optimizer: Optimizer,
        codec: str | None = None,
        *,
        servers: int = 1,
        named_parameters: Iterable[NamedTensor] | None = None,
        backup_workers: int | BackupWorkers = 0,
        staleness: int = 0,
        history: int = 64,
        pulls: str = UPDATES,
        barrier: str = "step",
        model: nn.Module | None = None,
        buffers_from: int | None = None,
        buffers_every: int = 50,
        process_group: dist.ProcessGroup | None = None,
        compression: Compression = Compression(),
        members: Members = Members(),
        execution: Execution = Execution(),
    ) -> None:
        require_optimizer(optimizer, "the others are given by name")
        settings = ServerSettings.make(
            compression.given(codec=codec),
            members.given(process_group=process_group),
            execution,
            optimizer,
            servers=servers,
            backup_workers=backup_workers,
            staleness=staleness,
            history=history,
            pulls=pulls,
            barrier=barrier,
        )
        if pulls == UPDATES:
            refuse_modes(optimizer, "ServerOptimizer")
        refuse_several_gradients(optimizer, "ServerOptimizer")
        settings.check_world(model)
        self.world_size, self.workers = settings.world_size, settings.workers
        if named_parameters is None and model is not None:
            named_parameters = model.named_parameters()
        buffers = make_buffers(model, buffers_from, buffers_every, self.workers)
        self._plan = make_plan(settings, optimizer, named_parameters, buffers)
        self._settings, self._named = self._plan.settings, self._plan.named
        if model is not None:
            refuse_wrapped(model, [tensor for _, tensor in self._named])
        self._link: ServerLink | None = None
        self._places: Places | None = None
        if settings.store is not None:
            setup = self._plan.describe()
            self._places = Places(settings, servers, settings.timeout, setup)
            if self._places.rank is None:
                self._link = self._places.join(
                    lambda meeting: ServerLink(meeting, settings.patience(False), setup)
                )
                self._link.drop_with(self)
        self.joined = self._link is not None
        own_place = None if self._places is None else self._places.rank
        self.rank = dist.get_rank(settings.process_group) if own_place is None else own_place
        self._side: Serving | Working
        self._barrier: TensorBarrier | None = None
        if self.is_server:
            self._side = Serving(self._plan, self.rank, optimizer, self._places)
        else:
            self._side = Working(self._plan, self.rank, optimizer)
            if model is not None and settings.is_tensorwise:
                self._barrier = TensorBarrier(model, self._side)
        super().__init__(optimizer)  # last: until then an error leaves it to the user
        self._is_connected = False
        self._shared = SharedParameters(
            "ServerOptimizer", self._named, optimizer, model, self._plan.others
        )
        self._steps = 0
        # The ranks that step the wrapped optimizer: the servers, or the workers.
        steps = self.is_server != settings.pulls_gradients
        self._optimizer_watch = OptimizerWatch(
            [tensor for _, tensor in self._named] if steps else [],
            usual_push_codec(self._plan.layout),
            self.rank - self.workers if self.is_server else self.rank,
        )

    @property
    def is_server(self) -> bool:
        return self.rank >= self.workers

    @property
    def version(self) -> int:
        """Number of updates of the model here: the lowest, if the servers' numbers differ. With
        barrier="tensor" that for which the next forward pass waits; others may have made more."""
        return self._side.version if self._barrier is None else self._barrier.version

    @property
    def error(self) -> Exception | None:
        """The error that ended the communication; after it no step can be taken."""
        return None if self._link is None else self._link.error

    def connect(self) -> None:
        """Connects to the other ranks, compares setups, and gives workers the servers' model.

        Parameters that require no gradient are not sent, and their values are compared, where
        `model` or `named_parameters` gives their names (with `store` as they are when the object is
        made).
        Every rank must call it before the first forward and after `load_state_dict`. A process that
        joins gets the model as the other workers have it, and the options of the last version.
        Raises PeerMismatchError naming the rank that differs, and the difference.
        """
        if self._is_connected:
            return
        if self._link is None:
            group, places = self._settings.process_group, self._places
            where = group if places is None else places.founding()
            patience = self._settings.patience(self.is_server)
            self._link = ServerLink(where, patience, self._plan.describe(), self._side.state_text())
            self._link.drop_with(self)
        self._is_connected = True
        with self._link.entire("connect()"):
            if self.joined and isinstance(self._side, Working):
                self._side.join(self._link)
            else:
                self._side.begin(self._link)
        if self._barrier is not None:
            self._barrier.attach()
        if not self._settings.pulls_gradients:
            # The servers have the model and the optimizer's state from here on.
            self._shared.keep_memory()
            self._shared.watch_loads()
            self._shared.note_values()
            self._own_use.refuse_loading("load a ServerOptimizer's state before connect()")

    def stats(self) -> ServerStats:
        """Counters over all steps of this rank."""
        return summarize(
            self._side,
            self._link,
            self._plan.layout,
            version=self.version,
            timeline=[] if self._barrier is None else self._barrier.timeline(),
            remarks=self._plan.stage.remarks() + self._optimizer_watch.remarks,
        )

    def _find_scalars(self) -> dict[str, float | None]:
        return scalars_between(*self._side.counted, self._side.moved) | {"version": self.version}

    # A worker ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes the gradients and applies the servers' changes of the model.

        A gradient that is None counts as zero. If a gradient holds NaN or Inf on any rank, no rank
        applies this version; the first time, a NonFiniteStepWarning names the rank and the element.
        Raises TypeError for a sparse gradient, and CommunicationError naming the rank that is gone,
        is silent, or has stopped.
        """
        if is_of_get_state_dict():
            return None  # it asks for the state then, which is refused
        if isinstance(self._side, Serving):
            raise RuntimeError(f"rank {self.rank} is a server: serve() takes its steps")
        with self._forgets_scaler():
            loss = self._evaluate(closure)
            if not self._is_connected:
                self._connect_late()
            step, self._steps = self._steps, self._steps + 1
            scale = vars(self).get("grad_scale")  # while a GradScaler calls this
            with self._side.link.guard(f"step {step}"), self._own_use.of_owner():
                self._shared.check()
                self._side.check_unedited(self._shared.check_load())
                if self._barrier is None:
                    self._side.step(step, 1.0 if scale is None else 1.0 / float(scale))
                else:
                    self._barrier.finish(is_scaled=scale is not None)
        self._shared.note_values()
        note_step(self._optimizer)  # which is taken on the servers
        self._side.warn()
        self._side.count()
        self._log(step)
        return loss

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, backward() only accumulates gradients, as in DDP's no_sync. Only with
        barrier="tensor" it is needed; otherwise it does nothing."""
        return contextlib.nullcontext() if self._barrier is None else self._barrier.pause()

    def synchronize(self) -> None:
        """Waits until the parameters have the values of `version`, or newer ones. Call it before
        they are read outside of the model's forward pass and `state_dict`, which do so themselves.
        Only with barrier="tensor" it is needed; otherwise it does nothing."""
        if self._barrier is not None and self._is_connected:
            self._barrier.synchronize()

    def close(self) -> None:
        """Leaves: waits until the other workers leave, and takes over the servers' last model.

        It does not wait for the last `backup_workers` workers. A server needs no close after serve.
        """
        self._own_use.end()
        link = self._link
        if link is None or link.error is not None:
            return
        if self._barrier is not None:
            self._barrier.detach()
        if isinstance(self._side, Working) and self._is_connected:
            with link.guard("waiting for the last model"):
                self._side.leave()
        self._side.warn()
        link.close()

    # A server ----------------------------------------------------------------------------------

    def serve(self, on_version: Callable[[int], None] | None = None) -> None:
        """Makes versions until the workers have left.

        on_version: called with the number of each version, to save `state_dict()` or to evaluate.
        The workers have the version then, and the next version waits until the call returns.
        Raises CommunicationError naming the rank that is gone, is silent, or has stopped.
        """
        if isinstance(self._side, Working):
            raise RuntimeError(f"rank {self.rank} is a worker: step() takes its steps")
        self.connect()

        def end_version(version: int) -> None:
            self._shared.check()
            self._side.warn()
            self._side.count()
            self._log(version)
            if on_version is not None:
                on_version(version)

        with self._side.link.guard("serving"), self._own_use.of_owner():
            self._side.run(end_version)
        self._side.link.close()

    # Checkpoint --------------------------------------------------------------------------------

    @runs_hooks_of_saving
    def state_dict(self) -> checkpoint.StateDict:
        """The local optimizer's state, with a further entry `gradwire`; every rank saves its own.

        Its entry `gradwire` has the version and this rank's residuals: on a worker those of its
        pushes, on a server those of its pulls. With pulls="updates" it has the model, too: the
        server's own tensors, and the sums of their changes on a worker.
        """
        refuse_get_state_dict(self)
        self.synchronize()
        state, buffers = self._optimizer.state_dict(), self._plan.buffers
        state["gradwire"] = self._identity().make_state(
            self._side.residuals(),
            version=self._side.version,
            workers=self.workers,
            model=self._side.named_model(),
            buffers={} if buffers is None or not self.is_server else buffers.named(),
        )
        return state

    @runs_hooks_of_loading
    def load_state_dict(self, state_dict: checkpoint.StateDict) -> None:
        """Goes on from a saved state, before `connect`.

        If every rank loads the state that it saved at the same version, the result is that of the
        uninterrupted run, bit for bit (without backup workers, staleness and on_lost="continue",
        with which it depends on who is fast). Otherwise workers get the servers' model in
        `connect`, which holds all that the servers' residuals still owed them. A worker without a
        saved state goes on without its residuals.

        With pulls="gradients" no state has the model: load it on every rank before `connect`.
        Raises ValueError for a state of another rank, world size, number of workers, codec, kind of
        pulls or model; `gradwire.torch.reshard` moves states to other numbers.
        """
        if self._is_connected:
            raise RuntimeError("load_state_dict comes before connect()")
        if self.joined:
            raise RuntimeError("a process that joins loads no state: it gets the servers' model")
        own = checkpoint.with_clean_names(own_part_of(state_dict))
        self._identity().check(own)
        checkpoint.check_order(own, [name for name, _ in self._named])
        if own.get("workers", self.workers) != self.workers:
            raise ValueError(
                f"the state is that of {own['workers']} workers, here are {self.workers}, of "
                f"{self.world_size} ranks"
            )
        local = {k: v for k, v in state_dict.items() if k != "gradwire"}
        here = self._side.own_names
        mine = {index for index, (name, _) in enumerate(self._named) if name in here}
        local["state"] = {i: s for i, s in local["state"].items() if i in mine}
        self._side.load_state(own, local)

    def __repr__(self) -> str:
        return f"ServerOptimizer({self._optimizer!r})"

    def _identity(self) -> checkpoint.Identity:
        tensors = shapes_of(self._named)
        identity = self._settings.identity("ServerOptimizer", self.rank, self.world_size, tensors)
        return replace(identity, exchange=exchange_text(self._settings.pulls))

    def _connect_late(self) -> None:
        before = [tensor.detach().clone() for _, tensor in self._named]
        self.connect()
        if not all(torch.equal(t, old) for (_, t), old in zip(self._named, before, strict=True)):
            raise RuntimeError(
                "the servers' model differs from that for which this gradient was computed: call "
                "connect() on every rank before the first forward"
            )
