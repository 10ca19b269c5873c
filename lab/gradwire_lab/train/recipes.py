"""What can be trained: data sets with their metrics, and models with the settings that suit them.

This module needs no PyTorch; data.py, text.py and models.py make what is named here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """What an evaluation measures on data that were not trained on.

    name: in JSON. title: for people. unit: of `scale` times a value, in plots. margin: how much
    worse than a reference a value may be, and count as having come to it.
    """

    name: str
    title: str
    unit: str
    scale: float
    higher_is_better: bool
    form: str  # of str.format
    margin: float

    def near(self, value: float) -> float:
        """The goal that is the margin worse than the value."""
        return value - self.margin if self.higher_is_better else value + self.margin

    def text(self, value: float) -> str:
        return self.form.format(value)

    def reached(self, value: float, goal: float | None) -> bool:
        """Whether the value is as good as the goal; None is never reached."""
        if goal is None:
            return False
        return value >= goal if self.higher_is_better else value <= goal


ACCURACY = Metric(
    "accuracy", "test accuracy", "%", 100.0, higher_is_better=True, form="{:.2%}", margin=0.005
)
LOSS = Metric(
    "held_out_loss",
    "held-out loss",
    "nats a byte",
    1.0,
    higher_is_better=False,
    form="{:.4f}",
    margin=0.02,
)

TEXT = "text"
DICTIONARY = "gcide"
IMAGES = ("fashion-mnist", "cifar10")
METRICS = {**dict.fromkeys(IMAGES, ACCURACY), TEXT: LOSS, DICTIONARY: LOSS}


@dataclass(frozen=True)
class Recipe:
    """A model's defaults.

    layers: as exclude_last counts them. data: the data sets that fit, first the default. sgd, adam:
    base learning rates; that of SGD is one worker's. width: channels of a ResNet's first stage, or
    values of a hidden layer; None: the model has no choice. clip: see TrainSettings; 0: none.
    warmup: the least number of steps, in a training of at least four times as many.
    """

    sgd: float
    adam: float
    layers: int
    width: int | None
    data: tuple[str, ...] = IMAGES
    optimizer: str = "sgd"
    batch: int = 32
    clip: float = 0.0
    warmup: int = 0


# ResNets: 0.1 is the rate of 3LC and He et al., for networks with batch normalisation. LeNet has
# none: on Fashion-MNIST with 4 workers it stays at 10 % accuracy with 0.05 or more, and
# 3lc:s=1.75, whose residuals delay the gradients, falls back to 10 % within 2000 steps at 0.01. At
# 0.005 it reaches 83 % in 2000 steps (without compression: 88 %). ResNet-20 with 4 workers and 200
# steps has learnt nothing by step 40 if it warms up in 10 steps (10.8 % accuracy), and has 29 % if
# it does in 50; gpt with 200 steps ends at a loss of 2.58 and 2.41.
MODELS = {
    "lenet": Recipe(sgd=0.005, adam=1e-3, layers=5, width=None),
    "mlp": Recipe(sgd=0.02, adam=1e-3, layers=5, width=256),
    "resnet8": Recipe(sgd=0.1, adam=1e-3, layers=8, width=8, warmup=50),
    "resnet20": Recipe(sgd=0.1, adam=1e-3, layers=20, width=16, warmup=50),
    "resnet56": Recipe(sgd=0.1, adam=1e-3, layers=56, width=16, warmup=50),
    "resnet110": Recipe(sgd=0.1, adam=1e-3, layers=110, width=16, warmup=50),
    "gpt": Recipe(
        sgd=0.05,
        adam=3e-3,
        layers=15,
        width=128,
        data=(TEXT,),
        optimizer="adamw",
        batch=8,
        clip=1.0,
        warmup=50,
    ),
    "gpt10m": Recipe(
        sgd=0.05,
        adam=1e-3,
        layers=35,
        width=320,
        data=(DICTIONARY,),
        optimizer="adamw",
        batch=2,
        clip=1.0,
        warmup=100,
    ),
    "lstm": Recipe(sgd=0.5, adam=3e-3, layers=3, width=256, data=(TEXT,), batch=8, clip=1.0),
}
