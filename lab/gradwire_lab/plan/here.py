"""A plan for the training that calls it: its model, its gradients, its links."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradwire.cli.output import say
from gradwire.local_schedule import Schedule
from gradwire.machine import describe_build, describe_machine
from gradwire.torch.optimizer_list import name_of
from gradwire.torch.wrapping_optimizer import is_adaptive
from gradwire_lab.plan.advise import CODECS, Plan, make_plan
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.links import Links, probe
from gradwire_lab.plan.measure import KEPT_GRADIENTS, Gradients, gradients_of, mean, measure_codec
from gradwire_lab.plan.print_plan import print_plan
from gradwire_lab.plan.profile import CodecSpeed, MessageCosts, PlanError, Profile
from gradwire_lab.plan.recorder import StepRecorder, profile_of, without_exchange
from gradwire_lab.train import messages

_SAMPLED = 4_000_000  # values on which codecs are timed
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


def advise(
    model: nn.Module,
    step: Callable[[nn.Module], Any],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    steps: int = 10,
    codecs: Sequence[str] = CODECS,
    every: int = 1,
    ranks_per_machine: int | None = None,
) -> Advice:
    """Predicts what a step of this training would take with each codec and exchange.

        advice = advise(model, lambda module: loss_of(module(inputs), targets).backward())
        if dist.get_rank() == 0:
            advice.show()

    Every rank of the process group, whose tensors are on the CPU, calls it together and gets the
    same. It takes some steps without any exchange, times the codecs on their gradients, measures
    the links between the ranks, and messages between processes of this machine. The model's
    parameters and buffers are then as before.

    Args:
        model: Plain, before DistributedDataParallel or LocalSteps.
        step: Computes the loss with the module that it is given, and its gradients.
        optimizer: Decides between the hook and LocalSteps. None: the hook.
        steps: To take; the first three don't count.
        codecs: To compare.
        every: Above 1: LocalSteps that exchange every so many steps, in all rows but DDP's.
        ranks_per_machine: None: torchrun's number, or that of ranks with the same host name.

    Raises:
        PlanError: There is one rank, too few steps, or a parameter that got no gradient.
        ValueError: `every` is below 1.
    """
    schedule = Schedule(every)
    links = probe(ranks_per_machine)
    before = [(tensor, tensor.detach().clone()) for tensor in model.state_dict().values()]
    marks, gradients = _take_steps(model, step, steps)
    with torch.no_grad():
        for tensor, values in before:
            tensor.copy_(values)
    profile = profile_of(type(model).__name__, model, [marks])  # refuses what can't be measured
    speeds = {codec: asdict(measure_codec(codec, gradients)) for codec in codecs}
    measured = messages.gather({"marks": marks, "speeds": speeds})
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    transport: dict[str, float] = {}
    if dist.get_rank() == 0:
        transport = _measure_transport(max(2, links.ranks_per_machine), numel)
    costs = MessageCosts(**messages.broadcast(transport))
    profile = profile_of(type(model).__name__, model, [each["marks"] for each in measured])
    profile = Profile(
        **{
            **vars(profile),
            "codecs": {
                codec: mean([CodecSpeed(**each["speeds"][codec]) for each in measured])
                for codec in codecs
            },
            "transport": costs,
            "how": {"machine": describe_machine(), "build": describe_build()},
        }
    )
    cluster = links.cluster(costs.message_seconds)
    plan = make_plan(profile, cluster, schedule=schedule)
    return Advice(profile, links, cluster, plan, _lines(plan, optimizer))


def _take_steps(
    model: nn.Module, step: Callable[[nn.Module], Any], steps: int
) -> tuple[list[dict[str, float]], list[Gradients]]:
    """The marks of each step, and samples of the last gradients."""
    forward = without_exchange(model)
    gradients: list[Gradients] = []
    with StepRecorder(model) as recorder:
        for number in range(steps):
            model.zero_grad()
            dist.barrier()
            recorder.begin_step()
            step(forward)
            recorder.end_step()
            if number >= steps - KEPT_GRADIENTS:
                gradients.append(_sample(gradients_of(model)))
    model.zero_grad()
    return recorder.steps, gradients


def _sample(gradients: Gradients) -> Gradients:
    """The same share of each tensor: its first rows."""
    total = sum(values.size for values in gradients.values())
    share = min(1.0, _SAMPLED / max(total, 1))
    if share == 1.0:
        return gradients
    return {
        name: values[: math.ceil(len(values) * share)] if values.ndim else values
        for name, values in gradients.items()
    }


def _measure_transport(processes: int, values: int) -> dict[str, float]:
    """In a process of its own: those that it starts would run the caller's program again."""
    command = [sys.executable, "-c", _TRANSPORT, str(processes), str(min(values, _SAMPLED))]
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
        f"state = gradwire.torch.GradwireState({options})",
        "model.register_comm_hook(state, gradwire.torch.gradwire_hook)",
    )
