"""The settings for the options of a command line, with the defaults that follow from others."""

from __future__ import annotations

import os
import re
from typing import Any

from gradwire.local_schedule import GATED_CODEC
from gradwire_lab.train.checks import check
from gradwire_lab.train.recipes import MODELS
from gradwire_lab.train.rivals import BF16, PLAIN_DDP
from gradwire_lab.train.settings import (
    BANDWIDTHS,
    HOOKED,
    IN_ONE_PROCESS,
    OUTERS,
    SERVED,
    SHARDED,
    SHARDED_OPTIMIZER,
    WEIGHT_DECAY,
    Rule,
    SettingsError,
    TrainSettings,
    parse_bandwidth,
)


def from_options(given: dict[str, Any]) -> TrainSettings:
    """The settings for the options of a command line, by the names in TrainSettings. An option of
    None was not given. Raises SettingsError."""
    values = {name: value for name, value in given.items() if value not in (None, [], ())}
    for name in ("codecs", "exclude"):
        if name in values:
            values[name] = tuple(values[name])
    values["rules"] = tuple(parse_rule(rule) for rule in values.get("rules", ()))
    usual = "none" if values.get("exchange") in IN_ONE_PROCESS else BANDWIDTHS[0]
    values["bandwidth"] = parse_bandwidth(values.get("bandwidth", usual))
    chosen = TrainSettings(**_defaults(values) | values)
    check(chosen)
    return chosen


def _defaults(values: dict[str, Any]) -> dict[str, Any]:
    recipe = MODELS.get(values["model"], MODELS["lenet"])
    optimizer = values.get("optimizer", recipe.optimizer)
    exchange, every, steps = values["exchange"], values["every"], values["steps"]
    hooked = HOOKED.get(exchange.partition(":")[0], HOOKED[SHARDED])
    own = GATED_CODEC if values.get("gate") else hooked["default_codec"]
    keeps_gradients = exchange in (*SERVED, SHARDED_OPTIMIZER)
    sums_gradients = keeps_gradients or exchange in IN_ONE_PROCESS
    steps_gradients = keeps_gradients or IN_ONE_PROCESS.get(exchange) == "gradients"
    updates = (optimizer != "sgd" and not steps_gradients) or (every > 1 and not sums_gradients)
    return {
        # One process has no PyTorch hooks.
        "codecs": (PLAIN_DDP, own) if exchange in IN_ONE_PROCESS else (PLAIN_DDP, BF16, own),
        "data": recipe.data[0],
        "batch": recipe.batch,
        "width": recipe.width,
        "optimizer": optimizer,
        "compress": "updates" if updates else "gradients",
        "learning_rate": recipe.sgd if optimizer == "sgd" else recipe.adam,
        "weight_decay": WEIGHT_DECAY.get(optimizer, 0.0),
        "warmup": max(steps // 20, min(recipe.warmup, steps // 4)),
        "clip": 0.0 if keeps_gradients else recipe.clip,
        "outer_lr": OUTERS.get(values.get("outer", "average"), 1.0),
        "threads": len(os.sched_getaffinity(0)) if exchange in IN_ONE_PROCESS else 1,
        "eval_every": default_eval_every(steps, every),
    }


def default_eval_every(steps: int, every: int) -> int:
    """About a tenth of all steps, and a multiple of `every`: then the workers' models are equal."""
    tenth = max(steps // 10, 1)
    return -(-tenth // every) * every if every > 0 else tenth


def parse_rule(text: str) -> Rule:
    """`PATTERN=CODEC`, `PATTERN=CODEC@push` or `PATTERN=CODEC@pull`."""
    match = re.fullmatch("([^=]+)=([^@]+)(?:@(push|pull))?", text)
    if match is None:
        raise SettingsError(
            "--rules",
            f"cannot read the rule '{text}'; valid are PATTERN=CODEC, PATTERN=CODEC@push and "
            "PATTERN=CODEC@pull",
        )
    return Rule(match[1], match[2], match[3] or "both")
