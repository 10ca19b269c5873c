"""The settings of a training: the options of `gradwire train`, each described once."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from typer import BadParameter, Option

import gradwire
from gradwire._core import is_goal
from gradwire.errors import RECOMMENDED
from gradwire_lab.json_fields import FromJson
from gradwire_lab.train.recipes import METRICS, MODELS, Metric
from gradwire_lab.train.rivals import BF16, FP16, PLAIN_DDP, POWERSGD, is_rival

DATA = tuple(METRICS)
BANDWIDTHS = ("10mbit", "100mbit", "1gbit", "none")
DEVICES = ("cpu", "cuda", "cuda:K")

# The exchanges of DDP's hook.
HOOKED = {info["name"]: info for info in gradwire.exchanges() if not info["has_servers"]}
SHARDED = next(iter(HOOKED))
SERVER = "server"
SHARDED_OPTIMIZER = "sharded-optimizer"
ONE_PROCESS = "one-process"
RAW = "raw"
EXCHANGES = (*HOOKED, SERVER, SHARDED_OPTIMIZER, ONE_PROCESS)

# The exchanges in which codecs can be chosen at run time: `auto`.
CHOOSING = (
    *(name for name in HOOKED if HOOKED[name]["chooses_codecs"]),
    SHARDED_OPTIMIZER,
    ONE_PROCESS,
)

DEFAULT_CODECS = (PLAIN_DDP, BF16, RECOMMENDED)

BETAS = (0.9, 0.99)  # of Adam; a short training forgets its first gradients sooner than with 0.999
WEIGHT_DECAY = {"sgd": 1e-4, "adam": 0.0, "adamw": 0.1, "muon": 0.1}
# What local steps do with the average change of the workers: subtract it, or step an optimizer by
# it, as SparseLoCo and DiLoCo do. Their learning rates are those of the papers.
OUTERS = {"average": 1.0, "sgd": 1.0, "nesterov": 0.7}

# The exchanges with servers, as processes or all in one process, and what the workers pull
# when they push gradients: the change of a server's model, or the average gradient, which they step
# themselves (as the hook).
SERVED, IN_ONE_PROCESS = (
    {name: "updates", f"{name}:pulls=gradients": "gradients", f"{name}:pulls=updates": "updates"}
    for name in (SERVER, ONE_PROCESS)
)

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


_LOCAL = "Local steps (--compress updates): "
# The descriptions of the options.
_HELP = {
    "codecs": "A codec as `gradwire codecs` lists them, auto:bits=1, PUSH/PULL for two codecs, or "
    f"without gradwire: {PLAIN_DDP}, {BF16}, {FP16}, {POWERSGD}:rank=4. Repeatable; default: "
    f"{', '.join(DEFAULT_CODECS)}; with other exchanges the codec that fits.",
    "workers": "Processes on this machine.",
    "bandwidth": "Rate of every worker's link (of every machine's with hierarchical:ranks=k), each "
    f"way: {', '.join(BANDWIDTHS)}; default 10mbit.",
    "latency": "Milliseconds that a packet travels from link to link, as over a long distance.",
    "model": ", ".join(MODELS),
    "width": "Channels of a ResNet's first stage, or values of a hidden layer. Default: 16 and 8 "
    "(resnet8), 256 (mlp, lstm), 128 (gpt), 320 (gpt10m).",
    "dropout": "Share of values dropped.",
    "init": "A .safetensors file of the model, in float32, with which every run begins.",
    "data": f"{', '.join(DATA)}; default: what fits the model.",
    "data_dir": "Folder of the data; needed for cifar10.",
    "augment": "Images of the training: cropped at random and mirrored, or as they are.",
    "steps": "Steps with each codec.",
    "batch": "Images of a worker in a step (32), or sequences of text (8; gpt10m: 2).",
    "optimizer": "sgd, adam, adamw, or muon for the matrices inside gpt's blocks and adamw for the "
    "rest; default by model.",
    "compress": "What the workers exchange: gradients, or the updates of their own optimizers. "
    "Default: gradients with sgd in every step, updates otherwise.",
    "learning_rate": "Highest learning rate; with sgd it is that of one worker, and multiplied by "
    "their number. Default with sgd or another: "
    + ", ".join(f"{name} {recipe.sgd:g} or {recipe.adam:g}" for name, recipe in MODELS.items())
    + ".",
    "momentum": "Of sgd; 0: none.",
    "weight_decay": "Default 1e-4 for sgd, 0.1 for adamw and muon (not of vectors), 0 for adam.",
    "warmup": "First steps, in which the learning rate grows. Default: a twentieth of all; for "
    "ResNets and gpt at least 50 (gpt10m: 100), or a quarter of all if that is less.",
    "schedule": "cosine, poly, constant",
    "clip": "Largest norm of the average gradient, which is estimated where updates are exchanged "
    "between processes. 0: no clipping. Default 1 for text.",
    "loss_scale": "The loss is multiplied by it before its gradient is computed, and the step of "
    "sgd divided by it: codecs with an absolute bound err less. 32: with batches of 32, the "
    "gradient of the sum of their losses.",
    "ema": "Evaluate the exponential moving average of the weights with this decay. 0: none.",
    "seed": "Seed of weights and batches.",
    "seeds": "Runs of each codec, with the seeds --seed, --seed + 1, ...",
    "threads": "Threads of a worker's codecs; of the computation with --exchange one-process "
    "(default: all CPUs).",
    "eval_every": "Steps between evaluations; default: about a tenth of all.",
    "start_iter": "First steps that go uncompressed.",
    "rules": "Another codec for tensors whose name matches. Repeatable.",
    "exclude": "Names of tensors that go raw. Repeatable.",
    "exclude_last": "So many layers at the end of the model go raw.",
    "min_numel": "Smaller tensors go raw.",
    "exchange": f"{', '.join(EXCHANGES)}, some with parameters, such as hierarchical:ranks=2; for "
    f"every codec but ddp. With {ONE_PROCESS}, one process has all workers and their server, and "
    f"nothing is sent. With {SERVER} and {ONE_PROCESS}, workers pull the change of the server's "
    "model, or with :pulls=gradients the average gradient, by which each steps its own.",
    "every": "Steps from one exchange to the next; workers step alone between.",
    "fragments": f"{_LOCAL}parts of the model, whose exchanges take turns within --every steps.",
    "delay": f"{_LOCAL}steps that an exchange may take while the next ones compute.",
    "mix": f"{_LOCAL}share of a worker's own values that it keeps after an exchange, below 1.",
    "outer": f"{_LOCAL}the workers subtract the average change, or step an outer optimizer by it: "
    "sgd as in SparseLoCo, nesterov (momentum 0.9) as in DiLoCo.",
    "outer_lr": "The outer optimizer's learning rate. Default 0.7 for nesterov, 1 for sgd.",
    "gate": f"{_LOCAL}a worker sends only what alters the model in bfloat16, and keeps the rest "
    "until it does, as in PULSELoCo.",
    "residual_decay": f"{_LOCAL}residuals are multiplied by it after each exchange.",
    "correct_noise": f"{_LOCAL}changes are multiplied by the gain for the gradient's noise, by "
    "default up to --every 4 with adam, adamw and muon, without --outer and --mix.",
    "servers": f"With --exchange {SERVER}: processes that hold the model.",
    "backup_workers": f"With --exchange {SERVER}: workers that a step does not wait for.",
    "staleness": f"With --exchange {SERVER}: steps that a worker may be ahead of what it pulled.",
    "barrier": f"With --exchange {SERVER}: workers push and wait in each step, or for each tensor, "
    "while the backward and the next forward pass compute.",
    "until": "Stop a run when an evaluation reaches this accuracy (such as 0.85) or loss, and "
    "report the time to it.",
    "device": "Device of model, data and optimizer; cuda gives the workers the GPUs in turn.",
}


class SettingsError(BadParameter):
    """An option's value cannot be used. `option` names it, the message lists the valid values."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message, param_hint=option)
        self.option = option


