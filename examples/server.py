"""Training with two workers and a server, which holds the model and the optimizer's state.

torchrun --nproc-per-node 3 examples/server.py
"""

import torch
import torch.distributed as dist
from torch import nn

from gradwire.torch import ServerOptimizer

STEPS = 200

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
target = torch.randn(64, 8)  # the same on every rank
torch.manual_seed(1 + dist.get_rank())  # from here on every rank has its own data

optimizer = ServerOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    named_parameters=model.named_parameters(),
    codec="3lc:s=1.75",
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
optimizer.connect()  # from here on the workers have the server's model
if optimizer.is_server:
    optimizer.serve()  # until the workers have left
else:
    while optimizer.version < STEPS:
        inputs = torch.randn(32, 64)
        loss = nn.functional.cross_entropy(model(inputs), (inputs @ target).argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0 and optimizer.version % 50 == 0:
            print(f"version {optimizer.version}: loss {loss.item():.3f}")
    optimizer.close()  # brings the server's exact model

if dist.get_rank() != 1:
    print(optimizer.stats())
dist.destroy_process_group()
