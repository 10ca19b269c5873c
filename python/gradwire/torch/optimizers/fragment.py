"""A fragment of a model: layers that are exchanged together, and what is kept for them.

Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512) cuts a model into fragments whose
exchanges take turns (section 2.2), travel while the next steps are computed, and are mixed with the
values that the rank has by then (section 2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradwire.local_schedule import deal_by_size
from gradwire.torch.buckets.session import Averaged
from gradwire.torch.errors import PeerMismatchError
from gradwire.torch.network.engine import Unused
from gradwire.torch.optimizers.gate import Gate
from gradwire.torch.optimizers.gradient_noise import GradientNoise
from gradwire.torch.optimizers.late_momentum import LateMomentum, LocalMomentum
from gradwire.torch.optimizers.local_rules import LocalRules, OuterLike
from gradwire.torch.optimizers.replica import ReplicaBucket
from gradwire.torch.parameters import NamedTensor, ordinary_tensors, wide_of
from gradwire.torch.staging.moves import Shelf, overwrite
from gradwire.torch.stats import StepCounters
from gradwire.torch.tensor_memory import in_order_of

_NOTES = 3  # values
_STEPS = 64  # modulo which numbers of steps are compared: sums of squares are exact in float32
EQUALLY_OFTEN = (
    "call step, and synchronize, equally often on all ranks, such as while "
    "optimizer.local_steps < N"
)


def deal_layers(named: Sequence[NamedTensor], fragments: int) -> list[list[int]]:
    """The places of each fragment's parameters in `named`. Raises ValueError if there are fewer
    layers than fragments."""
    return deal_by_size([(name, tensor.numel()) for name, tensor in named], fragments)


@dataclass
class Flight:
    """An exchange that has begun, and whose result is not applied yet."""

    bucket: ReplicaBucket
    job: int  # exchanges that began before
    steps: int  # whose changes it holds
    due: int  # the step in which its result is applied
    result: Future[Averaged]
    unused: Callable[[], Sequence[int]]  # places that no rank had a gradient of, when it has ended
    arrived: StepCounters | None = None  # the noise has taken the result in

    def wait(self) -> Averaged:
        """For the result, with which the device's further work can go on."""
        averaged = self.result.result()
        averaged.follow()
        return averaged


