"""The anchors of a model, and the exchanges that average what the ranks have changed since."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from gradwire.torch import checkpoint
from gradwire.torch.buckets.bucket import BucketJob
from gradwire.torch.buckets.session import Session
from gradwire.torch.checkpoint import Residual, StateDict
from gradwire.torch.errors import CommunicationError, DamagedMessageError, PeerMismatchError
from gradwire.torch.network.meeting import Where
from gradwire.torch.optimizer_list import name_of, parts_of
from gradwire.torch.optimizers.fragment import Fragment, deal_layers
from gradwire.torch.optimizers.gradient_noise import correct_changes, count_decay, norms_of
from gradwire.torch.optimizers.late_momentum import momentum_of_each
from gradwire.torch.optimizers.local_rules import LocalRules, describe_lost_eps
from gradwire.torch.optimizers.replica import Replica, most_bytes
from gradwire.torch.optimizers.weights_watch import WeightsWatch
from gradwire.torch.parameters import OptionsText, ordinary_tensors
from gradwire.torch.staging.moves import moved, overwrite
from gradwire.torch.stats import StepCounters
from gradwire.torch.tensor_memory import local_of

Exchange = Callable[["Peers"], None]


class Averaging:
    """What LocalSteps keeps of its model beside the parameters.

    Attributes:
        fragments: Parts of the model, each with its anchors and an exchange that may be under way.
        corrected: Whether `correct_noise` is for each parameter.
        betas: Momenta of the parameters that are applied late. Empty: none.
        steps: Local steps so far: how far the training is, equal on all ranks at the same step.
        clock: Steps since the schedule began.
        exchanges: The number that have begun.
        arrived: Counters of the exchange that the last step applied. Their step is -1 if it applied
            none.
    """

    def __init__(self, replica: Replica, optimizer: Optimizer, rules: LocalRules) -> None:
        """Raises ValueError if the model has fewer layers than fragments."""
        self.replica, self.optimizer, self.rules = replica, optimizer, rules
        # Of each part. Most have none yet; some, such as Adagrad, can't step without it.
        self._first_states = [
            {key: copy.deepcopy(kept) for key, kept in part.state.items() if _is_first(kept)}
            for part in parts_of(optimizer)
        ]
        self.betas = momentum_of_each(optimizer) if rules.late_momentum else []
        dealt = deal_layers(replica.named, rules.schedule.fragments)
        local = [(name, local_of(parameter)) for name, parameter in replica.named]
        self.fragments = [
            Fragment(local, places, rules, self.betas, replica.device, replica.settings.memory)
            for places in dealt
        ]
        self._weights_watch = WeightsWatch(optimizer, replica.parameters, len(dealt))
        self.steps = self.clock = self.exchanges = 0
        self.arrived = StepCounters()
        self._kept = [1.0] * len(replica.named)  # by weight decay, since the anchors
        self.corrected = rules.corrected(optimizer)
        self._gradients: list[torch.Tensor | None] = []  # of the step under way
        self._gradients_count = True  # false after a step that a GradScaler left out
        # Of the last exchange that arrived: whether it was not finite, and how it was applied.
        self._last_skipped, self._last_mix = False, 0.0
        self._options = OptionsText()
        for fragment in self.fragments:
            fragment.set_anchors()

    # Steps --------------------------------------------------------------------------------------

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients of the parameters, as far as this rank has them."""
        if self._gradients:
            return self._gradients
        return [None if p.grad is None else local_of(p.grad) for p in self.replica.parameters]

    def keep_gradients(self) -> None:
        """Before the optimizer's step, which may take them off the parameters."""
        self._gradients = []
        self._gradients = self.gradients()

    def drop_gradients(self) -> None:
        self._gradients = []

    def _measured(self, places: Sequence[int]) -> list[torch.Tensor | None]:
        """The gradients at these places, but for those whose noise does not matter."""
        found = self.gradients()
        return [found[p] if self.rules.measures(self.corrected[p]) else None for p in places]

    def copy_parameters(self) -> list[list[torch.Tensor]]:
        """For `count_step`, before the optimizer's step."""
        return [f.local.copy_parameters() if f.local else [] for f in self.fragments]

    def count_step(self, before: Sequence[Sequence[torch.Tensor]], has_gradients: bool) -> None:
        """After the optimizer's step. has_gradients: a GradScaler did not leave it out."""
        self._gradients_count = has_gradients
        self.arrived = StepCounters()
        self.steps += 1
        self.clock += 1
        for fragment in self.fragments:
            fragment.steps += 1
        if not has_gradients:
            return
        self._weights_watch.look(self.fragments)
        has_gradient = [gradient is not None for gradient in self.gradients()]
        for fragment, copies in zip(self.fragments, before, strict=True):
            used = [has_gradient[place] for place in fragment.places]
            fragment.note_gradients(used)
            if fragment.local is not None:
                fragment.local.go_on(copies, fragment.steps, used)
        count_decay(self.optimizer, self._kept, has_gradient)

    # Exchanges ----------------------------------------------------------------------------------

    def exchange_due(self, peers: Peers) -> None:
        """Begins the exchanges whose turn it is, and applies those that are due."""
        for index, fragment in enumerate(self.fragments):
            if self.rules.schedule.begins(index, self.clock):
                self._begin(peers, fragment)
        for fragment in self.fragments:
            if fragment.flight is not None and fragment.flight.due == self.clock:
                self.apply(fragment, self.rules.schedule.mix)

    def options_text(self, with_own: bool = True) -> str:
        """The options of the outer optimizers and of the wrapped one, which all ranks must have
        alike."""
        parts = parts_of(self.optimizer) if with_own else []
        optimizers = {f"{type(part).__name__} {i}": part for i, part in enumerate(parts)}
        if len(parts) == 1:
            optimizers = {name_of(self.optimizer): self.optimizer}
        for place, fragment in enumerate(self.fragments):
            if (outer := fragment.outer) is not None:
                fragment.lead_outer()
                optimizers[f"the outer {type(outer).__name__} of fragment {place}"] = outer
        return self._options.of(optimizers)

    def exchange_all(self, peers: Peers, compares: bool = True) -> None:
        """Exchanges all changes that were not sent. Every rank calls it at the same time.
        compares: the optimizers' options with other ranks'."""
        under_way = [fragment for fragment in self.fragments if fragment.flight is not None]
        if not self.rules.schedule.is_back_to_back:
            for fragment in under_way:
                self.apply(fragment, self.rules.schedule.mix)
        for fragment in self.fragments:
            if fragment.steps > 0:
                self._begin(peers, fragment, compares)
        for fragment in self.fragments:
            if fragment.flight is not None:
                self.apply(fragment, 0.0)
        self.clock = 0

    @ordinary_tensors()
    def _begin(self, peers: Peers, fragment: Fragment, compares: bool = True) -> None:
        """Begins to average the fragment's changes. If the result before is due in this step, it is
        applied after they are taken, and then they are not lost. compares: see exchange_all."""
        with fragment.anchors_at_hand(change=False):
            self._begin_with_anchors(peers, fragment, compares)

    def _begin_with_anchors(self, peers: Peers, fragment: Fragment, compares: bool) -> None:
        fragment.write_changes()
        bucket = fragment.bucket
        none: list[torch.Tensor | None] = [None] * len(fragment.places)
        gradients = self._measured(fragment.places) if self._gradients_count else none
        norms = bucket.beside[:0] if fragment.noise is None else norms_of(gradients)
        fault, norms_read = bucket.look_with(norms.to(bucket.values.device))
        if fault is not None:
            fault += describe_lost_eps(self.optimizer)
            self._start_afresh()
        if fragment.flight is not None:
            fragment.arrive()  # the noise takes in that exchange before this one
        if fragment.noise is not None:
            fragment.noise.sketch(gradients, fragment.sketch, norms_read)
            if self.rules.correct_noise and fault is None:
                kept = [self._kept[place] for place in fragment.places]
                correct_changes(bucket.parts, fragment.anchors, self._gains_of(fragment), kept)
        if self.rules.is_elastic:
            fragment.write_notes(peers.are_asked())
        steps = fragment.steps
        if self.rules.schedule.is_back_to_back:
            self.apply(fragment, 0.0)
        unused = fragment.take_unused()
        decay = self.rules.residual_decay
        if fragment.gate is not None:
            fragment.gate.split(bucket.parts, fragment.anchors, unused.own, decay)
        job = BucketJob(
            self.exchanges,
            bucket.tensors,
            bucket.values,
            unused=unused,
            index=self.fragments.index(fragment),
            parts=len(self.fragments),
            # (The notes compare the steps of ranks that come and go.)
            moment="" if self.rules.is_elastic else f" after {self.steps} local steps",
            alike=self.options_text() if compares else "",
        )
        result = peers.session.average(job, fault, decay, bucket.beside.numel())
        due = self.clock + self.rules.schedule.delay
        fragment.take_off(result, unused, self.exchanges, steps, due)
        self.exchanges += 1

    def apply(self, fragment: Fragment, mix: float) -> None:
        """Waits for the fragment's exchange, if there is one, and applies it."""
        if fragment.flight is not None:
            self.arrived = fragment.arrive()
            self._last_mix = 0.0 if self.arrived.skipped else mix
            self._last_skipped = self.arrived.skipped
        fragment.apply(mix)
        self._forget_decay(fragment)

    def _start_afresh(self) -> None:
        """After a change that is not finite: goes back to all anchors, with the state that the
        optimizer had before its first step."""
        for part, first in zip(parts_of(self.optimizer), self._first_states, strict=True):
            part.state.clear()
            part.state.update({key: copy.deepcopy(kept) for key, kept in first.items()})
        for fragment in self.fragments:
            fragment.go_back()
            self._forget_decay(fragment)

    def _forget_decay(self, fragment: Fragment) -> None:
        for place in fragment.places:
            self._kept[place] = 1.0

    def gains(self) -> list[float]:
        """By which the changes of each parameter are multiplied; empty: by 1."""
        if not self.rules.correct_noise:
            return []
        gains = {
            place: gain
            for fragment in self.fragments
            for place, gain in zip(fragment.places, self._gains_of(fragment), strict=True)
        }
        return [gains[place] for place in range(len(self._kept))]

    def _gains_of(self, fragment: Fragment) -> list[float]:
        assert fragment.noise is not None, "gains are made of it"
        places = zip(fragment.places, fragment.noise.gains(), strict=True)
        return [gain if self.corrected[place] else 1.0 for place, gain in places]

    # States -------------------------------------------------------------------------------------

    def load_optimizer(self, state: StateDict) -> None:
        """Loads the state of the wrapped optimizer."""
        self.optimizer.load_state_dict(state)
        if self.betas:
            self.betas = momentum_of_each(self.optimizer)
            for fragment in self.fragments:
                fragment.set_betas(self.betas)

    def state_dict(self) -> StateDict:
        """Waits for exchanges under way; their results are in the state."""
        return {
            "fragments": [fragment.state_dict() for fragment in self.fragments],
            "schedule": self.rules.schedule.state_dict(),
            "local_steps": self.steps,
            "clock": self.clock,
            "kept": list(self._kept),
            "optimizer_class": name_of(self.optimizer),
            "optimizer": self.optimizer.state_dict(),
            "shard": self.replica.shard_text(),
        }

    def check_state(self, state: StateDict) -> None:
        """Raises ValueError for a state of other settings."""
        here = self.replica.shard_text()
        if state["shard"] != here:
            raise ValueError(f"the state is of shard {state['shard']}, not {here}")
        schedule = self.rules.schedule
        schedule.check_state(state["schedule"])
        # After `synchronize` the schedule begins again.
        if state["format"] < 2 and 0 < schedule.delay < schedule.every and state["clock"] > 0:
            raise ValueError(
                f"the state is of LocalSteps of an earlier version, whose exchanges began with "
                f"their turn and were applied delay={schedule.delay} steps later; now they begin "
                "that much earlier. Load it in that version, call synchronize() on all ranks, and "
                "save it again; or begin anew with the model it has"
            )
        checkpoint.check_order(state, self.replica.names)
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.check_state(saved)
        checkpoint.check_optimizer(state, self.optimizer)

    def load_state_dict(self, state: StateDict) -> None:
        """Goes on from a state that `check_state` accepts. The session must be idle."""
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        self.exchanges = int(state["iterations"])
        self.steps, self.clock = int(state["local_steps"]), int(state["clock"])
        self._kept = list(state["kept"])
        self.arrived = StepCounters()

    # Ranks that come and go ---------------------------------------------------------------------

    def give_up(self) -> None:
        """Applies the exchanges that have arrived, and gives up the others."""
        under_way = [f for f in self.fragments if f.flight is not None]
        for fragment in sorted(under_way, key=lambda f: f.flight.job if f.flight else 0):
            try:
                self.apply(fragment, self.rules.schedule.mix)
            except (PeerMismatchError, DamagedMessageError):
                raise
            except CommunicationError:
                fragment.flight = None  # the parameters still have the changes
                self.exchanges -= 1

    @property
    def unsent(self) -> tuple[int, ...]:
        """Local steps of each fragment since its last exchange."""
        return tuple(fragment.steps for fragment in self.fragments)

    @unsent.setter
    def unsent(self, steps: Sequence[int]) -> None:
        for fragment, count in zip(self.fragments, steps, strict=True):
            fragment.steps = count

    def set_world_size(self, world_size: int) -> None:
        for fragment in self.fragments:
            if fragment.noise is not None:
                fragment.noise.world_size = world_size

    def take_asked(self) -> bool:
        """Whether a rank said in an exchange, since the last call, that a process asks it."""
        asked = any(fragment.is_asked for fragment in self.fragments)
        for fragment in self.fragments:
            fragment.is_asked = False
        return asked

    def most_state(self) -> int:
        """The most bytes of another member's `shared_state`."""
        shared: list[object] = []
        for fragment in self.fragments:
            velocities = None if fragment.momentum is None else fragment.momentum.velocities
            noise = None if fragment.noise is None else fragment.noise.state_dict()
            shared += [fragment.anchors, velocities, noise, fragment.outer]
        tensors = [tensor for _, _, tensor in self.replica.tensors()]
        return most_bytes(tensors, self.optimizer, *shared)

    def shared_state(self) -> StateDict:
        """What a newcomer takes over, or a rank that lacks the last exchange."""
        return {
            "tensors": [tensor.clone() for _, _, tensor in self.replica.tensors()],
            "fragments": [fragment.shared_state() for fragment in self.fragments],
            "optimizer": self.optimizer.state_dict(),
            "exchanges": self.exchanges,
            "last_skipped": self._last_skipped,
            "last_mix": self._last_mix,
        }

    @ordinary_tensors()
    def become(self, state: StateDict) -> None:
        """Takes over a member's `shared_state`."""
        overwrite([tensor for _, _, tensor in self.replica.tensors()], state["tensors"])
        self.load_optimizer(state["optimizer"])
        for fragment, shared in zip(self.fragments, state["fragments"], strict=True):
            fragment.load_shared_state(shared)
            if fragment.noise is not None:
                fragment.noise.load_state_dict(shared["noise"])
            fragment.follow_anchors(0.0)
        self.exchanges = int(state["exchanges"])
        self._last_skipped, self._last_mix = bool(state["last_skipped"]), float(state["last_mix"])

    def catch_up(self, state: StateDict, unfinished: int) -> bool:
        """Takes over the result of the last exchange, that of the fragment `unfinished`, which
        broke off here. Returns whether it was not finite."""
        for each, shared in zip(self.fragments, state["fragments"], strict=True):
            each.load_shared_state(shared)
        fragment = self.fragments[unfinished]
        if fragment.noise is not None:
            fragment.noise.follow(state["fragments"][unfinished]["noise"])
        if not state["last_skipped"]:
            fragment.confirm_gate()
        fragment.follow_anchors(float(state["last_mix"]))
        self._forget_decay(fragment)
        self.exchanges = int(state["exchanges"])
        return bool(state["last_skipped"])

    def decay(self, residuals: Sequence[Residual], unfinished: int) -> list[Residual]:
        """The residuals as the exchange of the fragment `unfinished` leaves them behind."""
        names = {name for name, _ in self.fragments[unfinished].bucket.tensors}
        factor = np.float32(self.rules.residual_decay)
        return [r._replace(values=r.values * factor) if r.name in names else r for r in residuals]

    def digest(self) -> str:
        """Of the anchors and late momenta, which all ranks share."""
        digest = hashlib.sha256()
        momenta = [f.momentum.velocities for f in self.fragments if f.momentum is not None]
        for values in moved(chain(*(f.anchors for f in self.fragments), *momenta)):
            digest.update(values.numpy())
        return digest.hexdigest()


