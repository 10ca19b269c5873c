"""Publishes versions 1 to 3 as a rank of two that hold DTensors.

Usage: sharded_publisher.py RANK RENDEZVOUS STORE
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gradwire.weights import Publisher
from states import state_of

rank, rendezvous, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
publisher = Publisher(store, rank=rank, ranks=2, run="one")
for time in range(1, 4):
    state = state_of(time)
    publisher.publish(
        {
            "weight": distribute_tensor(state["weight"], mesh, [Shard(time % 2)]),
            "bias": distribute_tensor(state["bias"], mesh, [Shard(0)]),
            "step": distribute_tensor(state["step"], mesh, [Replicate()]),
        }
    )
dist.destroy_process_group()
