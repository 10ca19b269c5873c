"""`QSVRG`: quantized stochastic variance-reduced gradient descent (QSGD, section 3.3).

It minimizes a mean of functions, f(x) = mean of f_j(x), of which K workers hold equally many. In
each epoch, from the point y on:

    full   every worker sends the gradient of its own functions at y, as floats. Their mean g is the
           gradient of f at y
    steps  T times: every worker draws one of its functions, j, and sends the quantized
           Q(grad f_j(x) - grad f_j(y) + g) to all others. All subtract lr times the mean from x
    end    y becomes the mean of the points x at which gradients were taken

Theorem 3.6 of the paper: f(y) - f* falls by a factor in each epoch, on average over the draws, if
every f_j is convex with L-Lipschitz gradients and f is l-strongly convex. The factor is

    1 / (l lr T (1 - 4 L lr)) + 4 L lr / (1 - 4 L lr)

because Q, with sqrt(n) levels, at most doubles the second moment of what it quantizes, and variance
reduction bounds that by 4 L (f(x) - f* + f(y) - f*). The proof holds as it is though a worker draws
from its own functions alone, instead of from all (as the paper has it): with equally many functions
on each worker, the mean over workers is the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from gradwire.torch.link.engine import agree
from gradwire.torch.link.transport import Transport
from gradwire.torch.records.checkpoint import Identity, StateDict, residuals_in, residuals_of
from gradwire.torch.records.exchange_settings import ExchangeSettings
from gradwire.torch.records.modes import ordinary_tensors
from gradwire.torch.records.parameters import (
    NamedShape,
    all_finite,
    require_trainable,
    split_like,
)
from gradwire.torch.records.shared_parameters import SharedParameters
from gradwire.torch.records.stats import Stats
from gradwire.torch.session.bucket import BucketJob
from gradwire.torch.session.session import Session, SessionOwner

LossOf = Callable[[torch.Tensor], torch.Tensor]

# With lr = 1 / (17 L) the factor is 0.9 after the fewest steps: T = 37.6 L / l.
_SMOOTHNESS_TIMES_LR = 1 / 17
_STEPS_PER_CONDITION = 38


@dataclass(frozen=True)
class QSVRGEpoch:
    """What a worker sent in an epoch. A packet for all others counts once.

    full_bits    of the full gradient: 32 a value
    update_bits  of the quantized updates, without the packets' headers
    sent_bytes   with headers, each packet as often as it was sent
    """

    steps: int
    full_bits: int
    update_bits: int
    sent_bytes: int


class QSVRG(SessionOwner):
    """Minimizes a mean of convex functions, at a proven linear rate, with compressed exchanges.

        def loss_of(j):  # the mean of the functions j at the present parameters
            return functional.mse_loss(model(inputs[j]), labels[j]) / 2

        optimizer = QSVRG(model.parameters(), loss_of, len(inputs), smoothness=L, convexity=l)
        for _ in range(epochs):
            optimizer.epoch()

    With a process group, every rank is a worker with functions of its own. Without one, this
    process plays all workers, with the same result, and nothing is sent.

    params        float32 on the CPU, and equal on all ranks. `epoch` changes them in place
    loss_of       takes indices of functions, as int64 from 0 to count - 1, and returns the mean of
                  these functions at the present parameters, a scalar. No other random numbers or
                  states (dropout, batch norm) may enter, as each function is taken at two points
    count         how many functions there are: on this rank, the same number on every rank; or for
                  all workers of this process, of which each gets an equal share
    smoothness    L: the gradient of every function is L-Lipschitz
    convexity     l: the mean of all functions is l-strongly convex, 0 < l <= L
    lr, steps     None: 1 / (17 L), and the number of steps T with which the factor is at most 0.9
    codec         None: qsgd with ceil(sqrt(n)) levels for n parameters, norm=l2 of the whole vector
                  and coder=elias-dense, for which the theorem holds
    workers       without a process group: the number of workers
    process_group, seed, timeout   as in GradwireState

    Raises ValueError for arguments that the theorem does not cover. An epoch raises
    PeerMismatchError, naming two ranks and what differs, if their arguments or parameters do.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        loss_of: LossOf,
        count: int,
        *,
        smoothness: float,
        convexity: float,
        lr: float | None = None,
        steps: int | None = None,
        codec: str | None = None,
        workers: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        timeout: float = 600.0,
    ) -> None:
        self._parameters = list(params)
        self._loss_of = loss_of
        numel = _count_values(self._parameters)
        self.lr, self.steps = _choose(smoothness, convexity, lr, steps)
        self.smoothness, self.convexity = smoothness, convexity
        self.codec = codec or _codec_for(numel)
        settings = ExchangeSettings.of(
            self.codec,
            {
                "exchange": "broadcast",
                "rules": [("*", self.codec)],
                "process_group": process_group,
                "seed": seed,
                "timeout": timeout,
            },
        )
        tensors: list[NamedShape] = [("update", [numel])]
        self._ranks: _Ranks | _Here
        if dist.is_initialized():
            if workers is not None:
                raise ValueError("workers is for one process; with a process group they are ranks")
            self._session = Session(settings)
            self._session.close_with(self)
            self._ranks = _Ranks(self._session, tensors)
            mine, players = [self._session.rank], 1
        else:
            players = 1 if workers is None else workers
            if players < 1:
                raise ValueError(f"workers is {workers}; at least one is needed")
            self._ranks = _Here(settings, tensors, players)
            mine = list(range(players))
        if count < 1 or count % players:
            raise ValueError(
                f"QSVRG minimizes a finite sum, of which {players} workers here hold equal shares: "
                f"count is {count}, valid are {players}, {2 * players}, {3 * players}, ..."
            )
        share = count // players
        self._seed, self._workers = seed, mine
        self._draws = [np.random.default_rng([seed, worker]) for worker in mine]
        with ordinary_tensors():
            places = torch.arange(count, dtype=torch.int64, device="cpu")
            self._shares = places.split(share)
        self._values = self._read()
        self._step = 0
        self._share = share
        named = [(f"parameter {place}", p) for place, p in enumerate(self._parameters)]
        self._shared = SharedParameters("QSVRG", named)
        shapes = [(str(place), list(p.shape)) for place, p in enumerate(self._parameters)]
        rank, world_size = self._ranks.place
        self._identity = settings.identity("QSVRG", rank, world_size, shapes)

    @property
    def factor(self) -> float:
        """The proven factor of f - f* in an epoch, on average; above 1 if nothing is proven."""
        noise = 4 * self.smoothness * self.lr
        if noise >= 1:
            return math.inf
        return (1 / (self.convexity * self.lr * self.steps) + noise) / (1 - noise)

    def epoch(self) -> QSVRGEpoch:
        """Takes an epoch on all workers, from the parameters as they are now to the new y.

        Raises FloatingPointError, on all ranks alike, if a gradient is NaN or infinite; parameters
        are then as before the epoch. Raises the errors of GradwireState.
        """
        self._shared.check()
        self._values = self._read()
        digest = hashlib.sha256(self._values.numpy().tobytes()).hexdigest()
        steps = f"{self._share} functions a worker, {self.steps} steps of {self.lr} in an epoch"
        self._ranks.compare([f"QSVRG of {steps}", f"parameters {digest}"])
        before = self._ranks.sent()
        y = self._values.clone()
        try:
            self._take_steps(y)
        finally:
            self._set(self._values)
        sent = [after - earlier for after, earlier in zip(self._ranks.sent(), before, strict=True)]
        full_bits = 32 * y.numel() if self._ranks.workers > 1 else 0
        return QSVRGEpoch(self.steps, full_bits, 8 * sent[0], sent[1])

    def state_dict(self) -> StateDict:
        """The point y, the numbers of steps and draws, and this rank's residuals, between two
        epochs; every rank saves its own. A process that plays all workers is rank 0 of 1."""
        return {
            **self._ranks.state_dict(self._identity, self._step),
            "values": self._values.clone(),
            "draws": [draws.bit_generator.state for draws in self._draws],
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Goes on from a saved state, with its point y as the parameters; every rank must load its
        own, at the same epoch.

        The result is that of the uninterrupted run, bit for bit. Raises ValueError for a state of
        another rank, world size, codec or model, or of another number of workers in this process.
        """
        self._identity.check(state)
        saved = state["draws"]
        if saved is not None and len(saved) != len(self._workers):
            raise ValueError(
                f"the state is that of {len(saved)} workers in one process, here are "
                f"{len(self._workers)}"
            )
        self._ranks.load_state_dict(state)
        self._step = int(state["iterations"])
        for place, worker in enumerate(self._workers):
            self._draws[place] = np.random.default_rng([self._seed, worker, self._step])
            if saved is not None:  # None: `reshard` gives the workers new draws
                self._draws[place].bit_generator.state = saved[place]
        self._values.copy_(state["values"])
        self._set(self._values)

    def stats(self) -> Stats:
        """Sums over all exchanges of this rank. Raises ValueError without a process group."""
        if self._session is None:
            raise ValueError("nothing was sent: all workers are in this process")
        return self._session.stats()

    def _take_steps(self, y: torch.Tensor) -> None:
        full = self._average([self._gradient(y, share) for share in self._shares], raw=True)
        x = y.clone()
        total = torch.zeros_like(x, dtype=torch.float64)
        for _ in range(self.steps):
            total += x
            updates = []
            for share, draws in zip(self._shares, self._draws, strict=True):
                j = share[int(draws.integers(len(share)))].reshape(1)
                updates.append(self._gradient(x, j) - self._gradient(y, j) + full)
            x -= self.lr * self._average(updates)
        self._values.copy_(total / self.steps)

    def _average(self, vectors: list[torch.Tensor], raw: bool = False) -> torch.Tensor:
        mean = self._ranks.average(vectors, self._step, raw)
        self._step += 1
        if not all_finite(mean):
            raise FloatingPointError(
                f"QSVRG: a gradient is not finite in exchange {self._step - 1}; the steps diverge "
                f"if lr={self.lr:g} is too large (1 / (17 L) is proven), or loss_of is at fault"
            )
        return mean

    def _gradient(self, at: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """The flat gradient of the mean of the functions j."""
        self._set(at)
        with torch.inference_mode(False), torch.enable_grad():
            # A function may leave parameters out: its gradient of them is 0.
            parts = torch.autograd.grad(self._loss_of(j), self._parameters, materialize_grads=True)
        return torch.cat([part.reshape(-1) for part in parts])

    @ordinary_tensors()
    def _read(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self._parameters])

    @ordinary_tensors()
    def _set(self, values: torch.Tensor) -> None:
        for parameter, part in zip(
            self._parameters, split_like(values, self._parameters), strict=True
        ):
            parameter.copy_(part)


class _Ranks:
    """Averages over the ranks of a process group."""

    def __init__(self, session: Session, tensors: list[NamedShape]) -> None:
        self._session, self._tensors = session, tensors
        self.workers = session.world_size
        self.place = session.rank, session.world_size

    def state_dict(self, identity: Identity, step: int) -> StateDict:
        return self._session.state_dict(identity, step)

    def load_state_dict(self, state: StateDict) -> None:
        self._session.load_state_dict(state)

    def compare(self, facts: Sequence[str]) -> None:
        def work(wire: Transport) -> None:
            agree("\n".join(facts), wire)

        self._session.start(work, "comparing the settings of QSVRG").result()

    def average(self, vectors: list[torch.Tensor], step: int, raw: bool) -> torch.Tensor:
        (values,) = vectors
        # Buckets with another codec are other buckets.
        job = BucketJob(step, self._tensors, values, index=int(raw), raw=raw)
        return self._session.submit(job).result()

    def sent(self) -> tuple[int, int]:
        """Bytes of the quantized payloads, each once, and of all packets that this rank sent."""
        totals = self._session.runner.ledger.totals
        return totals.push_payload_bytes // max(self.workers - 1, 1), totals.push_bytes


class _Here:
    """Averages over workers that are all in this process, with the bits that ranks compute."""

    place = 0, 1

    def __init__(self, settings: ExchangeSettings, tensors: list[NamedShape], workers: int) -> None:
        self.workers = workers
        ((_, (self._numel,)),) = tensors
        self._exchanges = {
            raw: [
                settings.make_exchange(settings.bucket_layout(tensors, workers, raw=raw), worker)
                for worker in range(workers)
            ]
            for raw in (False, True)
        }

    def state_dict(self, identity: Identity, step: int) -> StateDict:
        """The workers' residuals lie one after the other."""
        residuals = [
            residual._replace(offset=residual.offset + worker * self._numel)
            for worker, exchange in enumerate(self._exchanges[False])
            for residual in residuals_in(exchange)
        ]
        return identity.make_state(residuals, iterations=step)

    def load_state_dict(self, state: StateDict) -> None:
        for exchange in self._exchanges[False]:
            exchange.scale_residuals(0.0)
        for kind, name, offset, values in residuals_of(state):
            worker, offset = divmod(offset, self._numel)
            self._exchanges[False][worker].import_residual(kind, name, offset, values)

    def compare(self, facts: Sequence[str]) -> None:
        """There is one set of facts."""

    def average(self, vectors: list[torch.Tensor], step: int, raw: bool) -> torch.Tensor:
        exchanges = self._exchanges[raw]
        for exchange, values in zip(exchanges, vectors, strict=True):
            exchange.start(values.numpy(), step)
        for worker, exchange in enumerate(exchanges):
            for peer, message in exchange.outgoing():
                exchanges[peer].receive(worker, message)
        return vectors[0]

    def sent(self) -> tuple[int, int]:
        quantized, raw = (self._exchanges[kind][0].stats() for kind in (False, True))
        payloads = quantized["push_payload_bytes"] // max(self.workers - 1, 1)
        return payloads, quantized["push_bytes"] + raw["push_bytes"]


def _count_values(parameters: Sequence[torch.Tensor]) -> int:
    """Raises ValueError without parameters, TypeError for one that is not as it must be."""
    if not parameters:
        raise ValueError("QSVRG got no parameters")
    for place, parameter in enumerate(parameters):
        require_trainable(f"parameter {place}", parameter)
        dense = parameter.dtype == torch.float32 and parameter.layout == torch.strided
        if not (dense and parameter.device.type == "cpu" and parameter.requires_grad):
            raise TypeError(
                f"QSVRG takes dense float32 parameters on the CPU that require a gradient; "
                f"parameter {place} is {parameter.dtype}, {parameter.layout}, on "
                f"{parameter.device}, requires_grad={parameter.requires_grad}"
            )
    return sum(parameter.numel() for parameter in parameters)


def _choose(
    smoothness: float, convexity: float, lr: float | None, steps: int | None
) -> tuple[float, int]:
    """Raises ValueError for numbers that the theorem does not cover."""
    if not 0 < convexity <= smoothness < math.inf:
        raise ValueError(
            f"convexity is {convexity} and smoothness {smoothness}; valid are 0 < convexity <= "
            "smoothness. A mean that is not strongly convex has no linear rate: add L2 "
            "regularization"
        )
    lr = _SMOOTHNESS_TIMES_LR / smoothness if lr is None else lr
    steps = math.ceil(_STEPS_PER_CONDITION * smoothness / convexity) if steps is None else steps
    if not 0 < lr < math.inf or steps < 1:
        raise ValueError(f"lr is {lr} and steps {steps}; both must be above 0")
    return lr, steps


def _codec_for(numel: int) -> str:
    """The dense regime of the paper: Q(v, sqrt(n)), which at most doubles the second moment."""
    levels = math.isqrt(numel - 1) + 1 if numel > 1 else 1
    group = -(-numel // 8) * 8
    return f"qsgd:levels={levels},bucket={group},norm=l2,coder=elias-dense"
