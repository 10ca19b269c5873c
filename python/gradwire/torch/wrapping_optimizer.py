"""The base of gradwire's optimizers, which wrap an optimizer of one process."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from gradwire._core import Layout, is_goal, spell_out_codec
from gradwire.errors import RECOMMENDED, sends_coarsely, warn_user
from gradwire.torch.errors import CoarseGradientsWarning
from gradwire.torch.live import LiveScalars
from gradwire.torch.optimizer_list import OptimizerList, Optimizers, name_of, parts_of
from gradwire.torch.parameters import ordinary_tensors
from gradwire.torch.shared_parameters import ModuleHook, remove_hooks, remove_hooks_of

_USE = "_gradwire_use"  # attribute of a wrapped optimizer
_MODES = ("train", "eval")  # methods of schedule-free optimizers
# Optimizers of torch.distributed whose steps send parameters from rank to rank. (By name: their
# modules take long to import.)
_SENDING = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")


def require_optimizer(optimizer: object, others: str) -> None:
    """Raises TypeError for anything else, such as a model, and for an optimizer that exchanges
    already. others: what the other arguments are."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        hint = " (LocalSteps takes several)" if isinstance(optimizer, list | tuple) else ""
        raise TypeError(
            f"the first argument is the optimizer, and {others}; the first is a {name}{hint}"
        )
    if isinstance(optimizer, WrappingOptimizer):
        raise TypeError(f"{name} exchanges already: give the optimizer that it was made with")
    if any(base.__name__ in _SENDING for base in type(optimizer).__mro__):
        raise TypeError(
            f"{name} sends parameters to the other ranks itself, uncompressed, and a rank's own "
            "step would be lost: give an optimizer of one process, such as AdamW. ShardedOptimizer "
            "spreads its state over the ranks, too"
        )
    _require_hooks(optimizer)


def _require_hooks(optimizer: Optimizer) -> None:
    """Raises TypeError for an optimizer that has no place for hooks, as some that wrap another."""
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"{type(optimizer).__name__}.__init__ does not call that of torch.optim.Optimizer, "
            "which makes the place for hooks: call it there, or give the optimizer that is wrapped"
        )


def as_one(optimizer: object, others: str) -> Optimizer:
    """The optimizer, or those in a list as one. Raises TypeError as `require_optimizer`, and
    ValueError for a list of what can't be one."""
    if not isinstance(optimizer, list | tuple):
        require_optimizer(optimizer, others)
        return cast(Optimizer, optimizer)
    if not optimizer:
        raise ValueError("the list of optimizers is empty")
    for part in optimizer:
        require_optimizer(part, others)
    return optimizer[0] if len(optimizer) == 1 else OptimizerList(optimizer)


def refuse_modes(optimizer: Optimizer, owner: str) -> None:
    """Raises ValueError for an optimizer that puts other weights into the model to evaluate it,
    from a state that `owner` does not keep equal on all ranks."""
    for part in parts_of(optimizer):
        if all(hasattr(part, mode) for mode in _MODES):
            raise ValueError(describe_weights(part, owner, "which train() and eval() exchange"))


def describe_weights(optimizer: Optimizer, owner: str, which: str) -> str:
    """The error for weights in the state of an optimizer. which: of them."""
    return (
        f"{name_of(optimizer)} keeps weights in its state ({which}), and {owner} would not "
        "keep those equal on all ranks: take DDP and gradwire_hook, or "
        "ServerOptimizer(pulls='gradients'), where all ranks take the same steps"
    )


def refuse_several_gradients(optimizer: Optimizer, owner: str) -> None:
    """Raises ValueError for LBFGS and sharpness-aware minimization, which compute several gradients
    in a step, for an `owner` that gives them one."""
    is_sam = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")
    if is_sam or isinstance(optimizer, LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} computes several gradients in a step, and {owner} "
            "exchanges one: take LocalSteps, which exchanges what such a step has changed"
        )


