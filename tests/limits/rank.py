"""A rank of test_large.py: steps of DDP with the hook, then a digest of the model.

rank.py FOLDER STEPS TENSORS: with TENSORS of one value each; 0: a perceptron of two layers
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import Compression, GradwireState, gradwire_hook

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder, steps, tensors = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Scalars(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.randn(1)) for _ in range(count))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.values)) * inputs.mean()


dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
torch.manual_seed(0)
perceptron = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
model = DistributedDataParallel(Scalars(tensors) if tensors else perceptron)
state = GradwireState(
    codec="3lc:s=1.00,coder=rice",
    start_iter=0,
    compression=Compression(min_numel=256 if not tensors else 1),
)
model.register_comm_hook(state, gradwire_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank + 1)
for _ in range(steps):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
status = Path("/proc/self/status").read_text()
largest = int(status.partition("\nVmHWM:")[2].split()[0]) / 2**20  # of kB
print(digest.hexdigest(), f"{largest:.1f}")
dist.destroy_process_group()
