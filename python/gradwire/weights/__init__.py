"""Weights in flight: exact deltas from a trainer to those who serve its model.

    publisher = gradwire.weights.Publisher("policy/")
    publisher.publish(model.state_dict())

    subscriber = gradwire.weights.Subscriber("policy/")
    subscriber.fetch()
    subscriber.apply_(model)

It needs no PyTorch, and takes its tensors.
"""

from gradwire.weights.difference import changes, diff, patch
from gradwire.weights.errors import (
    ConflictError,
    DamagedVersionError,
    MissingVersionError,
    StaleBaseError,
    WeightsError,
)
from gradwire.weights.folder import Folder
from gradwire.weights.nested import flatten, unflatten
from gradwire.weights.publisher import Published, Publisher
from gradwire.weights.retention import fold, prune
from gradwire.weights.subscriber import Applied, Fetched, Subscriber
from gradwire.weights.tensors import Shard

__all__ = [
    "Applied",
    "ConflictError",
    "DamagedVersionError",
    "Fetched",
    "Folder",
    "MissingVersionError",
    "Published",
    "Publisher",
    "Shard",
    "StaleBaseError",
    "Subscriber",
    "WeightsError",
    "changes",
    "diff",
    "flatten",
    "fold",
    "patch",
    "prune",
    "unflatten",
]
