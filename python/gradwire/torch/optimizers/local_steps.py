"""`LocalSteps`: every rank steps alone; after every k-th step the ranks agree on a model again.

The *anchor* is the model on which all ranks agreed last. Each rank sends its change since then
(anchor - parameters, the *pseudo-gradient*), compressed and with residuals. The average over the
ranks is applied to the anchor, in one of two ways.

plain   the average is subtracted from the anchor: local SGD.
outer   the average is the gradient of an outer optimizer, as in DiLoCo (local_rules.py).

The model may be cut into fragments, each with an anchor and exchanges of its own, as in Streaming
DiLoCo (Douillard et al. 2025, arXiv:2501.18512). An exchange may be applied some steps after its
start, and meanwhile the ranks step on.

The "2 local steps" of 3LC (Lim, Andersen, Kaminsky; SysML 2019, section 4.2) are different: the
workers do not step a model of their own, but accumulate gradients of the same model and send the
sum every second step. In gradwire that is gradient accumulation, with the hook and DDP's `no_sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradwire.errors import warn_user
from gradwire.local_schedule import EVERY_STEP, Schedule
from gradwire.option_record import explains_arguments
from gradwire.torch import checkpoint
from gradwire.torch.errors import CoarseGradientsWarning, PeerMismatchError
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.live import scalars_of
from gradwire.torch.network.engine import agree
from gradwire.torch.network.transport import Transport
from gradwire.torch.optimizer_list import Optimizers
from gradwire.torch.optimizers.averaging import Averaging, Peers, ratio_in_steps
from gradwire.torch.optimizers.fragment import EQUALLY_OFTEN
from gradwire.torch.optimizers.gradient_noise import average_norm
from gradwire.torch.optimizers.late_momentum import check_momentum, without_momentum
from gradwire.torch.optimizers.local_rules import LocalRules, OuterFactory, OuterLike
from gradwire.torch.optimizers.replica import Replica
from gradwire.torch.options import Compression, Execution, Members
from gradwire.torch.parameters import ordinary_tensors
from gradwire.torch.tensor_memory import require_memory
from gradwire.torch.wrapping_optimizer import (
    WrappingOptimizer,
    as_one,
    is_of_get_state_dict,
    refuse_get_state_dict,
    refuse_modes,
    runs_hooks_of_loading,
    runs_hooks_of_saving,
)

if TYPE_CHECKING:
    from gradwire.torch.optimizers.local_stats import LocalStats


class LocalSteps(WrappingOptimizer):
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

    A parameter that no rank has a gradient of between two exchanges stays as it is, whatever
    momentum or an outer optimizer would make of it, and so does what is owed to it.

    If a change is not finite on any rank, all ranks go back to the anchor of that fragment. A
    NonFiniteStepWarning names the rank, stats() counts the step, and residuals are kept. That rank
    goes back to the anchors of all fragments, and its optimizer loses its state.

    Sparse gradients may be used if the wrapped optimizer takes them, without clip_norm, and where
    correct_noise changes nothing: only changes of parameters are sent.

    A model that `fully_shard` (FSDP2) has sharded inside a machine, on a mesh of one dimension, may
    have replicas on other machines: process_group is the group of the ranks with the same shard,
    and all ranks must step together. Then each replica takes the place of a rank above, and shards
    go back to their anchors one by one.

    A torch.amp.GradScaler works as with any optimizer; `unscale_` and `step` both take this object.
    Each rank has its own; where it finds a gradient that is not finite, this rank takes no step,
    and takes part in the exchange.

    When ranks are lost, `step` gives a RankLostWarning and goes on; docs/guides/far_apart.md says
    what is kept. It raises ExpelledError on a rank that the others took for dead, and
    StoreLostError if the store is gone. The constructor raises PeerMismatchError on a process with
    other settings or another model than the members have, and PeerSilentError if `timeout` passes
    before it is in.

    `step` raises the errors of GradwireState; after an error no step can be taken.

    Args:
        optimizer: Any torch.optim optimizer (LBFGS without `clip_norm` and `correct_noise`), or a
            list of several, such as Muon for matrices and AdamW for the rest. It shares its groups
            and state with this one.
        model: Gives the parameters their names, which rules and errors mention.
        codec: As text. None: the default of the exchange, for "sharded" "small", or "half-byte"
            with `outer` and where `every` is above 4.
        every: Steps from one exchange to the next. None: 1.
        exchange: As in Compression. None: "sharded".
        outer: An outer optimizer, as a function that makes it for a list of parameters, or as an
            optimizer of `model`, whose class and options are taken, also as a scheduler changes
            them. Each fragment has its own, whose state is in that of LocalSteps. None: plain
            average.
        clip_norm: Clips each rank's gradient by the norm of the *average* gradient, as
            clip_grad_norm_ would do in DDP; that norm is estimated (gradient_noise.py). None: no
            clipping.
        correct_noise: Multiplies each parameter's change by the gain that gradient_noise.py
            describes, so that the average steps as far as one optimizer of the average gradient
            would. Decoupled weight decay is left as it is. None: for the optimizers of PyTorch that
            divide by the root of a second moment, without `outer` and `mix`, and with `every` up to
            4: with longer changes AdamW's loss ended higher.
        late_momentum: Leaves the momentum of Adam and AdamW (the first of `betas`) out of their
            steps, and applies it to the averaged changes, alike on all ranks (late_momentum.py). It
            smooths the error of the codec, too. A new learning rate takes effect over the next
            1 / (1 - momentum) steps. None: for these optimizers, without `outer` and `mix`.
        residual_decay: Multiplies residuals after each exchange, in (0, 1]: what is left out fades,
            as in SparseLoCo. For codecs with error feedback, or with `gate`.
        gate: As in Schedule. Without `codec`, what it lets through is sent exactly. None: all.
        process_group: None: the default group.
        compression: Further options of what is sent.
        schedule: Fragments, delay and mix, with `every` and `gate`.
        members: Who takes part, where ranks come and go. `ranks` processes begin; the constructor
            waits for them. Whoever comes later joins after an exchange: it takes over model,
            buffers, states of the optimizers and counters from a member, and begins without
            residual.
        execution: Threads, seed, timeout.
    """

    @explains_arguments
    def __init__(
        self,
        optimizer: Optimizers,
        model: nn.Module,
        codec: str | None = None,
        *,
        every: int | None = None,
        exchange: str | None = None,
        outer: OuterFactory | Optimizer | None = None,
        clip_norm: float | None = None,
        correct_noise: bool | None = None,
        late_momentum: bool | None = None,
        residual_decay: float = 1.0,
        gate: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        compression: Compression = Compression(),
        schedule: Schedule = EVERY_STEP,
        members: Members = Members(),
        execution: Execution = Execution(),
    ) -> None:
        optimizer = as_one(optimizer, "the second is the model")
        refuse_modes(optimizer, "LocalSteps")
        self._rules = rules = LocalRules.choose(
            optimizer,
            schedule.given(every=every, gate=gate),
            outer=outer,
            clip_norm=clip_norm,
            correct_noise=correct_noise,
            late_momentum=late_momentum,
            residual_decay=residual_decay,
            is_elastic=members.goes_on,
        )
        settings = ExchangeSettings.of(
            rules.with_codec(compression.given(codec=codec, exchange=exchange)),
            members.given(process_group=process_group),
            execution,
            finer=rules.finer_codec,
        )
        self._replica = replica = Replica("LocalSteps", optimizer, model, rules.complete(settings))
        rules.check_members(replica.shards, replica.settings)
        self._averaging = averaging = Averaging(replica, optimizer, rules)
        self._own_steps = 0  # of this object, whose bytes are counted
        self._left_out = 0
        # (A process that joins takes over the options of its optimizer from a member.)
        options = averaging.options_text(with_own=not rules.is_elastic)
        terms = [*rules.describe(averaging.betas), options]
        self._peers: Peers
        if rules.is_elastic:
            from gradwire.torch.optimizers.elastic_peers import ElasticPeers

            self._peers = ElasticPeers(averaging, terms, members, execution.timeout)
        else:
            self._peers = Peers(averaging, terms)
        super().__init__(optimizer)  # last: until then an error leaves it to the user
        replica.shared.watch_loads()
        replica.shared.note_values()
        late = rules.describe_late_changes(replica.settings.codec)
        if late and self.rank == 0:
            warn_user(late, CoarseGradientsWarning)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's model, and exchanges after every k-th step; returns the loss."""
        if is_of_get_state_dict():
            return None  # it asks for the state then, which is refused
        with self._forgets_scaler():
            self._begin_step()
            scale, not_finite = self._scaler_says()
            before = self._averaging.copy_parameters()
            loss = self._evaluate(closure) if not_finite else self._step_alone(closure, scale)
            self._end_step(before, not_finite)
            return loss

    def _let_user_step(self) -> None:
        """From now on the user steps the wrapped optimizer, between `_begin_step` and `_end_step`,
        as in DiLoCo."""
        self._own_use.end()

    def _begin_step(self) -> None:
        """Raises the errors of `step`."""
        self._check()
        for fragment in self._averaging.fragments:
            fragment.check_outer()
        if self._averaging.betas:
            check_momentum(self._optimizer, self._averaging.betas)
            self._check_unedited()

    def _end_step(
        self, before: Sequence[Sequence[torch.Tensor]] | None = None, not_finite: bool = False
    ) -> None:
        """Exchanges what is due.

        Args:
            before: Of Averaging.copy_parameters, for late momentum.
            not_finite: A GradScaler left the step out.
        """
        averaging = self._averaging
        before = before or [[] for _ in averaging.fragments]
        with self._peers.session.entire(f"step {averaging.steps}"):
            averaging.count_step(before, has_gradients=not not_finite)
            self._left_out += not_finite
            self._own_steps += 1
            self._peers.run(averaging.exchange_due)
            averaging.drop_gradients()
            self._replica.shared.note_values()
        if averaging.arrived.step >= 0:
            self._log(averaging.steps - 1)

    def _check(self) -> None:
        self._peers.check()
        self._replica.shared.check()
        self._replica.shared.check_load()

    def _scaler_says(self) -> tuple[float | None, bool]:
        """If a torch.amp.GradScaler called `step`: the scale of the gradients (None: they are not
        scaled), and whether one of them is not finite."""
        scale, found = (vars(self).get(name) for name in ("grad_scale", "found_inf"))
        return None if scale is None else float(scale), found is not None and bool(found)

    def _check_unedited(self, only_unsent: bool = False) -> None:
        """Raises RuntimeError if the user has changed a parameter since the last step. only_unsent:
        one that was stepped since its last exchange."""
        edited = set(self._replica.shared.edited())
        for fragment in self._averaging.fragments if edited else ():
            if only_unsent and fragment.steps == 0:
                continue
            names = [self._replica.names[place] for place in fragment.places]
            places = zip(names, fragment.parameters, fragment.anchors, strict=True)
            for name, values, anchor in places:
                # After an exchange it may have been changed and put back, as to evaluate a mean.
                agreed = anchor.to(values.device, values.dtype)
                if name in edited and (fragment.steps > 0 or not torch.equal(values, agreed)):
                    raise RuntimeError(
                        f"{name} was changed between two steps, such as by a cast and back, a "
                        "clamp or a step that broke off, and late momentum averages what steps "
                        "change: give LocalSteps late_momentum=False, which exchanges every "
                        "change. To evaluate other weights, put them into a copy of the model"
                    )

    def _step_alone(self, closure: Callable[[], Any] | None, scale: float | None) -> Any:
        is_late = bool(self._averaging.betas)

        def evaluate() -> Any:  # several times, if the optimizer does, as LBFGS and SAM do
            loss = self._evaluate(closure)
            if is_late and closure is not None:
                self._check_unedited()  # a forward pass may change parameters
            for name, parameter in self._replica.named:
                if parameter.grad is not None:
                    require_memory(name, parameter.grad)
            self._averaging.keep_gradients()
            if scale is not None or self._rules.has_noise:
                self._scale_gradients(scale)
            return loss

        momentum = without_momentum(self._optimizer) if is_late else nullcontext()
        if closure is None:
            evaluate()
        with momentum:
            return self._own_use.step(*([] if closure is None else [evaluate]))

    @ordinary_tensors()
    def _scale_gradients(self, scale: float | None) -> None:
        """Divides them by the GradScaler's scale and clips them."""
        gradients = self._averaging.gradients()
        mine = [gradient for gradient in gradients if gradient is not None]
        factor = 1.0 if scale is None else 1.0 / scale
        if self._rules.has_noise:
            corrected = self._averaging.corrected
            self._rules.check_gradients(self._replica.names, gradients, corrected)
        if self._rules.clip_norm is not None:
            noises = [f.noise for f in self._averaging.fragments if f.noise is not None]
            norm = factor * average_norm(noises, gradients, self._replica.shards)
            if norm > self._rules.clip_norm:
                factor *= self._rules.clip_norm / norm
        if factor != 1.0 and mine:
            torch._foreach_mul_(mine, factor)

    def synchronize(self) -> None:
        """Exchanges what was changed since the last exchanges, and applies it without `mix`.

        For the end of a training: after it the ranks' models are equal. The exchanges are then
        spread over the next steps as at the beginning. Every rank must call it at the same step;
        otherwise all ranks get a PeerMismatchError, which names two ranks and their steps.
        """
        self._check()
        if self._averaging.betas:
            self._check_unedited(only_unsent=True)
        with self._peers.session.entire("synchronize()"):
            if not self._rules.is_elastic:  # whose exchanges compare the steps
                self._compare_steps()
            self._peers.run(self._averaging.exchange_all)
            self._replica.shared.note_values()

    def _compare_steps(self) -> None:
        """Raises PeerMismatchError unless all ranks have taken the same number of steps."""
        here = f"synchronize() after {self._averaging.steps} local steps"
        clock = self._averaging.clock

        def compare(wire: Transport) -> None:
            try:
                agree(f"{here}\nstep {clock} of the schedule", wire)
            except PeerMismatchError as error:
                raise PeerMismatchError(f"{error}: {EQUALLY_OFTEN}", error.ranks) from None

        self._peers.session.start(compare, here).result()

    def anchors(self) -> dict[str, torch.Tensor]:
        """The values on which all ranks agreed last, by the names that the model's state_dict has:
        the model to evaluate while the ranks' own differ. This object goes on to change them."""
        name_of = {id(p): name for name, p in self._replica.model.named_parameters()}
        anchors = {
            place: anchor.detach()
            for fragment in self._averaging.fragments
            for place, anchor in zip(fragment.places, fragment.anchors, strict=True)
        }
        named = enumerate(self._replica.named)  # for shards that a forward pass has gathered
        return {name_of.get(id(p), name): anchors[i] for i, (name, p) in named}

    @property
    def rank(self) -> int:
        """The place of this rank among those with which it exchanges now. It may change where
        ranks come and go."""
        return self._peers.session.rank

    @property
    def every(self) -> int:
        """Steps from one exchange to the next."""
        return self._rules.schedule.every

    @property
    def local_steps(self) -> int:
        """How far the training is. Equal on all ranks at the same step, also where they come and
        go: a rank then takes over the number of another one, as it does with the model."""
        return self._averaging.steps

    @property
    def error(self) -> Exception | None:
        """The error that ended the communication; after it no step can be taken."""
        return self._peers.error

    def explain(self, error: BaseException) -> BaseException:
        """As GradwireState.explain."""
        return self._peers.session.explain(error)

    def close(self) -> None:
        """Ends the communication thread and its process group, and gives the wrapped optimizer
        and the outer one back. Statistics and residuals stay. Happens by itself at exit, or when
        this is dropped."""
        self._peers.close()
        self._own_use.end()
        if isinstance(self._rules.outer, OuterLike):
            self._rules.outer.end()

    def stats(self) -> LocalStats:
        """Sums over all steps of this rank, and the tensors that go raw, with the reasons."""
        from gradwire.torch.optimizers.local_stats import summarize

        return summarize(self._averaging, self._peers, self._own_steps, self._left_out)

    def last_step(self) -> dict[str, Any]:
        """The exchange that the last step applied, as GradwireState.last_step(). Its "step" is -1
        if there is none."""
        return self._averaging.arrived.summary()

    def _find_scalars(self) -> dict[str, float | None]:
        totals = self._peers.session.runner.ledger.totals
        found = scalars_of(self._averaging.arrived, totals)
        ratio = ratio_in_steps(found["ratio"], self._averaging, self._own_steps, totals.values)
        return found | {"ratio": ratio}

    @runs_hooks_of_saving
    def state_dict(self) -> checkpoint.StateDict:
        """This rank's optimizer, the anchors, the outer optimizers, and residuals.

        Every rank saves its own state and its own parameters: they differ between two exchanges.
        Waits for exchanges under way; their results are saved, too. Raises RuntimeError in a hook
        of the wrapped optimizer, which has no momentum there.
        """
        refuse_get_state_dict(self)
        if self._averaging.betas:
            check_momentum(self._optimizer, self._averaging.betas)
        own = self._averaging.state_dict()
        session = self._peers.session
        identity = self._replica.identity(session)
        return {
            **session.state_dict(identity, self._averaging.exchanges),
            **own,
            "left_out": self._left_out,
        }

    @runs_hooks_of_loading
    def load_state_dict(self, state_dict: checkpoint.StateDict) -> None:
        """Goes on from a saved state; every rank must load its own, and its model's parameters.

        The result is that of the uninterrupted run, bit for bit. Raises ValueError for a state of
        another rank, world size, shard, codec, model, class of optimizer, `every`, `fragments`,
        `delay`, `mix`, `gate` or `outer`.
        """
        state = checkpoint.with_clean_names(state_dict)
        session, averaging = self._peers.session, self._averaging
        self._replica.identity(session).check(state)
        averaging.check_state(state)
        averaging.load_optimizer(state["optimizer"])
        session.load_state_dict(state)
        averaging.load_state_dict(state)
        self._left_out = int(state["left_out"])
        self._replica.shared.allow_load()
