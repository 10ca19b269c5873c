"""Ray Train with a compressed exchange, in the function that a TorchTrainer runs on its workers.

    from gradwire.contrib.ray import compress

    model = ray.train.torch.prepare_model(model)
    optimizer, way = compress(model, optimizer, every=30)
    ...  # the training
    way.finish()

Without `every` this puts a hook into DDP, and `finish` has nothing to do.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.errors import requiring

with requiring(__name__, "Ray Train", "ray", "'.[recipes]'"):
    import ray.train as _train

from gradwire.contrib.way import Way
from gradwire.torch.parameters import uncompiled


def compress(
    model: nn.Module, optimizer: Optimizer, codec: str | None = None, **options: Any
) -> tuple[Optimizer, Way]:
    """Compresses what a training with Ray Train sends, by the hook of DistributedDataParallel, or
    by LocalSteps if `every` or `schedule` is given.

    With LocalSteps DDP averages nothing: clip with `clip_norm=`, evaluate inside
    `with way.agreed():`, and call `way.finish()` when the training ends; then the workers' models
    are equal.

    A checkpoint needs the state of every worker: each calls `way.save(folder)` with the folder that
    it gives to `ray.train.report`, and Ray puts the files of all together. After the model and the
    optimizer have been loaded, `way.restore([folder])` goes on from there, with as many workers. Of
    two models, each needs a folder of its own inside.

    Args:
        model: As `ray.train.torch.prepare_model` returned it, compiled or not.
        optimizer: Of the model's parameters.
        codec: As text. None: the default of the way.
        options: Further arguments of GradwireState or LocalSteps.

    Returns:
        The optimizer to step from now on, and the way, whose `stats()` are a report.

    Raises:
        RuntimeError: It is called outside a worker of Ray Train, with a single worker, or for a
            model and an optimizer that are compressed already.
        TypeError: The model is not in DDP, or the class that is taken lacks an option.
        Further errors: Those of GradwireState or LocalSteps.
    """
    workers = _count_workers()
    if workers < 2:
        raise RuntimeError(
            f"Ray Train has {workers} worker, which sends nothing; ask for more with "
            "ScalingConfig(num_workers=2)"
        )
    if not isinstance(uncompiled(model), DistributedDataParallel):
        raise TypeError(
            "compress takes the model that ray.train.torch.prepare_model returned, in "
            f"DistributedDataParallel, not {type(model).__name__}"
        )
    way = Way("gradwire.contrib.ray.compress", codec, options)
    return way.attach(model, optimizer), way


def _count_workers() -> int:
    try:
        workers = int(_train.get_context().get_world_size())
    except Exception as error:  # Ray has a class of errors for each of its versions
        raise RuntimeError(
            "gradwire.contrib.ray.compress is called in the function that a TorchTrainer runs on "
            f"its workers: {error}"
        ) from error
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed has no process group; gradwire.contrib.ray is for a TorchTrainer"
        )
    return workers
