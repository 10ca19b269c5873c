"""The errors between ranks, and the warnings of gradwire.torch.

With the hook, an error is raised in the communication thread, kept in `GradwireState.error`, and
raised again by `backward()` in the training thread. PyTorch carries it there through C++ as a
`RuntimeError` whose text holds the name and the message of the original.
"""

from __future__ import annotations


class CommunicationError(RuntimeError):
    """The exchange of a bucket could not be finished. `ranks` are the ranks that caused it."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class PeerLostError(CommunicationError):
    """The connection to a rank closed: its process died or left."""


class PeerSilentError(CommunicationError):
    """A rank is connected but sent nothing for `timeout` seconds."""


class PeerStoppedError(CommunicationError):
    """A rank stopped with an error of its own; the message repeats it."""


class PeerMismatchError(CommunicationError):
    """Two ranks differ, in their codec or another setting; the message names both ranks."""


class DamagedMessageError(CommunicationError):
    """A message is not what its sender sent: its checksum does not match. `ranks`: the sender."""


class StoreLostError(CommunicationError):
    """The store where ranks meet does not answer: before all are connected, or with on_lost."""


class JobKeyError(CommunicationError):
    """A record of the store or a connection was not made with this job's key, or there is no usable
    key."""


class ExpelledError(CommunicationError):
    """The others took this rank for dead, and went on without it (on_lost)."""


class NonFiniteStepWarning(RuntimeWarning):
    """A gradient or an average held NaN or Inf, so the step is skipped; residuals are kept."""


class UnmatchedPatternWarning(UserWarning):
    """A pattern of `rules` or `exclude` matches no tensor of the model."""


class UnsharedParameterWarning(UserWarning):
    """A parameter of the model changes, and no object of gradwire exchanges it: each rank trains
    its own."""


class GrowingScalesWarning(UserWarning):
    """In a ring, a codec's values may grow more than 8 times on the whole way."""


class OutgrownResidualWarning(RuntimeWarning):
    """What a rank still owes of a tensor is a large multiple of its gradients."""


class CoarseGradientsWarning(UserWarning):
    """A coarse codec sends gradients to an adaptive optimizer, which divides by their squares, or
    changes that are exchanged seldom (LocalSteps)."""


class OneMachineWarning(UserWarning):
    """All ranks of a hierarchical exchange are on one machine: nothing is compressed."""


class ResidualDroppedWarning(RuntimeWarning):
    """A residual is dropped, because the new configuration has no place for it."""


class RankLostWarning(RuntimeWarning):
    """A rank is gone, and the others go on without it (LocalSteps, on_lost; GroupFolder)."""


class WorkerLostWarning(RuntimeWarning):
    """A worker is gone, and the server goes on without it (`backup_workers`, `on_lost`)."""


class WorkerJoinedWarning(RuntimeWarning):
    """Another process has taken the place of a lost worker (ServerOptimizer, on_lost)."""


class WorkerDiffersWarning(RuntimeWarning):
    """Where ranks come and go, one has other options in its parameter groups. ServerOptimizer does
    not use them; LocalSteps lets each rank step with its own."""


def forget_frames(error: BaseException | None) -> None:
    """Lets go of what the frames that an error came through hold. The error of a session that has
    ended would keep the session, its memory and its threads, until Python looks for cycles."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
