"""Fits the costs of a profile to real steps.

Codecs, links and messages are measured apart. In a step they meet: a thread that exchanges waits
for a core on which the backward pass computes, its data are no longer in the caches, DDP and
LocalSteps have work of their own. So a step of each kind is taken, and what the sum of the parts
lacks is added to the costs that cause it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from gradwire.local_schedule import Schedule
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.predict import DDP, cut_buckets, predict
from gradwire_lab.plan.profile import LocalCosts, Profile
from gradwire_lab.train.settings import SHARDED

ALONE, HOOK, LOCAL = "alone", "hook", "local"  # ways to take a step, beside DDP

_HALVINGS = 50


def fit(
    profile: Profile,
    cluster: Cluster,
    codec: str,
    taken: Mapping[str, Sequence[float]],
    every: int = 1,
) -> Profile:
    """The profile with which predictions of those steps are as they were taken.

    Only costs grow: a step that was quicker than predicted changes nothing.

    Args:
        codec: Of the steps, in the exchange "sharded".
        taken: Seconds of the steps of each way, ALONE among them, which took turns. DDP: gives
            `allreduce_seconds`. HOOK: gives `exchange_seconds`. LOCAL: of LocalSteps, `every` steps
            in each turn; gives `local`.
    """
    if DDP in taken:
        profile = _fit_transport(profile, cluster, (DDP, DDP), taken[DDP], taken[ALONE])
    if HOOK in taken:
        profile = _fit_transport(profile, cluster, (codec, SHARDED), taken[HOOK], taken[ALONE])
    if LOCAL in taken:
        profile = _fit_local(profile, cluster, codec, taken, Schedule(every))
    return profile


def _fit_transport(
    profile: Profile,
    cluster: Cluster,
    way: tuple[str, str],
    taken: Sequence[float],
    alone: Sequence[float],
) -> Profile:
    """With the cost by which steps are longer than those that exchange nothing. way: codec and
    exchange."""
    codec, exchange = way
    cost = "allreduce_seconds" if codec == DDP else "exchange_seconds"
    buckets = cut_buckets(profile)
    target = profile.compute_seconds + max(0.0, median(taken) - median(alone))

    def with_cost(seconds: float) -> Profile:
        return replace(profile, transport=replace(profile.transport, **{cost: seconds}))

    def predicted(seconds: float) -> float:
        return predict(with_cost(seconds), cluster, codec, exchange, buckets).seconds

    return with_cost(_solve(predicted, target, getattr(profile.transport, cost)))


def _solve(predicted: Callable[[float], float], target: float, least: float) -> float:
    """The cost from `least` on with which `predicted`, which grows with it, is the target."""
    if predicted(least) >= target:
        return least
    most = least + target  # a step has one message at least
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if predicted(middle) > target else (middle, most)
    return most


def _fit_local(
    profile: Profile,
    cluster: Cluster,
    codec: str,
    taken: Mapping[str, Sequence[float]],
    schedule: Schedule,
) -> Profile:
    alone, turns = median(taken[ALONE]), schedule.every
    *between, last = (median(taken[LOCAL][turn::turns]) for turn in range(turns))
    quiet = fmean(between) if between else alone  # of a step without an exchange
    costs = LocalCosts(step_seconds=max(0.0, quiet - alone))
    profile = replace(profile, local=costs)
    buckets = cut_buckets(profile)
    waiting = predict(profile, cluster, codec, SHARDED, buckets, schedule).exposed_seconds
    left = max(0.0, last - quiet - turns * waiting)
    return replace(profile, local=replace(costs, exchange_seconds=left))
