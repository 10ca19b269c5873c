"""Records gradients of a real training run, as data to measure codecs on.

    python bench/record_gradients.py bench/data/resnet20_gradients.safetensors

Trains ResNet-20 on Fashion-MNIST in one process with 3LC's recipe and stores the gradient that a
worker would push, tensor by tensor, at an early, a middle and a late step: float32, 273 thousand
values each. The file's metadata say how it was made; the same command makes the same values on the
same machine and PyTorch.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gradwire.train import data, models, schedule

STEPS = 300
RECORDED_STEPS = (20, 150, 290)
BATCH = 32
BASE_LEARNING_RATE = 0.1
LARGEST_FILE = 4 * 10**6


def main() -> None:
    """Trains, writes the file, and says what is in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="the .safetensors file to write")
    parser.add_argument("--data-dir", type=Path, help="where Fashion-MNIST lies")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    gradients = _train_and_record(options.data_dir, options.seed)
    size = sum(gradient.nbytes for gradient in gradients.values())
    if size > LARGEST_FILE:
        sys.exit(f"{size} bytes of gradients are more than the {LARGEST_FILE} allowed")
    save_file(gradients, options.output, metadata=_describe(options.seed))
    print(f"{options.output}: {len(gradients)} tensors, {options.output.stat().st_size} bytes")


def _train_and_record(data_dir: Path | None, seed: int) -> dict[str, Tensor]:
    """Returns "step0020/conv1.weight" and so on, each the gradient of one parameter."""
    images = data.load("fashion-mnist", data_dir)
    batches = data.Batches(images, BATCH, world=1, rank=0, seed=seed)
    model = models.build("resnet20", images.channels, images.side, images.classes, seed)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=BASE_LEARNING_RATE, momentum=0.9, weight_decay=1e-4
    )
    recorded: dict[str, Tensor] = {}
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step, STEPS, BASE_LEARNING_RATE, workers=1)
        pictures, labels = batches.at(step)
        logits = model(torch.from_numpy(pictures))
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        if step in RECORDED_STEPS:
            print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    recorded[f"step{step:04}/{name}"] = parameter.grad.clone().contiguous()
        optimizer.step()
    return recorded


def _describe(seed: int) -> dict[str, str]:
    steps = ", ".join(map(str, RECORDED_STEPS))
    return {
        "how": f"gradients of ResNet-20 on Fashion-MNIST at steps {steps} of {STEPS}, one process, "
        f"batch {BATCH}, SGD momentum 0.9, weight decay 1e-4, cosine from {BASE_LEARNING_RATE}, "
        f"seed {seed}",
        "made_with": f"PyTorch {torch.__version__}",
        "command": shlex.join(["python", "bench/record_gradients.py", *sys.argv[1:]]),
    }


if __name__ == "__main__":
    main()
