"""`ServerOptimizer`: an optimizer whose model and state live on dedicated server ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from gradwire.torch.link.errors import (
    NonFiniteStepWarning,
    OutgrownResidualWarning,
    UnmatchedPatternWarning,
)
from gradwire.torch.records import checkpoint
from gradwire.torch.records.exchange_settings import DEFAULT_CODEC, CodecArguments, CodecSettings
from gradwire.torch.records.optimizer_watch import OptimizerWatch, usual_push_codec
from gradwire.torch.records.parameters import NamedTensor, name_parameters, shapes_of
from gradwire.torch.records.stats import OutgrownResidual
from gradwire.torch.records.wrapping_optimizer import WrappingOptimizer
from gradwire.torch.server.model_parts import ServerPart
from gradwire.torch.server.server_link import ServerLink
from gradwire.torch.server.server_loop import Serving
from gradwire.torch.server.server_stats import ServerStats, summarize
from gradwire.torch.server.worker_loop import Working


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

    servers         number of server ranks
    named_parameters   the names of the parameters, which rules and errors mention; without them a
                    name is "group.place"
    backup_workers  each version is finished without this number of pushes; late ones are dropped
    staleness       a worker goes on while at most this number of its pushed versions are not yet
                    pulled
    history         finished versions that a server keeps for workers that lack them; a worker that
                    lacks more gets the model itself
    process_group   workers and servers; None: all ranks. Ranks are counted in this group, also in
                    error messages
    codec, settings   as in GradwireState: pull_codec, rules, exclude, min_numel, threads, target,
                    seed, timeout

    Every rank must be given the same arguments (`connect` compares them). Raises GradwireError for
    an unknown codec or a bad parameter, ValueError and TypeError for other arguments.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        servers: int = 1,
        codec: str = DEFAULT_CODEC,
        named_parameters: Iterable[NamedTensor] | None = None,
        backup_workers: int = 0,
        staleness: int = 0,
        history: int = 64,
        **settings: Unpack[CodecArguments],
    ) -> None:
        self._settings = CodecSettings(codec, **settings)
        super().__init__(optimizer)
        self._share_groups()
        self.rank = dist.get_rank(self._settings.process_group)
        self.world_size = dist.get_world_size(self._settings.process_group)
        if not 1 <= servers < self.world_size:
            raise ValueError(
                f"servers is {servers}; a world of {self.world_size} ranks has 1 to "
                f"{self.world_size - 1} servers, the others are workers"
            )
        self.workers = self.world_size - servers
        self._named = name_parameters(optimizer, named_parameters)
        self._layout = self._settings.layout(
            shapes_of(self._named), self.world_size, servers=servers
        )
        for pattern in self._layout.unmatched:
            warnings.warn(
                f"no parameter matches {pattern!r}, which rules= or exclude= has",
                UnmatchedPatternWarning,
                stacklevel=2,
            )
        part = ServerPart(self._layout, self._named, self.rank)
        options: dict[str, Any] = {
            "backup": backup_workers,
            "staleness": staleness,
            "history": history,
            "threads": self._settings.threads,
            "target": self._settings.target,
            "seed": self._settings.seed,
        }
        self._side: Serving | Working
        if self.is_server:
            self._side = Serving(self._layout, part, self.rank, optimizer, **options)
        else:
            peers = range(self.workers, self.world_size)
            self._side = Working(self._layout, part, self.rank, peers, **options)
        self._link: ServerLink | None = None
        self._loaded_version = 0
        self._steps = 0
        self._warned = False  # of values that are not finite
        self._outgrown = 0  # residuals of which it has warned
        # A server steps the wrapped optimizer; a worker does not.
        mine = [tensor for _, tensor in self._named] if self.is_server else []
        self._optimizer_watch = OptimizerWatch(mine, usual_push_codec(self._layout))

    # What every rank has ------------------------------------------------------------------------

    @property
    def is_server(self) -> bool:
        return self.rank >= self.workers

    @property
    def version(self) -> int:
        """Number of updates of the model here: the lowest, if the servers' numbers differ."""
        return self._loaded_version if self._link is None else self._side.version

    @property
    def error(self) -> Exception | None:
        """The error that ended the communication; after it no step can be taken."""
        return None if self._link is None else self._link.error

    def connect(self) -> None:
        """Connects to the other ranks, compares setups, and gives workers the servers' model.

        Every rank must call it before the first forward and after `load_state_dict`.
        Raises PeerMismatchError naming the rank that differs, and the difference.
        """
        if self._link is not None:
            return
        settings, side = self._settings, self._side
        setup = side.exchange.describe()
        self._link = ServerLink(settings.process_group, settings.timeout, setup, side.peers)
        weakref.finalize(self, ServerLink.drop, self._link)
        side.begin(self._link, self._loaded_version)

    def stats(self) -> ServerStats:
        """Counters over all steps of this rank."""
        return summarize(
            self._side,
            self._link,
            self._layout,
            rank=self.rank,
            servers=self.world_size - self.workers,
            codec=self._settings.text(),
            version=self.version,
            remarks=self._optimizer_watch.remarks,
        )

    # A worker ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes the gradients and applies the servers' changes of the model.

        A gradient that is None counts as zero. If a gradient holds NaN or Inf on any rank, no rank
        applies this version; the first time, a NonFiniteStepWarning names the rank and the element.
        Raises TypeError for a sparse gradient, and CommunicationError naming the rank that is gone,
        is silent, or has stopped.
        """
        if isinstance(self._side, Serving):
            raise RuntimeError(f"rank {self.rank} is a server: serve() takes its steps")
        loss = self._evaluate(closure)
        if self._link is None:
            self._connect_late()
        step, self._steps = self._steps, self._steps + 1
        with self._side.link.guard(f"step {step}"):
            self._side.step(step, self.param_groups)
        self._warn(f"step {step}")
        return loss

    def close(self) -> None:
        """Leaves: waits until the other workers leave, and takes over the servers' last model.

        It does not wait for the last `backup_workers` workers. A server needs no close after serve.
        """
        link = self._link
        if link is None or link.error is not None:
            return
        if isinstance(self._side, Working):
            with link.guard("waiting for the last model"):
                self._side.leave()
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
            self._warn(f"version {version - 1}")
            if on_version is not None:
                on_version(version)

        with self._side.link.guard("serving"):
            self._side.run(end_version)
        self._side.link.close()

    # Checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> checkpoint.StateDict:
        """The local optimizer's state, with a further entry `gradwire`; every rank saves its own.

        The entry holds format, codec, rank, world_size, version and residuals: on a worker those of
        its pushes, on a server those of its pulls. A server's entry also has its tensors.
        """
        state = self._optimizer.state_dict()
        state["gradwire"] = checkpoint.make_state(
            self._settings.text(),
            self.rank,
            self.world_size,
            checkpoint.residuals_in(self._side.exchange),
            version=self.version,
            model=self._side.part.named_model() if self.is_server else {},
        )
        return state

    def load_state_dict(self, state_dict: checkpoint.StateDict) -> None:
        """Goes on from a saved state, before `connect`. Workers then get the servers' model.

        A server's residuals are not used: they are what its workers lack, and these get the whole
        model. A worker without a saved state goes on without its residuals.
        Raises ValueError for a state of another rank or world size.
        """
        if self._link is not None:
            raise RuntimeError("load_state_dict comes before connect()")
        own = state_dict["gradwire"]
        checkpoint.check_place(own, self.rank, self.world_size)
        self._optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "gradwire"})
        self._share_groups()
        self._loaded_version = int(own["version"])
        if self.is_server:
            self._side.part.load_named(own["model"])
            return
        for residual in checkpoint.residuals_of(own):
            self._side.exchange.import_residual(*residual)

    def __repr__(self) -> str:
        return f"ServerOptimizer({self._optimizer!r})"

    # -------------------------------------------------------------------------------------------

    def _connect_late(self) -> None:
        before = [tensor.detach().clone() for _, tensor in self._named]
        self.connect()
        if not all(torch.equal(t, old) for (_, t), old in zip(self._named, before, strict=True)):
            raise RuntimeError(
                "the servers' model differs from that for which this gradient was computed: call "
                "connect() on every rank before the first forward"
            )

    def _warn(self, when: str) -> None:
        found = self._side.exchange.outgrown_residuals
        for residual in found[self._outgrown :]:
            text = OutgrownResidual(**residual).describe()
            warnings.warn(text, OutgrownResidualWarning, stacklevel=3)
        self._outgrown = len(found)
        where = self._side.exchange.non_finite
        if where is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{when}: the gradient of rank {where['rank']} is not finite at element "
                f"{where['element']} of {where['tensor']}; nobody applied this version, and the "
                "residuals are kept. Further ones are only counted (skipped_versions)",
                NonFiniteStepWarning,
                stacklevel=3,
            )
