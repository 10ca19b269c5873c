"""Image classifiers for small pictures: LeNet-5, a multilayer perceptron, and the CIFAR ResNets of
He et al.

All take float32 images (batch, channels, side, side), side 28 or 32, and return logits
(batch, classes). text_models.py has those for text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.tensor_files import read_tensor_file
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.recipes import MODELS
from gradwire_lab.train.text_models import Gpt, Lstm


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling.

    28-pixel images are padded to the 32 pixels of the paper by the first convolution. 61,706
    parameters for one channel and ten classes. Dropout follows the fully connected layers.
    """

    def __init__(self, channels: int, side: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=(32 - side) // 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.zeros_(parameter)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = self.dropout(functional.relu(self.fc1(x.flatten(1))))
        x = self.dropout(functional.relu(self.fc2(x)))
        logits: Tensor = self.fc3(x)
        return logits


def mlp(inputs: int, width: int, classes: int, dropout: float) -> nn.Sequential:
    """Five fully connected layers, as INCEPTIONN's classifier of hand-written digits; dropout
    follows the hidden ones."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before in (inputs, width, width, width):
        layers += [nn.Linear(before, width), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, classes))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters ("option A": where the shape changes,
    it takes every second pixel and fills the new channels with zeros)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.stride = stride
        self.new_channels = channels_out - channels_in

    def shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1 and self.new_channels == 0:
            return x
        half = self.new_channels // 2
        x = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(x, (0, 0, 0, 0, half, self.new_channels - half))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return functional.relu(y + self.shortcut(x))


class CifarResNet(nn.Module):
    """ResNet of depth 6n + 2 for small images (He et al. 2015, section 4.2): three stages of n
    blocks with `width` (in the paper 16), twice and four times as many channels, then global
    average pooling. stride: of the first convolution, in the paper 1.

    With three channels and ten classes: 269,722 parameters for n = 3 (ResNet-20), 853,018 for
    n = 9 (ResNet-56), 1,727,962 for n = 18 (ResNet-110).
    """

    def __init__(
        self, depth: int, channels: int, classes: int, width: int = 16, stride: int = 1
    ) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.stage1 = _stage(width, width, blocks, stride=1)
        self.stage2 = _stage(width, 2 * width, blocks, stride=2)
        self.stage3 = _stage(2 * width, 4 * width, blocks, stride=2)
        self.fc = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(images)))
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def _stage(channels_in: int, channels_out: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(channels_in, channels_out, stride)
    rest = [BasicBlock(channels_out, channels_out, 1) for _ in range(blocks - 1)]
    return nn.Sequential(first, *rest)


_TEXT_MODELS: dict[str, Callable[[int, int, int, float], nn.Module]] = {
    "gpt": Gpt,
    "gpt10m": partial(Gpt, layers=8),
    "lstm": Lstm,
}


def build(
    name: str, *shape: int, seed: int, width: int | None = None, dropout: float = 0.0
) -> nn.Module:
    """One of recipes.MODELS, with weights drawn from `seed`: the same on every rank and for every
    codec. shape: that of the data. width: None takes the recipe's."""
    width = width or MODELS[name].width or 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if name in _TEXT_MODELS:
            vocabulary, context = shape
            return _TEXT_MODELS[name](vocabulary, context, width, dropout)
        channels, side, classes = shape
        if name == "lenet":
            return LeNet(channels, side, classes, dropout)
        if name == "mlp":
            return mlp(channels * side * side, width, classes, dropout)
        depth = int(name.removeprefix("resnet"))
        # A quarter of the pixels lets 10 workers of resnet8 take a step in 0.1 s on a CPU core.
        return CifarResNet(depth, channels, classes, width, stride=2 if depth == 8 else 1)


def load(model: nn.Module, path: Path) -> None:
    """Gives the model the tensors of a .safetensors file. Raises TrainError unless they are those
    of the model, in its dtypes."""
    from gradwire.weights.tensors import views_of  # few runs begin with a file

    try:
        tensors = {tensor.name: tensor for tensor in read_tensor_file(path).tensors}
    except (OSError, ValueError) as error:
        raise TrainError(f"--init: {error}") from error
    views = views_of(model)
    here = {name: f"{list(view.shape)} {view.dtype}" for name, view in views.items()}
    there = {name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
    for name in here | there:
        if here.get(name) != there.get(name):
            raise TrainError(
                f"--init: {path} is of another model: {name} is {there.get(name)} there, and "
                f"{here.get(name)} here"
            )
    for name, view in views.items():
        view.write(np.frombuffer(tensors[name].data, np.uint8))


def parameter_count(model: nn.Module) -> int:
    """Values in a gradient of the model."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
