"""What a training run is asked to do, checked once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MODELS = ("lenet", "resnet20", "resnet56", "resnet110")
DATA = ("fashion-mnist", "cifar10")
BANDWIDTHS = ("10mbit", "100mbit", "1gbit", "none")
ROLES = ("push", "pull")

SERVER = "server"
SHARDED_OPTIMIZER = "sharded-optimizer"
TERNGRAD = "terngrad"
EXCHANGES = ("sharded", "ring", TERNGRAD, SERVER, SHARDED_OPTIMIZER)

DEVICES = ("cpu", "cuda", "cuda:K")

DEFAULT_CODECS = ("raw", "bf16", "3lc:s=1.00", "3lc:s=1.75")
PLAIN_DDP = "ddp"  # in the place of a codec: DDP's own all-reduce, without our hook

# First learning rate of one worker. 0.1 is 3LC's and He et al.'s, for networks with batch
# normalisation. LeNet has none: on Fashion-MNIST with 4 workers it never leaves 10 % accuracy from
# 0.05 on, and 3lc:s=1.75, whose residuals delay the gradients, falls back to 10 % within 2000 steps
# at 0.01. At 0.005 it reaches 83 % in them (without compression: 88 %).
BASE_LEARNING_RATE = {"lenet": 0.005, "resnet20": 0.1, "resnet56": 0.1, "resnet110": 0.1}

MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class SettingsError(ValueError):
    """An option's value cannot be used; `option` names it, the message lists what can."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True)
class Rule:
    """Tensors whose name matches `pattern` take `codec`, in one role or (None) in both."""

    pattern: str
    codec: str
    role: str | None = None


@dataclass(frozen=True)
class TrainSettings:
    """Everything that decides what a run computes and how it is measured.

    bandwidth: of every worker's link, bits a second each way; None: loopback, no limit.
    learning_rate: of one worker at step 0; the run starts at learning_rate * workers.
    exchange, every: of all codecs but ddp, which is DDP's own all-reduce in every step.
    servers, backup_workers: with the exchange `server`. The servers are ranks of their own, behind
    the workers and on links like theirs.
    device: of model, data and optimizer in each worker; see devices.of_worker.
    """

    codecs: tuple[str, ...] = DEFAULT_CODECS
    workers: int = 4
    bandwidth: int | None = 10_000_000
    model: str = "lenet"
    data: str = "fashion-mnist"
    data_dir: Path | None = None
    steps: int = 400
    batch: int = 32
    learning_rate: float = BASE_LEARNING_RATE["lenet"]
    seed: int = 0
    threads: int = 1
    eval_every: int = 40
    start_iter: int = 0
    rules: tuple[Rule, ...] = ()
    exclude: tuple[str, ...] = field(default=())
    exchange: str = EXCHANGES[0]
    every: int = 1
    servers: int = 1
    backup_workers: int = 0
    device: str = "cpu"

    @property
    def ranks(self) -> int:
        """Processes: workers, and servers where there are any."""
        return self.workers + (self.servers if self.exchange == SERVER else 0)

    def is_server(self, rank: int) -> bool:
        return rank >= self.workers

    def names(self, ranks: Sequence[int]) -> str:
        """Of processes, for messages: `worker 0, 1`, `server 4`."""
        workers = [str(rank) for rank in ranks if not self.is_server(rank)]
        servers = [str(rank) for rank in ranks if self.is_server(rank)]
        named = (("worker", workers), ("server", servers))
        return ", ".join(f"{kind} {', '.join(group)}" for kind, group in named if group)

    def to_json(self) -> dict[str, Any]:
        """Plain values; from_json gives the same settings back."""
        return {**asdict(self), "data_dir": None if self.data_dir is None else str(self.data_dir)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> TrainSettings:
        folder = values["data_dir"]
        return TrainSettings(
            **{
                **values,
                "codecs": tuple(values["codecs"]),
                "data_dir": None if folder is None else Path(folder),
                "rules": tuple(Rule(**rule) for rule in values["rules"]),
                "exclude": tuple(values["exclude"]),
            }
        )


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


def format_bandwidth(bits_per_second: int | None) -> str:
    """The shortest text that parse_bandwidth reads as this number."""
    if bits_per_second is None:
        return "none"
    for unit, factor in reversed(_UNITS.items()):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:.6f}".rstrip("0").rstrip(".") + unit
    raise ValueError(bits_per_second)


