"""Ray Train: a TorchTrainer whose workers compress what they send.

python examples/recipes/ray_adamw.py
"""

import tempfile

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from gradwire.contrib.ray import compress

EPOCHS = 6


def train() -> None:
    """What Ray runs on every worker."""
    torch.manual_seed(0)
    inputs = torch.randn(1600, 64)
    labels = (inputs @ torch.randn(64, 8)).argmax(dim=1)
    mine = slice(get_context().get_world_rank(), None, get_context().get_world_size())
    batches = list(zip(inputs[mine].split(32), labels[mine].split(32), strict=True))
    model = prepare_model(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer, way = compress(model, optimizer, every=1, clip_norm=1.0)  # the new line
    for epoch in range(EPOCHS):
        total = 0.0
        for batch, wanted in batches:
            loss = nn.functional.cross_entropy(model(batch), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if get_context().get_world_rank() == 0:
            print(f"epoch {epoch + 1}: loss {total / len(batches):.3f}")
        report({"loss": total / len(batches)})
    way.finish()
    if get_context().get_world_rank() == 0:
        print(way.stats())


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        workers, results = ScalingConfig(num_workers=2), RunConfig(storage_path=folder)
        TorchTrainer(train, scaling_config=workers, run_config=results).fit()
