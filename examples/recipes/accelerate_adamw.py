"""Accelerate with AdamW, whose changes are compressed.

torchrun --nproc-per-node 2 examples/recipes/accelerate_adamw.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.contrib.accelerate import compress

EPOCHS = 8

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(1600, 64)
labels = (inputs @ torch.randn(64, 8)).argmax(dim=1)
batches = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
way = compress(accelerator, model, optimizer, every=1, clip_norm=1.0)  # the new line

for epoch in range(EPOCHS):
    total = 0.0
    for batch, wanted in batches:
        loss = nn.functional.cross_entropy(model(batch), wanted)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        total += loss.item()
    accelerator.print(f"epoch {epoch + 1}: loss {total / len(batches):.3f}")

accelerator.print(way.stats())
way.finish()
accelerator.end_training()
