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

from gradwire.option_record import explains_arguments
from gradwire.torch.buckets.bucket import BucketJob
from gradwire.torch.buckets.session import Session, SessionOwner
from gradwire.torch.checkpoint import StateDict
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.network.engine import agree
from gradwire.torch.options import Compression, Execution, Members
from gradwire.torch.parameters import (
    NamedShape,
    all_finite,
    ordinary_tensors,
    require_trainable,
    split_like,
)
from gradwire.torch.shared_parameters import SharedParameters
from gradwire.torch.stats import Stats

LossOf = Callable[[torch.Tensor], torch.Tensor]

# With lr = 1 / (17 L) the factor is 0.9 after the fewest steps: T = 37.6 L / l.
_SMOOTHNESS_TIMES_LR = 1 / 17
_STEPS_PER_CONDITION = 38


@dataclass(frozen=True)
class QSVRGEpoch:
    """What a worker sent in an epoch. A packet for all others counts once.

    Attributes:
        full_bits: Those of the full gradient: 32 a value.
        update_bits: Those of the quantized updates, without the packets' headers.
        sent_bytes: All, with headers, each packet as often as it was sent.
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

    Every rank is a worker with functions of its own. `gradwire.torch.loopback` has all workers in
    one process, with the same result.

    Args:
        params: float32 on the CPU, and equal on all ranks. `epoch` changes them in place.
        loss_of: Takes indices of functions, as int64 from 0 to count - 1, and returns the mean of
            these functions at the present parameters, a scalar. No other random numbers or states
            (dropout, batch norm) may enter, as each function is taken at two points.
        count: How many functions this rank has, the same number on every rank.
        smoothness: L: the gradient of every function is L-Lipschitz.
        convexity: l: the mean of all functions is l-strongly convex, 0 < l <= L.
        lr: None: 1 / (17 L).
        steps: T. None: so many that the factor is at most 0.9.
        codec: None: qsgd with ceil(sqrt(n)) levels for n parameters, norm=l2 of the whole vector
            and coder=elias-dense, for which the theorem holds.
        process_group: None: the default group.
        seed, timeout: As in Execution.

    Raises:
        ValueError: The theorem does not cover the arguments.

    An epoch raises PeerMismatchError, naming two ranks and what differs, if their arguments or
    parameters do.
    """

    _session: Session

    @explains_arguments
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
            Compression(self.codec, rules=[("*", self.codec)], exchange="broadcast"),
            Members(process_group),
            Execution(seed=seed, timeout=timeout),
        )
        self._tensors: list[NamedShape] = [("update", [numel])]
        if count < 1:
            raise ValueError(f"QSVRG minimizes a finite sum: count is {count}, valid are 1, 2, ...")
        if not dist.is_initialized():
            raise ValueError(
                "QSVRG needs a process group: call torch.distributed.init_process_group, or have "
                "all workers in this process, with gradwire.torch.loopback.run(workers, function)"
            )
        self._session = session = Session(settings)
        session.close_with(self)
        self._seed, self._count = seed, count
        self._draws = np.random.default_rng([seed, session.rank])
        self._values = self._read()
        self._step = 0
        named = [(f"parameter {place}", p) for place, p in enumerate(self._parameters)]
        self._shared = SharedParameters("QSVRG", named)
        shapes = [(str(place), list(p.shape)) for place, p in enumerate(self._parameters)]
        self._identity = session.identity("QSVRG", shapes)

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
        steps = f"{self._count} functions a worker, {self.steps} steps of {self.lr} in an epoch"
        facts = f"QSVRG of {steps}\nparameters {digest}"
        self._session.start(
            lambda wire: agree(facts, wire), "comparing the settings of QSVRG"
        ).result()
        before = self._sent()
        y = self._values.clone()
        try:
            self._take_steps(y)
        finally:
            self._set(self._values)
        sent = [after - earlier for after, earlier in zip(self._sent(), before, strict=True)]
        full_bits = 32 * y.numel() if self._session.world_size > 1 else 0
        return QSVRGEpoch(self.steps, full_bits, 8 * sent[0], sent[1])

    def state_dict(self) -> StateDict:
        """The point y, the numbers of steps and draws, and this rank's residuals, between two
        epochs; every rank saves its own."""
        return {
            **self._session.state_dict(self._identity, self._step),
            "values": self._values.clone(),
            "draws": self._draws.bit_generator.state,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Goes on from a saved state, with its point y as the parameters; every rank must load its
        own, at the same epoch.

        The result is that of the uninterrupted run, bit for bit. Raises ValueError for a state of
        another rank, world size, codec or model.
        """
        self._identity.check(state)
        self._session.load_state_dict(state)
        self._step = int(state["iterations"])
        self._draws = np.random.default_rng([self._seed, self._session.rank, self._step])
        if state["draws"] is not None:  # None: `reshard` gives the workers new draws
            self._draws.bit_generator.state = state["draws"]
        self._values.copy_(state["values"])
        self._set(self._values)

    def stats(self) -> Stats:
        """Sums over all exchanges of this rank."""
        return self._session.stats()

    def _take_steps(self, y: torch.Tensor) -> None:
        functions = torch.arange(self._count, dtype=torch.int64, device="cpu")
        full = self._average(self._gradient(y, functions), raw=True)
        x = y.clone()
        total = torch.zeros_like(x, dtype=torch.float64)
        for _ in range(self.steps):
            total += x
            j = functions[int(self._draws.integers(self._count))].reshape(1)
            update = self._gradient(x, j) - self._gradient(y, j) + full
            x -= self.lr * self._average(update)
        self._values.copy_(total / self.steps)

    def _average(self, values: torch.Tensor, raw: bool = False) -> torch.Tensor:
        # Buckets with another codec are other buckets.
        job = BucketJob(self._step, self._tensors, values, index=int(raw), raw=raw)
        mean = self._session.submit(job).result()
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

    def _sent(self) -> tuple[int, int]:
        """Bytes of the quantized payloads, each once, and of all packets that this rank sent."""
        totals = self._session.runner.ledger.totals
        others = max(self._session.world_size - 1, 1)
        return totals.push_payload_bytes // others, totals.push_bytes

    @ordinary_tensors()
    def _read(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self._parameters])

    @ordinary_tensors()
    def _set(self, values: torch.Tensor) -> None:
        for parameter, part in zip(
            self._parameters, split_like(values, self._parameters), strict=True
        ):
            parameter.copy_(part)


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
