"""Numbers of a training that runs, for TensorBoard, Weights & Biases, MLflow and their kin."""

from __future__ import annotations

from typing import Any, Protocol

from gradwire.torch.stats import StepCounters, Totals

PREFIX = "gradwire/"

_OF_STEP = (
    *("push_bytes", "pull_bytes", "received_bytes", "control_bytes"),
    *("encode_seconds", "decode_seconds", "wire_seconds", "own_seconds"),
)


class ScalarWriter(Protocol):
    """The part of `torch.utils.tensorboard.SummaryWriter` that log_to needs."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object: ...


class LiveScalars:
    """The base of everything that exchanges in steps and can be watched meanwhile. It refuses copy,
    deepcopy, pickle and torch.save: a copy would lack the connections."""

    _writer: ScalarWriter | None = None
    _log_every = 1
    _last_logged = -1

    def scalars(self) -> dict[str, float]:
        """This rank's last step, and the sums so far, as plain numbers.

            wandb.log(state.scalars() | {"loss": loss})
            mlflow.log_metrics(state.scalars(), step=step)

        docs/reference/live.md lists the names with their units. A number that does not exist, such
        as bits of a step that sent nothing, is left out.
        """
        found = self._find_scalars()
        return {PREFIX + name: float(value) for name, value in found.items() if value is not None}

    def log_to(self, writer: ScalarWriter, *, every: int = 10) -> None:
        """Writes `scalars()` of each `every`-th step to a SummaryWriter, counted from 0; of
        LocalSteps, of the first step in each `every` that applies an exchange.

            state.log_to(torch.utils.tensorboard.SummaryWriter("runs"))

        The thread that takes the steps writes them. The writer stays the caller's, who closes it.
        One rank is enough, as a rule rank 0. Raises TypeError for a writer without `add_scalar`,
        ValueError for `every` below 1.
        """
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                f"log_to takes a SummaryWriter, with a method add_scalar; this is a "
                f"{type(writer).__name__}. wandb.log and mlflow.log_metrics take scalars()"
            )
        if every < 1:
            raise ValueError(f"every is {every}; valid are 1 and more")
        self._writer, self._log_every = writer, every

    def __getstate__(self) -> Any:
        name = type(self).__name__
        raise TypeError(
            f"a {name} can't be copied or pickled, because it holds connections to other ranks: "
            f"save its state_dict() instead, and load that into another {name}"
        )

    def _find_scalars(self) -> dict[str, float | None]:
        """By their names without the prefix; None: there is no such number."""
        raise NotImplementedError

    def _log(self, step: int) -> None:
        """Called when a step is complete; logs the first of each `every` steps."""
        # (After a state was loaded, steps of the same numbers come again.)
        if self._writer is None or step // self._log_every == self._last_logged // self._log_every:
            return
        self._last_logged = step
        for name, value in self.scalars().items():
            self._writer.add_scalar(name, value, step)


def scalars_of(step: StepCounters, totals: Totals) -> dict[str, float | None]:
    """What everything with a session tells."""
    return {
        "push_bits": step.bits_per_value_push,
        "pull_bits": step.bits_per_value_pull,
        **{name: getattr(step, name) for name in _OF_STEP},
        "sent_bytes_total": totals.sent_bytes,
        "skipped_steps_total": totals.skipped_steps,
        "ratio": totals.ratio,
        "error_norm": totals.error_norm,
    }
