"""A rank of test_large.py: five steps of DDP with the hook, then a digest of the model."""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import GradwireState, gradwire_hook

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
meeting = f"file://{sys.argv[1]}/store"
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
state = GradwireState(codec="3lc:s=1.00,coder=rice", start_iter=0)
model.register_comm_hook(state, gradwire_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank + 1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(digest.hexdigest())
dist.destroy_process_group()