class Fragment:
    """Some parameters of a model, the anchors from which they depart, and the exchange under way.

    places   of the parameters among all of the optimizer
    anchors  the values on which all ranks agreed last
    steps    since the parameters had the values of the anchors
    bucket   free for the next exchange
    flight   the exchange under way, if there is one
    noise, momentum, local, outer, gate   None where the settings don't ask for them
    """

    @ordinary_tensors()
    def __init__(
        self,
        named: Sequence[NamedTensor],
        places: Sequence[int],
        rules: LocalRules,
        betas: Sequence[float],
        device: torch.device,
        memory: str = "",
    ) -> None:
        """betas: the momentum of each parameter in `named`, to be applied late; empty: none.
        memory: see options.Execution."""
        mine = [named[place] for place in places]
        self.places = list(places)
        self.parameters = [parameter for _, parameter in mine]
        self.anchors = [
            nn.Parameter(torch.empty_like(p, dtype=torch.float32)) for p in self.parameters
        ]
        numels = [parameter.numel() for parameter in self.parameters]
        self.noise = GradientNoise(numels, 1, device=device) if rules.has_noise else None
        self._sketch_numel = 0 if self.noise is None else self.noise.numel
        self._takes_notes = rules.is_elastic
        beside = self._sketch_numel + (_NOTES if rules.is_elastic else 0)
        self.bucket = self._spare = ReplicaBucket(mine, device, beside)
        if rules.schedule.is_back_to_back:
            self._spare = ReplicaBucket(mine, device, beside)
        self._outer_like = rules.outer if isinstance(rules.outer, OuterLike) else None
        self.outer = None if rules.outer is None else rules.outer(self.anchors)
        if rules.outer is not None and not isinstance(self.outer, Optimizer):
            raise TypeError(
                f"outer= must return the optimizer that it makes, and returned {self.outer!r}"
            )
        self.check_outer()
        self.gate = Gate(self.anchors) if rules.schedule.gate else None
        self.momentum: LateMomentum | None = None
        self.local: LocalMomentum | None = None
        if betas:
            self.momentum = LateMomentum([betas[place] for place in places], self.anchors)
            if rules.schedule.every > 1:
                self.local = LocalMomentum(self.momentum, self.parameters, self.anchors)
        self.shelf: Shelf | None = None
        if memory in ("host", "pinned") and device.type != "cpu":
            self.shelf = Shelf(self.anchors, memory == "pinned")
        self.steps = 0
        self._used = [False] * len(mine)  # since the last exchange began
        self.flight: Flight | None = None
        self.is_asked = False  # whether a rank said so in the last exchange

    def anchors_at_hand(self, change: bool = True) -> AbstractContextManager[None]:
        """Around what computes with the anchors, which may lie on the host. change: whether they
        may change inside."""
        return nullcontext() if self.shelf is None else self.shelf.at_hand(change)

    def lead_outer(self) -> None:
        """Gives the outer optimizer the options of the one that the user has."""
        if self._outer_like is not None and self.outer is not None:
            self._outer_like.lead(self.outer)

    def check_outer(self) -> None:
        """Raises ValueError unless the outer optimizer's parameters are the anchors."""
        if self.outer is None:
            return
        stepped = [id(p) for group in self.outer.param_groups for p in group["params"]]
        if sorted(stepped) != sorted(map(id, self.anchors)):
            raise ValueError(
                f"the outer {type(self.outer).__name__} has other parameters than the list that "
                "outer= was called with: make it of that list, and add or take away none"
            )

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def set_betas(self, betas: Sequence[float]) -> None:
        """betas: as in the constructor."""
        if self.momentum is not None:
            self.momentum.betas = [betas[place] for place in self.places]

    @property
    def sketch(self) -> torch.Tensor:
        """The part of the bucket that the noise writes."""
        return self.bucket.beside[: self._sketch_numel]

    def write_notes(self, is_asked: bool) -> None:
        """Writes to the bucket whether a process asks this rank to let it join, the number of steps
        since the last exchange, modulo _STEPS, and the square of that."""
        asked, steps, squared = self.bucket.beside[self._sketch_numel :]
        asked.fill_(is_asked)
        steps.fill_(self.steps % _STEPS)
        squared.fill_((self.steps % _STEPS) ** 2)

    @ordinary_tensors()
    def set_anchors(self) -> None:
        """Makes the parameters' values the anchors."""
        with self.anchors_at_hand():
            for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
                anchor.copy_(parameter)
            if self.local is not None:
                self.local.restart()

    @ordinary_tensors()
    def write_changes(self) -> None:
        """Writes what this rank has changed since the parameters were the anchors to the bucket."""
        if self.local is not None:
            torch._foreach_copy_(self.bucket.parts, self.local.sums)
            return
        places = zip(self.parameters, self.anchors, self.bucket.parts, strict=True)
        for parameter, anchor, part in places:
            # A parameter of 16 bits began as the anchor's rounding.
            torch.sub(anchor.to(parameter.dtype).float(), wide_of(parameter), out=part)

    def note_gradients(self, used: Sequence[bool]) -> None:
        """used: of each parameter, whether this step has a gradient of it."""
        self._used = [before or now for before, now in zip(self._used, used, strict=True)]

    def take_unused(self) -> Unused:
        """The places of the parameters without a gradient since the last call. (If they were
        changed all the same, their values in the bucket say so.)"""
        unused = Unused(place for place, used in enumerate(self._used) if not used)
        self._used = [False] * len(self._used)
        return unused

    def take_off(
        self, result: Future[Averaged], unused: Unused, job: int, steps: int, due: int
    ) -> None:
        """The bucket, with the changes of so many steps, is now under way."""
        self.flight = Flight(self.bucket, job, steps, due, result, unused.everywhere)
        self.bucket, self._spare = self._spare, self.bucket

    def arrive(self) -> StepCounters:
        """Waits for the result under way, which the noise takes in; `apply` must follow."""
        assert self.flight is not None
        if self.flight.arrived is None:
            self.flight.arrived, beside, _ = self.flight.wait()
            if not self.flight.arrived.skipped and self.noise is not None:
                self.noise.update(beside[: self._sketch_numel])
            if self._takes_notes and not self.flight.arrived.skipped:
                self._read_notes(beside[self._sketch_numel :], self.flight.steps)
        return self.flight.arrived

    def _read_notes(self, averages: torch.Tensor, steps: int) -> None:
        asked, average, average_square = averages.tolist()
        self.is_asked = asked > 0
        own = steps % _STEPS
        # Every rank sees in the square that others differ, also where its own steps are average.
        if max(abs(average - own), abs(average_square - own**2)) > 1e-3:
            raise PeerMismatchError(
                f"this rank exchanges the changes of {steps} local steps, and others those of more "
                f"or fewer: {EQUALLY_OFTEN}"
            )

    @ordinary_tensors()
    def apply(self, mix: float) -> None:
        """Applies the result under way, if there is one, to the anchors. The parameters become
        mix * parameters + (1 - mix) * anchors; or the anchors, if the result is not finite."""
        arrived = None if self.flight is None else self.arrive()
        flight, self.flight = self.flight, None
        if flight is None or arrived is None or arrived.skipped:
            self.follow_anchors(0.0)
            return
        with self.anchors_at_hand():
            self._step_anchors(flight)
            self.confirm_gate()
            self.follow_anchors(mix)

    def confirm_gate(self) -> None:
        """The last exchange counts."""
        if self.gate is not None:
            self.gate.confirm()

    @ordinary_tensors()
    def follow_anchors(self, mix: float) -> None:
        """After the anchors changed. mix: as in `apply`."""
        if mix > 0:
            with self.anchors_at_hand(change=False):
                for parameter, anchor in zip(self.parameters, self.anchors, strict=True):
                    parameter.copy_(torch.lerp(wide_of(parameter), anchor, 1.0 - mix))
        else:
            self.go_back()
            self.steps = 0

    @ordinary_tensors()
    def go_back(self) -> None:
        """Makes the anchors' values the parameters."""
        with self.anchors_at_hand(change=False):
            for parameter, anchor in zip(self.parameters, self.anchors, strict=True):
                parameter.copy_(anchor)
            if self.local is not None:
                self.local.restart()

    def _step_anchors(self, flight: Flight) -> None:
        averages, unused = flight.bucket.parts, set(flight.unused())
        if self.momentum is not None:
            self.momentum.smooth(averages, flight.steps, unused)
        for place, (anchor, average) in enumerate(zip(self.anchors, averages, strict=True)):
            if self.outer is None:
                anchor.sub_(average)
            elif place not in unused:
                anchor.grad = in_order_of(anchor, average)
        if self.outer is not None:
            self.lead_outer()
            self.outer.step()
            for anchor in self.anchors:
                anchor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Waits for the exchange under way, whose result is saved, too."""
        flight = self.flight
        return {
            **self.shared_state(),
            "steps": self.steps,
            "used": list(self._used),
            "gate": None if self.gate is None else self.gate.state_dict(),
            "local_momentum": None if self.local is None else self.local.state_dict(),
            "under_way": flight
            and {
                "finite": not flight.wait().counters.skipped,
                "values": flight.bucket.values.clone(),
                "steps": flight.steps,
                "due": flight.due,
                "unused": list(flight.unused()),
            },
        }

    def shared_state(self) -> dict[str, Any]:
        """What is equal on all ranks when no exchange is under way (of the noise: the power of the
        average gradient)."""
        return {
            "noise": None if self.noise is None else self.noise.state_dict(),
            "momentum": None if self.momentum is None else self.momentum.state_dict(),
            "outer": None if self.outer is None else self.outer.state_dict(),
            "anchors": [anchor.detach().clone() for anchor in self.anchors],
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the state of another fragment, of other settings, or of an earlier
        version, whose groups of the optimizer and momenta hold other things."""
        if "used" not in state:
            raise ValueError(
                "the state is of LocalSteps of an earlier version: begin anew with the model it has"
            )
        shapes = [list(anchor.shape) for anchor in self.anchors]
        exact = (state["local_momentum"] or {}).get("exact", ())
        halves = 0 if self.local is None else len(self.local.exact_of_16_bits())
        for what, saved, here in (
            ("an outer optimizer", state["outer"] is not None, self.outer is not None),
            ("late momentum", state["momentum"] is not None, self.momentum is not None),
            ("the gradient's noise", state["noise"] is not None, self.noise is not None),
            ("parameters of the shapes", [list(a.shape) for a in state["anchors"]], shapes),
            ("the number of parameters of 16 bits", len(exact), halves),
        ):
            if saved != here:
                raise ValueError(f"{what}: the state has {saved}, this rank has {here}")

    @ordinary_tensors()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gives up the exchange under way. The session must be idle."""
        self.load_shared_state(state)
        if self.noise is not None:
            self.noise.load_state_dict(state["noise"])
        self.steps = int(state["steps"])
        self._used = list(state["used"])
        if self.gate is not None:
            self.gate.load_state_dict(state["gate"])
        if self.local is not None:
            self.local.load_state_dict(state["local_momentum"])
        self.flight = None
        if (saved := state["under_way"]) is not None:
            self._spare.values.copy_(saved["values"])
            counters = StepCounters(skipped=not saved["finite"])
            result: Future[Averaged] = Future()
            result.set_result(Averaged(counters, self._spare.beside.cpu().clone()))
            steps, due, unused = int(saved["steps"]), int(saved["due"]), list(saved["unused"])
            self.flight = Flight(self._spare, 0, steps, due, result, lambda: unused)

    @ordinary_tensors()
    def load_shared_state(self, state: dict[str, Any]) -> None:
        """All of shared_state() but the noise."""
        with self.anchors_at_hand():
            overwrite(self.anchors, state["anchors"])
            if self.outer is not None:  # which brings its state to where its parameters are
                self.outer.load_state_dict(state["outer"])
                if self._outer_like is not None:
                    self._outer_like.follow(self.outer)
        if self.momentum is not None:
            self.momentum.load_state_dict(state["momentum"])