@dataclass(frozen=True)
class Rule:
    """Tensors whose name matches `pattern` take `codec` in one direction or in both."""

    pattern: str
    codec: str
    direction: str = "both"


@dataclass(frozen=True)
class Run:
    """One training of a command, which trains with each codec and each seed."""

    codec: str
    seed: int


@dataclass(frozen=True)
class TrainSettings(FromJson):
    """All settings of a run's computation and measurement. Each setting is an option of the command
    line, which option_name names.

    bandwidth: bits a second each way; None: no limit. latency: milliseconds, one way. Rivals
    (rivals.py) exchange in every step, whatever `exchange` and `every` are. Servers are the ranks
    after the workers, on equal links.
    """

    codecs: Annotated[tuple[str, ...], Option()] = DEFAULT_CODECS
    workers: Annotated[int, Option(min=1, max=250)] = 4
    bandwidth: Annotated[int | None, Option()] = 10_000_000
    latency: Annotated[float, Option(min=0, max=1000)] = 0.0
    model: Annotated[str, Option()] = "lenet"
    width: Annotated[int | None, Option(min=1, max=10**4)] = None
    dropout: Annotated[float, Option(min=0, max=0.9)] = 0.0
    init: Annotated[Path | None, Option(metavar="FILE")] = None
    data: Annotated[str, Option()] = DATA[0]
    data_dir: Annotated[Path | None, Option()] = None
    augment: Annotated[Literal["crop-flip", "none"], Option(metavar="crop-flip|none")] = "crop-flip"
    steps: Annotated[int, Option(min=1, max=10**7)] = 400
    batch: Annotated[int, Option(min=1, max=10**5)] = 32
    optimizer: Annotated[Literal["sgd", "adam", "adamw", "muon"], Option()] = "sgd"
    compress: Annotated[Literal["gradients", "updates"], Option(metavar="gradients|updates")] = (
        "gradients"
    )
    learning_rate: Annotated[float, Option()] = MODELS["lenet"].sgd
    momentum: Annotated[float, Option(min=0, max=0.9999)] = 0.9
    weight_decay: Annotated[float, Option(min=0, max=1)] = 1e-4
    warmup: Annotated[int, Option(min=0)] = 0
    schedule: Annotated[Literal["cosine", "poly", "constant"], Option()] = "cosine"
    clip: Annotated[float, Option(min=0, max=1e6)] = 0.0
    loss_scale: Annotated[float, Option(min=2**-16, max=2**16)] = 1.0
    ema: Annotated[float, Option(min=0, max=0.99999)] = 0.0
    seed: Annotated[int, Option(min=0, max=2**32 - 1)] = 0
    seeds: Annotated[int, Option(min=1, max=100)] = 1
    threads: Annotated[int, Option(min=1, max=256)] = 1
    eval_every: Annotated[int, Option(min=1, max=10**7)] = 40
    start_iter: Annotated[int, Option(min=0, max=10**7)] = 0
    rules: Annotated[tuple[Rule, ...], Option(metavar="PATTERN=CODEC[@push|@pull]")] = ()
    exclude: Annotated[tuple[str, ...], Option(metavar="PATTERN")] = ()
    exclude_last: Annotated[int, Option(min=0, max=1000)] = 0
    min_numel: Annotated[int, Option(min=0, max=10**9)] = 256
    exchange: Annotated[str, Option()] = SHARDED
    every: Annotated[int, Option(min=1)] = 1
    fragments: Annotated[int, Option(min=1, max=1000)] = 1
    delay: Annotated[int, Option(min=0)] = 0
    mix: Annotated[float, Option(min=0, max=0.999)] = 0.0
    gate: Annotated[str, Option(metavar="bfloat16")] = ""
    outer: Annotated[
        Literal["average", "sgd", "nesterov"], Option(metavar="average|sgd|nesterov")
    ] = "average"
    outer_lr: Annotated[float, Option(min=0, max=100)] = 1.0
    residual_decay: Annotated[float, Option(min=0.01, max=1)] = 1.0
    correct_noise: Annotated[Literal["default", "on", "off"], Option(metavar="default|on|off")] = (
        "default"
    )
    servers: Annotated[int, Option(min=1, max=100)] = 1
    backup_workers: Annotated[int, Option(min=0)] = 0
    staleness: Annotated[int, Option(min=0, max=1000)] = 0
    barrier: Annotated[Literal["step", "tensor"], Option(metavar="step|tensor")] = "step"
    until: Annotated[float | None, Option(min=0, max=1000)] = None
    device: Annotated[str, Option(metavar="|".join(DEVICES))] = "cpu"

    @property
    def metric(self) -> Metric:
        return METRICS[self.data]

    def runs(self) -> list[Run]:
        seeds = range(self.seed, self.seed + self.seeds)
        return [Run(codec, seed) for seed in seeds for codec in self.codecs]

    def of_run(self, run: Run) -> TrainSettings:
        return replace(self, codecs=(run.codec,), seed=run.seed, seeds=1)

    def title(self, run: Run) -> str:
        """The run's name in messages."""
        return run.codec if self.seeds == 1 else f"{run.codec} seed {run.seed}"

    def can_lose_workers(self, run: Run) -> bool:
        """Whether the run goes on when some of its workers end."""
        return self.backup_workers > 0 and not is_rival(run.codec)

    @property
    def in_one_process(self) -> bool:
        return self.exchange in IN_ONE_PROCESS

    @property
    def takes_local_steps(self) -> bool:
        """Whether every worker steps a model of its own (LocalSteps)."""
        is_of_equals = self.in_one_process or self.exchange.partition(":")[0] in HOOKED
        return self.compress == "updates" and is_of_equals

    @property
    def has_servers(self) -> bool:
        """Whether processes of their own are servers."""
        return self.exchange in SERVED

    @property
    def ranks(self) -> int:
        return self.workers + (self.servers if self.has_servers else 0)

    @property
    def workers_here(self) -> int:
        return self.workers if self.in_one_process else 1

    @property
    def processes(self) -> int:
        return 1 if self.in_one_process else self.ranks

    def of_ranks(self) -> TrainSettings:
        """Those of a run (`of_run`) as its ranks have them: an exchange in one process is the one
        between ranks that it stands for."""
        if not self.in_one_process:
            return self
        (codec,), pulls = self.codecs, IN_ONE_PROCESS[self.exchange]
        served = replace(self, exchange=f"{SERVER}:pulls={pulls}")
        if codec == PLAIN_DDP:
            return replace(served, codecs=(RAW,), rules=(), every=1, compress="gradients")
        if self.compress == "updates":
            return replace(self, exchange=SHARDED)
        if any(map(is_goal, both_ways(codec))):
            return replace(self, exchange=SHARDED if pulls == "gradients" else SHARDED_OPTIMIZER)
        return served

    @property
    def links(self) -> str:
        travels = f" and {self.latency:g} ms" if self.latency else ""
        return format_bandwidth(self.bandwidth) + travels

    @property
    def ranks_per_machine(self) -> int:
        """Workers that share a link. Without the parameter `ranks`, each has its own."""
        hooked = self.exchange.partition(":")[0] in HOOKED
        parsed = gradwire.parse_exchange(self.exchange) if hooked else {}
        return parsed.get("ranks_per_machine") or 1

    def is_server(self, rank: int) -> bool:
        return rank >= self.workers

    def names(self, ranks: Sequence[int]) -> str:
        """The names of processes for messages: `worker 0, 1`, `server 4`."""
        named: dict[str, list[str]] = {}
        for rank in sorted(ranks):
            kind = "server" if self.is_server(rank) else "worker"
            named.setdefault(kind, []).append(str(rank))
        return ", ".join(f"{kind} {', '.join(group)}" for kind, group in named.items())

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return plain


