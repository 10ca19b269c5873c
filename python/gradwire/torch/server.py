"""`ServerOptimizer`: an optimizer whose model and state live on dedicated server ranks."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from gradwire._core import Layout, ServerExchange
from gradwire.torch import checkpoint
from gradwire.torch.errors import (
    NonFiniteStepWarning,
    UnmatchedPatternWarning,
)
from gradwire.torch.residuals import Residual
from gradwire.torch.server_link import CONNECT_SECONDS, ServerLink
from gradwire.torch.server_loop import Serving
from gradwire.torch.server_parts import NamedParameters, ServerPart
from gradwire.torch.server_stats import ServerStats, summarize
from gradwire.torch.server_worker import Working
from gradwire.torch.wire import Kind

StateDict = dict[str, Any]


class ServerOptimizer(Optimizer):
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

    The last `servers` ranks hold the model and the optimizer's state, each parameter whole on one
    of them; the others are workers. A worker's `step()` pushes its gradient and applies the changes
    of the model that come back; `zero_grad`, `param_groups`, schedulers and hooks of the optimizer
    work as ever, and what a worker sets in `param_groups` reaches the servers with its next push.
    Any optimizer will do that steps each parameter by itself: SGD with momentum, Adam, and so on.

    servers         number of server ranks
    codec, pull_codec, rules, exclude, min_numel, threads, target, seed
                    as for GradwireState; names are those of `named_parameters`, else
                    "group.place"
    backup_workers  a version is finished without the last so many pushes; these are dropped
    staleness       versions that a worker has pushed and need not have pulled when it goes on
    history         finished versions that a server keeps for workers that are behind; one that
                    lacks more gets the model itself
    process_group   workers and servers; None: all ranks. Ranks, here and in messages, are places in
                    it
    timeout         seconds to wait for a rank that is connected but silent

    Every rank must be given the same arguments (compared by `connect`). Raises GradwireError for an
    unknown codec or a bad parameter, ValueError and TypeError for other arguments.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        servers: int = 1,
        codec: str = "3lc:s=1.75",
        pull_codec: str | None = None,
        rules: Sequence[tuple[str, ...]] = (),
        exclude: Sequence[str] = (),
        min_numel: int = 256,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        backup_workers: int = 0,
        staleness: int = 0,
        history: int = 64,
        process_group: dist.ProcessGroup | None = None,
        threads: int = 1,
        target: str = "auto",
        seed: int = 0,
        timeout: float = 600.0,
    ) -> None:
        if not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"timeout is {timeout}; a positive number of seconds is needed")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._optimizer = optimizer
        self._share()
        self._group = process_group
        self._timeout = timeout
        self._backup, self._staleness, self._history = backup_workers, staleness, history
        self._codec = codec if pull_codec is None else f"{codec}, pull {pull_codec}"
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        if not 1 <= servers < self.world_size:
            raise ValueError(
                f"servers is {servers}; a world of {self.world_size} ranks has 1 to "
                f"{self.world_size - 1} servers, the others are workers"
            )
        self.workers = self.world_size - servers
        self._parameters = NamedParameters(optimizer, named_parameters)
        self._layout = Layout(
            self._parameters.shapes(),
            self.world_size,
            codec,
            pull_codec=pull_codec,
            rules=rules,
            exclude=exclude,
            min_numel=min_numel,
            servers=servers,
        )
        for pattern in self._layout.unmatched:
            warnings.warn(
                f"no parameter matches {pattern!r}, which rules= or exclude= has",
                UnmatchedPatternWarning,
                stacklevel=2,
            )
        self._part = ServerPart(self._layout, self._parameters, self.rank)
        self._exchange = ServerExchange(
            self._layout,
            self.rank,
            self._update if self.is_server else self._apply,
            backup=backup_workers,
            staleness=staleness,
            history=history,
            threads=threads,
            target=target,
            seed=seed,
        )
        self._link: ServerLink | None = None
        self._loaded_version = 0
        self._steps = 0
        self._serving: Serving | None = None
        self._working: Working | None = None
        self._warned = False

    # What every rank has ------------------------------------------------------------------------

    @property
    def is_server(self) -> bool:
        return self.rank >= self.workers

    @property
    def version(self) -> int:
        """Updates that the model here has seen; of several servers' tensors, the oldest."""
        if self._link is None:
            return self._loaded_version
        return min(self._exchange.version(server) for server in self._servers())

    @property
    def error(self) -> Exception | None:
        """What ended the communication; after it no step can be taken."""
        return None if self._link is None else self._link.error

    def connect(self) -> None:
        """Finds the other ranks, compares setups, and gives workers the servers' model.

        Before the first forward, on every rank at the same place; `load_state_dict` comes before.
        Raises PeerMismatchError naming the rank that differs and how.
        """
        if self._link is not None:
            return
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=max(self._timeout, CONNECT_SECONDS)),
            backend="gloo",
            use_local_synchronization=len(ranks) < dist.get_world_size(),
            group_desc="gradwire",
            sort_ranks=False,
        )
        workers = list(range(self.workers))
        peers = workers if self.is_server else list(self._servers())
        self._link = ServerLink(group, self._timeout, self._exchange, peers)
        weakref.finalize(self, ServerLink.abandon, self._link)
        if self.is_server:
            self._exchange.set_version(self.rank, self._loaded_version)
            self._part.keep_model(with_replica=self._backup > 0)
            model = self._part.model(self._loaded_version)
            for worker in workers:
                self._link.send(worker, Kind.MODEL, model)
            return
        self._working = Working(self._link, self._exchange, self._part, self._servers())
        with self._link.guard("waiting for the model"):
            self._working.receive_models(self._exchange.set_version)

    def stats(self) -> ServerStats:
        """Sums over what this rank did."""
        link = self._link
        return summarize(
            self._exchange,
            self._layout,
            self._part,
            servers=self.world_size - self.workers,
            codec=self._codec,
            version=self.version,
            sent_bytes=0 if link is None else link.traffic.sent_bytes + link.traffic.framing_bytes,
            wire_seconds=0.0 if link is None else link.wire_seconds,
            serving=self._serving,
        )

    # A worker ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes the gradients and applies what the servers made of them.

        A gradient that is None counts as zero. Where some rank's gradient is NaN or Inf, nobody
        applies this version, and NonFiniteStepWarning says once which rank and where.
        Raises CommunicationError naming the rank that is gone, silent, or stopped.
        """
        if self.is_server:
            raise RuntimeError(f"rank {self.rank} is a server: serve() takes its steps")
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self._link is None:
            self._connect_late()
        assert self._working is not None
        step, self._steps = self._steps, self._steps + 1
        with self._connected().guard(f"step {step}"):
            self._working.step(step, self.param_groups)
        self._warn_of_non_finite(f"step {step}")
        return result

    def close(self) -> None:
        """Leaves: takes over the servers' model as it is when the other workers are through, too.

        Where backup workers are allowed, so many of them are not waited for. On a server nothing
        is left to do after `serve`.
        """
        link = self._link
        if link is None or link.error is not None:
            return
        if self._working is not None:
            with link.guard("waiting for the last model"):
                self._working.leave()
        link.close()

    # A server ----------------------------------------------------------------------------------

    def serve(self, on_version: Callable[[int], None] | None = None) -> None:
        """Makes versions until the workers have left.

        on_version: called after each version with its number, to save `state_dict()` now and then,
        or to evaluate. The workers have the version by then; the next one waits for this.
        Raises CommunicationError naming the rank that is gone, silent, or stopped.
        """
        if not self.is_server:
            raise RuntimeError(f"rank {self.rank} is a worker: step() takes its steps")
        self.connect()
        link = self._connected()
        self._serving = Serving(
            link,
            self._exchange,
            self._part,
            self.workers,
            self._backup,
            in_step=self._backup == 0 and self._staleness == 0,
            keep_sends=2 * self._history if self._staleness else 0,
        )
        with link.guard("serving"):
            self._serving.run(lambda version: self._end_version(version, on_version))
        link.close()

    # Checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """The local optimizer's state, and this rank's part of the rest; every rank saves its own.

        `gradwire` holds format, rank, world_size, version and: on a worker the residuals of its
        pushes, on a server those of its pulls and its tensors of the model.
        """
        state = self._optimizer.state_dict()
        state["gradwire"] = {
            "format": checkpoint.FORMAT,
            "codec": self._codec,
            "rank": self.rank,
            "world_size": self.world_size,
            "version": self.version,
            "model": self._part.named_model() if self.is_server else {},
            "residuals": checkpoint.residuals_to_list(
                Residual(**entry) for entry in self._exchange.export_residuals()
            ),
        }
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Goes on from a saved state, before `connect`. Workers then get the servers' model.

        A server's residuals are not needed: they are what its workers lack, who then get all of it.
        A worker that has no saved state goes on without what it owed.
        Raises ValueError if it was saved by another rank or for another world size.
        """
        if self._link is not None:
            raise RuntimeError("load_state_dict comes before connect()")
        own = state_dict["gradwire"]
        residuals = checkpoint.residuals_of(own)
        if (own["rank"], own["world_size"]) != (self.rank, self.world_size):
            raise ValueError(
                f"the state is that of rank {own['rank']} of {own['world_size']}, this is rank "
                f"{self.rank} of {self.world_size}"
            )
        self._optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "gradwire"})
        self._share()
        self._loaded_version = int(own["version"])
        if self.is_server:
            self._part.load_named(own["model"])
            return
        for residual in residuals:
            self._exchange.import_residual(
                residual.kind, residual.name, residual.offset, residual.values
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_optimizer"):
            raise RuntimeError("the servers' tensors are set: no parameter can be added")
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"ServerOptimizer({self._optimizer!r})"

    # -------------------------------------------------------------------------------------------

    def _share(self) -> None:
        """Groups and state are those of the local optimizer, the same objects."""
        self.param_groups = self._optimizer.param_groups
        self.state = self._optimizer.state

    def _servers(self) -> range:
        if self.is_server:
            return range(self.rank, self.rank + 1)
        return range(self.workers, self.world_size)

    def _connected(self) -> ServerLink:
        assert self._link is not None
        return self._link

    def _connect_late(self) -> None:
        before = self._parameters.snapshot()
        self.connect()
        if not self._parameters.equal(before):
            raise RuntimeError(
                "the servers' model differs from that for which this gradient was computed: call "
                "connect() on every rank before the first forward"
            )

    def _apply(self, server: int, version: int) -> None:
        self._part.apply(server)

    def _update(self) -> None:
        """The averages of this server's tensors are in the bucket: the local optimizer steps."""
        assert self._serving is not None
        self._part.step(self._optimizer, self._serving.options_of_version())

    def _end_version(self, version: int, on_version: Callable[[int], None] | None) -> None:
        self._warn_of_non_finite(f"version {version - 1}")
        if on_version is not None:
            on_version(version)

    def _warn_of_non_finite(self, when: str) -> None:
        where = self._exchange.non_finite
        if where is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{when}: the gradient of rank {where['rank']} is not finite at element "
                f"{where['element']} of {where['tensor']}; nobody applied this version, and the "
                "residuals are kept. Further ones are only counted (skipped_versions)",
                NonFiniteStepWarning,
                stacklevel=3,
            )
