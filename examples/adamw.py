"""AdamW on every rank, whose changes are compressed and averaged: for adaptive optimizers.

torchrun --nproc-per-node 2 examples/adamw.py
"""

import torch
import torch.distributed as dist
from torch import nn

from gradwire.torch import LocalSteps

STEPS = 200

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))  # not in DDP
adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = LocalSteps(adamw, model, codec="3lc:s=1.00,coder=rice", clip_norm=1.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

target = torch.randn(64, 8)  # the same on every rank
torch.manual_seed(1 + dist.get_rank())  # from here on every rank has its own data
for step in range(STEPS):
    inputs = torch.randn(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), (inputs @ target).argmax(dim=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # a step of AdamW, and then the ranks average their changes
    schedule.step()
    if dist.get_rank() == 0 and step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.3f}")

if dist.get_rank() == 0:
    print(optimizer.stats())
optimizer.close()
dist.destroy_process_group()
