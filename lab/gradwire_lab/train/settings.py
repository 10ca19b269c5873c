"""The settings of a training: the options of `gradwire train`, each described once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from typer import BadParameter, Option

import gradwire
from gradwire._core import is_goal
from gradwire.errors import RECOMMENDED
from gradwire_lab.train.recipes import METRICS, MODELS, Metric
from gradwire_lab.train.rivals import BF16, FP16, PLAIN_DDP, POWERSGD, is_rival

DATA = tuple(METRICS)
BANDWIDTHS = ("10mbit", "100mbit", "1gbit", "none")
DEVICES = ("cpu", "cuda", "cuda:K")
DIRECTIONS = ("push", "pull")

# The exchanges of DDP's hook.
HOOKED = {info["name"]: info for info in gradwire.exchanges() if not info["has_servers"]}
SHARDED = next(iter(HOOKED))
SERVER = "server"
SHARDED_OPTIMIZER = "sharded-optimizer"
ONE_PROCESS = "one-process"
RAW = "raw"
ON_DEVICE = (*(name for name in HOOKED if not HOOKED[name]["adds_trits"]), ONE_PROCESS)
EXCHANGES = (*HOOKED, SERVER, SHARDED_OPTIMIZER, ONE_PROCESS)

# The exchanges in which codecs can be chosen at run time: `auto`.
CHOOSING = (
    *(name for name in HOOKED if HOOKED[name]["chooses_codecs"]),
    SHARDED_OPTIMIZER,
    ONE_PROCESS,
)

DEFAULT_CODECS = (PLAIN_DDP, BF16, RECOMMENDED)

SGD, ADAM, ADAMW = OPTIMIZERS = ("sgd", "adam", "adamw")
BETAS = (0.9, 0.99)  # of Adam; a short training forgets its first gradients sooner than with 0.999
WEIGHT_DECAY = {SGD: 1e-4, ADAM: 0.0, ADAMW: 0.1}
SCHEDULES = ("cosine", "poly", "constant")
STEP, TENSOR = BARRIERS = ("step", "tensor")
GRADIENTS, UPDATES = COMPRESSED = ("gradients", "updates")
# What local steps do with the average change of the workers: subtract it, or step an optimizer by
# it, as SparseLoCo and DiLoCo do. Their learning rates are those of the papers.
AVERAGE, NESTEROV = "average", "nesterov"
OUTERS = {AVERAGE: 1.0, "sgd": 1.0, NESTEROV: 0.7}

# The exchanges with servers, as processes or all in one process, and what the workers pull
# when they push gradients: the change of a server's model, or the average gradient, which they step
# themselves (as the hook).
SERVED, IN_ONE_PROCESS = (
    {name: UPDATES} | {f"{name}:pulls={what}": what for what in COMPRESSED}
    for name in (SERVER, ONE_PROCESS)
)

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


# The longer descriptions of options.
_CODEC_HELP = (
    "A codec as `gradwire codecs` lists them, auto:bits=1, PUSH/PULL for two codecs, or without "
    "gradwire: "
    f"{PLAIN_DDP}, {BF16}, {FP16}, {POWERSGD}:rank=4. Repeatable; default: "
    f"{', '.join(DEFAULT_CODECS)}; with other exchanges the codec that fits."
)
_BANDWIDTH_HELP = (
    f"Rate of every worker's link (of every machine's with hierarchical:ranks=k), each way: "
    f"{', '.join(BANDWIDTHS)}; default 10mbit."
)
_LATENCY_HELP = "Milliseconds that a packet travels from link to link, as over a long distance."
_LEARNING_RATE_HELP = (
    "Highest learning rate; with sgd it is that of one worker, and multiplied by their number. "
    "Default with sgd or adam: "
    + ", ".join(f"{name} {recipe.sgd:g} or {recipe.adam:g}" for name, recipe in MODELS.items())
    + "."
)
_COMPRESS_HELP = (
    "What the workers exchange: gradients, or the updates of their own optimizers. Default: "
    "updates with adam and adamw, and with --every above 1."
)
_MOMENTUM_HELP = "Of sgd; 0: none."
_WEIGHT_DECAY_HELP = "Default 1e-4 for sgd, 0.1 for adamw (not of vectors), 0 for adam."
_CLIP_HELP = (
    "Largest norm of the average gradient, which is estimated where updates are exchanged between "
    "processes. 0: no clipping. Default 1 for text."
)
_WIDTH_HELP = (
    "Channels of a ResNet's first stage, or values of a hidden layer. Default: 16 and 8 "
    "(resnet8), 256 (mlp, lstm), 128 (gpt)."
)
_THREADS_HELP = (
    "Threads of a worker's codecs; of the computation with --exchange one-process (default: all "
    "CPUs)."
)
_BATCH_HELP = "Images of a worker in a step (32), or sequences of text (8)."
_WARMUP_HELP = (
    "First steps, in which the learning rate grows. Default: a twentieth of all; for ResNets and "
    "gpt at least 50, or a quarter of all if that is less."
)
_EMA_HELP = "Evaluate the exponential moving average of the weights with this decay. 0: none."
_SEEDS_HELP = "Runs of each codec, with the seeds --seed, --seed + 1, ..."
_EVAL_EVERY_HELP = "Steps between evaluations; default: about a tenth of all."
_EXCHANGE_HELP = (
    f"{', '.join(EXCHANGES)}, some with parameters, such as hierarchical:ranks=2; for every codec "
    f"but ddp. With {ONE_PROCESS}, one process has all workers and their server, and nothing "
    f"is sent. With {SERVER} and {ONE_PROCESS}, workers pull the change of the server's model, or "
    "with :pulls=gradients the average gradient, by which each steps its own."
)
_EVERY_HELP = "Steps from one exchange to the next; workers step alone between."
_LOCAL = "Local steps (--compress updates): "
_FRAGMENTS_HELP = _LOCAL + "parts of the model, whose exchanges take turns within --every steps."
_DELAY_HELP = _LOCAL + "steps that an exchange may take while the next ones compute."
_MIX_HELP = _LOCAL + "share of a worker's own values that it keeps after an exchange, below 1."
_OUTER_HELP = (
    _LOCAL + "the workers subtract the average change, or step an outer optimizer by it: "
    "sgd as in SparseLoCo, nesterov (momentum 0.9) as in DiLoCo."
)
_OUTER_LR_HELP = "The outer optimizer's learning rate. Default 0.7 for nesterov, 1 for sgd."
_RESIDUAL_DECAY_HELP = _LOCAL + "residuals are multiplied by it after each exchange."
_SERVERS_HELP = f"With --exchange {SERVER}: processes that hold the model."
_BACKUP_WORKERS_HELP = f"With --exchange {SERVER}: workers that a step does not wait for."
_STALENESS_HELP = f"With --exchange {SERVER}: steps that a worker may be ahead of what it pulled."
_BARRIER_HELP = (
    f"With --exchange {SERVER}: workers push and wait in each step, or for each tensor, while the "
    "backward and the next forward pass compute."
)
_UNTIL_HELP = (
    "Stop a run when an evaluation reaches this accuracy (such as 0.85) or loss, and report the "
    "time to it."
)
_DEVICE_HELP = (
    "Device of model, data and optimizer; cuda gives the workers the GPUs in turn. It goes with "
    f"the exchanges {', '.join(ON_DEVICE)}, and with {PLAIN_DDP} and torch:... ."
)


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
class TrainSettings:
    """All settings of a run's computation and measurement. Each setting is an option of the command
    line, which option_name names.

    bandwidth: bits a second each way; None: no limit. latency: milliseconds, one way. Rivals
    (rivals.py) exchange in every step, whatever `exchange` and `every` are. Servers are the ranks
    after the workers, on equal links.
    """

    codecs: Annotated[tuple[str, ...], Option(help=_CODEC_HELP)] = DEFAULT_CODECS
    workers: Annotated[int, Option(help="Processes on this machine.", min=1, max=250)] = 4
    bandwidth: Annotated[int | None, Option(help=_BANDWIDTH_HELP)] = 10_000_000
    latency: Annotated[float, Option(help=_LATENCY_HELP, min=0, max=1000)] = 0.0
    model: Annotated[str, Option(help=", ".join(MODELS))] = "lenet"
    width: Annotated[int | None, Option(help=_WIDTH_HELP, min=1, max=10**4)] = None
    dropout: Annotated[float, Option(help="Share of values dropped.", min=0, max=0.9)] = 0.0
    data: Annotated[str, Option(help=f"{', '.join(DATA)}; default: what fits the model.")] = DATA[0]
    data_dir: Annotated[Path | None, Option(help="Folder of the data; needed for cifar10.")] = None
    steps: Annotated[int, Option(help="Steps with each codec.", min=1, max=10**7)] = 400
    batch: Annotated[int, Option(help=_BATCH_HELP, min=1, max=10**5)] = 32
    optimizer: Annotated[str, Option(help=f"{', '.join(OPTIMIZERS)}; default by model.")] = SGD
    compress: Annotated[str, Option(help=_COMPRESS_HELP, metavar="|".join(COMPRESSED))] = GRADIENTS
    learning_rate: Annotated[float, Option(help=_LEARNING_RATE_HELP)] = MODELS["lenet"].sgd
    momentum: Annotated[float, Option(help=_MOMENTUM_HELP, min=0, max=0.9999)] = 0.9
    weight_decay: Annotated[float, Option(help=_WEIGHT_DECAY_HELP, min=0, max=1)] = 1e-4
    warmup: Annotated[int, Option(help=_WARMUP_HELP, min=0)] = 0
    schedule: Annotated[str, Option(help=", ".join(SCHEDULES))] = SCHEDULES[0]
    clip: Annotated[float, Option(help=_CLIP_HELP, min=0, max=1e6)] = 0.0
    ema: Annotated[float, Option(help=_EMA_HELP, min=0, max=0.99999)] = 0.0
    seed: Annotated[int, Option(help="Seed of weights and batches.", min=0, max=2**32 - 1)] = 0
    seeds: Annotated[int, Option(help=_SEEDS_HELP, min=1, max=100)] = 1
    threads: Annotated[int, Option(help=_THREADS_HELP, min=1, max=256)] = 1
    eval_every: Annotated[int, Option(help=_EVAL_EVERY_HELP, min=1, max=10**7)] = 40
    start_iter: Annotated[
        int, Option(help="First steps that go uncompressed.", min=0, max=10**7)
    ] = 0
    rules: Annotated[
        tuple[Rule, ...],
        Option(
            help="Another codec for tensors whose name matches. Repeatable.",
            metavar="PATTERN=CODEC[@push|@pull]",
        ),
    ] = ()
    exclude: Annotated[
        tuple[str, ...],
        Option(help="Names of tensors that go raw. Repeatable.", metavar="PATTERN"),
    ] = ()
    exclude_last: Annotated[
        int, Option(help="So many layers at the end of the model go raw.", min=0, max=1000)
    ] = 0
    min_numel: Annotated[int, Option(help="Smaller tensors go raw.", min=0, max=10**9)] = 256
    exchange: Annotated[str, Option(help=_EXCHANGE_HELP)] = SHARDED
    every: Annotated[int, Option(help=_EVERY_HELP, min=1)] = 1
    fragments: Annotated[int, Option(help=_FRAGMENTS_HELP, min=1, max=1000)] = 1
    delay: Annotated[int, Option(help=_DELAY_HELP, min=0)] = 0
    mix: Annotated[float, Option(help=_MIX_HELP, min=0, max=0.999)] = 0.0
    outer: Annotated[str, Option(help=_OUTER_HELP, metavar="|".join(OUTERS))] = AVERAGE
    outer_lr: Annotated[float, Option(help=_OUTER_LR_HELP, min=0, max=100)] = OUTERS[AVERAGE]
    residual_decay: Annotated[float, Option(help=_RESIDUAL_DECAY_HELP, min=0.01, max=1)] = 1.0
    servers: Annotated[int, Option(help=_SERVERS_HELP, min=1, max=100)] = 1
    backup_workers: Annotated[int, Option(help=_BACKUP_WORKERS_HELP, min=0)] = 0
    staleness: Annotated[int, Option(help=_STALENESS_HELP, min=0, max=1000)] = 0
    barrier: Annotated[str, Option(help=_BARRIER_HELP, metavar="|".join(BARRIERS))] = STEP
    until: Annotated[float | None, Option(help=_UNTIL_HELP, min=0, max=1000)] = None
    device: Annotated[str, Option(help=_DEVICE_HELP, metavar="|".join(DEVICES))] = "cpu"

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
        """Whether all ranks are in one process."""
        return self.exchange in IN_ONE_PROCESS

    @property
    def takes_local_steps(self) -> bool:
        """Whether every worker is a process that steps a model of its own (LocalSteps)."""
        return self.compress == UPDATES and self.exchange.partition(":")[0] in HOOKED

    @property
    def has_servers(self) -> bool:
        """Whether processes of their own are servers."""
        return self.exchange in SERVED

    @property
    def ranks(self) -> int:
        """Number of workers and servers."""
        return self.workers + (self.servers if self.has_servers else 0)

    @property
    def workers_here(self) -> int:
        """Number of workers in a process."""
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
            return replace(served, codecs=(RAW,), every=1, compress=GRADIENTS)
        if self.compress == UPDATES:
            return replace(self, exchange=SHARDED)
        if any(map(is_goal, both_ways(codec))):
            return replace(self, exchange=SHARDED if pulls == GRADIENTS else SHARDED_OPTIMIZER)
        return served

    @property
    def links(self) -> str:
        """Bandwidth and latency, as text."""
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
        workers = [str(rank) for rank in ranks if not self.is_server(rank)]
        servers = [str(rank) for rank in ranks if self.is_server(rank)]
        named = (("worker", workers), ("server", servers))
        return ", ".join(f"{kind} {', '.join(group)}" for kind, group in named if group)

    def to_json(self) -> dict[str, Any]:
        """Plain values, by the names of the settings."""
        return {**asdict(self), "data_dir": None if self.data_dir is None else str(self.data_dir)}

    @staticmethod
    def read(values: dict[str, Any]) -> TrainSettings:
        """The settings that to_json wrote; what is newer than the file has its default. Raises
        TypeError for values of another kind."""
        names = {known.name for known in fields(TrainSettings)}
        chosen = {name: value for name, value in values.items() if name in names}
        for name in ("codecs", "exclude"):
            chosen[name] = tuple(chosen.get(name, getattr(TrainSettings, name)))
        chosen["rules"] = tuple(Rule(**rule) for rule in chosen.get("rules", ()))
        folder = chosen.get("data_dir")
        return TrainSettings(**chosen | {"data_dir": None if folder is None else Path(folder)})


def options() -> dict[str, Any]:
    """The option of each setting."""
    hints = get_type_hints(TrainSettings, include_extras=True)
    return {name: get_args(hint)[1] for name, hint in hints.items()}


def option_name(setting: str) -> str:
    """The name of a setting's option."""
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
