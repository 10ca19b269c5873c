"""A trainer publishes each step of its model, and another process follows.

python examples/weights.py train policy/     in one terminal
python examples/weights.py follow policy/    in another; Ctrl-C ends it
"""

import sys
import time

import torch

from gradwire.weights import Publisher, Subscriber

INPUTS = torch.linspace(-1, 1, 32 * 256).reshape(32, 256).bfloat16()


def make_model() -> torch.nn.Module:
    layers = (torch.nn.Linear(256, 256) for _ in range(4))
    return torch.nn.Sequential(*layers).bfloat16()


def train(store: str) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    publisher = Publisher(store, anchor_every=50)
    for _ in range(20):
        loss = model(INPUTS).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        published = publisher.publish(model)
        print(
            f"version {published.version}: {published.share_changed:.1%} of the weights changed, "
            f"{published.bytes} bytes, sum {sum_of(model)}"
        )
        time.sleep(0.5)


def follow(store: str) -> None:
    model = make_model()
    subscriber = Subscriber(store)
    while True:
        if subscriber.fetch() is None:  # while the model is in use
            time.sleep(0.1)
            continue
        applied = subscriber.apply_(model)  # the pause
        pause = 1000 * applied.seconds
        print(f"version {applied.version} is in use: pause {pause:.1f} ms, sum {sum_of(model)}")


def sum_of(model: torch.nn.Module) -> int:
    """Of all bits: the same number, the same model."""
    return sum(int(values.view(torch.int16).sum()) for values in model.state_dict().values())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["train", store]:
            train(store)
        case ["follow", store]:
            follow(store)
        case _:
            sys.exit("usage: weights.py train|follow FOLDER")
