"""Lightning with a compressed exchange: strategies for its Trainer and for Fabric.

    from gradwire.contrib.lightning import FabricStrategy, GradwireStrategy

    trainer = Trainer(strategy=GradwireStrategy(every=30), devices=2)

    fabric = Fabric(strategy=FabricStrategy(every=30), devices=2)
    model, optimizer = fabric.setup(model, optimizer)

Without `every` the strategies put a hook into DDP.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradwire.errors import requiring, warn_user

with requiring(__name__, "Lightning", "lightning", "'.[recipes]'"):
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.strategies import DDPStrategy

from gradwire.contrib.way import Way, split_options
from gradwire.torch.errors import ResidualDroppedWarning


class GradwireStrategy(DDPStrategy):
    """Lightning's DDPStrategy with gradwire's hook or, if `every` or `schedule` is given, with
    LocalSteps instead of DDP.

    With LocalSteps `gradient_clip_val` becomes `clip_norm`, unless that is given or values are
    clipped. Validation and checkpoints see the weights on which all ranks agreed last; when the
    training ends, the ranks exchange what they have changed since. Where a callback then puts an
    average of the weights in place, all ranks take that of rank 0.

    Each rank saves a file beside every checkpoint, `CHECKPOINT.gradwire_RANK.pt`, so that a resumed
    training ends with the same bits. Checkpoints must be files on a disk. The module has one
    optimizer.

    Args:
        codec: As text. None: the default of the way.
        options: Further arguments of GradwireState or LocalSteps; all others are DDPStrategy's.

    Attributes:
        way: Has `stats()`.

    Raises:
        TypeError: GradwireState lacks an option of LocalSteps, and `every` is not given.
    """

    optimizers: list[Optimizer]  # a property of DDPStrategy

    def __init__(self, codec: str | None = None, **options: Any) -> None:
        ours, theirs = split_options(options)
        super().__init__(**theirs)
        self.way = Way("GradwireStrategy", codec, ours)
        self._loaded: list[Path] = []  # the checkpoint that was read last

    def configure_ddp(self) -> None:
        if not self.way.is_local:
            super().configure_ddp()

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        defaults = {}
        clips_values = str(getattr(trainer.gradient_clip_algorithm, "value", "norm")) == "value"
        takes_clipping = self.way.is_local and trainer.gradient_clip_val and not clips_values
        if takes_clipping:
            defaults["clip_norm"] = float(trainer.gradient_clip_val)
        self.optimizers = [self.way.attach(self.model, _only(self.optimizers), **defaults)]
        if takes_clipping:  # by one rank's gradient
            value = trainer.gradient_clip_val
            self.way.undo.callback(setattr, trainer, "gradient_clip_val", value)
            trainer.gradient_clip_val = None
        if self.way.is_local:
            first = _First(self.way)
            trainer.callbacks.insert(0, first)
            self.way.undo.callback(trainer.callbacks.remove, first)

    def on_validation_end(self) -> None:
        self.way.show_own()
        super().on_validation_end()

    def on_train_end(self) -> None:  # after all callbacks
        self.way.level()
        super().on_train_end()

    def teardown(self) -> None:
        self.way.detach()
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self.way.agreed():
            return super().lightning_module_state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.way.is_attached and "optimizer_states" in checkpoint:
            self.way.save(filepath)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if not Path(filepath).is_symlink():  # save_last="link": the files are those of another
            self.way.file_of(filepath).unlink(missing_ok=True)
        super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, **options: Any) -> dict[str, Any]:
        self._loaded = [Path(checkpoint_path)]
        return super().load_checkpoint(checkpoint_path, **options)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self.way.restore(self._loaded)


class _First(Callback):
    """Comes before all other callbacks: they may put weights in place, such as averages, and put
    back what was there. (Lightning asks the strategy last.)"""

    def __init__(self, way: Way) -> None:
        self._way = way

    def on_validation_start(self, *_: Any) -> None:
        self._way.show_agreed()

    def on_train_end(self, *_: Any) -> None:
        self._way.finish()


class FabricStrategy(FabricDDPStrategy):
    """Fabric's DDPStrategy with gradwire's hook or, if `every` or `schedule` is given, with
    LocalSteps instead of DDP.

    `fabric.setup(model, optimizer)` takes both together. With LocalSteps `fabric.clip_gradients`
    would clip by one rank's gradient: give `clip_norm=` in its place. Evaluate inside
    `with fabric.strategy.way.agreed():`, and call `fabric.strategy.way.finish()` when the training
    ends: then the ranks' models are equal.

    Where `fabric.save` saves the optimizer, each rank adds a file `CHECKPOINT.gradwire_RANK.pt`,
    which `fabric.load` reads.

    Args, Attributes and Raises: As GradwireStrategy.
    """

    def __init__(self, codec: str | None = None, **options: Any) -> None:
        ours, theirs = split_options(options)
        super().__init__(**theirs)
        self.way = Way("FabricStrategy", codec, ours)
        if self.way.is_local:
            self._backward_sync_control = _NothingToSkip()

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        if not self.way.is_local:
            module = super().setup_module(module)
        return module, [self.way.attach(module, _only(optimizers))], scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        raise RuntimeError("FabricStrategy needs both at once: fabric.setup(model, optimizer)")

    def save_checkpoint(self, path: str | Path, state: dict[str, Any], **options: Any) -> None:
        with self.way.agreed():
            super().save_checkpoint(path, state, **options)
        if count := _count_optimizers(state):
            self.way.save(path)
        if count > 1:
            warn_user(
                f"{path} has {count} optimizers, and gradwire's state of the last one that was set "
                "up alone: the training of the others goes on from there without residuals",
                ResidualDroppedWarning,
            )

    def load_checkpoint(
        self, path: str | Path, state: Any = None, **options: Any
    ) -> dict[str, Any]:
        has_optimizer = isinstance(state, dict) and _count_optimizers(state) > 0
        self.way.show_own()
        rest: dict[str, Any] = super().load_checkpoint(path, state, **options)
        if has_optimizer:
            self.way.restore([path])
        return rest


class _NothingToSkip:
    """For gradient accumulation: no backward pass averages."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


def _count_optimizers(state: dict[str, Any]) -> int:
    return sum(isinstance(value, Optimizer) for value in state.values())


def _only(optimizers: list[Optimizer]) -> Optimizer:
    if len(optimizers) != 1:
        raise ValueError(
            f"gradwire.contrib.lightning takes one optimizer, not {len(optimizers)}: step several "
            "as one in a loop of your own, gradwire.torch.LocalSteps([muon, adamw], model)"
        )
    return optimizers[0]
