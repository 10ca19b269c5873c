"""The part of a model that this rank owns, and the optimizer that steps it."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradwire._core import Layout
from gradwire.errors import keeps_residual
from gradwire.torch.checkpoint import Residual
from gradwire.torch.network.engine import Unused
from gradwire.torch.optimizer_list import is_of_pytorch
from gradwire.torch.parameters import all_finite, ordinary_tensors
from gradwire.torch.staging.moves import moved
from gradwire.torch.wrapping_optimizer import OwnUse, remake

# These optimizers step a tensor as a whole, or take sparse gradients.
_NOT_ELEMENTWISE = ("Adafactor", "Muon", "SparseAdam")


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer that cannot step a part of a tensor, or has stepped."""
    name = type(optimizer).__name__
    if name in _NOT_ELEMENTWISE or not _steps_elements(optimizer):
        raise ValueError(f"{name} does not step each element by itself, so it can't be sharded")
    # (Adagrad has its state before the first step.)
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    if any(float(state.get("step", len(state))) > 0 for state in states):
        raise ValueError(
            f"the {name} has taken steps already, so its state is of whole tensors. Wrap a new "
            "one, and load a checkpoint that a ShardedOptimizer saved"
        )


@ordinary_tensors()
def _steps_elements(optimizer: Optimizer) -> bool:
    """Whether two halves of a matrix, flat and each with an optimizer of its own, step as the whole
    matrix does; True where a copy of the optimizer does not tell."""
    if is_of_pytorch(optimizer):
        return True
    dtype, device = torch.float32, torch.device("cpu")
    weights = torch.linspace(-1, 2, 24, dtype=dtype, device=device)
    gradients = torch.linspace(1, -0.5, 24, dtype=dtype, device=device)

    def step(*shape: int, half: slice = slice(None)) -> torch.Tensor:
        groups = []
        for group in optimizer.param_groups:
            part = nn.Parameter(weights[half].reshape(shape).clone())
            part.grad = gradients[half].reshape(shape)
            lr = group.get("lr")
            rate = torch.full_like(lr, 0.1) if isinstance(lr, torch.Tensor) else 0.1
            groups.append({**group, "lr": rate, "params": [part]})
        made = remake(optimizer, groups)
        made.step()
        made.step()
        return torch.stack([group["params"][0].detach().reshape(-1) for group in groups], -1)

    with torch.random.fork_rng(devices=()), contextlib.suppress(Exception):  # of its own code
        whole, again = step(4, 6), step(4, 6)
        halves = torch.cat([step(12, half=slice(12)), step(12, half=slice(12, 24))])
        is_random = not torch.allclose(whole, again)
        return is_random or torch.allclose(whole, halves, rtol=1e-3, atol=1e-4)
    return True


def keeps_residuals(layout: Layout) -> bool:
    """Whether any of several ranks keeps a residual."""
    codecs = {s[key] for s in layout.segments for key in ("push_codec", "pull_codec")}
    return any(map(keeps_residual, codecs))


@dataclass(frozen=True)
class Piece:
    """Consecutive values of one parameter, from its flattened element `offset` on.

    Attributes:
        parameter: The user's.
        replica: The values of the whole parameter on every rank, f32, on the parameter's device.
        values: The exact values, which this rank's optimizer steps, f32, on the host.
        start: Where the values are in the bucket: first the average, then the change.
        is_owed: Whether a residual keeps the codec's error, to be sent later. Without a residual
            the owner takes over the values that every rank got.
        copied: The values that every rank has, on the host, if the parameter is elsewhere.
    """

    name: str
    offset: int
    parameter: torch.Tensor
    replica: torch.Tensor
    values: nn.Parameter
    start: int
    is_owed: bool
    copied: torch.Tensor | None

    @property
    def in_replica(self) -> torch.Tensor:
        """The values that every rank has, on the host, to be read."""
        return self.read_replica() if self.copied is None else self.copied

    def read_replica(self) -> torch.Tensor:
        """The same from where they are."""
        return _part(self.replica, self.offset, self.values.numel())


def _part(tensor: torch.Tensor, offset: int, numel: int) -> torch.Tensor:
    return tensor.detach().reshape(-1)[offset : offset + numel]


def _first_state(optimizer: Optimizer, piece: Piece) -> dict[str, Any]:
    """Of an optimizer that has states of the parameters before its first step."""

    def cut(key: str, kept: Any) -> Any:
        if not isinstance(kept, torch.Tensor):
            return copy.deepcopy(kept)
        if key != "step" and kept.shape == piece.parameter.shape:
            kept = _part(kept, piece.offset, piece.values.numel()).float()
        return kept.detach().to("cpu", copy=True)

    return {key: cut(key, kept) for key, kept in optimizer.state[piece.parameter].items()}