class OwnUse:
    """Makes its holder the only one who uses the wrapped optimizer, until `end` or another
    holder: a step that the user takes with it would be exchanged nowhere."""

    def __init__(self, optimizer: Optimizer, owner: str) -> None:
        self._optimizer, self._parts, self._owner = optimizer, parts_of(optimizer), owner
        self._is_own = False
        self._handles: list[RemovableHandle] = []
        remove_hooks_of(self, self._handles)
        for part in self._parts:
            before = vars(part).get(_USE)
            if before is not None and (holder := before()) is not None:
                holder.end()  # of a wrapper that was given up, such as after an error
            setattr(part, _USE, weakref.ref(self))
        self._refuse(
            "register_step_pre_hook",
            "was stepped",
            f"give the {owner} to everything that steps, such as scaler.step, or close() it first",
        )

    def end(self) -> None:
        remove_hooks(self._handles)

    def refuse_saving(self) -> None:
        """From now on the user's state_dict() of the optimizer is an error, too."""
        self._refuse(
            "register_state_dict_pre_hook",
            "was asked for its state",
            f"take the state_dict() of the {self._owner}",
        )

    def refuse_loading(self, instead: str) -> None:
        """From now on the user's load_state_dict() of the optimizer is an error, too."""
        self._refuse("register_load_state_dict_pre_hook", "was given a state", instead)

    def _refuse(self, register: str, what: str, instead: str) -> None:
        for part in self._parts:
            hook = ModuleHook(self._before_use, what, instead)
            self._handles.append(getattr(part, register)(hook))

    def _before_use(self, what: str, instead: str, part: Optimizer, *_: Any) -> None:
        if not self._is_own:
            name = type(part).__name__
            raise RuntimeError(f"{name} {what} itself, but {self._owner} wraps it: {instead}")

    @contextlib.contextmanager
    def of_owner(self) -> Iterator[None]:
        """Inside, every use is the holder's."""
        before, self._is_own = self._is_own, True
        try:
            yield
        finally:
            self._is_own = before

    def step(self, *closure: Callable[[], Any]) -> Any:
        with self.of_owner():
            return self._optimizer.step(*closure)


def note_step(optimizer: Optimizer) -> None:
    """Tells PyTorch that an optimizer has stepped whose steps another one takes: it warns of
    schedulers that come before the first step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def is_of_get_state_dict() -> bool:
    """Whether the caller's method was called by torch.distributed.checkpoint's get_state_dict,
    which also steps an optimizer that has no state yet, with learning rates of 0."""
    frame: FrameType | None = sys._getframe(1)
    name = "gradwire."
    while frame is not None and name.startswith(("gradwire.", "torch.optim.")):
        name, frame = frame.f_globals.get("__name__", ""), frame.f_back
    return name == "torch.distributed.checkpoint.state_dict"


def refuse_get_state_dict(optimizer: WrappingOptimizer) -> None:
    """Raises TypeError where get_state_dict asks for the state."""
    if is_of_get_state_dict():
        name = type(optimizer).__name__
        raise TypeError(
            f"get_state_dict cuts an optimizer's state by parameters, and that of {name} is each "
            "rank's own: take get_model_state_dict, and save PerRank(optimizer) beside the model"
        )


def runs_hooks_of_saving(save: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """For the state_dict() of a WrappingOptimizer: runs what was registered for it, as that of
    PyTorch's optimizers does."""

    @wraps(save)
    def state_dict(self: WrappingOptimizer) -> dict[str, Any]:
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = save(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, state)
            state = state if replaced is None else replaced
        return state

    return state_dict


