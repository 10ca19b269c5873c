"""What the adapters of training frameworks share: a way to train, and its state in files."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradwire.torch
from gradwire.errors import warn_user
from gradwire.torch import GradwireState, gradwire_hook
from gradwire.torch.checkpoint import save
from gradwire.torch.door import check_options
from gradwire.torch.errors import ResidualDroppedWarning
from gradwire.torch.hook.ddp_module import require_unhooked
from gradwire.torch.network.engine import gather
from gradwire.torch.parameters import ordinary_tensors, uncompiled
from gradwire.torch.staging.moves import checksums_of
from gradwire.torch.wrapping_optimizer import runs_hooks_of_loading, runs_hooks_of_saving

_LOCAL = ("every", "schedule")  # options that make it LocalSteps


class LocalSteps(gradwire.torch.LocalSteps):
    """To a framework this is the wrapped optimizer, whose state it saves and loads. The state of
    LocalSteps is each rank's own, and `Way.save` and `Way.restore` have it."""

    @runs_hooks_of_saving
    def state_dict(self) -> Any:
        return self._optimizer.state_dict()

    @runs_hooks_of_loading
    def load_state_dict(self, state_dict: Any) -> None:
        self._optimizer.load_state_dict(state_dict)


class Way:
    """The hook of DistributedDataParallel, or LocalSteps where `every` or `schedule` is given.

    Args:
        owner: The name that users call, for errors.
        codec: As text, or None for the default.
        options: Further arguments of GradwireState or LocalSteps.

    Attributes:
        is_local: Whether it is LocalSteps.
        is_attached: Whether a training is under way.
        model: The module inside DistributedDataParallel.
        undo: What `detach` does, the last first.
        file_name: That of this rank's file begins with it.

    Raises:
        TypeError: The class that is taken lacks an option, or an option is of another type.
    """

    def __init__(self, owner: str, codec: str | None, options: Mapping[str, Any]) -> None:
        self.is_local = not options.keys().isdisjoint(_LOCAL)
        kind = LocalSteps if self.is_local else GradwireState
        why = f"every= is {'' if self.is_local else 'not '}given"
        self._options = {"codec": codec, **options}
        check_options(owner, self._options, kind, why)
        self._owner = owner
        self._exchange: GradwireState | LocalSteps | None = None
        self._local: LocalSteps | None = None  # until `detach`
        self.is_attached = False
        self.model: nn.Module | None = None
        self.file_name = "gradwire"
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []  # while the agreed ones are there
        self.undo = contextlib.ExitStack()

    @property
    def exchange(self) -> Any:
        """The GradwireState or LocalSteps. Raises RuntimeError before the first training."""
        if self._exchange is None:
            raise RuntimeError(f"{self._owner} makes its exchange when the training begins")
        return self._exchange

    def stats(self) -> Any:
        """Counters over all steps of this rank; as text it is a report."""
        return self.exchange.stats()

    def attach(self, model: nn.Module, optimizer: Optimizer, **defaults: Any) -> Optimizer:
        """Returns the optimizer that the framework shall step from now on.

        Args:
            model: In DistributedDataParallel; a plain one is for LocalSteps.
            defaults: Options where the user gave none.

        Raises:
            RuntimeError: There is no process group, or model and optimizer are compressed already.
            Further errors: Those of GradwireState or LocalSteps.
        """
        inner = uncompiled(model)
        ddp = inner if isinstance(inner, DistributedDataParallel) else None
        if not dist.is_initialized() or (ddp is None and not self.is_local):
            raise RuntimeError(
                f"{self._owner} compresses what several processes send, and this is one without "
                "DistributedDataParallel: start the program with torchrun --nproc-per-node 2"
            )
        if self.is_local and ddp is not None and ddp.static_graph:
            raise ValueError(  # no_sync ends in an internal error of PyTorch
                f"{self._owner}: with every= DistributedDataParallel averages nothing, and with a "
                "static graph it always does: leave static_graph=True out"
            )
        self.detach()
        if isinstance(optimizer, gradwire.torch.LocalSteps):
            raise RuntimeError(
                f"{self._owner} takes a model and its optimizer once, and these are compressed "
                "already: call detach() of what it returned before"
            )
        options = {**defaults, **self._options}
        plain = model if ddp is None else ddp.module
        if self.is_local:
            self._exchange = self._local = optimizer = LocalSteps(optimizer, plain, **options)
            self.undo.callback(optimizer.close)
            if ddp is not None:  # which would average gradients, and buffers of the model
                self.undo.enter_context(ddp.no_sync())
        elif ddp is not None and all(own is not self._exchange for _, own in ddp._comm_hooks):
            require_unhooked(ddp, self._owner)
            self._exchange = GradwireState(model=ddp, optimizer=optimizer, **options)
            ddp.register_comm_hook(self._exchange, gradwire_hook)
        self.model, self.is_attached = plain, True
        return optimizer

    def detach(self) -> None:
        """Gives optimizer and model back. The hook stays, because DDP takes none back."""
        self.show_own()
        self.undo.close()
        self._local, self.is_attached = None, False

    def finish(self) -> None:
        """Makes the ranks' models equal."""
        self.show_own()
        if self._local is not None:
            self._local.synchronize()

    def level(self) -> None:
        """Gives all ranks the model of rank 0, whose checkpoints are kept, if theirs differ: after
        `finish` a callback may have put each rank's own average of weights in place."""
        if self._local is None:
            return
        session, own = self._local._peers.session, str(self._checksums())
        models = session.start(lambda wire: gather(own, wire), "comparing the models").result()
        if len(set(models)) > 1:
            self._local._replica.follow_rank_0(session, [])

    def show_agreed(self) -> None:
        """Puts the weights on which all ranks agreed last into the model, to evaluate or to save
        it. Moves no values: the parameters look at other memory meanwhile."""
        if self._own or self._local is None:
            return
        agreed = self._local.anchors()
        assert self.model is not None
        for name, parameter in self.model.named_parameters():
            if name in agreed:
                self._own.append((parameter, parameter.data))
                parameter.data = agreed[name].to(parameter.device, parameter.dtype)

    def show_own(self) -> None:
        """Takes `show_agreed` back."""
        for parameter, values in self._own:
            parameter.data = values
        self._own.clear()

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Inside, the model has the weights on which all ranks agreed last."""
        was_shown = bool(self._own)
        self.show_agreed()
        try:
            yield
        finally:
            if not was_shown:
                self.show_own()

    # Files -------------------------------------------------------------------------------------

    def file_of(self, checkpoint: str | Path) -> Path:
        """This rank's file in a folder, or beside a file."""
        name, path = f"{self.file_name}_{dist.get_rank()}.pt", Path(checkpoint).resolve()
        return path / name if path.is_dir() else path.with_name(f"{path.name}.{name}")

    def save(self, checkpoint: str | Path) -> None:
        """Saves this rank's state to `file_of(checkpoint)`, with its own values of what differs
        between ranks."""
        with self.agreed():
            model = self._checksums()
        shown = dict(self._own)
        own = {
            name: shown.get(tensor, tensor).detach() for name, tensor in self._differing().items()
        }
        file = self.file_of(checkpoint)
        # The framework makes it on one rank, perhaps a little later, or on another machine.
        file.parent.mkdir(parents=True, exist_ok=True)
        save({"gradwire": self._state_dict(), "own": own, "model": model}, file)

    def restore(self, checkpoints: Iterable[str | Path], remedy: str = "") -> None:
        """Loads the first file that was saved with the model which has been loaded. If there is
        none, the training goes on without residuals, and a ResidualDroppedWarning says so.

        The model and the optimizer have been loaded. Raises ValueError for a state of another rank,
        world size, codec or way, and if there is none where LocalSteps has another model already.
        """
        files = [self.file_of(checkpoint) for checkpoint in checkpoints]
        for file in filter(Path.exists, files):
            try:
                saved = _read(file)
                if saved["model"] == self._checksums():
                    self._load(saved)
                    return
            except ValueError as error:
                raise ValueError(
                    f"{file}: {error}. Remove this file of every rank to go on from the "
                    "checkpoint without residuals"
                ) from error
        none = f"no state of gradwire for the loaded model in {' or '.join(map(str, files))}"
        if self._local is not None:
            try:
                self._local._check()
            except RuntimeError as error:
                raise ValueError(
                    f"{none}: to go on from it without residuals, load it before LocalSteps is made"
                ) from error
        warn_user(
            f"{none}: the training goes on without residuals{remedy}. Where other ranks have found "
            "theirs, it ends with a PeerMismatchError: copy the files of all ranks, or remove them",
            ResidualDroppedWarning,
        )

    @ordinary_tensors()
    def _load(self, saved: Mapping[str, Any]) -> None:
        differing = self._differing()
        if absent := sorted(differing.keys() - saved["own"].keys()):
            raise ValueError(
                f"it has no values of {absent[0]}, which LocalSteps did not train when it was saved"
            )
        for name, tensor in differing.items():
            tensor.detach().copy_(saved["own"][name])
        if self._local is not None:
            gradwire.torch.LocalSteps.load_state_dict(self._local, saved["gradwire"])
        else:
            self.exchange.load_state_dict(saved["gradwire"])

    def _state_dict(self) -> dict[str, Any]:
        if self._local is not None:
            return gradwire.torch.LocalSteps.state_dict(self._local)
        return self.exchange.state_dict()

    def _differing(self) -> dict[str, torch.Tensor]:
        """Tensors of the model that are each rank's own."""
        if not self.is_local:
            return {}
        assert self.model is not None
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        return {**trained, **dict(self.model.named_buffers())}

    def _checksums(self) -> list[int]:
        assert self.model is not None
        return checksums_of(self.model.parameters())


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of GradwireState and LocalSteps, and all others."""
    names = {n for way in (GradwireState, LocalSteps) for n in inspect.signature(way).parameters}
    ours = {name: value for name, value in options.items() if name in names}
    return ours, {name: value for name, value in options.items() if name not in names}


def _read(file: Path) -> Any:
    """Raises ValueError for a file that is not whole, or another one."""
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except (EOFError, RuntimeError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
    except OSError:
        raise
    except Exception:  # of a parser; PyTorch's advice is to unpickle
        saved = None
    if not isinstance(saved, dict) or saved.keys() != {"gradwire", "own", "model"}:
        raise ValueError("it is no state of gradwire; without `git lfs pull` it may be a pointer")
    return saved
