"""The recipe and the exchange of a training, in words."""

from __future__ import annotations

from gradwire_lab.train import schedule
from gradwire_lab.train.settings import TrainSettings


def optimizer(chosen: TrainSettings) -> str:
    first, last = schedule.first_rate(chosen), schedule.last_share(chosen)
    text = {"sgd": f"SGD, momentum {chosen.momentum:g}", "adam": "Adam", "muon": "Muon, AdamW"}
    falls = f"learning rate {first:g} to {first * last:g} ({chosen.schedule}"
    parts = [
        text.get(chosen.optimizer, "AdamW"),
        f"weight decay {chosen.weight_decay:g}",
        f"{falls}, warm-up in {chosen.warmup} steps)" if chosen.warmup else f"{falls})",
    ]
    for setting, value in (("clip", chosen.clip), ("dropout", chosen.dropout), ("ema", chosen.ema)):
        parts += [f"{setting} {value:g}"] if value else []
    parts += ["no augmentation"] if chosen.augment == "none" else []
    parts += [f"loss scale {chosen.loss_scale:g}"] if chosen.loss_scale != 1 else []
    return ", ".join(parts)


def exchange(chosen: TrainSettings) -> str:
    every = f"every {chosen.every} steps" if chosen.every > 1 else "every step"
    if chosen.has_servers:
        parts = [every, f"servers: {chosen.servers}"]
        if chosen.backup_workers:
            parts.append(f"{chosen.backup_workers} backup workers")
        if chosen.staleness:
            parts.append(f"staleness {chosen.staleness}")
        if chosen.barrier != "step":
            parts.append(f"barrier {chosen.barrier}")
    elif chosen.takes_local_steps:
        alone = ["local ones between"] if chosen.every > 1 else []
        outer = f"outer {chosen.outer}, learning rate {chosen.outer_lr:g}"
        differing = {
            f"{chosen.fragments} fragments": chosen.fragments > 1,
            f"applied {chosen.delay} steps later": chosen.delay > 0,
            f"mix {chosen.mix:g}": chosen.mix > 0,
            f"gate {chosen.gate}": bool(chosen.gate),
            outer: chosen.outer != "average",
            f"residuals decay by {chosen.residual_decay:g}": chosen.residual_decay < 1,
            f"gain for noise {chosen.correct_noise}": chosen.correct_noise != "default",
        }
        parts = [every, *alone, "of updates", *(text for text, said in differing.items() if said)]
    elif chosen.every == 1:
        parts = [every, f"of {chosen.compress}"]
    else:
        is_summed = chosen.compress == "gradients"
        parts = [every, "gradients are summed between" if is_summed else "local ones between"]
    return ", ".join([chosen.exchange, *parts])
