"""Accelerate with a compressed exchange.

    from gradwire.contrib.accelerate import compress

    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    way = compress(accelerator, model, optimizer, every=30)
    ...  # the training
    way.finish()

Without `every` this puts a hook into DDP, and `finish` has nothing to do.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradwire.errors import requiring

with requiring(__name__, "Accelerate", "accelerate", "'.[recipes]'"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType

from gradwire.contrib.way import Way


def compress(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    codec: str | None = None,
    **options: Any,
) -> Way:
    """Compresses what a training with Accelerate sends, by the hook of DistributedDataParallel, or
    by LocalSteps if `every` or `schedule` is given.

    With LocalSteps DDP averages nothing. `accelerator.clip_grad_norm_` would clip by one rank's
    gradient: give `clip_norm=` in its place. Evaluate inside `with way.agreed():`, and call
    `way.finish()` when the training ends: then the ranks' models are equal.

    `accelerator.save_state` and `load_state` have the state, too: each rank adds a file
    `gradwire_RANK.pt` to the folder, for a second optimizer `gradwire_1_RANK.pt`. Call this first,
    then `load_state`. With LocalSteps `save_state` saves the weights on which all ranks agreed
    last, and its hooks see them, which may save the model themselves.

    Args:
        model: As `accelerator.prepare` returned it.
        optimizer: As `accelerator.prepare` returned it.
        codec: As text. None: the default of the way.
        options: Further arguments of GradwireState or LocalSteps.

    Raises:
        TypeError: The optimizer is not prepared, or the class that is taken lacks an option.
        RuntimeError: There is no process group, there is FSDP or DeepSpeed, or model and optimizer
            are compressed already.
        Further errors: Those of GradwireState or LocalSteps.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError(
            "compress takes the optimizer that accelerator.prepare returned, not "
            f"{type(optimizer).__name__}"
        )
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise RuntimeError(
            f"gradwire.contrib.accelerate is for DistributedDataParallel, and this is {kind.value}"
        )
    way = Way("gradwire.contrib.accelerate.compress", codec, options)
    folders: list[str] = []  # where a load is under way
    inner = optimizer.optimizer
    step_with(way, model, optimizer)
    places = [place for place, each in enumerate(accelerator._optimizers) if each is optimizer]
    if any(places):  # as Accelerate names optimizer_1.bin
        way.file_name = f"gradwire_{places[0]}"

    save_state = accelerator.save_state

    def save_agreed(*arguments: Any, **named: Any) -> Any:
        with way.agreed():  # for hooks that save the model themselves, too
            return save_state(*arguments, **named)

    def on_save(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        way.save(folder)

    def on_load(models: list[nn.Module], folder: str) -> None:
        way.show_own()
        folders.append(folder)

    def after_load(_: Optimizer) -> None:  # the model is loaded before the optimizer
        if folders:
            way.restore([folders.pop()])

    handles = [
        accelerator.register_save_state_pre_hook(on_save),
        accelerator.register_load_state_pre_hook(on_load),
        inner.register_load_state_dict_post_hook(after_load),
    ]
    if way.is_local:  # DDP keeps the hook, and its state is saved on
        accelerator.save_state = save_agreed  # stays: after `detach` it does nothing of its own
        for handle in handles:
            way.undo.callback(handle.remove)
    return way


def step_with(way: Way, model: nn.Module, optimizer: AcceleratedOptimizer, **defaults: Any) -> None:
    """Attaches the way to what Accelerate has prepared: until `way.detach()`, `optimizer` steps the
    optimizer of the way. defaults: as in Way.attach."""
    way.detach()
    inner = optimizer.optimizer
    stepped = way.attach(model, inner, **defaults)
    if stepped is not inner:
        _put_into(optimizer, stepped)
        way.undo.callback(_put_into, optimizer, inner)


def _put_into(optimizer: AcceleratedOptimizer, inner: Optimizer) -> None:
    AcceleratedOptimizer.__init__(optimizer, inner, device_placement=False, scaler=optimizer.scaler)