def options() -> dict[str, Any]:
    hints = get_type_hints(TrainSettings, include_extras=True)
    found = {name: get_args(hint)[1] for name, hint in hints.items()}
    for name, option in found.items():
        option.help = _HELP[name]
    return found


def choices() -> dict[str, Sequence[str]]:
    """The valid values of the settings that are a choice; of an exchange without parameters."""
    hints = get_type_hints(TrainSettings)
    listed = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    return {"model": tuple(MODELS), "data": DATA, **listed, "exchange": EXCHANGES}


def option_name(setting: str) -> str:
    short = {"codecs": "--codec", "learning_rate": "--lr"}
    return short.get(setting, f"--{setting.replace('_', '-')}")


def parse_bandwidth(text: str) -> int | None:
    """`10mbit` -> 10_000_000; `none` -> None. Decimal units, as `tc` has them."""
    if text == "none":
        return None
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)(kbit|mbit|gbit)", text)
    bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 64_000 <= bits <= 100_000_000_000:
        raise SettingsError(
            "--bandwidth",
            f"unknown bandwidth '{text}'; valid are {', '.join(BANDWIDTHS)}, or another number of "
            "kbit, mbit or gbit between 64kbit and 100gbit",
        )
    return bits


def shares_scales(codec: str) -> bool:
    """Whether all ranks must take the same scales, as an exchange that adds trits needs."""
    name = codec.partition(":")[0]
    return any(info["shares_scales"] for info in gradwire.codecs() if info["name"] == name)


def format_bandwidth(bits_per_second: int | None) -> str:
    """The shortest text that parse_bandwidth reads as this number."""
    if bits_per_second is None:
        return "none"
    for unit, factor in reversed(_UNITS.items()):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:.6f}".rstrip("0").rstrip(".") + unit
    raise ValueError(bits_per_second)


def both_ways(codec: str) -> tuple[str, str]:
    """The codecs of push and of pull, from CODEC or PUSH/PULL."""
    push, _, pull = codec.partition("/")
    return push, pull or push


def is_cuda(device: str) -> bool:
    return device.partition(":")[0] == "cuda"
