"""`LocalSteps`: every rank steps alone; after every k-th step the ranks agree on a model again.

The *anchor* is the model on which all ranks agreed last. Each rank sends its change since then
(anchor - parameters, the *pseudo-gradient*), compressed and with residuals. The average over the
ranks is applied to the anchor, in one of two ways.

plain   the average is subtracted from the anchor: local SGD.
outer   the average is the gradient of an outer optimizer, as in DiLoCo (presets.py).

The model may be cut into fragments, each with an anchor and exchanges of its own, as in Streaming
DiLoCo (Douillard et al. 2025, arXiv:2501.18512). An exchange may be applied some steps after its
start, and meanwhile the ranks step on.

The "2 local steps" of 3LC (Lim, Andersen, Kaminsky; SysML 2019, section 4.2) are different: the
workers do not step a model of their own, but accumulate gradients of the same model and send the
sum every second step. In gradwire that is gradient accumulation, with the hook and DDP's `no_sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.optim import LBFGS, Adam, AdamW, Optimizer

from gradwire.advice import keeps_residual
from gradwire.local_schedule import Schedule
from gradwire.torch.link.engine import agree
from gradwire.torch.link.errors import PeerMismatchError
from gradwire.torch.link.wire import Wire
from gradwire.torch.members.membership import MemberSettings
from gradwire.torch.optimizers.elastic_replica import ElasticReplica
from gradwire.torch.optimizers.elastic_settings import check_elastic
from gradwire.torch.optimizers.fragment import EQUALLY_OFTEN, Fragment, OuterFactory, deal_layers
from gradwire.torch.optimizers.gradient_noise import average_norm, correct_changes, count_decay
from gradwire.torch.optimizers.late_momentum import (
    check_momentum,
    momentum_of_each,
    without_momentum,
)
from gradwire.torch.optimizers.local_stats import LocalStats
from gradwire.torch.optimizers.replica import BESIDE, name_trainable
from gradwire.torch.optimizers.weights_in_state import find_weights
from gradwire.torch.records import checkpoint
from gradwire.torch.records.exchange_settings import ExchangeArguments, ExchangeSettings
from gradwire.torch.records.modes import ordinary_tensors
from gradwire.torch.records.parameters import local_of, options_of, require_dense
from gradwire.torch.records.stats import StepCounters
from gradwire.torch.records.wrapping_optimizer import (
    describe_weights,
    refuse_modes,
    require_optimizer,
)
from gradwire.torch.session.bucket import BucketJob

_MIN_RANKS, _LOST_AFTER = 1, 30.0
_ADAMS = (Adam, AdamW)  # up to PyTorch 2.6 AdamW is no Adam
# Their steps shrink with the root of the second moment of the gradient that they are given.
_OF_SECOND_MOMENTS = (
    *_ADAMS,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)


class LocalSteps(ElasticReplica):
    """Wraps an optimizer of one process and keeps its interface.

        optimizer = LocalSteps(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
        ...
        loss.backward()
        optimizer.step()

    For a plain module, not in DistributedDataParallel. Every rank must construct it, step it and
    load it alike; on construction the ranks compare settings and tensors, and take over rank 0's
    parameters and buffers. After an exchange the parameters are the same bits on every rank (but
    for `mix`); between two exchanges they are not. Buffers and the optimizer's state stay each
    rank's own.

    optimizer      any torch.optim optimizer (LBFGS without clip_norm and correct_noise); it shares
                   its groups and state with this one
    model          gives the parameters their names, which rules and errors mention
    every          steps from one exchange to the next
    fragments      parts of the model, each of whole layers; the exchanges of each are `every` steps
                   apart, and those of different fragments are spread evenly over these steps
    delay          an exchange travels while the next steps are computed, and is applied this many
                   steps after its start, in the same step on all ranks: 0 (at once) to `every`
    mix            the share of a rank's own values in the parameters after an exchange, below 1;
                   the rest are those on which all ranks agree. Needs a `delay` below `every`.
                   0: with a `delay` below `every`, what a rank changed during the delay is dropped;
                   with delay=every the next exchange takes it
    outer          makes an outer optimizer for a list of parameters; None: plain average. Each
                   fragment has its own
    clip_norm      clips each rank's gradient by the norm of the *average* gradient, as
                   clip_grad_norm_ would do in DDP; that norm is estimated (gradient_noise.py).
                   None: no clipping
    correct_noise  multiplies each parameter's change by the gain that gradient_noise.py describes,
                   so that the average steps as far as one optimizer of the average gradient would.
                   Decoupled weight decay is left as it is. None: for the optimizers of PyTorch that
                   divide by the root of a second moment, without `outer` and `mix`
    late_momentum  leaves the momentum of Adam and AdamW (the first of `betas`) out of their steps,
                   and applies it to the averaged changes, alike on all ranks (late_momentum.py). It
                   smooths the error of the codec, too. A new learning rate takes effect over the
                   next 1 / (1 - momentum) steps. None: for these optimizers, without `outer` and
                   `mix`
    residual_decay  by which residuals are multiplied after each exchange, in (0, 1]: what is left
                   out fades, as in SparseLoCo. For codecs with error feedback
    on_lost        "stop": an error on every rank when one is lost. "continue": the others go on,
                   and processes may join later; `store`, `ranks`, `min_ranks` and `lost_after` are
                   for this alone, and process_group is not
    store          where the processes meet, without a world of torch.distributed: a store whose
                   host outlives them, such as TCPStore(host, port) of a process of its own. It
                   serves one LocalSteps; another one needs a PrefixStore
    ranks          so many processes begin; the constructor waits for them. Whoever comes later
                   joins after an exchange: it takes over model, buffers, states of the optimizers
                   and counters from a member, and begins without residual
    min_ranks      with fewer ranks left, a PeerLostError ends the training on all of them
    lost_after     seconds without a heartbeat after which a rank counts as lost
    codec, settings   as in GradwireState: pull_codec, rules, exclude, exclude_last, min_numel,
                   exchange, ranks_per_machine, process_group, threads, target, seed, timeout

    A parameter that no rank has a gradient of between two exchanges stays as it is, whatever
    momentum or an outer optimizer would make of it, and so does what is owed to it.

    If a change is not finite on any rank, all ranks go back to the anchor of that fragment. A
    NonFiniteStepWarning names the rank, stats() counts the step, and residuals are kept. That rank
    goes back to the anchors of all fragments, and its optimizer loses its state.

    Sparse gradients may be used if the wrapped optimizer takes them, without clip_norm and
    correct_noise: only changes of parameters are sent.

    A model that `fully_shard` (FSDP2) has sharded inside a machine, on a mesh of one dimension, may
    have replicas on other machines: process_group is the group of the ranks with the same shard,
    and all ranks must step together. Then each replica takes the place of a rank above, and shards
    go back to their anchors one by one.

    A torch.amp.GradScaler works as with any optimizer. Each rank has its own; where it finds a
    gradient that is not finite, this rank takes no step, and takes part in the exchange.

    When ranks are lost, `step` gives a RankLostWarning and goes on; docs/exchanges.md says what is
    kept. It raises ExpelledError on a rank that the others took for dead, and StoreLostError if the
    store is gone. The constructor raises PeerMismatchError on a process with other settings or
    another model than the members have, and PeerSilentError if `timeout` passes before it is in.

    `step` raises the errors of GradwireState; after an error no step can be taken.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        every: int = 1,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        outer: OuterFactory | None = None,
        clip_norm: float | None = None,
        correct_noise: bool | None = None,
        late_momentum: bool | None = None,
        residual_decay: float = 1.0,
        on_lost: str = "stop",
        store: Store | None = None,
        ranks: int | None = None,
        min_ranks: int = _MIN_RANKS,
        lost_after: float = _LOST_AFTER,
        codec: str | None = None,
        **settings: Unpack[ExchangeArguments],
    ) -> None:
        require_optimizer(optimizer, "the second is the model")
        refuse_modes(optimizer, "LocalSteps")
        schedule = Schedule(every, fragments, delay, mix)
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm is {clip_norm}; a positive norm is needed")
        if mix > 0 and (correct_noise or late_momentum):
            raise ValueError(
                "correct_noise and late_momentum need whole changes since the last exchange, of "
                "which mix keeps a part: give mix=0, or neither of them"
            )
        replaces = outer is None and mix == 0
        if correct_noise is None:
            correct_noise = replaces and isinstance(optimizer, _OF_SECOND_MOMENTS)
        if late_momentum is None:
            late_momentum = replaces and isinstance(optimizer, _ADAMS)
        elif late_momentum and (outer is not None or not isinstance(optimizer, _ADAMS)):
            raise ValueError("late_momentum is that of torch.optim.Adam or AdamW, without outer=")
        needs_gradients = correct_noise or clip_norm is not None
        if needs_gradients and isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS computes several gradients in a step, so clip_norm and correct_noise don't "
                "go with it"
            )
        named = name_trainable(optimizer, model)
        dealt = deal_layers(named, fragments)
        less_often = f"To send less in all, exchange less often: every={2 * every}"
        exchange_settings = replace(ExchangeSettings.of(codec, settings), remedy=less_often)
        if exchange_settings.goals and fragments > 1:
            raise ValueError(
                f"{exchange_settings.goals[0]} chooses codecs for the tensors of a whole model, "
                "which fragments exchange apart: give another codec, or fragments=1"
            )
        _check_decay(residual_decay, exchange_settings)
        given = {
            "store": store is not None,
            "ranks": ranks is not None,
            "min_ranks": min_ranks != _MIN_RANKS,
            "lost_after": lost_after != _LOST_AFTER,
        }
        check_elastic(on_lost, given, store, ranks, named, schedule, exchange_settings)
        members = None
        if ranks is not None:
            members = MemberSettings(ranks, min_ranks, lost_after, exchange_settings.timeout)
        if needs_gradients or members is not None:
            exclude = [*exchange_settings.exclude, BESIDE]
            exchange_settings = replace(exchange_settings, exclude=exclude)
        super().__init__(optimizer, model, named, exchange_settings)
        self.every = every
        self._schedule = schedule
        self._clip_norm = clip_norm
        self._residual_decay = residual_decay
        self._corrects = correct_noise
        self._momentum_is_late = late_momentum
        self._betas = momentum_of_each(optimizer.param_groups) if late_momentum else []
        self._locals = [(name, local_of(parameter)) for name, parameter in named]
        self._fragments = [
            Fragment(
                self._locals,
                places,
                has_noise=needs_gradients,
                takes_notes=members is not None,
                betas=self._betas,
                outer=outer,
                is_back_to_back=schedule.is_back_to_back,
                exchanges_each_step=every == 1,
            )
            for places in dealt
        ]
        self._exchanges = 0
        self._local_steps = 0
        self._own_steps = 0  # of this object, whose bytes are counted
        self._left_out = 0
        self._looks = 2 * fragments  # for weights in the state of the optimizer
        self._clock = 0  # steps since the construction, or since `synchronize`
        self._kept = [1.0] * len(named)  # by weight decay, since the parameters were the anchors
        self._gradients_count = True  # false after a step that a GradScaler left out
        self._arrived = StepCounters()  # of the exchange that the last step applied, if any
        clipped = "not clipped" if clip_norm is None else f"clipped to norm {clip_norm}"
        follows = [
            *schedule.describe(),
            f"gradients {clipped}, changes {'corrected' if correct_noise else 'not corrected'} for "
            "noise",
            f"late momentum {self._betas or 'of none'}",
            f"residuals multiplied by {residual_decay}",
        ]
        follows += self._outer_text()
        self._last_skipped, self._last_mix = False, 0.0
        if members is not None and store is not None:
            follows.append(f"min_ranks {min_ranks}, lost_after {lost_after:g}")
            self._join(store, members, self._describe(follows))
        else:
            self._connect()
            self._set_world_size(self._session.world_size)
            self._follow_rank_0(follows)
            for fragment in self._fragments:
                fragment.set_anchors()
        self._shared.watch_loads()
        self._shared.note_values()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's model, and exchanges after every k-th step; returns the loss."""
        self._check_session()
        self._shared.check()
        self._shared.check_load()
        for fragment in self._fragments:
            fragment.check_outer()
        if self._momentum_is_late:
            check_momentum(self.param_groups, self._betas)
            self._check_unedited()
        scale, not_finite = self._scaler_says()
        self._gradients_count = not not_finite
        before = [f.local.copy_parameters() if f.local else [] for f in self._fragments]
        loss = self._evaluate(closure) if not_finite else self._step_alone(closure, scale)
        for fragment in self._fragments:
            fragment.steps += 1
        self._look_for_weights()
        if self._gradients_count:
            for fragment, copies in zip(self._fragments, before, strict=True):
                used = [gradient is not None for gradient in self._gradients(fragment.places)]
                fragment.note_gradients(used)
                if fragment.local is not None:
                    fragment.local.go_on(copies, fragment.steps, used)
            count_decay(self._optimizer, self._kept)
        self._left_out += not self._gradients_count
        self._local_steps += 1
        self._own_steps += 1
        self._clock += 1
        self._arrived = StepCounters()
        self._go_on(self._exchange)
        self._shared.note_values()
        if self._arrived.step >= 0:
            self._log(self._local_steps - 1)
        return loss

    def _look_for_weights(self) -> None:
        """Raises ValueError if the optimizer keeps weights in its state. It looks twice: at the
        first look, a copy of the parameters may still be just these."""
        fragments = [f for f in self._fragments if f.steps == 1 and self._gradients_count]
        if not fragments or not self._looks:
            return
        self._looks -= 1
        for fragment in fragments:
            parameters = [self._parameters[place] for place in fragment.places]
            if key := find_weights(self._optimizer, parameters, fragment.anchors):
                raise ValueError(describe_weights(self._optimizer, "LocalSteps", repr(key)))

    def _check_unedited(self) -> None:
        """Raises RuntimeError if the user has changed a parameter since the last step."""
        edited = set(self._shared.edited())
        for fragment in self._fragments if edited else ():
            for place, anchor in zip(fragment.places, fragment.anchors, strict=True):
                name, values = self._locals[place]
                # After an exchange it may have been changed and put back, as to evaluate a mean.
                if name in edited and (fragment.steps > 0 or not torch.equal(values, anchor)):
                    raise RuntimeError(
                        f"{name} was changed between two steps, and late momentum averages what "
                        "steps change: give LocalSteps late_momentum=False, which exchanges every "
                        "change. To evaluate other weights, put them into a copy of the model"
                    )

    def _step_alone(self, closure: Callable[[], Any] | None, scale: float | None) -> Any:
        def evaluate() -> Any:  # several times, if the optimizer does, as LBFGS and SAM do
            loss = self._evaluate(closure)
            if scale is not None or self._has_noise():
                self._scale_gradients(scale)
            return loss

        momentum = without_momentum(self.param_groups) if self._momentum_is_late else nullcontext()
        if closure is None:
            evaluate()
        with momentum:
            return self._own_use.step(*([] if closure is None else [evaluate]))

    def synchronize(self) -> None:
        """Exchanges what was changed since the last exchanges, and applies it without `mix`.

        For the end of a training: after it the ranks' models are equal. The exchanges are then
        spread over the next steps as at the beginning. Every rank must call it at the same step;
        otherwise all ranks get a PeerMismatchError, which names two ranks and their steps.
        """
        self._check_session()
        self._shared.check()
        self._shared.check_load()
        self._go_on(self._exchange_all if self._compares_steps else self._exchange_together)
        self._shared.note_values()

    def _exchange_together(self) -> None:
        """Raises PeerMismatchError unless all ranks have taken the same number of steps."""

        here = f"synchronize() after {self._local_steps} local steps"

        def compare(wire: Wire) -> None:
            try:
                agree(f"{here}\nstep {self._clock} of the schedule", wire)
            except PeerMismatchError as error:
                raise PeerMismatchError(f"{error}: {EQUALLY_OFTEN}", error.ranks) from None

        self._session.start(compare, here).result()
        self._exchange_all()

    def _exchange_all(self) -> None:
        under_way = [fragment for fragment in self._fragments if fragment.flight is not None]
        if not self._schedule.is_back_to_back:
            for fragment in under_way:
                self._apply(fragment, self._schedule.mix)
        for fragment in self._fragments:
            if fragment.steps > 0:
                self._begin(fragment)
        for fragment in self._fragments:
            if fragment.flight is not None:
                self._apply(fragment, 0.0)
        self._clock = 0

    def anchors(self) -> dict[str, torch.Tensor]:
        """The values on which all ranks agreed last, by the names that the model's state_dict has:
        the model to evaluate while the ranks' own differ. This object goes on to change them."""
        name_of = {id(parameter): name for name, parameter in self._model.named_parameters()}
        anchors: dict[int, torch.Tensor] = {}
        for fragment in self._fragments:
            anchors |= zip(fragment.places, (a.detach() for a in fragment.anchors), strict=True)
        return {name_of[id(p)]: anchors[place] for place, p in enumerate(self._parameters)}

    def _exchange(self) -> None:
        """Begins the exchanges whose turn it is, and applies those that are due."""
        for index, fragment in enumerate(self._fragments):
            if self._schedule.begins(index, self._clock):
                self._begin(fragment)
        for fragment in self._fragments:
            if fragment.flight is not None and fragment.flight.due == self._clock:
                self._apply(fragment, self._schedule.mix)

    @property
    def _compares_steps(self) -> bool:
        """Whether every exchange does so, as those of members that come and go."""
        return self._members is not None

    def _has_noise(self) -> bool:
        return self._fragments[0].noise is not None

    def _gradients(self, places: Iterable[int]) -> list[torch.Tensor | None]:
        """The gradients of the parameters at these places, as far as this rank has them."""
        gradients = (self._parameters[place].grad for place in places)
        return [None if gradient is None else local_of(gradient) for gradient in gradients]

    @ordinary_tensors()
    def _scale_gradients(self, scale: float | None) -> None:
        """Divides them by the GradScaler's scale and clips them."""
        gradients = self._gradients(range(len(self._parameters)))
        factor = 1.0 if scale is None else 1.0 / scale
        if self._has_noise():
            for name, gradient in zip(self._names, gradients, strict=True):
                if gradient is not None:
                    require_dense(name, gradient)
        if self._clip_norm is not None:
            noises = [fragment.noise for fragment in self._fragments if fragment.noise is not None]
            norm = factor * average_norm(noises, gradients, self._shards)
            if norm > self._clip_norm:
                factor *= self._clip_norm / norm
        if factor != 1.0:
            torch._foreach_mul_([g for g in gradients if g is not None], factor)

    @ordinary_tensors()
    def _begin(self, fragment: Fragment) -> None:
        """Begins to average the fragment's changes. If the result before is due in this step, it is
        applied after they are taken, and then they are not lost."""
        fragment.write_changes()
        bucket = fragment.bucket
        fault = bucket.find_non_finite()
        if fault is not None:
            self._start_afresh()
        if fragment.flight is not None:
            fragment.arrive()  # the noise takes in that exchange before this one
        if fragment.noise is not None:
            none: list[torch.Tensor | None] = [None] * len(fragment.places)
            gradients = self._gradients(fragment.places) if self._gradients_count else none
            fragment.noise.sketch(gradients, fragment.sketch)
            if self._corrects and fault is None:
                kept = [self._kept[place] for place in fragment.places]
                correct_changes(bucket.parts, fragment.anchors, fragment.noise.gains(), kept)
        if self._members is not None:
            fragment.write_notes(bool(self._members.asking()))
        steps = fragment.steps
        if self._schedule.is_back_to_back:
            self._apply(fragment, 0.0)
        unused = fragment.take_unused()
        job = BucketJob(
            self._exchanges,
            bucket.tensors,
            bucket.values,
            unused=unused,
            index=self._fragments.index(fragment),
            parts=len(self._fragments),
            moment="" if self._compares_steps else f" after {self._local_steps} local steps",
        )
        result = self._session.average(job, fault, self._residual_decay)
        due = self._clock + self._schedule.delay
        fragment.take_off(result, unused, self._exchanges, steps, due)
        self._exchanges += 1

    def _apply(self, fragment: Fragment, mix: float) -> None:
        """Waits for the fragment's exchange, if there is one, and applies it."""
        if fragment.flight is not None:
            self._arrived = fragment.arrive()
            self._last_mix = 0.0 if self._arrived.skipped else mix
            self._last_skipped = self._arrived.skipped
        fragment.apply(mix)
        self._forget_decay(fragment)

    def _start_afresh(self) -> None:
        """After a change that is not finite: goes back to all anchors, with no optimizer state."""
        self._optimizer.state.clear()
        for fragment in self._fragments:
            fragment.go_back()
            self._forget_decay(fragment)

    def _forget_decay(self, fragment: Fragment) -> None:
        for place in fragment.places:
            self._kept[place] = 1.0

    @property
    def rank(self) -> int:
        """The place of this rank among those with which it exchanges now. It may change where
        ranks come and go."""
        return self._session.rank

    @property
    def local_steps(self) -> int:
        """How far the training is. Equal on all ranks at the same step, also where they come and
        go: a rank then takes over the number of another one, as it does with the model."""
        return self._local_steps

    def stats(self) -> LocalStats:
        """Sums over all steps of this rank, and the tensors that go raw, with the reasons."""
        gains = [1.0] * len(self._parameters) if self._corrects else []
        for fragment in self._fragments:
            if self._corrects and fragment.noise is not None:
                for place, gain in zip(fragment.places, fragment.noise.gains(), strict=True):
                    gains[place] = gain
        exchanges = self._session.stats()
        raw = tuple(tensor for tensor in exchanges.raw_tensors if tensor.name != BESIDE)
        tensors = tuple(tensor for tensor in exchanges.tensors if tensor.name != BESIDE)
        exchanges = replace(exchanges, raw_tensors=raw, tensors=tensors)
        sizes = tuple(fragment.numel for fragment in self._fragments)
        ratio = self._ratio(exchanges.ratio, exchanges.values)
        roster = self._members.roster if self._members is not None else None
        return LocalStats(
            self.every,
            sizes,
            self._local_steps,
            self._left_out,
            tuple(gains),
            exchanges,
            ratio,
            generation=roster.generation if roster else 0,
            members=roster.members if roster else (),
            lost_members=tuple(self._lost) if roster else (),
        )

    def _ratio(self, of_exchanges: float | None, exchanged: int) -> float | None:
        """See LocalStats. exchanged: values in all exchanges."""
        if of_exchanges is None:
            return None
        numel = sum(fragment.numel for fragment in self._fragments)
        return of_exchanges * self._own_steps * numel / exchanged

    def _find_scalars(self) -> dict[str, float | None]:
        found = super()._find_scalars()
        return found | {"ratio": self._ratio(found["ratio"], self._totals().values)}

    def last_step(self) -> dict[str, Any]:
        """The exchange that the last step applied, as GradwireState.last_step(). Its "step" is -1
        if there is none."""
        return super().last_step()

    def _last_counters(self) -> StepCounters:
        return self._arrived

    def state_dict(self) -> checkpoint.StateDict:
        """This rank's optimizer, the anchors, the outer optimizers, and residuals.

        Every rank saves its own state and its own parameters: they differ between two exchanges.
        Waits for exchanges under way; their results are saved, too.
        """
        fragments = [fragment.state_dict() for fragment in self._fragments]
        return {
            **self._session.state_dict(self._identity("LocalSteps"), self._exchanges),
            "schedule": self._schedule.state_dict(),
            "local_steps": self._local_steps,
            "left_out": self._left_out,
            "clock": self._clock,
            "kept": list(self._kept),
            "optimizer_class": type(self._optimizer).__name__,
            "optimizer": self._optimizer.state_dict(),
            "fragments": fragments,
            "shard": self._shard_text(),
        }

    def load_state_dict(self, state: checkpoint.StateDict) -> None:
        """Goes on from a saved state; every rank must load its own, and its model's parameters.

        The result is that of the uninterrupted run, bit for bit. Raises ValueError for a state of
        another rank, world size, shard, codec, model, class of optimizer, `every`, `fragments`,
        `delay`, `mix` or `outer`.
        """
        state = checkpoint.with_clean_names(state)
        self._identity("LocalSteps").check(state)
        if state["shard"] != self._shard_text():
            raise ValueError(f"the state is of shard {state['shard']}, not {self._shard_text()}")
        self._schedule.check_state(state["schedule"])
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.check_state(saved)
        checkpoint.check_optimizer(state, self._optimizer)
        self._load_optimizer(state["optimizer"])
        self._session.load_state_dict(state)
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        self._exchanges = int(state["iterations"])
        self._local_steps = int(state["local_steps"])
        self._left_out = int(state["left_out"])
        self._clock = int(state["clock"])
        self._kept = list(state["kept"])
        self._arrived = StepCounters()
        self._shared.allow_load()

    def _load_optimizer(self, state: checkpoint.StateDict) -> None:
        self._optimizer.load_state_dict(state)
        if self._momentum_is_late:
            self._betas = momentum_of_each(self.param_groups)
            for fragment in self._fragments:
                fragment.set_betas(self._betas)

    def _outer_text(self) -> Sequence[str]:
        outer = self._fragments[0].outer  # those of the others have the same options
        if outer is None:
            return ["plain average"]
        name = type(outer).__name__
        return [f"outer {name} {options}" for options in options_of(outer.param_groups)]


def _check_decay(decay: float, settings: ExchangeSettings) -> None:
    """Raises ValueError if it is out of range, or if no codec keeps a residual."""
    if not 0 < decay <= 1:
        raise ValueError(f"residual_decay is {decay}; a factor above 0, and at most 1, is needed")
    codecs = [settings.codec, settings.pull_codec or settings.codec]
    if decay < 1 and not any(map(keeps_residual, codecs)):
        raise ValueError(
            f"{settings.codec} keeps no residual that residual_decay could multiply: take a codec "
            "with error feedback, such as topk2bit, or leave residual_decay out"
        )
