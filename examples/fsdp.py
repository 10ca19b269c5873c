"""FSDP2 with compressed gradients and weights.

torchrun --nproc-per-node 4 examples/fsdp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradwire.torch import FullyShardComm

STEPS = 200

dist.init_process_group("gloo")
torch.manual_seed(0)  # the replicas must begin alike
layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(64, 8))

# Two replicas, each sharded among the ranks of a machine. For FSDP: init_device_mesh("cpu", (4,)).
machines = 2
shards = dist.get_world_size() // machines
mesh = init_device_mesh("cpu", (machines, shards), mesh_dim_names=("replicate", "shard"))
for layer in layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
comm = FullyShardComm(model, codec="int8")  # the one new line

adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
target = torch.randn(64, 8)  # the same on every rank
torch.manual_seed(1 + dist.get_rank())  # from here on every rank has its own data
for step in range(STEPS):
    inputs = torch.randn(32, 64)
    loss = nn.functional.cross_entropy(model(inputs), (inputs @ target).argmax(dim=1))
    adamw.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    if dist.get_rank() == 0 and step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.3f}")

if dist.get_rank() == 0:
    print(comm.stats())
comm.close()
dist.destroy_process_group()
