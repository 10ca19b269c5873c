"""Data-parallel training with compressed gradients: two lines more than without.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import GradwireState, gradwire_hook

STEPS = 200

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
state = GradwireState(codec="3lc:s=1.00,coder=rice")  # line one
model.register_comm_hook(state, gradwire_hook)  # line two

optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
target = torch.randn(64, 8)  # the same on every rank
torch.manual_seed(1 + dist.get_rank())  # from here on every rank has its own data
for step in range(STEPS):
    inputs = torch.randn(32, 64)
    loss = nn.functional.cross_entropy(model(inputs), (inputs @ target).argmax(dim=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.3f}")

if dist.get_rank() == 0:
    print(state.stats())
dist.destroy_process_group()