class Shard:
    """The pieces that this rank owns, and the optimizer's state of them.

    The optimizer has them only while it steps them. Otherwise its groups have the user's
    parameters, whose gradients its zero_grad takes.
    """

    _own_use: OwnUse

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self.pieces: list[Piece] = []
        self._of_groups: list[list[Piece]] = []
        self._names: list[str] = []
        self._unused = Unused()
        self._parts: list[torch.Tensor] = []  # of the bucket, for each piece
        self._is_loaded = False  # the user may load the model later

    @ordinary_tensors()
    def take(
        self,
        parameters: Mapping[str, torch.Tensor],
        replicas: Mapping[str, torch.Tensor],
        layout: Layout,
        rank: int,
        world_size: int,
        own_use: OwnUse,
    ) -> None:
        """Cuts the parameters into the pieces that `rank` owns in the layout.

        replicas: of each parameter, see Piece. own_use: of the optimizer.
        """
        self._own_use = own_use
        self._names = list(parameters)
        own = [segment for segment in layout.segments if segment["owner"] == rank]
        places = [(s["name"], s["tensor_offset"], s["numel"]) for s in own]
        on_host = moved(_part(replicas[name], offset, size) for name, offset, size in places)
        for segment, (name, offset, _), hosted in zip(own, places, on_host, strict=True):
            values = hosted.clone()
            is_elsewhere = replicas[name].device.type != "cpu"
            piece = Piece(
                name,
                offset,
                parameters[name],
                replicas[name],
                nn.Parameter(values),
                segment["bucket_offset"],
                world_size > 1 and keeps_residual(segment["pull_codec"]),
                values.clone() if is_elsewhere else None,
            )
            self.pieces.append(piece)
            if piece.parameter in self.optimizer.state:
                self.state[piece.values] = _first_state(self.optimizer, piece)
        for group in self.optimizer.param_groups:
            members = {id(parameter) for parameter in group["params"]}
            self._of_groups.append([p for p in self.pieces if id(p.parameter) in members])

    @contextlib.contextmanager
    def _in_optimizer(self) -> Iterator[None]:
        """Inside, the optimizer has the pieces and their state."""
        optimizer = self.optimizer
        keys = ("params", "param_names")
        kept = [
            {key: group[key] for key in keys if key in group} for group in optimizer.param_groups
        ]
        theirs, optimizer.state = optimizer.state, self.state
        for group, pieces in zip(optimizer.param_groups, self._of_groups, strict=True):
            names = [f"{piece.name}[{piece.offset}:]" for piece in pieces]
            group |= {"params": [piece.values for piece in pieces]}
            group |= {"param_names": names} if "param_names" in group else {}
        try:
            with self._own_use.of_owner():
                yield
        finally:
            self.state, optimizer.state = optimizer.state, theirs
            for group, entries in zip(optimizer.param_groups, kept, strict=True):
                group |= entries

    def begin(self, values: torch.Tensor, unused: Unused) -> None:
        """Begins a step. values: the bucket on the host. unused: of the parameters, in the order of
        `take`."""
        self._unused = unused
        self._parts = [values[p.start : p.start + p.values.numel()] for p in self.pieces]
        if self._is_loaded:
            self._is_loaded = False
            self._read_replicas(self.pieces)

    def _read_replicas(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.copied is not None:
                piece.copied.copy_(piece.read_replica())

    def _has_gradient(self) -> list[bool]:
        """Whether some rank has a gradient of it, for each piece."""
        unused = {self._names[place] for place in self._unused.everywhere()}
        return [piece.name not in unused for piece in self.pieces]

    @ordinary_tensors()
    def update(self) -> None:
        """Turns the shard's averaged gradients, in the bucket, into the model's changes.

        Changes nothing if an average is not finite: no rank applies such a step.
        """
        if not all(map(all_finite, self._parts)):
            return
        # What the replicas lack, and no residual will send, is in the change: after a checkpoint of
        # other ranks. (Otherwise they lack nothing then.)
        before = [(p.values.detach() if p.is_owed else p.in_replica).clone() for p in self.pieces]
        places = list(zip(self.pieces, self._parts, before, self._has_gradient(), strict=True))
        for piece, part, _, has_gradient in places:
            piece.values.grad = part if has_gradient else None
        with self._in_optimizer():
            self.optimizer.step()
        for piece, part, old, _ in places:
            piece.values.grad = None
            torch.sub(piece.values, old, out=part)
            if not all_finite(part):
                raise FloatingPointError(
                    f"{type(self.optimizer).__name__} made {piece.name} NaN or infinite, from a "
                    "finite gradient"
                )

    @ordinary_tensors()
    def follow(self, is_applied: bool) -> None:
        """After an exchange, before the changes are added to the model: takes over its values where
        no residual keeps the difference. is_applied: whether the changes are added."""
        places = zip(self.pieces, self._parts, self._has_gradient(), strict=True)
        for piece, part, has_gradient in places:
            now = piece.in_replica + part if is_applied else piece.in_replica
            if has_gradient and not piece.is_owed:
                piece.values.copy_(now)
            if piece.copied is not None:
                piece.copied.copy_(now)

    @ordinary_tensors()
    def take_over(self, names: Sequence[str], residuals: Iterable[Residual]) -> None:
        """The user has changed these parameters: their exact values are the model's, and what
        residuals still owe it."""
        edited = [piece for piece in self.pieces if piece.name in names]
        self._read_replicas(edited)
        for piece in edited:
            piece.values.copy_(piece.in_replica)
            for owed in residuals:
                first = owed.offset - piece.offset
                if (owed.kind, owed.name) == ("pull", piece.name) and first >= 0:
                    values = torch.from_numpy(owed.values)
                    piece.values[first : first + values.numel()] += values

    def state_bytes(self) -> int:
        """Bytes of the optimizer's tensors with a value for each element: momentum, moments."""
        tensors = [
            tensor
            for state in self.state.values()
            if isinstance(state, dict)
            for tensor in state.values()
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 0
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def state_dict(self) -> dict[str, Any]:
        """The pieces are in the order of the optimizer's state."""
        for tensor in [tensor for tensor, kept in self.state.items() if not kept]:
            del self.state[tensor]  # looking at what is not there makes an entry
        with self._in_optimizer():
            optimizer = self.optimizer.state_dict()
        return {
            "optimizer": optimizer,
            "pieces": [
                {"name": p.name, "offset": p.offset, "values": p.values.detach().clone()}
                for p in self._in_order()
            ],
        }

    @ordinary_tensors()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what the state has of the pieces here, and of their optimizer states.

        Raises ValueError if it lacks values of a piece.
        """
        saved = state["optimizer"]
        places = [(p["name"], p["offset"], p["values"].numel()) for p in state["pieces"]]
        values = [p["values"] for p in state["pieces"]]
        states = [saved["state"].get(index, {}) for index in range(len(places))]
        loaded: dict[int, dict[str, Any]] = {}
        exact: list[tuple[Piece, torch.Tensor]] = []
        for index, piece in enumerate(self._in_order()):
            parts = _find(places, piece)
            exact.append((piece, torch.cat([values[i][cut] for i, cut in parts])))
            if any(states[i] for i, _ in parts):
                loaded[index] = _join_states(piece, [(states[i], values[i], c) for i, c in parts])
        with self._in_optimizer():
            here = self.optimizer.state_dict()["param_groups"]
            groups = [
                options | {key: ours[key] for key in ("params", "param_names") if key in ours}
                for options, ours in zip(saved["param_groups"], here, strict=True)
            ]
            self.optimizer.load_state_dict({"state": loaded, "param_groups": groups})
        for piece, own in exact:
            piece.values.copy_(own)
        self._is_loaded = True

    def _in_order(self) -> list[Piece]:
        """The order in which the optimizer's state_dict counts the pieces."""
        return [piece for pieces in self._of_groups for piece in pieces]


def join_shards(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The `Shard.state_dict()` of a rank that owns all that these shards own."""
    entries: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    groups = []
    for options in zip(*(shard["optimizer"]["param_groups"] for shard in shards), strict=True):
        members: list[int] = []
        for shard, group in zip(shards, options, strict=True):
            for index in group["params"]:
                if index in shard["optimizer"]["state"]:
                    states[len(entries)] = shard["optimizer"]["state"][index]
                members.append(len(entries))
                entries.append(shard["pieces"][index])
        groups.append({**options[0], "params": members})
    return {"optimizer": {"state": states, "param_groups": groups}, "pieces": entries}


def _find(places: Sequence[tuple[str, int, int]], piece: Piece) -> list[tuple[int, slice]]:
    """Which saved places, and which values of them, together are the piece.

    Raises ValueError if values are missing.
    """
    end = piece.offset + piece.values.numel()
    at, parts = piece.offset, []
    for name, offset, numel, index in sorted((*place, i) for i, place in enumerate(places)):
        if name == piece.name and offset <= at < min(offset + numel, end):
            last = min(offset + numel, end)
            parts.append((index, slice(at - offset, last - offset)))
            at = last
    if at < end:
        raise ValueError(
            f"the state lacks elements {at} to {end - 1} of {piece.name}, which this rank owns: "
            "the parameters were divided among the ranks with other settings"
        )
    return parts


def _join_states(
    piece: Piece, parts: Sequence[tuple[dict[str, Any], torch.Tensor, slice]]
) -> dict[str, Any]:
    """The optimizer's state of a piece that consists of these parts of saved pieces, each given as
    state and values of the saved piece, and the part.

    Raises ValueError if the optimizer keeps something that has no value for each element.
    """
    first, _, _ = parts[0]
    joined = dict(first)
    for key, kept in first.items():
        if not isinstance(kept, torch.Tensor) or kept.dim() == 0:
            continue
        for state, values, _ in parts:
            if state[key].shape != values.shape:
                raise ValueError(
                    f"the optimizer's {key} of {piece.name} is {list(state[key].shape)}, and not "
                    f"one value for each of {values.numel()} elements, so it can't be divided"
                )
        joined[key] = torch.cat([state[key][cut] for state, _, cut in parts])
    return joined
