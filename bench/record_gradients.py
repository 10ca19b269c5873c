"""Records gradients of a real training run, on which codecs can be measured.

    python bench/record_gradients.py bench/data/resnet20_gradients.safetensors

Trains ResNet-20 on Fashion-MNIST with 3LC's recipe and one worker, by the loop of `gradwire train`.
At an early, a middle and a late step it stores the gradient that the worker would push, tensor by
tensor: float32, 273 thousand values each. The file's metadata say how it was made; the same command
gives the same values on the same machine with the same PyTorch.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from gradwire_lab.train import data
from gradwire_lab.train.loop import Trainer
from gradwire_lab.train.rivals import PLAIN_DDP
from gradwire_lab.train.settings import Run, TrainSettings
from gradwire_lab.train.strategies import local_optimizer
from gradwire_lab.train.strategy import Strategy

STEPS = 300
RECORDED_STEPS = (20, 150, 290)
BATCH = 32
BASE_LEARNING_RATE = 0.1
LARGEST_FILE = 4 * 10**6


def main() -> None:
    """Trains, writes the file, and prints its size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="the .safetensors file to write")
    parser.add_argument("--data-dir", type=Path, help="the folder with Fashion-MNIST")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    gradients = _train_and_record(options.data_dir, options.seed)
    size = sum(gradient.nbytes for gradient in gradients.values())
    if size > LARGEST_FILE:
        sys.exit(f"{size} bytes of gradients are more than the {LARGEST_FILE} allowed")
    save_file(gradients, options.output, metadata=_describe(options.seed))
    print(f"{options.output}: {len(gradients)} tensors, {options.output.stat().st_size} bytes")


class Recording(Strategy):
    """Plain SGD of one worker, which records the gradients of some steps."""

    def __init__(self, model: nn.Module, settings: TrainSettings) -> None:
        super().__init__(model, local_optimizer(model, settings))
        self._step = 0
        self.recorded: dict[str, Tensor] = {}

    def take_step(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = super().take_step(images, labels)
        if self._step in RECORDED_STEPS:
            print(f"step {self._step}: loss {loss.item():.3f}", file=sys.stderr)
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.clone().contiguous()
                    self.recorded[f"step{self._step:04}/{name}"] = gradient
        self._step += 1
        return loss


def _train_and_record(data_dir: Path | None, seed: int) -> dict[str, Tensor]:
    """Returns "step0020/conv1.weight" and so on, each the gradient of one parameter."""
    settings = TrainSettings(
        model="resnet20",
        workers=1,
        steps=STEPS,
        batch=BATCH,
        learning_rate=BASE_LEARNING_RATE,
        seed=seed,
        eval_every=STEPS,
    )
    images = data.load_images(settings.data, data_dir)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    strategies: list[Recording] = []

    def choose(model: nn.Module, *_: object) -> Recording:
        strategies.append(Recording(model, settings))
        return strategies[0]

    trainer = Trainer(settings, images, 0, None, torch.device("cpu"))
    trainer.run(Run(PLAIN_DDP, seed), lambda event: None, choose)
    dist.destroy_process_group()
    return strategies[0].recorded


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
