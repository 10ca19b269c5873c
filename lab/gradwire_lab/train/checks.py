"""What settings no run can have."""

from __future__ import annotations

import re

import gradwire
from gradwire._core import Layout, is_goal
from gradwire.errors import keeps_residual
from gradwire.local_schedule import Schedule
from gradwire_lab.train import rivals
from gradwire_lab.train.recipes import MODELS
from gradwire_lab.train.rivals import PLAIN_DDP, RIVALS, is_rival
from gradwire_lab.train.settings import (
    AVERAGE,
    BARRIERS,
    CHOOSING,
    COMPRESSED,
    DATA,
    DEVICES,
    EXCHANGES,
    GRADIENTS,
    HOOKED,
    IN_ONE_PROCESS,
    ON_DEVICE,
    ONE_PROCESS,
    OPTIMIZERS,
    OUTERS,
    SCHEDULES,
    SERVED,
    SERVER,
    SGD,
    SHARDED_OPTIMIZER,
    TENSOR,
    UPDATES,
    SettingsError,
    TrainSettings,
    both_ways,
    is_cuda,
    option_name,
    options,
)


def check(settings: TrainSettings) -> None:
    """Raises SettingsError for values that no run can have."""
    for option, value, valid in (
        ("--model", settings.model, tuple(MODELS)),
        ("--data", settings.data, DATA),
        ("--optimizer", settings.optimizer, OPTIMIZERS),
        ("--compress", settings.compress, COMPRESSED),
        ("--schedule", settings.schedule, SCHEDULES),
        ("--barrier", settings.barrier, BARRIERS),
        ("--outer", settings.outer, tuple(OUTERS)),
        ("--exchange", settings.exchange.partition(":")[0], EXCHANGES),
    ):
        if value not in valid:
            raise SettingsError(option, f"unknown value '{value}'; valid are {', '.join(valid)}")
    last = {
        "every": settings.steps,
        "warmup": settings.steps,
        "delay": settings.every,
        "backup_workers": settings.workers - 1,
    }
    for name, option in options().items():
        value, most = getattr(settings, name), last.get(name, option.max)
        if None not in (option.min, value) and not option.min <= value <= most:
            raise SettingsError(
                option_name(name), f"{value} is not valid; valid are {option.min} to {most}"
            )
    if settings.until is not None and settings.until > 1 and settings.metric.unit == "%":
        raise SettingsError(
            "--until", f"{settings.until:g} is no accuracy: give a share, such as 0.85"
        )
    if not 0.0 < settings.learning_rate <= 100.0:
        raise SettingsError("--lr", f"{settings.learning_rate} is not valid; valid are (0, 100]")
    if settings.optimizer != SGD:
        _refuse(settings, f"goes only with --optimizer {SGD}", "momentum")
    _check_model(settings)
    _check_exchange(settings)
    _check_device(settings)
    if not settings.codecs:
        raise SettingsError("--codec", "no codec given")
    for codec in settings.codecs:
        if settings.codecs.count(codec) > 1:
            raise SettingsError("--codec", f"{codec} is given more than once")
        check_codec(codec)
    for rule in settings.rules:
        check_codec(rule.codec, "--rules")
    if settings.data == "cifar10" and settings.data_dir is None:
        raise SettingsError("--data-dir", "cifar10 needs --data-dir, the folder that holds it")


def _check_model(settings: TrainSettings) -> None:
    model, recipe = settings.model, MODELS[settings.model]
    if settings.data not in recipe.data:
        valid = ", ".join(recipe.data)
        raise SettingsError("--data", f"{model} does not take {settings.data}; valid are {valid}")
    if settings.width is not None and recipe.width is None:
        raise SettingsError("--width", f"{model} has no choice of width")
    if model == "gpt" and settings.width is not None and settings.width % 32:
        raise SettingsError("--width", f"{settings.width} is no multiple of 32, as gpt needs")
    if settings.dropout > 0.0 and model.startswith("resnet"):
        raise SettingsError("--dropout", f"{model} has no dropout")


