"""A plan for the training that calls it: its model, its gradients, its links."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradwire.cli.output import say
from gradwire.local_schedule import Schedule
from gradwire.machine import describe_build, describe_machine
from gradwire.option_record import explains_arguments
from gradwire.torch.optimizer_list import name_of
from gradwire.torch.wrapping_optimizer import is_adaptive
from gradwire_lab.plan.advise import CODECS, Plan, make_plan
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.fit import ALONE, HOOK, LOCAL, fit
from gradwire_lab.plan.links import Links, probe
from gradwire_lab.plan.measure import Gradients, mean, measure_codec
from gradwire_lab.plan.other_work import OtherWork
from gradwire_lab.plan.predict import DDP, cut_buckets, predict
from gradwire_lab.plan.print_plan import print_plan
from gradwire_lab.plan.profile import CodecSpeed, MessageCosts, PlanError, Profile
from gradwire_lab.plan.recorder import LEFT_OUT, profile_of
from gradwire_lab.plan.trial import Trial, slowest
from gradwire_lab.train import messages
from gradwire_lab.train.settings import SHARDED

_SAMPLED = 4_000_000  # values on which codecs are timed
_LEAST_SECONDS = 1.0  # for the steps of a way
_LONGEST_SECONDS = 2.0  # that a step of a trial may wait
_TRANSPORT = """
import json, sys
from gradwire_lab.plan.measure import measure_transport
if __name__ == "__main__":
    print(json.dumps(vars(measure_transport(*map(int, sys.argv[1:])))))
