"""`gradwire train`: options in, settings out; everything else is in gradwire.train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradwire.cli.output import CommandError
from gradwire.train import settings as known
from gradwire.train.settings import TrainSettings

_WIDTH_WITHOUT_TERMINAL = 120


def train(
    codec: Annotated[
        list[str] | None,
        typer.Option(
            "--codec",
            help="A codec as `gradwire codecs` lists them, or ddp: DDP's own all-reduce. "
            f"Repeatable; default: {', '.join(known.DEFAULT_CODECS)}.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes on this machine; default 4.")
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help=f"Of every worker's link, each way: {', '.join(known.BANDWIDTHS)}; default 10mbit."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help=", ".join(known.MODELS))] = "lenet",
    data: Annotated[str, typer.Option(help=", ".join(known.DATA))] = "fashion-mnist",
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the data set is; needed for cifar10.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps with each codec.")] = 400,
    batch: Annotated[int, typer.Option(help="Images of a worker in a step.")] = 32,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--lr",
            help="First learning rate of one worker; multiplied by the number of workers, falls to "
            "a hundredth along a cosine. Default 0.1, for lenet 0.005.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="PATH", help="Write the report there; - for stdout."),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write PNG files there.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of a worker's codecs.")] = 1,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations; default: about a tenth of all.")
    ] = None,
    start_iter: Annotated[int, typer.Option(help="First steps that go uncompressed.")] = 0,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=CODEC[@push|@pull]",
            help="Another codec for tensors whose name matches. Repeatable.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Names of tensors that go raw. Repeatable."),
    ] = None,
    exchange: Annotated[
        str, typer.Option(help=f"{', '.join(known.EXCHANGES)}; for every codec but ddp.")
    ] = known.EXCHANGES[0],
    every: Annotated[
        int, typer.Option(help="Steps from one exchange to the next; workers step alone between.")
    ] = 1,
    servers: Annotated[
        int, typer.Option(help="With --exchange server: processes that hold the model.")
    ] = 1,
    backup_workers: Annotated[
        int,
        typer.Option(
            help="With --exchange server: a step goes on without the last so many workers."
        ),
    ] = 0,
    device: Annotated[
        str,
        typer.Option(
            metavar="|".join(known.DEVICES),
            help="Of model, data and optimizer; cuda gives the workers the GPUs in turn. With "
            f"--exchange {known.EXCHANGES[0]}, and with ddp.",
        ),
    ] = "cpu",
) -> None:
    """Train with data parallelism behind a slow link, once with each codec, and compare.

    Starts the workers on this machine, each in a network namespace of its own behind a link of the
    given bandwidth (needs root; otherwise times are modelled). Under torchrun it joins the ranks
    that are there, on the network that is there.
    """
    from gradwire.train import run, worker

    try:
        chosen = TrainSettings(
            codecs=tuple(codec or known.DEFAULT_CODECS),
            workers=4 if workers is None else workers,
            bandwidth=known.parse_bandwidth(bandwidth or "10mbit"),
            model=model,
            data=data,
            data_dir=data_dir,
            steps=steps,
            batch=batch,
            seed=seed,
            threads=threads,
            eval_every=known.default_eval_every(steps, every) if eval_every is None else eval_every,
            start_iter=start_iter,
            rules=tuple(known.parse_rule(rule) for rule in rules or []),
            exclude=tuple(exclude or []),
            exchange=exchange,
            every=every,
            servers=servers,
            backup_workers=backup_workers,
            device=device,
        )
        if learning_rate is None:
            known.check(chosen)
            learning_rate = known.BASE_LEARNING_RATE[model]
        chosen = replace(chosen, learning_rate=learning_rate)
        known.check(chosen)
        for name in chosen.codecs:
            known.check_codec(name)
        for rule in chosen.rules:
            known.check_codec(rule.codec, "--rules")
    except known.SettingsError as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from None

    console = Console(stderr=json_path == "-")
    if not console.is_terminal:
        console = Console(stderr=json_path == "-", width=_WIDTH_WITHOUT_TERMINAL)
    outputs = run.Outputs(json_path, plots)
    try:
        if worker.is_under_torchrun():
            rank, _ = worker.world_of_torchrun()
            if rank == 0 and (bandwidth not in (None, "none") or workers is not None):
                console.print("Under torchrun --workers and --bandwidth do nothing.", style="bold")
            run.train_under_torchrun(chosen, outputs, console)
        else:
            run.train_here(chosen, outputs, console)
    except run.CannotRunError as error:
        raise CommandError(str(error)) from None
