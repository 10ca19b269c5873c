"""Accelerate with AdamW: the model stays out of DDP, and the changes of AdamW are compressed.

torchrun --nproc-per-node 2 examples/recipes/accelerate_adamw.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.torch import LocalSteps

EPOCHS = 8

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(1600, 64)
labels = (inputs @ torch.randn(64, 8)).argmax(dim=1)
batches = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(accelerator.device)
adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = LocalSteps(adamw, model, codec="3lc:s=1.00,coder=rice", clip_norm=1.0)

batches = accelerator.prepare(batches)  # neither the model nor the optimizer
for epoch in range(EPOCHS):
    total = 0.0
    for batch, wanted in batches:
        with accelerator.autocast():
            loss = nn.functional.cross_entropy(model(batch), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    accelerator.print(f"epoch {epoch + 1}: loss {total / len(batches):.3f}")

accelerator.print(optimizer.stats())
optimizer.close()
accelerator.end_training()