def _check_exchange(settings: TrainSettings) -> None:
    exchange, every = settings.exchange, settings.every
    name = exchange.partition(":")[0]
    hooked = HOOKED.get(name)
    if hooked:
        try:
            choice = gradwire.parse_exchange(exchange)
        except gradwire.GradwireError as error:
            raise SettingsError("--exchange", str(error)) from error
        ranks = choice["ranks_per_machine"]
        if ranks and settings.workers % ranks:
            raise SettingsError(
                "--exchange", f"{settings.workers} workers cannot be on machines of {ranks}"
            )
    elif name in (ONE_PROCESS, SERVER):
        known = IN_ONE_PROCESS if name == ONE_PROCESS else SERVED
        if exchange not in known:
            valid = f"'{exchange}' is no exchange; valid are {', '.join(known)}"
            raise SettingsError("--exchange", valid)
        if IN_ONE_PROCESS.get(exchange) == GRADIENTS != settings.compress:
            goes = f"{exchange} goes with {GRADIENTS}; valid for {UPDATES} is {ONE_PROCESS}"
            raise SettingsError("--compress", goes)
    elif exchange not in EXCHANGES:
        raise SettingsError("--exchange", f"{name} has no parameters")
    if not hooked and not settings.in_one_process:
        _refuse(settings, f"{exchange} exchanges in every step", "every")
    for option, steps in (("--steps", settings.steps), ("--eval-every", settings.eval_every)):
        if steps % every:
            different = (
                f"{steps} is no multiple of --every {every}: the models of the workers differ"
            )
            raise SettingsError(option, different)
    if every > 1 and hooked and settings.compress == GRADIENTS:
        raise SettingsError("--compress", f"local steps exchange {UPDATES}")
    if settings.compress == UPDATES or not hooked:
        goes = f"goes only with gradients in every step, --exchange {', '.join(HOOKED)}"
        _refuse(settings, goes, "start_iter")
    _check_local_steps(settings)
    if not settings.has_servers:
        _refuse(
            settings,
            f"goes only with --exchange {SERVER}",
            "servers",
            "backup_workers",
            "staleness",
            "barrier",
        )
    if SERVED.get(exchange) == GRADIENTS:
        goes = f"does not go with {exchange}, which averages the pushes of all workers in each step"
        _refuse(settings, goes, "backup_workers", "staleness", "barrier")
    if settings.barrier == TENSOR:
        goes = f"does not go with --barrier {TENSOR}, which takes the pushes of all workers"
        _refuse(settings, goes, "backup_workers", "staleness")
    if exchange in (*SERVED, SHARDED_OPTIMIZER):
        goes = f"goes only with --exchange {', '.join((*HOOKED, ONE_PROCESS))}"
        _refuse(settings, goes, "clip", "compress")
    codecs: tuple[str, ...] = ()
    if hooked and hooked["adds_trits"]:
        listed = gradwire.codecs()
        added = [codec["name"] for codec in listed if codec["shares_scales"] or codec["lossless"]]
        codecs = (*added, *RIVALS)
    elif settings.in_one_process:
        _refuse(settings, f"does not go with --exchange {ONE_PROCESS}", "rules")
        for codec in settings.codecs:
            if is_rival(codec) and codec != PLAIN_DDP:
                goes = f"--exchange {ONE_PROCESS} cannot run {codec}: it needs real ranks"
                raise SettingsError("--codec", goes)
        if settings.bandwidth is not None:
            raise SettingsError("--bandwidth", f"{exchange} sends nothing; valid is none")
    if settings.latency and settings.bandwidth is None:
        raise SettingsError("--latency", "only links with a --bandwidth have one")
    chosen = [part for codec in settings.codecs for part in codec.split("/", 1)]
    chosen += [rule.codec for rule in settings.rules]
    if name not in CHOOSING and any(map(is_goal, chosen)):
        raise SettingsError("--codec", f"auto goes with --exchange {', '.join(CHOOSING)}")
    if exchange in (ONE_PROCESS, f"{ONE_PROCESS}:pulls={UPDATES}") and any(map(is_goal, chosen)):
        goes = f"with auto it goes with --compress {UPDATES}"
        if settings.compress == GRADIENTS:
            _refuse(settings, goes, "clip")
    for codec in settings.codecs:
        if is_rival(codec):
            continue
        if codecs and any(part.partition(":")[0] not in codecs for part in codec.split("/")):
            valid = f"{', '.join(codecs[:-1])} and {codecs[-1]}"
            goes = f"--exchange {exchange} goes with {valid}, not with {codec}"
            raise SettingsError("--codec", goes)


