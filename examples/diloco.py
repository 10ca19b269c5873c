"""DiLoCo: two machines train alone for 20 steps, and then exchange what they have changed.

On each machine, with the address of the first one:
torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 diloco.py
"""

import torch
import torch.distributed as dist
from torch import nn

from gradwire.torch import LocalSteps, outer_nesterov

STEPS = 400

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))  # not in DDP
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = LocalSteps(inner, model, every=20, outer=outer_nesterov(), codec="qsgd:bits=4")

target = torch.randn(64, 8)  # the same on every machine
torch.manual_seed(1 + dist.get_rank())  # from here on every machine has its own data
for step in range(STEPS):
    inputs = torch.randn(32, 64)
    loss = nn.functional.cross_entropy(model(inputs), (inputs @ target).argmax(dim=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # of AdamW; in every 20th step the machines exchange
    if dist.get_rank() == 0 and step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.3f}")
optimizer.synchronize()  # from here on the models are equal

if dist.get_rank() == 0:
    print(optimizer.stats())
optimizer.close()
dist.destroy_process_group()
