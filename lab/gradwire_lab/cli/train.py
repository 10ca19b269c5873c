"""`gradwire train`: options in, settings out; everything else is in gradwire_lab.train."""

from __future__ import annotations

import inspect
from copy import copy
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from typer import Context, Option

from gradwire.cli.output import complete_codec, complete_exchange, terminal
from gradwire_lab.train import options, run, settings, worker
from gradwire_lab.train.config import OPTION, read_config
from gradwire_lab.train.settings import TrainSettings

_OUT_HELP = (
    "Write a JSON file of each run there as soon as it ends, and don't repeat the runs that are "
    "there."
)
_CONFIG_HELP = (
    "Settings from a file: TOML with their names in the JSON report, such as learning_rate = 0.1, "
    "or a report itself (a .json file). Options of the command line win."
)
_PAGE_HELP = "Write a web page with interactive pictures there: one file that needs no network."
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
# The groups of the options in the help; `_signature` adds the five of `train` to the last.
_PANELS = {
    "What to train and compare": (
        *("codecs", "model", "width", "data", "data_dir", "steps", "seed", "seeds"),
        *("init", "device"),
    ),
    "Recipe": (
        *("batch", "optimizer", "learning_rate", "momentum", "schedule", "warmup"),
        *("weight_decay", "clip", "dropout", "augment", "loss_scale", "ema"),
    ),
    "Network and exchange": (
        *("workers", "bandwidth", "latency"),
        *("exchange", "every", "compress", "start_iter", "rules"),
        *("fragments", "delay", "mix", "gate", "outer", "outer_lr", "residual_decay"),
        "correct_noise",
        *("exclude", "exclude_last", "min_numel", "threads"),
        *("servers", "backup_workers", "staleness", "barrier"),
    ),
    "Evaluation and output": ("eval_every", "until"),
}
# Options whose defaults follow from other options (options.from_options), and their types on the
# command line.
_WITHOUT_DEFAULT: dict[str, Any] = {
    "bandwidth": str,
    "data": str,
    "batch": int,
    "width": int,
    "optimizer": str,
    "compress": str,
    "learning_rate": float,
    "weight_decay": float,
    "warmup": int,
    "clip": float,
    "outer_lr": float,
    "threads": int,
    "eval_every": int,
}
_COMPLETED = {"codecs": complete_codec, "exchange": complete_exchange}


def train(
    context: Context,
    config: Annotated[Path | None, Option(OPTION, metavar="FILE", help=_CONFIG_HELP)] = None,
    json_path: Annotated[
        str | None, Option("--json", metavar="PATH", help="Write the report there; - for stdout.")
    ] = None,
    plots: Annotated[Path | None, Option(metavar="DIR", help="Write PNG files there.")] = None,
    page: Annotated[Path | None, Option("--report", metavar="PATH", help=_PAGE_HELP)] = None,
    out: Annotated[Path | None, Option(metavar="DIR", help=_OUT_HELP)] = None,
    **given: Any,
) -> None:
    """Train with data parallelism behind a slow link, once with each codec, and compare.

    Starts the workers on this machine, each in a network namespace of its own behind a link of the
    given bandwidth (needs root; otherwise times are modelled). Under torchrun it joins the ranks
    that are there, on the network that is there.
    """
    in_file = {} if config is None else read_config(config)
    typed = {name for name in given if _is_typed(context, name)}
    given |= {name: value for name, value in in_file.items() if name not in typed}
    chosen = options.from_options(given)
    console = terminal(is_on_stderr=json_path == "-")
    outputs = run.Destinations(json_path, plots, out, page)
    place = worker.world_of_torchrun()
    if place is None:
        run.train_here(chosen, outputs, console)
        return
    workers_given = "workers" in typed | in_file.keys()
    if place[0] == 0 and (given["bandwidth"] not in (None, "none") or workers_given):
        console.print("Under torchrun --workers and --bandwidth do nothing.", style="bold")
    run.train_under_torchrun(chosen, outputs, console, *place)


def _is_typed(context: Context, name: str) -> bool:
    """Whether the option stands in the command line, rather than having its default."""
    return str(context.get_parameter_source(name)).endswith("COMMANDLINE")


def _signature() -> inspect.Signature:
    """The signature of `train` with an option for each setting, for typer to read."""
    context, *outputs, _ = inspect.signature(train, eval_str=True).parameters.values()
    types = get_type_hints(TrainSettings)
    parameters = [context]
    for panel, names in _PANELS.items():
        for name in names:
            type_, default = types[name], getattr(TrainSettings, name)
            if get_origin(type_) is Literal:
                type_ = str  # checks.py says what is valid
            if get_origin(type_) is tuple:
                type_, default = list[str], None
            elif name in _WITHOUT_DEFAULT:
                type_, default = _WITHOUT_DEFAULT[name], None
            option = copy(settings.options()[name])
            option.param_decls = (settings.option_name(name),)
            option.autocompletion = _COMPLETED.get(name)
            type_ = type_ | None if default is None else type_
            annotation = _in_panel(type_, option, panel)
            parameters.append(
                inspect.Parameter(name, _KEYWORD, default=default, annotation=annotation)
            )
    for parameter in outputs:
        type_, option = get_args(parameter.annotation)
        annotation = _in_panel(type_, option, panel)
        parameters.append(parameter.replace(kind=_KEYWORD, annotation=annotation))
    return inspect.Signature(parameters)


def _in_panel(type_: Any, option: Any, panel: str) -> Any:
    """The annotation of an option in a group of the help."""
    option.rich_help_panel = panel
    return Annotated[type_, option]


train.__signature__ = _signature()  # type: ignore[attr-defined]