def default_eval_every(steps: int, every: int) -> int:
    """About a tenth of all steps, when the workers' models are equal."""
    tenth = max(steps // 10, 1)
    return -(-tenth // every) * every if every > 0 else tenth


def is_cuda(device: str) -> bool:
    return device.partition(":")[0] == "cuda"


def parse_rule(text: str) -> Rule:
    """`PATTERN=CODEC`, `PATTERN=CODEC@push` or `PATTERN=CODEC@pull`."""
    pattern, _, rest = text.partition("=")
    codec, at, role = rest.partition("@")
    if not pattern or not codec or (at and role not in ROLES):
        raise SettingsError(
            "--rules",
            f"cannot read the rule '{text}'; valid are PATTERN=CODEC, PATTERN=CODEC@push and "
            "PATTERN=CODEC@pull",
        )
    return Rule(pattern, codec, role or None)


def check(settings: TrainSettings) -> None:
    """Raises SettingsError for values that no run can have. Codecs: see check_codec."""
    _one_of("--model", "model", settings.model, MODELS)
    _one_of("--data", "data set", settings.data, DATA)
    _one_of("--exchange", "exchange", settings.exchange, EXCHANGES)
    for option, value, least, most in (
        ("--workers", settings.workers, 1, 250),
        ("--steps", settings.steps, 1, 10**7),
        ("--batch", settings.batch, 1, 10**5),
        ("--threads", settings.threads, 1, 256),
        ("--eval-every", settings.eval_every, 1, 10**7),
        ("--every", settings.every, 1, settings.steps),
        ("--servers", settings.servers, 1, 100),
        ("--backup-workers", settings.backup_workers, 0, settings.workers - 1),
        ("--start-iter", settings.start_iter, 0, 10**7),
        ("--seed", settings.seed, 0, 2**32 - 1),
    ):
        if not least <= value <= most:
            raise SettingsError(option, f"{value} is not valid; valid are {least} to {most}")
    if not 0.0 < settings.learning_rate <= 100.0:
        raise SettingsError("--lr", f"{settings.learning_rate} is not valid; valid are (0, 100]")
    _check_exchange(settings)
    _check_device(settings)
    if not settings.codecs:
        raise SettingsError("--codec", "no codec given")
    for codec in settings.codecs:
        if settings.codecs.count(codec) > 1:
            raise SettingsError("--codec", f"{codec} is given more than once")
    if settings.data == "cifar10" and settings.data_dir is None:
        raise SettingsError("--data-dir", "cifar10 needs --data-dir, the folder that holds it")


def _check_exchange(settings: TrainSettings) -> None:
    every, hooked = settings.every, settings.exchange not in (SERVER, SHARDED_OPTIMIZER)
    if every > 1 and not hooked:
        raise SettingsError("--every", f"{settings.exchange} exchanges in every step")
    if settings.exchange != SERVER:
        for option, value, default in (
            ("--servers", settings.servers, 1),
            ("--backup-workers", settings.backup_workers, 0),
        ):
            if value != default:
                raise SettingsError(option, f"goes with --exchange {SERVER} alone")
    if settings.exchange == TERNGRAD:
        for codec in settings.codecs:
            if codec.partition(":")[0] not in (TERNGRAD, "raw", PLAIN_DDP):
                raise SettingsError(
                    "--codec",
                    f"--exchange {TERNGRAD} goes with {TERNGRAD}, raw and {PLAIN_DDP}, "
                    f"not with {codec}",
                )
    for option, steps in (("--steps", settings.steps), ("--eval-every", settings.eval_every)):
        if steps % every:
            raise SettingsError(
                option,
                f"{steps} is no multiple of --every {every}: the models of the workers differ",
            )
    if settings.start_iter and (every > 1 or not hooked):
        raise SettingsError(
            "--start-iter",
            f"goes with --exchange {', '.join(EXCHANGES[:3])} in every step alone",
        )


def _check_device(settings: TrainSettings) -> None:
    """Whether the device is there: see devices.check_usable."""
    device = settings.device
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device):
        raise SettingsError(
            "--device", f"unknown device '{device}'; valid are {', '.join(DEVICES)} (K: a number)"
        )
    if not is_cuda(device):
        return
    goes = f"does not go with --device {device}; what goes is"
    if settings.exchange != EXCHANGES[0]:
        raise SettingsError(
            "--exchange", f"{settings.exchange} {goes} {EXCHANGES[0]}, and --codec {PLAIN_DDP}"
        )
    for option, value in (("--every", settings.every), ("--threads", settings.threads)):
        if value != 1:
            raise SettingsError(option, f"{value} {goes} 1")


def check_codec(codec: str, option: str = "--codec") -> None:
    """Raises SettingsError, with the codecs or parameters that are valid."""
    import gradwire

    if codec == PLAIN_DDP and option == "--codec":
        return
    try:
        gradwire.max_encoded_size(codec, 1)
    except gradwire.GradwireError as error:
        outside = f" (or {PLAIN_DDP}: DDP's own all-reduce)" if option == "--codec" else ""
        raise SettingsError(option, f"{error}{outside}") from error


def _one_of(option: str, what: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise SettingsError(option, f"unknown {what} '{value}'; valid are {', '.join(valid)}")
