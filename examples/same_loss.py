"""Does a codec cost accuracy on your model? Trains with and without it, from equal seeds.

torchrun --nproc-per-node 2 examples/same_loss.py
"""

from statistics import fmean, stdev

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import GradwireState, gradwire_hook

CODECS, SEEDS, STEPS = ("raw", "3lc:s=1.00,coder=rice"), (0, 1, 2), 100


def train(codec: str, seed: int) -> float:
    """Your training, and in the end its loss on data that were not trained on."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
    model.register_comm_hook(GradwireState(codec=codec), gradwire_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    target = torch.randn(64, 8)
    torch.manual_seed(1000 * seed + dist.get_rank() + 1)  # every rank has its own data
    for _ in range(STEPS):
        inputs = torch.randn(32, 64)
        loss = nn.functional.cross_entropy(model(inputs), (inputs @ target).argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    inputs = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model.module(inputs)
        return nn.functional.cross_entropy(logits, (inputs @ target).argmax(dim=1)).item()


dist.init_process_group("gloo")
losses = {codec: [train(codec, seed) for seed in SEEDS] for codec in CODECS}
if dist.get_rank() == 0:
    for codec, found in losses.items():
        print(f"{codec}: loss {fmean(found):.4f}, between seeds {stdev(found):.4f}")
    raw, coded = losses.values()
    differences = [own - base for own, base in zip(coded, raw, strict=True)]
    error = stdev(differences) / len(SEEDS) ** 0.5
    print(f"difference {fmean(differences):+.4f}, known to about {error:.4f}")
dist.destroy_process_group()