class Peers:
    """The ranks with which a rank averages: all of a process group, from beginning to end.

    Attributes:
        session: The one with these ranks. It ends with this object.
    """

    session: Session

    def __init__(self, averaging: Averaging, terms: Sequence[str]) -> None:
        """Compares `terms` and the model on all ranks, and takes over rank 0's model."""
        self._connect(averaging)
        averaging.set_world_size(self.session.world_size)
        averaging.replica.follow_rank_0(self.session, terms)
        for fragment in averaging.fragments:
            fragment.set_anchors()

    def _connect(self, averaging: Averaging, where: Where = None) -> None:
        self.session = Session(averaging.replica.settings, averaging.replica.device, where)
        self.session.close_with(self)

    @property
    def error(self) -> Exception | None:
        """What ended the training; after it no step can be taken."""
        return self.session.error

    def check(self) -> None:
        """Raises `error`."""
        self.session.check()

    def run(self, exchange: Exchange) -> None:
        exchange(self)

    def are_asked(self) -> bool:
        """Whether a process asks to be let in."""
        return False

    def counted(self) -> dict[str, Any]:
        """Entries of LocalStats."""
        return {}

    def close(self) -> None:
        self.session.close()


def _is_first(state: Any) -> bool:
    """Whether it says that no step was taken."""
    return isinstance(state, dict) and float(state.get("step", 1)) == 0


def ratio_in_steps(
    of_exchanges: float | None, averaging: Averaging, steps: int, exchanged: int
) -> float | None:
    """`ratio` of LocalStats. exchanged: values in all exchanges."""
    if of_exchanges is None:
        return None
    return of_exchanges * steps * sum(f.numel for f in averaging.fragments) / exchanged
