"""What settings no run can have."""

from __future__ import annotations

import re
from collections.abc import Iterator

import gradwire
from gradwire._core import Layout, is_goal
from gradwire.errors import keeps_residual
from gradwire.local_schedule import EVERY_STEP, GATED_CODEC, Schedule
from gradwire_lab.train import rivals
from gradwire_lab.train.recipes import IMAGES, MODELS
from gradwire_lab.train.rivals import PLAIN_DDP, RIVALS, is_rival
from gradwire_lab.train.settings import (
    CHOOSING,
    DEVICES,
    EXCHANGES,
    HOOKED,
    IN_ONE_PROCESS,
    ONE_PROCESS,
    SERVED,
    SERVER,
    SHARDED_OPTIMIZER,
    SettingsError,
    TrainSettings,
    both_ways,
    choices,
    option_name,
    options,
)

LOCAL = (*HOOKED, ONE_PROCESS)  # exchanges with which workers may step models of their own

_Problems = Iterator[tuple[str, str]]  # a setting, and why it cannot have its value


def check(settings: TrainSettings) -> None:
    """Raises SettingsError for values that no run can have."""
    for problems in (_of_values, _of_model, _of_exchange, _of_local_steps, _of_codecs, _of_device):
        for setting, why in problems(settings):
            raise SettingsError(option_name(setting), why)


def _of_values(settings: TrainSettings) -> _Problems:
    for name, valid in choices().items():
        value = getattr(settings, name)
        known = value.partition(":")[0] if name == "exchange" else value
        if known not in valid:
            yield name, f"unknown value '{known}'; valid are {', '.join(valid)}"
    last = {
        "every": settings.steps,
        "warmup": settings.steps,
        "delay": settings.every,
        "backup_workers": settings.workers - 1,
        "exclude_last": MODELS[settings.model].layers,
    }
    for name, option in options().items():
        value, most = getattr(settings, name), last.get(name, option.max)
        if None not in (option.min, value) and not option.min <= value <= most:
            yield name, f"{value} is not valid; valid are {option.min} to {most}"
    if settings.until is not None and settings.until > 1 and settings.metric.unit == "%":
        yield "until", f"{settings.until:g} is no accuracy: give a share, such as 0.85"
    if not 0.0 < settings.learning_rate <= 100.0:
        yield "learning_rate", f"{settings.learning_rate} is not valid; valid are (0, 100]"
    if settings.optimizer != "sgd":
        yield from _given(settings, "goes only with --optimizer sgd", "momentum", "loss_scale")
    elif settings.clip > 0.0:
        goes = "does not go with --clip, which takes the gradient of the loss itself"
        yield from _given(settings, goes, "loss_scale")


def _of_model(settings: TrainSettings) -> _Problems:
    model, recipe, width = settings.model, MODELS[settings.model], settings.width
    if settings.data not in recipe.data:
        yield "data", f"{model} does not take {settings.data}; valid are {', '.join(recipe.data)}"
    if settings.data == "cifar10" and settings.data_dir is None:
        yield "data_dir", "cifar10 needs --data-dir, the folder that holds it"
    if width is not None and recipe.width is None:
        yield "width", f"{model} has no choice of width"
    is_gpt = model.startswith("gpt")
    if is_gpt and width is not None and width % 32:
        yield "width", f"{width} is no multiple of 32, as {model} needs"
    if settings.optimizer == "muon" and not is_gpt:
        yield "optimizer", f"muon steps the matrices of gpt's blocks, and {model} has none"
    if settings.dropout > 0.0 and model.startswith("resnet"):
        yield "dropout", f"{model} has no dropout"
    if settings.data not in IMAGES:
        yield from _given(settings, f"{settings.data} is not made of images", "augment")


def _of_exchange(settings: TrainSettings) -> _Problems:
    exchange, name, every = settings.exchange, settings.exchange.partition(":")[0], settings.every
    of_gradients = settings.compress == "gradients"
    listed = {ONE_PROCESS: IN_ONE_PROCESS, SERVER: SERVED}.get(name, EXCHANGES)
    if name in HOOKED:
        try:
            machine = gradwire.parse_exchange(exchange)["ranks_per_machine"]
        except gradwire.GradwireError as error:
            raise SettingsError("--exchange", str(error)) from error
        if machine and settings.workers % machine:
            yield "exchange", f"{settings.workers} workers cannot be on machines of {machine}"
    elif exchange not in listed:
        valid = f"'{exchange}' is no exchange; valid are {', '.join(listed)}"
        yield "exchange", f"{name} has no parameters" if name == SHARDED_OPTIMIZER else valid
    elif IN_ONE_PROCESS.get(exchange) == "gradients" and not of_gradients:
        goes = f"{exchange} goes with gradients; valid for updates is {ONE_PROCESS}"
        yield "compress", goes
    elif not settings.in_one_process:
        yield from _given(settings, f"{exchange} exchanges in every step", "every")
    for setting in ("steps", "eval_every"):
        if (steps := getattr(settings, setting)) % every:
            differ = "the models of the workers differ"
            yield setting, f"{steps} is no multiple of --every {every}: {differ}"
    if every > 1 and of_gradients and name in HOOKED:
        yield "compress", "local steps exchange updates"
    if not of_gradients or name not in HOOKED:
        goes = f"goes only with gradients in every step, --exchange {', '.join(HOOKED)}"
        yield from _given(settings, goes, "start_iter")
    without_some = ("backup_workers", "staleness")
    if not settings.has_servers:
        goes = f"goes only with --exchange {SERVER}"
        yield from _given(settings, goes, "servers", *without_some, "barrier")
    if SERVED.get(exchange) == "gradients":
        goes = f"does not go with {exchange}, which averages the pushes of all workers in each step"
        yield from _given(settings, goes, *without_some, "barrier")
    if exchange in (*SERVED, SHARDED_OPTIMIZER):
        goes = f"goes only with --exchange {', '.join(LOCAL)}"
        yield from _given(settings, goes, "clip", "compress")
    if settings.in_one_process:
        for codec in settings.codecs:
            if is_rival(codec) and codec != PLAIN_DDP:
                goes = f"--exchange {ONE_PROCESS} cannot run {codec}: it needs real ranks"
                yield "codecs", goes
        if settings.bandwidth is not None:
            yield "bandwidth", f"{exchange} sends nothing; valid is none"
    if settings.latency and settings.bandwidth is None:
        yield "latency", "only links with a --bandwidth have one"