"""


@dataclass(frozen=True)
class Advice:
    """What was measured, the plan, and what to write.

    Attributes:
        profile: Of the model's step and of the codecs.
        links: Between the ranks.
        plan: All predictions, and the one to take.
        lines: Of the program, to paste; empty where compression does not pay.
    """

    profile: Profile
    links: Links
    cluster: Cluster
    plan: Plan
    lines: tuple[str, ...]

    def show(self) -> None:
        """Prints the links, the table of the predictions, the advice and the lines."""
        say(self.links.describe())
        print_plan(self.profile, self.cluster, self.plan)
        for line in self.lines:
            say(line)

    def __str__(self) -> str:
        """What `show` prints."""
        with io.StringIO() as text, redirect_stdout(text):
            self.show()
            return text.getvalue().rstrip()


@explains_arguments
def advise(
    model: nn.Module,
    step: Callable[[nn.Module], Any],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    steps: int = 10,
    codecs: Sequence[str] | None = None,
    every: int = 1,
    ranks_per_machine: int | None = None,
) -> Advice:
    """Predicts what a step of this training would take with each codec and exchange.

        advice = advise(model, lambda module: loss_of(module(inputs), targets).backward())
        if dist.get_rank() == 0:
            advice.show()

    Every rank of the process group, whose tensors are on the CPU, calls it together and gets the
    same. It measures the links between the ranks, times the codecs on the gradients of steps that
    exchange nothing, and then takes steps with DDP and with gradwire, unless they would wait for
    more than 2 s. All of them are steps of copies of the model and the optimizer.

    Args:
        model: Plain, before DistributedDataParallel or LocalSteps.
        step: Computes the loss with the module that it is given, and its gradients.
        optimizer: Its steps are part of the times, and it decides between the hook and LocalSteps.
            None: no optimizer steps, and the hook.
        steps: To take of each kind; the first three don't count. Of short steps more are taken.
        codecs: To compare. None: from `raw` to `small`; with `every` above 4 none that hold much
            back.
        every: Above 1: LocalSteps that exchange every so many steps, in all rows but DDP's.
        ranks_per_machine: None: torchrun's number, or that of ranks with the same host name.

    Raises:
        PlanError: There is one rank, too few steps, a parameter that got no gradient, or no
            optimizer for `every`.
        ValueError: `every` is below 1.
    """
    schedule = Schedule(every)
    if every > 1 and optimizer is None:
        raise PlanError(
            f"every={every} needs the optimizer, which LocalSteps wraps: advise(model, step, "
            f"optimizer, every={every})"
        )
    is_local = every > 1 or (optimizer is not None and is_adaptive(optimizer))
    links, others = probe(ranks_per_machine), OtherWork()
    with closing(Trial(model, step, optimizer, every)) as trial:
        trial.take_alone(steps)
        parts = _measure(model, trial, {*(codecs or CODECS), trial.codec}, links)
        cluster = links.cluster(parts.transport.message_seconds)
        ways = (DDP, LOCAL if is_local else HOOK)
        counts = _count_steps(parts, cluster, ways, trial.codec, schedule, steps - LEFT_OUT)
        taken = slowest(trial.take(counts))
        steps_of_all = profile_of(parts.model, model, messages.gather(trial.marks))
    how = {**parts.how, "cores_of_others": others.cores()}
    profile = replace(steps_of_all, codecs=parts.codecs, transport=parts.transport, how=how)
    profile = fit(profile, cluster, trial.codec, taken, every)
    plan = make_plan(profile, cluster, codecs or (), schedule=schedule if is_local else None)
    return Advice(profile, links, cluster, plan, _lines(plan, optimizer))


def _measure(model: nn.Module, trial: Trial, codecs: Iterable[str], links: Links) -> Profile:
    """The profile of steps that exchange nothing, with what was measured apart."""
    name = type(model).__name__
    profile_of(name, model, [trial.marks])  # refuses what can't be measured
    gradients = [_sample(step) for step in trial.gradients]
    speeds = {}
    for codec in sorted(codecs):
        dist.barrier()  # ranks that share a machine share its cores and caches
        speeds[codec] = asdict(measure_codec(codec, gradients))
    measured = messages.gather({"marks": trial.marks, "speeds": speeds})
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    transport: dict[str, float] = {}
    if dist.get_rank() == 0:
        transport = _measure_transport(max(2, links.ranks_per_machine), numel)
    return replace(
        profile_of(name, model, [each["marks"] for each in measured]),
        codecs={
            codec: mean([CodecSpeed(**each["speeds"][codec]) for each in measured])
            for codec in speeds
        },
        transport=MessageCosts(**messages.broadcast(transport)),
        how={"machine": describe_machine(), "build": describe_build()},
    )


def _count_steps(
    profile: Profile,
    cluster: Cluster,
    ways: Iterable[str],
    codec: str,
    schedule: Schedule,
    least: int,
) -> dict[str, int]:
    """How many steps of ALONE and each way are taken: at least so many, and as many as fill a
    second, because threads that wait for a core make short steps differ. None of a way whose steps
    wait for long: the link decides, and all else counts little."""

    def count(seconds: float) -> int:
        return max(least, ceil(_LEAST_SECONDS / seconds))

    buckets, counts = cut_buckets(profile), {ALONE: count(profile.compute_seconds)}
    for way in ways:
        sent, exchange = (DDP, DDP) if way == DDP else (codec, SHARDED)
        local = schedule if way == LOCAL else None
        predicted = predict(profile, cluster, sent, exchange, buckets, local)
        if predicted.exposed_seconds * predicted.every <= _LONGEST_SECONDS:
            counts[way] = count(predicted.seconds * predicted.every)
    return counts


def _sample(gradients: Gradients) -> Gradients:
    """The same share of each tensor: its first rows."""
    total = sum(values.size for values in gradients.values())
    share = min(1.0, _SAMPLED / max(total, 1))
    if share == 1.0:
        return gradients
    return {
        name: values[: ceil(len(values) * share)] if values.ndim else values
        for name, values in gradients.items()
    }


def _measure_transport(processes: int, values: int) -> dict[str, float]:
    """In a process of its own: those that it starts would run the caller's program again."""
    command = [sys.executable, "-P", "-c", _TRANSPORT]
    command += [str(processes), str(min(values, _SAMPLED))]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise PlanError(f"messages could not be measured: {ended.stderr.strip()[-500:]}")
    costs: dict[str, float] = json.loads(ended.stdout)
    return costs


def _lines(plan: Plan, optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[str, ...]:
    if not plan.pays:
        return ()
    codec, exchange = plan.choice.codec, plan.choice.exchange
    options = f"codec={codec!r}" + (f", exchange={exchange!r}" if exchange != "sharded" else "")
    if plan.choice.every > 1:
        return (
            "# local steps train in another way than DDP, so look at the accuracy, too",
            f"optimizer = gradwire.torch.LocalSteps(optimizer, model, {options}, "
            f"every={plan.choice.every})",
        )
    if optimizer is not None and is_adaptive(optimizer):
        return (
            f"# {name_of(optimizer)} learns too slowly from compressed gradients: its changes go",
            f"optimizer = gradwire.torch.LocalSteps(optimizer, model, {options})",
        )
    return (
        "# after model = DistributedDataParallel(model)",
        f"state = gradwire.torch.GradwireState({options})",
        "model.register_comm_hook(state, gradwire.torch.gradwire_hook)",
    )
