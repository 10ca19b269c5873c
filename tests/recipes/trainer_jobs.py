"""What test_transformers.py looks at: training runs of Hugging Face's Trainer on two ranks. Each
rank writes what came out as JSON to the folder that it is given."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import HPSearchBackend

from gradwire.contrib.transformers import GradwireCallback
from gradwire.torch import LocalSteps, outer_nesterov

FOLDER = Path(sys.argv[1])
STEPS = 24
WAYS: dict[str, dict[str, Any]] = {"local": {"every": 5}, "hook": {}}
found: dict[str, Any] = {}


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences of different lengths that count up from a random number, modulo 64."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = torch.randint(64, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (start + torch.arange(16)) % 64
        labels = torch.where(torch.arange(16) < 16 - index % 5, tokens, -100)
        return {"input_ids": tokens, "labels": labels}


def make(callbacks: list[Any], name: str, dropout: float = 0.0, **options: Any) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=1,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    arguments: dict[str, Any] = {
        "output_dir": str(FOLDER / name),
        "use_cpu": True,
        "ddp_backend": "gloo",
        "per_device_train_batch_size": 8,
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(**(arguments | options)),
        train_dataset=Counting(),
        eval_dataset=Counting(),
        callbacks=callbacks,
    )


def digest(model: torch.nn.Module) -> str:
    parameters = [p.detach().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(parameters)).hexdigest()


def logged(trainer: Trainer, name: str = "loss") -> list[float]:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


def train(
    name: str, *callbacks: Any, resume: str | None = None, dropout: float = 0.0, **options: Any
) -> Trainer:
    trainer = make(list(callbacks), name, dropout, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume)
    found[name] = {
        "model": digest(trainer.model),
        "losses": logged(trainer),
        "evaluated": logged(trainer, "eval_loss"),
        "warnings": [type(w.message).__name__ for w in said],
        "max_grad_norm": trainer.args.max_grad_norm,
        "average_tokens": trainer.args.average_tokens_across_devices,
    }
    return trainer


def saved(name: str, step: int) -> str:
    """The weights of a checkpoint, in a few digits."""
    weights = load_file(FOLDER / name / f"checkpoint-{step}" / "model.safetensors")
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in weights.values())).hexdigest()


def by_hand(name: str, every: int, outer: Any = None) -> None:
    """The loop of the Trainer with LocalSteps, written down."""
    trainer = make([], name, max_grad_norm=0.0, average_tokens_across_devices=False)
    model, batches = trainer.model, iter(())
    adamw = trainer.create_optimizer()
    scheduler = trainer.create_scheduler(num_training_steps=STEPS)
    steps = LocalSteps(adamw, model, "small", every=every, clip_norm=0.5, outer=outer)
    model.train()
    done = 0
    while done < STEPS:
        samples, items = trainer.get_batch_samples(batches, 2, torch.device("cpu"))
        if not samples:
            loader = trainer.get_train_dataloader()
            loader.set_epoch(done // 8)
            batches = iter(loader)
            continue
        for inputs in samples:
            trainer.compute_loss(model, inputs, num_items_in_batch=items).backward()
        steps.step()
        scheduler.step()
        steps.zero_grad()
        done += 1
    steps.synchronize()
    steps.close()
    found[name] = {"model": digest(model)}


class Interrupt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


class StopEpoch(TrainerCallback):
    """Ends each epoch after 4 steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step % 4 == 0


