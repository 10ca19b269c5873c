"""NVIDIA FLARE: models to the clients and changes from them are compressed, in its simulator.

python examples/recipes/nvflare_fedavg.py
"""

import sys
import tempfile

import nvflare.client as flare
import torch
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe.sim_env import SimEnv
from torch import nn

from gradwire.contrib.nvflare import compress

ROUNDS = 8
MODEL = {"in_features": 256, "out_features": 8}


def train() -> None:
    """What FLARE runs on every client."""
    flare.init()
    name = flare.get_site_name()
    own = torch.Generator().manual_seed(int(name.removeprefix("site-")))  # data of its own
    inputs = torch.randn(640, 256, generator=own)
    target = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))  # alike everywhere
    model = nn.Linear(**MODEL)
    while flare.is_running():
        received = flare.receive()
        model.load_state_dict(received.params)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        total = 0.0
        for batch in inputs.split(32):
            loss = nn.functional.cross_entropy(model(batch), (batch @ target).argmax(dim=1))
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            total += loss.item()
        print(f"{name}, round {received.current_round}: loss {total / 20:.3f}", flush=True)
        flare.send(flare.FLModel(params=model.state_dict()))


def main() -> None:
    recipe = FedAvgRecipe(
        model={"class_path": "torch.nn.Linear", "args": MODEL},
        min_clients=2,
        num_rounds=ROUNDS,
        train_script=__file__,
        train_args="--client",
        params_transfer_type=TransferType.DIFF,  # changes, not models
    )
    compress(recipe)  # the new line
    with tempfile.TemporaryDirectory() as folder:
        recipe.execute(SimEnv(num_clients=2, workspace_root=folder))


if __name__ == "__main__":
    if "--client" in sys.argv:
        train()
    else:
        main()
