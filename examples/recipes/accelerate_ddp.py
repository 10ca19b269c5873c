"""Accelerate: the hook on the prepared model.

torchrun --nproc-per-node 2 examples/recipes/accelerate_ddp.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.torch import GradwireState, gradwire_hook

EPOCHS = 8

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(1600, 64)
labels = (inputs @ torch.randn(64, 8)).argmax(dim=1)
batches = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
state = GradwireState(codec="3lc:s=1.00,coder=rice")
model.register_comm_hook(state, gradwire_hook)  # the model is in DDP now

for epoch in range(EPOCHS):
    total = 0.0
    for batch, wanted in batches:
        loss = nn.functional.cross_entropy(model(batch), wanted)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        total += loss.item()
    accelerator.print(f"epoch {epoch + 1}: loss {total / len(batches):.3f}")

accelerator.print(state.stats())
state.close()
accelerator.end_training()