def _check_local_steps(settings: TrainSettings) -> None:
    if not settings.takes_local_steps:
        goes = f"goes only with --compress {UPDATES} and --exchange {', '.join(HOOKED)}"
        names = ("fragments", "delay", "mix", "outer", "outer_lr", "residual_decay")
        _refuse(settings, goes, *names)
        return
    codecs = [both_ways(codec)[0] for codec in settings.codecs if not is_rival(codec)]
    for codec in codecs:
        check_codec(codec)
    try:
        Schedule(settings.every, settings.fragments, settings.delay, settings.mix)
    except ValueError as error:
        setting = re.match("[a-z]+", str(error))
        raise SettingsError(option_name(setting[0] if setting else "every"), str(error)) from error
    if settings.fragments > 1 and any(map(is_goal, codecs)):
        raise SettingsError("--fragments", "auto chooses codecs for a whole model: valid is 1")
    for codec in codecs:
        if settings.residual_decay < 1 and not keeps_residual(codec):
            raise SettingsError("--residual-decay", f"{codec} keeps no residual: valid is 1")
    if settings.outer == AVERAGE:
        others = " or ".join(name for name in OUTERS if name != AVERAGE)
        _refuse(settings, f"goes only with --outer {others}", "outer_lr")
    elif settings.outer_lr == 0:
        raise SettingsError("--outer-lr", "0 is not valid: the model would not change")


def _check_device(settings: TrainSettings) -> None:
    """Checks the name; devices.check_usable checks that the device exists."""
    device = settings.device
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device):
        raise SettingsError(
            "--device", f"unknown device '{device}'; valid are {', '.join(DEVICES)} (K: a number)"
        )
    if not is_cuda(device) or settings.in_one_process:
        return
    if settings.exchange.partition(":")[0] not in ON_DEVICE:
        raise SettingsError(
            "--exchange",
            f"{settings.exchange} does not go with --device {device}; valid are "
            f"{', '.join(ON_DEVICE)}, and --codec {PLAIN_DDP}",
        )
    _refuse(settings, f"with --device {device} the only valid value is 1", "every", "threads")


def check_codec(codec: str, option: str = "--codec") -> None:
    """Raises SettingsError for a bad codec, with the valid codecs or parameters."""
    if is_rival(codec) and option == "--codec":
        try:
            rivals.parse(codec)
        except ValueError as error:
            raise SettingsError(option, str(error)) from error
        return
    try:
        for part in codec.split("/", 1) if option == "--codec" else [codec]:
            Layout([("probe", [1])], 1, "raw", rules=[("*", part)], chosen=())
    except gradwire.GradwireError as error:
        outside = f" (or, without gradwire, {', '.join(RIVALS)})" if option == "--codec" else ""
        raise SettingsError(option, f"{error}{outside}") from error


def _refuse(settings: TrainSettings, why: str, *names: str) -> None:
    """Raises SettingsError for the first setting of `names` that is not its default."""
    for name in names:
        if getattr(settings, name) != getattr(TrainSettings, name):
            raise SettingsError(option_name(name), why)
