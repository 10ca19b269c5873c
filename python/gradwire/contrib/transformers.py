"""Hugging Face's Trainer with a compressed exchange.

    from gradwire.contrib.transformers import GradwireCallback

    callbacks = [GradwireCallback(every=30)]
    Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()

Without `every` the callback puts a hook into DDP; torchrun starts the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradwire.errors import requiring

with requiring(__name__, "transformers and Accelerate", None, "'.[recipes]'"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gradwire.contrib.accelerate import step_with
from gradwire.contrib.way import Way
from gradwire.torch.hook.ddp_module import all_objects


class GradwireCallback(TrainerCallback):
    """Compresses what a Trainer sends under torchrun, by the hook of DistributedDataParallel or by
    LocalSteps.

        GradwireCallback()  # the hook; codec "safe" for Adam, "small" for SGD
        GradwireCallback(codec="qsgd:bits=4")  # the hook
        GradwireCallback(every=1)  # LocalSteps: codec "small", at the loss of DDP with AdamW
        GradwireCallback(every=30, outer=outer_nesterov())  # DiLoCo

    With LocalSteps DDP averages nothing, and these are different from a training with DDP:

    - `max_grad_norm` becomes LocalSteps' `clip_norm`, unless that is given.
    - With `every` above 1 each rank averages its loss over its own tokens, instead of waiting in
      each step for the number that the others have (`average_tokens_across_devices`).
    - The Trainer evaluates and saves the weights on which all ranks agreed last. When the training
      ends, the ranks exchange what they have changed since. Where another callback then puts an
      average of the weights in place, all ranks take that of rank 0.

    Each rank adds a file `gradwire_RANK.pt` to every checkpoint, so that a resumed training ends
    with the same bits as one that was not interrupted. It is read from `checkpoint-STEP` in
    `output_dir`, or from the folder that TrainingArguments(resume_from_checkpoint=) names; if
    neither has the file of the loaded model, the training goes on without residuals, and a
    ResidualDroppedWarning says so.

    Args:
        codec: As text. None: the default of the way.
        options: Further arguments of GradwireState or, with `every` or `schedule`, of LocalSteps.

    Raises:
        TypeError: The class that is taken lacks an option.

    `train` raises RuntimeError for a process that torchrun did not start, FSDP, DeepSpeed and a
    second GradwireCallback, and the errors of GradwireState or LocalSteps. A process that torchrun
    started alone trains alone, and sends nothing.
    """

    def __init__(self, codec: str | None = None, **options: Any) -> None:
        self._way = Way("GradwireCallback", codec, options)
        self._ended = False
        self._folder = Path()  # of the checkpoints; each run of a hyperparameter search has its own

    @property
    def exchange(self) -> Any:
        """The GradwireState or LocalSteps, for `log_to`, `scalars` and the like. Raises
        RuntimeError before the first training."""
        return self._way.exchange

    def stats(self) -> Any:
        """Counters over all steps of this rank; as text it is a report."""
        return self._way.stats()

    # Events, in the order in which they come ----------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: Any,
        control: Any,
        optimizer: AcceleratedOptimizer = None,
        **_: Any,
    ) -> None:
        trainer = _find_trainer(self)
        self._folder = Path(trainer._get_output_dir(trainer._trial))
        # Last of all, because the others may ask for an evaluation, a checkpoint or the end.
        handler = trainer.callback_handler
        handler.callbacks = [each for each in handler.callbacks if each is not self] + [self]
        self._ended = not self._way.is_local
        if self._way.is_local and args.max_grad_norm:
            step_with(self._way, trainer.model_wrapped, optimizer, clip_norm=args.max_grad_norm)
            self._keep_from_clipping(trainer.accelerator)
        else:
            step_with(self._way, trainer.model_wrapped, optimizer)
        if self._way.is_local and self.exchange.every > 1:
            self._keep_from_waiting(args)
        if state.global_step > 0:
            self._load(args, state.global_step)
        if args.eval_on_start:
            self._way.show_agreed()

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        self._way.show_own()
        self._ended = not self._way.is_local

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if control.should_training_stop:
            self._end()
        elif control.should_evaluate or control.should_save:
            self._way.show_agreed()

    def on_epoch_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        self.on_step_end(args, state, control)

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if not args.save_only_model:
            self._way.save(self._checkpoint(state.global_step))

    def on_log(
        self, args: TrainingArguments, state: Any, control: Any, logs: Any = None, **_: Any
    ) -> None:
        if "train_runtime" in (logs or ()):  # the last: the Trainer loads the best model after it
            self._end()
        else:
            self.on_step_end(args, state, control)

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        self._way.level()
        self._way.detach()

    # --------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._way.finish()

    def _keep_from_clipping(self, accelerator: Accelerator) -> None:
        """The Trainer goes on to log the norm of this rank's gradient, and LocalSteps clips."""
        clip = accelerator.clip_grad_norm_

        def measure(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            return clip(parameters, float("inf"), norm_type)

        accelerator.clip_grad_norm_ = measure
        self._way.undo.callback(setattr, accelerator, "clip_grad_norm_", clip)

    def _keep_from_waiting(self, args: TrainingArguments) -> None:
        name = "average_tokens_across_devices"
        self._way.undo.callback(setattr, args, name, getattr(args, name))
        setattr(args, name, False)

    def _load(self, args: TrainingArguments, step: int) -> None:
        folders = [self._checkpoint(step)]
        if isinstance(args.resume_from_checkpoint, str):
            folders.insert(0, Path(args.resume_from_checkpoint))
        self._way.restore(
            folders,
            ". If the checkpoint is elsewhere, give TrainingArguments(resume_from_checkpoint=) its "
            "folder",
        )

    def _checkpoint(self, step: int) -> Path:
        return self._folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _find_trainer(callback: GradwireCallback) -> Trainer:
    """The Trainer that has the callback, which no event is given. Raises RuntimeError for one with
    which it does not go."""
    objects: Iterable[Any] = all_objects()
    trainer = next(
        found
        for found in objects
        # There are hundreds of thousands of objects, and isinstance runs code of some.
        if Trainer in type(found).__mro__
        and callback in getattr(getattr(found, "callback_handler", None), "callbacks", ())
    )
    handler = trainer.callback_handler
    if sum(isinstance(other, GradwireCallback) for other in handler.callbacks) > 1:
        raise RuntimeError(
            "this Trainer has two GradwireCallbacks: one compresses all that it sends"
        )
    for name in ("fsdp", "deepspeed"):
        if getattr(trainer, f"is_{name}_enabled"):
            raise RuntimeError(
                f"GradwireCallback is for DistributedDataParallel, and this Trainer has {name}: "
                f"leave {name} out of TrainingArguments, or the callback"
            )
    return trainer
