"""States of each rank in torch.distributed.checkpoint, which takes equal names for equal values."""

from __future__ import annotations

from typing import Protocol, Unpack

import torch.distributed as dist

from gradwire.torch.checkpoints.reshard import Target, reshard
from gradwire.torch.records.checkpoint import StateDict, from_bytes, to_bytes


class _Stateful(Protocol):
    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class PerRank:
    """Gives torch.distributed.checkpoint a state that differs from rank to rank:

        saved = {"model": model, "gradwire": PerRank(state)}
        torch.distributed.checkpoint.save(saved, checkpoint_id=folder)
        ...
        torch.distributed.checkpoint.load(saved, checkpoint_id=folder)

    Every rank saves its own state under a name of its own, as bytes. Given without PerRank, the
    states would have the same names, of which the checkpoint keeps one rank's.

    source   a GradwireState, LocalSteps, ShardedOptimizer, FullyShardComm, ServerOptimizer or
             QSVRG; with LocalSteps the model, too, because the ranks' models differ between two
             exchanges
    saved_world_size   how many ranks saved the checkpoint to load, if it was another number than
             now. Each rank then loads what `reshard` makes of all states
    process_group      the ranks that save; None: all
    target   ranks_per_machine, shards, servers, codec and exchange of the training that loads, as
             in `reshard`

    Raises ValueError, as `source.load_state_dict` does, for a state that does not fit. PyTorch says
    which name a checkpoint lacks, such as `rank 3 of 4`.
    """

    def __init__(
        self,
        source: _Stateful,
        *,
        saved_world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        **target: Unpack[Target],
    ) -> None:
        if saved_world_size is not None and saved_world_size < 1:
            raise ValueError(f"saved_world_size is {saved_world_size}; at least 1 is needed")
        self._source = source
        self._rank = dist.get_rank(process_group)
        self._world_size = dist.get_world_size(process_group)
        self._saved_world_size = saved_world_size or self._world_size
        self._target = target

    def state_dict(self) -> dict[str, bytes]:
        """Also asked for by `load`, which fills in what the checkpoint has of these names."""
        own = to_bytes(self._source.state_dict())
        if not self._reshards:
            return {_name(self._rank, self._world_size): own}
        return dict.fromkeys(self._saved_names(), own)

    def load_state_dict(self, saved: dict[str, bytes]) -> None:
        if not self._reshards:
            state = from_bytes(saved[_name(self._rank, self._world_size)])
        else:
            states = [from_bytes(saved[name]) for name in self._saved_names()]
            state = reshard(states, self._world_size, **self._target)[self._rank]
        self._source.load_state_dict(state)
        self._saved_world_size, self._target = self._world_size, Target()  # for `save`

    @property
    def _reshards(self) -> bool:
        return self._saved_world_size != self._world_size or bool(self._target)

    def _saved_names(self) -> list[str]:
        return [_name(rank, self._saved_world_size) for rank in range(self._saved_world_size)]


def _name(rank: int, world_size: int) -> str:
    return f"rank {rank} of {world_size}"
