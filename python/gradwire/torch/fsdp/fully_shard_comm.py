"""Compressed gradients and weights for a model that `fully_shard` (FSDP2) has sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from gradwire.option_record import explains_arguments
from gradwire.torch import checkpoint
from gradwire.torch.buckets.bucket import BucketJob
from gradwire.torch.buckets.reduction import ExchangeWork, Op, factor_of, is_reduction, write_shard
from gradwire.torch.buckets.session import Session, SessionOwner
from gradwire.torch.exchange_settings import RAW_CODECS, ExchangeSettings
from gradwire.torch.fsdp.legs import (
    ReplacedCollective,
    all_gather_settings,
    among_shards,
    explained,
    reduce_scatter_settings,
)
from gradwire.torch.fsdp.reductions import Reduction, Reductions
from gradwire.torch.fsdp.units import DefaultAllGather, DefaultReduceScatter, Unit, find_units
from gradwire.torch.hook.gradwire_state import LossScaler
from gradwire.torch.live import scalars_of
from gradwire.torch.network.engine import Unused, agree, lacking_in_all
from gradwire.torch.network.failure import FailureBoard
from gradwire.torch.network.transport import Transport
from gradwire.torch.optimizer_list import Optimizers
from gradwire.torch.options import Compression, Execution
from gradwire.torch.parameters import NamedShape, named_parameters, uncompiled
from gradwire.torch.staging.moves import describe_values
from gradwire.torch.stats import Stats
from gradwire.torch.wrapping_optimizer import OptimizerWatch, finer_codec, usual_push_codec

_SHARDS_IN_FLIGHT = 2  # buffers of whole gradients; they take the memory that sharding saves
_CALLBACK = -1  # autograd's number of a backward pass whose callbacks run


class FullyShardComm(SessionOwner):
    """Compresses what a model sends that `torch.distributed.fsdp.fully_shard` has sharded.

        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        comm = FullyShardComm(model, codec="safe")

    What is compressed depends on the mesh.

    one dimension (FSDP)    the reduce-scatter of gradients. Every rank encodes each shard for its
                            owner, with a residual, and the owner adds them up
    two dimensions (HSDP)   the all-reduce of gradients between the replicas, both ways, with
                            residuals. The reduce-scatter inside a replica stays PyTorch's own. All
                            replicas get the same bits

    `weights` compresses the all-gather of parameters among the shards, in forward and backward.

    Every rank must be given the same arguments, after the last call of `fully_shard`, once for a
    model; the ranks compare them. Gradient accumulation (`set_requires_gradient_sync`), mixed
    precision, `reshard_after_forward`, activation checkpointing and `clip_grad_norm_` need no
    change. A parameter that no rank uses has no gradient; where some ranks use it, zeros are the
    gradients of the others.

    Raises TypeError for a model that is not sharded, ValueError for settings that do not fit its
    mesh, GradwireError for an unknown codec, PeerMismatchError for ranks that differ, ImportError
    for a PyTorch before 2.13.

    Sources: Zhao et al. 2023 (PyTorch FSDP, arXiv:2304.11277) for sharding, section 3.2 for hybrid
    sharding; Wang et al. 2023 (ZeRO++, arXiv:2306.10209), section 4.1 for quantized weights.

    Args:
        model: After the last call of `fully_shard`.
        codec: Of gradients, as text. None: as in GradwireState. An adaptive optimizer needs one
            that sends every value (docs/guides/adam.md).
        optimizer: For the default of `codec`; None: any.
        weights: The codec of weights, such as "bf16" or "safe"; it takes no error feedback. The
            ranks compute with the decoded weights, and the optimizer steps the exact ones. None:
            PyTorch's own all-gather.
        weights_rules: (pattern, codec) for weights.
        exchange: Between replicas (HSDP), as in Compression. None: "sharded".
        start_iter: Number of first iterations whose gradients go raw.
        scaler: The GradScaler, if gradients are scaled: residuals follow its scale.
        overlap: Gradients are exchanged while `backward()` goes on, where nothing reads them before
            it ends. False: each unit waits for its result, to measure what overlap saves.
        compression: Further options for gradients; `pull_codec` for HSDP alone.
        execution: Threads, seed, timeout.
    """

    _session: Session

    @explains_arguments
    def __init__(
        self,
        model: nn.Module,
        codec: str | None = None,
        *,
        optimizer: Optimizers | None = None,
        weights: str | None = None,
        weights_rules: Sequence[tuple[str, str]] = (),
        exchange: str | None = None,
        start_iter: int = 2,
        scaler: LossScaler | None = None,
        overlap: bool = True,
        compression: Compression = Compression(),
        execution: Execution = Execution(),
    ) -> None:
        if start_iter < 0:
            raise ValueError(f"start_iter is {start_iter}; it must not be negative")
        self._units = find_units(model)
        self._start_iter, self._scaler, self._overlap = start_iter, scaler, overlap
        shards, replicas = self._units[0].shards, self._units[0].replicas
        self._hybrid = replicas is not None
        chosen = ExchangeSettings.of(
            compression.given(codec=codec, exchange=exchange),
            execution,
            finer=partial(finer_codec, optimizer),
        )
        if not self._hybrid:
            chosen = reduce_scatter_settings(chosen)
        terms = f"start_iter {start_iter}"
        chosen = replace(chosen, process_group=replicas or shards, terms=terms)
        shapes = dict(tensor for unit in self._units for tensor in unit.gradients())
        tensors = [(n, shapes[n]) for n, _ in named_parameters(model) if n in shapes]
        self._settings = chosen.with_last_excluded(tensors)
        sizes = {name: size for unit in self._units for name, size in unit.sizes().items()}
        self._tensors = [(n, sizes.get(n, list(p.shape))) for n, p in named_parameters(model)]
        inner = None
        if self._hybrid:
            inner = ExchangeSettings(process_group=shards, timeout=self._settings.timeout)
        if weights is not None:
            inner = all_gather_settings(self._settings, weights, weights_rules, shards)
        self._reductions = Reductions()
        self._unused: Callable[[], Unused] = Unused  # of the reduction under way
        # Backward passes whose gradients were reduced. It numbers the steps, so that a forward and
        # its backward draw alike for weights, also after a restart.
        self._iterations = 0
        self._is_compared = False  # with the other ranks of the mesh, since it began or was loaded
        self._backward: int | None = None  # autograd's number of the one under way
        self._gathers = False  # whether weights were gathered since the last end of a step
        self._loss_scale: float | None = None
        device = self._units[0].device
        board = None if inner is None else FailureBoard.of_world(self._units[0].ranks)
        lines = self._settings.describe()
        lines += [f"weights {weights}", f"weights_rules {list(weights_rules)}"]
        for unit in self._units:
            lines += [f"unit {unit.index} {name} {shape}" for name, shape in unit.weights()]

        def connect(settings: ExchangeSettings) -> Session:
            session = Session(settings, device, board=board)
            session.close_with(self)
            session.start(partial(agree, "\n".join(lines)), "comparing the model").result()
            return session

        self._session = connect(self._settings)
        # Inside a replica it carries weights, or only tells which rank is gone.
        self._inner_session = None if inner is None else connect(inner)
        self._weights_session = None if weights is None else self._inner_session
        layout = self._settings.layout(tensors, world_size=1)
        parameters = [p for unit in self._units for p in unit.parameters]
        push = usual_push_codec(layout)
        self._watch = OptimizerWatch(parameters, push, dist.get_rank(), local_steps=False)
        for unit in self._units:
            self._take_over(unit)
        if self._weights_session is not None:
            uncompiled(model).register_forward_hook(torch.compiler.disable(self._end_pass))

    # Statistics and checkpoints ----------------------------------------------------------------

    def stats(self) -> Stats:
        """Sums over all complete steps of this rank, of gradients, and which tensors go raw and
        why."""
        stats = self._session.stats()
        return replace(stats, remarks=stats.remarks + self._watch.remarks)

    def weights_stats(self) -> Stats | None:
        """The same of the all-gathers of weights; None if they are PyTorch's own. A forward pass
        without gradients is a step of its own."""
        return None if self._weights_session is None else self._weights_session.stats()

    def _find_scalars(self) -> dict[str, float | None]:
        found, weights = super()._find_scalars(), self._weights_session
        if weights is not None:
            gathered = scalars_of(weights.runner.ledger.last_step, weights.runner.ledger.totals)
            found |= {f"weights_{name}": number for name, number in gathered.items()}
        return found

    def state_dict(self) -> checkpoint.StateDict:
        """This rank's residuals and its count of iterations; every rank saves its own."""
        return {
            **self._session.state_dict(self._identity(), self._iterations),
            "replicas": self._session.world_size if self._hybrid else None,
            "shard": self._shard(),
            "dims": {name: dim for unit in self._units for name, dim in unit.dims().items()},
        }

    def load_state_dict(self, state: checkpoint.StateDict) -> None:
        """Goes on from a saved state, bit for bit; every rank must load its own.

        Raises ValueError for a state of another rank, mesh, codec, exchange or model.
        """
        state = checkpoint.with_clean_names(state)
        self._identity().check(state)
        if state.get("shard") != self._shard():
            raise ValueError(f"the state is of shard {state.get('shard')}, this is {self._shard()}")
        self._session.load_state_dict(state)
        self._iterations = int(state["iterations"])
        self._is_compared = False

    def close(self) -> None:
        """Ends the communication threads and their process groups. The model can't be used after
        it; statistics and residuals stay."""
        super().close()
        if self._inner_session is not None:
            self._inner_session.close()

    def explain(self, error: BaseException) -> BaseException:
        """An error that names the ranks that are gone; `error` itself if no rank is.

        For errors of PyTorch's own communication, which does not say whose connection closed. What
        `forward` and `backward` raise is explained already.
        """
        inner = self._inner_session
        found = error if inner is None else inner.explain(error)
        return super().explain(error) if found is error else found

    # Construction ------------------------------------------------------------------------------

    def _identity(self) -> checkpoint.Identity:
        return self._session.identity("FullyShardComm", self._tensors)

    def _shard(self) -> str:
        """This rank's place among the shards, which `rank` of a state does not say in HSDP."""
        shards = self._units[0].shards
        return f"{shards.rank()} of {shards.size()}"

    def _compare_ranks(self) -> None:
        """Compares HSDP's models, frozen parameters too. Averages of gradients keep replicas equal
        that began equal. And inside a replica PyTorch communicates itself, so nothing else shows
        that a shard is of another step."""
        inner = self._inner_session
        assert inner is not None, "there are replicas"
        lines = [f"a state of step {self._iterations}"]

        def compare(wire: Transport) -> None:
            for unit in self._units:
                lines.extend(describe_values(unit.all_shards()))
            agree("\n".join(lines), wire)

        inner.start(partial(agree, lines[0]), "comparing the steps of the shards").result()
        self._session.start(compare, "comparing the replicas").result()
        self._is_compared = True

    def _take_over(self, unit: Unit) -> None:
        """Replaces the unit's communication."""
        if self._hybrid or unit.shards.size() > 1:
            unit.fill_before_reducing(partial(self._note_unused, unit))
        gather = explained(DefaultAllGather(), self.explain)
        if self._weights_session is not None:
            gather = among_shards(partial(self._all_gather, unit), unit.shards.size(), gather)
        if self._hybrid:
            unit.reduce_inside()
            reduce = explained(DefaultReduceScatter(), self.explain)
            unit.replace_communication(reduce, gather, partial(self._average_replicas, unit))
        else:
            reduce = ReplacedCollective(partial(self._reduce_scatter, unit))
            unit.replace_communication(reduce, gather)

    # Gradients ---------------------------------------------------------------------------------

    def _note_unused(self, unit: Unit, unused: Unused) -> None:
        """Notes what this rank lacks; with HSDP, what all ranks of the replica lack, which PyTorch
        does not say as it adds their gradients up."""
        self._unused = lambda: unused
        if self._hybrid:
            inner = self._inner_session
            assert inner is not None, "there are replicas"
            work = partial(lacking_in_all, unused, len(unit.reduced))
            agreed = inner.start(work, "asking which gradients there are")
            if unused.own:
                self._unused = agreed.result

    def _average_replicas(self, unit: Unit, reduced: torch.Tensor) -> None:
        if unit.accumulates_shards():
            raise RuntimeError(
                "set_requires_all_reduce(False) adds up shards between two all-reduces, which "
                "FullyShardComm replaces: accumulate with set_requires_gradient_sync(False)"
            )
        factor = self._session.world_size if unit.adds_replicas_up() else 1
        self._exchange(unit, unit.reduced_pieces(), reduced, reduced, lambda: None, factor)
        if unit.after_reduction is not None:
            unit.after_reduction(reduced)

    def _reduce_scatter(
        self, unit: Unit, output_tensor: torch.Tensor, input_tensor: torch.Tensor, op: Op, **_: Any
    ) -> None:
        """Fills the output with this rank's shard of the average or the sum, at the latest when
        `backward()` ends. The input is changed."""
        if not is_reduction(op):
            raise ValueError(
                f"the gradients are reduced with {op}, because set_gradient_divide_factor was "
                "called: call set_force_sum_reduction_for_comms(True), too"
            )
        size, rank = unit.shards.size(), unit.shards.rank()
        deliver = partial(write_shard, input_tensor, output_tensor, rank, size)
        tensors, factor = unit.reduced_tensors(), factor_of(op, size)
        self._exchange(unit, tensors, input_tensor, output_tensor, deliver, factor)

    def _exchange(
        self,
        unit: Unit,
        tensors: list[NamedShape],
        values: torch.Tensor,
        reduced: torch.Tensor,
        deliver: Callable[[], None],
        factor: int = 1,
    ) -> None:
        self._check_session()
        self._reductions.end_silence()
        if values.dtype not in RAW_CODECS:
            raise TypeError(
                "float32, bfloat16 and float16 gradients are exchanged; those of "
                f"{unit.names()} are reduced as {values.dtype}"
            )
        backward = torch._C._current_graph_task_id()  # -1 in the callbacks at its end
        if self._backward is None or backward not in (self._backward, _CALLBACK):
            self._begin_step(backward)
        later = self._overlap and unit.takes_result_later(reduced)
        if not later:
            self._reductions.land(0)  # what PyTorch does next may read earlier results
        unused, parameters = self._unused(), unit.reduced
        self._reductions.note(parameters[place] for place in unused.own)
        job = BucketJob(
            step=self._iterations,
            index=unit.index,
            last=False,
            raw=self._iterations < self._start_iter,
            factor=factor,
            unused=unused,
            tensors=tensors,
            values=values,
            loss_scale=self._loss_scale,
        )
        if not self._hybrid:
            self._reductions.land(_SHARDS_IN_FLIGHT - 1)
        future = self._session.submit_for_torch(job)
        self._reductions.add(Reduction(future, deliver, unused, parameters))
        if not later:
            self._reductions.silence(self._reductions.land(0))

    def _begin_step(self, backward: int) -> None:
        self._reductions.begin()
        if self._hybrid and not self._is_compared:
            self._compare_ranks()
        self._backward = backward
        self._loss_scale = None if self._scaler is None else self._scaler.get_scale()
        try:  # PyTorch calls it when all units are done, before backward() returns.
            Variable._execution_engine.queue_callback(self._end_step)
        except RuntimeError as error:
            raise RuntimeError(
                "FullyShardComm exchanges gradients inside backward(), and PyTorch reduces these "
                "after it: leave set_manual_backward_finalization(True) out"
            ) from error

    def _end_step(self) -> None:
        self._backward = None
        self._reductions.end()
        self._iterations += 1
        _end_step(self._session)
        self._end_weights_step()
        self._log(self._iterations - 1)

    # Weights -----------------------------------------------------------------------------------

    def _all_gather(self, unit: Unit, output: torch.Tensor) -> ExchangeWork:
        """Replaces `output`, in which this rank's shard is, by the decoded shards of all ranks."""
        session = self._weights_session
        assert session is not None, "the unit's all-gather was replaced"
        session.check()
        if output.dtype not in RAW_CODECS:
            raise TypeError(
                f"{unit.names()} are gathered as {output.dtype}, because their dtypes differ or a "
                "tensor subclass encodes them: give weights=None, or the unit one dtype"
            )
        self._gathers = True
        job = BucketJob(
            step=self._iterations,
            index=unit.index,
            last=False,
            tensors=unit.weights(),
            values=output,
        )
        return ExchangeWork(session.submit_for_torch(job), [output])

    def _end_pass(self, *_: Any) -> None:
        """After a forward pass of the model. One without gradients, which no backward pass follows,
        is a step of weights by itself."""
        if not torch.is_grad_enabled() and self._backward is None:
            self._end_weights_step()

    def _end_weights_step(self) -> None:
        if self._weights_session is not None and self._gathers:
            self._gathers = False
            _end_step(self._weights_session)


def _end_step(session: Session) -> None:
    session.start(lambda _: session.runner.end_step(), "ending a step").result()
