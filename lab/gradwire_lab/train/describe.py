"""The recipe and the exchange of a training, in words."""

from __future__ import annotations

from gradwire_lab.train import schedule
from gradwire_lab.train.settings import TrainSettings


def optimizer(chosen: TrainSettings) -> str:
    first, last = schedule.first_rate(chosen), schedule.last_share(chosen)
    text = {"sgd": f"SGD, momentum {chosen.momentum:g}", "adam": "Adam"}
    falls = f"learning rate {first:g} to {first * last:g} ({chosen.schedule}"
    parts = [
        text.get(chosen.optimizer, "AdamW"),
        f"weight decay {chosen.weight_decay:g}",
        f"{falls}, warm-up in {chosen.warmup} steps)" if chosen.warmup else f"{falls})",
    ]
    for setting, value in (("clip", chosen.clip), ("dropout", chosen.dropout), ("ema", chosen.ema)):
        parts += [f"{setting} {value:g}"] if value else []
    return ", ".join(parts)


def exchange(chosen: TrainSettings) -> str:
    if chosen.has_servers:
        backup = f", {chosen.backup_workers} backup workers" if chosen.backup_workers else ""
        barrier = f", barrier {chosen.barrier}" if chosen.barrier != "step" else ""
        return f"{chosen.exchange}, every step, servers: {chosen.servers}{backup}{barrier}"
    if chosen.takes_local_steps:
        return f"{chosen.exchange}, {_local_steps(chosen)}"
    if chosen.every == 1:
        return f"{chosen.exchange}, every step, of {chosen.compress}"
    between = "local ones between"
    if chosen.compress == "gradients":
        between = "gradients are summed between"
    return f"{chosen.exchange}, every {chosen.every} steps, {between}"


def _local_steps(chosen: TrainSettings) -> str:
    outer = f"outer {chosen.outer}, learning rate {chosen.outer_lr:g}"
    every = f"every {chosen.every} steps, local ones between" if chosen.every > 1 else "every step"
    differing = {
        f"{chosen.fragments} fragments": chosen.fragments > 1,
        f"applied {chosen.delay} steps later": chosen.delay > 0,
        f"mix {chosen.mix:g}": chosen.mix > 0,
        outer: chosen.outer != "average",
        f"residuals decay by {chosen.residual_decay:g}": chosen.residual_decay < 1,
    }
    return ", ".join([f"{every}, of updates", *(text for text, said in differing.items() if said)])