class Ask(TrainerCallback):
    """Asks for a checkpoint of step 7. It comes after GradwireCallback."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step == 7


class Average(TrainerCallback):
    """Ends the training with a moving average of the weights."""

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.average = [p.detach().clone() for p in model.parameters()]

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        for average, parameter in zip(self.average, model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.1)

    def on_train_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        for average, parameter in zip(self.average, model.parameters(), strict=True):
            parameter.data.copy_(average)


class Gradients(TrainerCallback):
    """Whether a gradient is the same on both ranks."""

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        norms = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(norms, next(model.parameters()).grad.norm().reshape(1))
        found.setdefault("gradients equal", []).append(bool(norms[0] == norms[1]))


def main() -> None:
    often: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 6,
    }
    train("ddp")
    hook = GradwireCallback(codec="raw")
    train("hook raw", hook)
    found["hook raw"]["steps"] = hook.stats().steps
    default = GradwireCallback()
    train("hook default", default)
    found["hook default"]["codec"] = default.stats().codec

    # LocalSteps as written by hand.
    accumulate: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    local = GradwireCallback(codec="small", every=5)
    train("local", local, **accumulate)
    found["local"]["ratio"] = local.stats().ratio
    by_hand("local by hand", 5)
    diloco = GradwireCallback(codec="small", every=6, outer=outer_nesterov())
    train("diloco", diloco, Gradients(), **accumulate)
    by_hand("diloco by hand", 6, outer_nesterov())

    # Evaluating and saving changes nothing, and a resumed training ends with the same bits.
    for way, options in WAYS.items():
        train(f"{way} quiet", GradwireCallback("small", **options))
        train(f"{way} loud", GradwireCallback("small", **options), **often)
        train(f"{way} often", GradwireCallback("small", **options), dropout=0.1, **often)
        moved = FOLDER / f"{way} moved"
        if dist.get_rank() == 0:
            shutil.copytree(FOLDER / f"{way} often" / "checkpoint-8", moved)
            shutil.copytree(moved, FOLDER / f"{way} dropped")
            for file in (FOLDER / f"{way} dropped").glob("gradwire_*"):
                file.unlink()
        dist.barrier()
        resume = str(FOLDER / f"{way} often" / "checkpoint-8")
        found[f"{way} often at first"] = found[f"{way} often"]
        train(
            f"{way} often",
            GradwireCallback("small", **options),
            resume=resume,
            dropout=0.1,
            **often,
        )
        train(
            f"{way} elsewhere",
            GradwireCallback("small", **options),
            resume=str(moved),
            dropout=0.1,
            resume_from_checkpoint=str(moved),
            **often,
        )
        train(
            f"{way} without",
            GradwireCallback("small", **options),
            resume=str(FOLDER / f"{way} dropped"),
            dropout=0.1,
            **often,
        )

    train("average at the end", GradwireCallback("small", every=5), Average())
    train("saves", GradwireCallback(every=5), max_steps=11, save_strategy="steps", save_steps=1)
    found["saves"]["saved"] = [saved("saves", step) for step in range(4, 12)]
    train("asked", GradwireCallback(every=5), Ask(), max_steps=11)
    found["asked"]["saved"] = saved("asked", 7)
    best: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # so that the best model is the first one
    }
    trainer = train("best", GradwireCallback(every=5), **(often | {"eval_steps": 8}), **best)
    best_of = Path(str(trainer.state.best_model_checkpoint)).name
    weights = load_file(FOLDER / "best" / best_of / "model.safetensors")
    state = trainer.model.state_dict()
    found["best"]["is loaded"] = all(torch.equal(state[n], t) for n, t in weights.items())
    found["best"]["checkpoint"] = best_of
    stopping = EarlyStoppingCallback(early_stopping_patience=1)
    trainer = train(
        "stopped", GradwireCallback(every=5), stopping, **(often | {"eval_steps": 8}), **best
    )
    found["stopped"]["steps"] = trainer.state.global_step
    epochs: dict[str, Any] = {"save_strategy": "epoch", "eval_strategy": "epoch", "max_steps": 48}
    stopping = EarlyStoppingCallback(early_stopping_patience=1)
    trainer = train("stopped after an epoch", GradwireCallback(every=5), stopping, **epochs, **best)
    weights = load_file(Path(str(trainer.state.best_model_checkpoint)) / "model.safetensors")
    state = trainer.model.state_dict()
    found["best"]["is loaded"] &= all(torch.equal(state[n], t) for n, t in weights.items())

    # A run of `hyperparameter_search`, as its backend starts it on each rank.
    trainer = make([GradwireCallback(every=5)], "search", save_strategy="steps", save_steps=8)
    trainer.model_init = lambda: trainer.model
    trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.OPTUNA, lambda _: {}
    trial = SimpleNamespace(number=3, params={}, report=print, should_prune=lambda: False)
    with mock.patch("transformers.integrations.hp_params", lambda trial: trial.params):
        trainer.train(trial=trial)
    dist.barrier()
    files = (FOLDER / "search").glob("**/gradwire_*.pt")
    found["search"] = sorted(str(file.relative_to(FOLDER / "search")) for file in files)

    # The end comes before the number of steps that the Trainer has planned.
    short: dict[str, Any] = {"num_train_epochs": 2, "max_steps": -1}
    train("short epochs", GradwireCallback(every=5), StopEpoch(), **short)
    trainer = train(
        "short epochs, best", GradwireCallback(every=5), StopEpoch(), **(epochs | short), **best
    )
    weights = load_file(Path(str(trainer.state.best_model_checkpoint)) / "model.safetensors")
    state = trainer.model.state_dict()
    found["best"]["is loaded"] &= all(torch.equal(state[n], t) for n, t in weights.items())

    # Again with the same Trainer, also after an interruption.
    for way, options in WAYS.items():
        interrupt, again = Interrupt(), GradwireCallback(**options)
        trainer = make([again, interrupt], f"{way} again")
        try:
            trainer.train()
        except KeyboardInterrupt:
            trainer.remove_callback(interrupt)
        trainer.train()
        found[f"{way} again"] = {"model": digest(trainer.model), "losses": logged(trainer)}

    try:
        train("two", GradwireCallback(), GradwireCallback(every=2))
    except RuntimeError as error:
        found["two"] = str(error)
    for name in ("fsdp", "deepspeed"):
        trainer = make([GradwireCallback()], name)
        setattr(trainer, f"is_{name}_enabled", True)  # no machine with a GPU is needed for this
        try:
            trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
        except RuntimeError as error:
            found[name] = str(error)

    (FOLDER / f"found_{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")


main()