def runs_hooks_of_loading(load: Callable[[Any, dict[str, Any]], None]) -> Callable[..., None]:
    """The same for load_state_dict()."""

    @wraps(load)
    def load_state_dict(self: WrappingOptimizer, state_dict: dict[str, Any]) -> None:
        state = copy.copy(state_dict)  # which hooks may change; it may be of a wrong type
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state)
            state = state if replaced is None else replaced
        load(self, state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    return load_state_dict


class WrappingOptimizer(LiveScalars, Optimizer):
    """Keeps the interface of `optimizer`, which belongs to it until `close`. Groups and state are
    those of `optimizer`, whatever the user replaces there: a scheduler may be given either."""

    # A rank alone must not leave out a step. So a GradScaler calls `step` even if gradients are not
    # finite; meanwhile this object has attributes `found_inf` and `grad_scale`.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._own_use = OwnUse(optimizer, type(self).__name__)
        self.defaults = optimizer.defaults
        self.__setstate__({})  # makes what Optimizer.__init__ makes, beside groups and state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        return self._optimizer.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self._optimizer.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the ranks have agreed on the parameters."""
        raise RuntimeError(
            f"{type(self).__name__} takes no further parameters: make a new one, of an optimizer "
            "with all of them"
        )

    @contextlib.contextmanager
    def _forgets_scaler(self) -> Iterator[None]:
        """For a step: if it breaks off, a GradScaler leaves its attributes, and would multiply the
        next scale by this one."""
        try:
            yield
        except BaseException:
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)
            raise

    def __getattr__(self, name: str) -> Any:
        if name in _MODES and "_optimizer" in vars(self):
            return getattr(self._optimizer, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @staticmethod
    def _evaluate(closure: Callable[[], Any] | None) -> Any:
        """The closure's loss; None where there is no closure."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


# Entries of a parameter's state that are made of squares or magnitudes: those of Adam, AdamW, NAdam
# and RAdam; Adamax; RMSprop and Adadelta; Adagrad; Adafactor. Optimizers from elsewhere mostly use
# the same names.
_SQUARES = {"exp_avg_sq", "exp_inf", "square_avg", "sum", "row_var", "variance"}


def keeps_squares(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps means of squares. It must have taken a step."""
    states = optimizer.state.values()  # some optimizers have entries of their own beside
    return any(_SQUARES & state.keys() for state in states if isinstance(state, dict))


def usual_push_codec(layout: Layout) -> str:
    """The codec, or the `auto` text, that most values are pushed with; "raw" if there are none."""
    sent: Counter[str] = Counter()
    for segment in layout.segments:
        sent[segment["push_goal"] or segment["push_codec"]] += segment["numel"]
    return max(sent, key=sent.__getitem__, default="raw")


def describe_coarse_gradients(optimizer: str, codec: str, local_steps: bool = True) -> str:
    """What an adaptive optimizer makes of the gradients that a coarse codec sends, and the lines to
    write instead. local_steps: whether LocalSteps can take the place."""
    found = (
        f"{optimizer} learns several times too slowly from gradients compressed with {codec} "
        "(docs/guides/adam.md). "
    )
    if not local_steps:
        return found + "Take codec='int8'"
    instead = codec if is_goal(codec) else RECOMMENDED
    return found + (
        "Write instead: from gradwire.torch import LocalSteps; optimizer = "
        f"LocalSteps({optimizer}(...), model, codec='{instead}'), without DDP and with clip_norm= "
        "in place of clip_grad_norm_. Or take codec='int8'"
    )


class OptimizerWatch:
    """If `codec`, which sends the parameters' gradients, is coarse: waits for the first step of an
    adaptive optimizer on any of the parameters. Of all ranks, rank 0 warns.

    After that step, or when other optimizers have stepped all of the parameters, it only returns.
    """

    # Of all there are. A tuple in the place of another, so that threads can go through either.
    _all: tuple[weakref.ref[OptimizerWatch], ...] | None = None
    _lock = threading.Lock()

    def __init__(
        self, parameters: Iterable[torch.Tensor], codec: str, rank: int, local_steps: bool = True
    ) -> None:
        """local_steps: see describe_coarse_gradients."""
        self.remarks: tuple[str, ...] = ()  # the warning, if there was one
        self._codec, self._rank, self._local_steps = codec, rank, local_steps
        self._watched = {id(parameter) for parameter in parameters}
        if not sends_coarsely(codec):
            return
        with self._lock:
            cls = OptimizerWatch
            if cls._all is None:  # one hook for ever: PyTorch raises if they change under a step
                register_optimizer_step_post_hook(_show_watches)
            cls._all = (*(ref for ref in cls._all or () if ref() is not None), weakref.ref(self))

    def _look_at(self, optimizer: Optimizer) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if self._watched.isdisjoint(stepped):
            return
        if not keeps_squares(optimizer):
            self._watched -= stepped
            return
        self._watched.clear()
        remark = describe_coarse_gradients(type(optimizer).__name__, self._codec, self._local_steps)
        self.remarks = (remark,)
        if self._rank == 0:
            warn_user(remark, CoarseGradientsWarning)


def _show_watches(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for ref in OptimizerWatch._all or ():
        if (watch := ref()) is not None and watch._watched:
            watch._look_at(optimizer)


def is_adaptive(optimizer: Optimizers) -> bool:
    """Whether an optimizer, or one of several, divides by means of squares of gradients; True if
    that is not known, because it can't be copied."""
    return any(map(_is_adaptive, parts_of(optimizer)))


def finer_codec(optimizer: Optimizers | None) -> str:
    """Of gradients, in place of "small", for an optimizer that is adaptive, or may be (None): it
    sends every value in every step. Empty: none."""
    return spell_out_codec("safe") if optimizer is None or is_adaptive(optimizer) else ""


def _is_adaptive(optimizer: Optimizer) -> bool:
    with contextlib.suppress(Exception):  # of any optimizer's own code
        return keeps_squares(step_of_copy(optimizer))
    return True


@ordinary_tensors()
def step_of_copy(optimizer: Optimizer) -> Optimizer:
    """A copy without hooks that has taken a step of zeros, if possible on the device "meta", where
    tensors have no values; some need these. Raises what its step raises."""
    with contextlib.suppress(Exception):
        return _step_of_copy(optimizer, "meta")
    return _step_of_copy(optimizer, "cpu")


def _step_of_copy(optimizer: Optimizer, device: str) -> Optimizer:
    groups = []
    for group in optimizer.param_groups:
        places = [nn.Parameter(torch.zeros_like(p, device=device)) for p in group["params"]]
        for place in places:
            place.grad = torch.zeros_like(place)
        groups.append({**group, "params": places})
    return step_alone(remake(optimizer, groups))


def step_alone(made: Optimizer) -> Optimizer:
    """Steps a copy, of which neither hooks of all optimizers nor PyTorch's generator may know."""
    step = type(made).step
    if hasattr(step, "hooked"):  # PyTorch's, which calls hooks of all optimizers
        step = step.__wrapped__  # type: ignore[attr-defined]
    with torch.random.fork_rng(devices=()):
        step(made)
    return made


_PLAIN = (bool, int, float, str, type(None))  # attributes that no other optimizer can change


def remake(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A new optimizer of its class with these groups of parameters, which have all options. It
    gets copies of the options, and the numbers and texts among the optimizer's other attributes.
    Raises TypeError for one without a place for hooks: a copy that has it would change the class,
    whose steps then look for it."""
    _require_hooks(optimizer)
    made = type(optimizer).__new__(type(optimizer))
    own = [{**copy_options(group), "params": group["params"]} for group in groups]
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    defaults = copy_options(optimizer.defaults)
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
    made.__setstate__(plain | {"defaults": defaults, "state": state, "param_groups": own})
    return made


def copy_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group, without its parameters. What can't be copied is shared."""
    return {name: _copy(value) for name, value in options.items() if name != "params"}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    with contextlib.suppress(Exception):  # of any object's own code
        return copy.deepcopy(value)
    return value
