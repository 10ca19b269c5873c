"""The hook of DistributedDataParallel.

Without postponed annotations: DDP compares the hook's annotations with its own types.
"""

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.torch.hook.gradwire_state import GradwireState


def gradwire_hook(
    state: GradwireState,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # PyTorch hides it from checkers
) -> Future[torch.Tensor]:
    """Averages a gradient bucket over all ranks, compressed both ways.

        model.register_comm_hook(state, gradwire_hook)

    Returns at once. The future completes when the bucket holds the average, which has the same bits
    on every rank.
    """
    return state.average(bucket)