def _of_local_steps(settings: TrainSettings) -> _Problems:
    if not settings.takes_local_steps:
        goes = f"goes only with --compress updates and --exchange {', '.join(LOCAL)}"
        names = ("fragments", "delay", "mix", "gate", "outer", "outer_lr", "residual_decay")
        yield from _given(settings, goes, *names, "correct_noise")
        return
    codecs = [both_ways(codec)[0] for codec in settings.codecs if not is_rival(codec)]
    for codec in codecs:
        check_codec(codec)
    try:
        Schedule(*(getattr(settings, name) for name in vars(EVERY_STEP)))
    except ValueError as error:
        setting = re.match("[a-z]+", str(error))
        yield setting[0] if setting else "every", str(error)
    if settings.fragments > 1 and any(map(is_goal, codecs)):
        yield "fragments", "auto chooses codecs for a whole model: valid is 1"
    for codec in codecs:
        if settings.gate and keeps_residual(codec):
            holds = "keeps a residual, which holds values that --gate holds back"
            yield "codecs", f"{codec} {holds}: take one without, such as {GATED_CODEC}"
        elif not settings.gate and settings.residual_decay < 1 and not keeps_residual(codec):
            yield "residual_decay", f"{codec} keeps no residual: valid is 1"
    if settings.mix > 0 and settings.correct_noise == "on":
        yield "correct_noise", "on needs whole changes: valid is off, or a --mix of 0"
    if settings.outer == "average":
        yield from _given(settings, "goes only with --outer sgd or nesterov", "outer_lr")
    elif settings.outer_lr == 0:
        yield "outer_lr", "0 is not valid: the model would not change"


def _of_codecs(settings: TrainSettings) -> _Problems:
    if not settings.codecs:
        yield "codecs", "no codec given"
    exchange, name = settings.exchange, settings.exchange.partition(":")[0]
    own = [codec for codec in settings.codecs if not is_rival(codec)]
    parts = [part for codec in own for part in codec.split("/", 1)]
    if any(map(is_goal, [*parts, *(rule.codec for rule in settings.rules)])):
        if name not in CHOOSING:
            yield "codecs", f"auto goes with --exchange {', '.join(CHOOSING)}"
        if IN_ONE_PROCESS.get(exchange) == "updates" and settings.compress == "gradients":
            yield from _given(settings, "with auto it goes with --compress updates", "clip")
    if name in HOOKED and HOOKED[name]["adds_trits"]:
        listed = gradwire.codecs()
        added = [codec["name"] for codec in listed if codec["shares_scales"] or codec["lossless"]]
        *valid, last = *added, *RIVALS
        for codec in own:
            if any(part.partition(":")[0] not in added for part in codec.split("/")):
                goes = f"goes with {', '.join(valid)} and {last}, not with {codec}"
                yield "codecs", f"--exchange {exchange} {goes}"
    for codec in settings.codecs:
        if settings.codecs.count(codec) > 1:
            yield "codecs", f"{codec} is given more than once"
        check_codec(codec)
    for rule in settings.rules:
        check_codec(rule.codec, "--rules")


def _of_device(settings: TrainSettings) -> _Problems:
    """Of its name alone; devices.check_usable checks that the device exists."""
    device = settings.device
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device):
        valid = ", ".join(DEVICES)
        yield "device", f"unknown device '{device}'; valid are {valid} (K: a number)"


def check_codec(codec: str, option: str = "--codec") -> None:
    """Raises SettingsError for a bad codec, with the valid codecs or parameters."""
    is_of_run = option == "--codec"
    try:
        if is_rival(codec) and is_of_run:
            rivals.parse(codec)
            return
        for part in codec.split("/", 1) if is_of_run else [codec]:
            Layout([("probe", [1])], 1, "raw", rules=[("*", part)], chosen=())
    except gradwire.GradwireError as error:
        outside = f" (or, without gradwire, {', '.join(RIVALS)})" * is_of_run
        raise SettingsError(option, f"{error}{outside}") from error
    except ValueError as error:
        raise SettingsError(option, str(error)) from error


def _given(settings: TrainSettings, why: str, *names: str) -> _Problems:
    """A problem of each setting of `names` that is not its default."""
    for name in names:
        if getattr(settings, name) != getattr(TrainSettings, name):
            yield name, why
