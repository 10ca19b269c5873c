"""What the user's optimizer and module share with gradwire, looked at again in each step."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwire.torch.optimizer_list import name_of
from gradwire.torch.parameters import NamedTensor, named_parameters
from gradwire.torch.staging.moves import checksums_of
from gradwire.torch.tensor_memory import local_of, mark_of
from gradwire.torch.unshared import UnsharedWatch, claim


class ModuleHook:
    """Calls a method, and does not keep its object alive. A copy of the module (deepcopy, pickle,
    torch.save) has the hook without effect: the object knows the module itself alone."""

    def __init__(self, method: Callable[..., None] | None = None, *arguments: Any) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._arguments = arguments

    def __call__(self, *given: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(*self._arguments, *given)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Removes them and empties the list."""
    while handles:
        handles.pop().remove()


_dead: list[RemovableHandle] = []  # hooks of owners that are gone, whose methods are too


def remove_hooks_of(owner: object, handles: list[RemovableHandle]) -> None:
    """Removes these hooks in the first call of this function after `owner` is gone. Not at once:
    the garbage collector can find it while PyTorch goes through the hooks of the same object, and
    PyTorch raises if one is removed meanwhile."""
    remove_hooks(_dead)
    weakref.finalize(owner, _dead.extend, handles)


class Slots:
    """The parameters and submodules of a model, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (entries, dict(entries))
            for module in hookable_modules(model)
            for entries in (module._parameters, module._modules)
        ]

    def have_changed(self) -> bool:
        """Whether one was put in, taken out, or took the place of another since."""
        return any(
            len(entries) != len(before)
            or any(map(operator.is_not, entries.values(), before.values()))
            for entries, before in self._held
        )

    def replaced(self) -> Iterator[tuple[dict[str, Any], str, object, object]]:
        """What is no longer in its place: the entries of its module, its key, what it was, and what
        is there now."""
        for entries, before in self._held:
            for key, entry in before.items():
                if entry is not None and (found := entries.get(key)) is not entry:
                    yield entries, key, entry, found


class SharedParameters:
    """The parameters that an optimizer steps and a module computes with.

    `check` finds out if the user has given the optimizer others, put others into the module, or
    made them of another shape or dtype: they would be exchanged no longer, or wrongly. And it warns
    of others that are trained beside them.
    """

    def __init__(
        self,
        owner: str,
        named: Sequence[NamedTensor],
        optimizer: Optimizer | None = None,
        model: nn.Module | None = None,
        others: Sequence[NamedTensor] = (),
    ) -> None:
        """owner: the class to name in errors. None: it has no such object. others: parameters of
        the model beside `named`, where `model` is None."""
        self._owner = owner
        self._names = [name for name, _ in named]
        self._tensors = [tensor for _, tensor in named]
        self._optimizer = optimizer
        self._model = model
        self._not_empty = [t for t in self._tensors if t.numel() and not t.is_meta]
        self._kinds = [_kind(tensor) for tensor in self._tensors]
        self._marks: list[tuple[int, int]] = []
        self._before_load: list[int] | None = None  # checksums
        self._may_load = True
        self._slots: Slots | None = None
        self._others = others if model is None else self._others_in(model)
        self._unshared = UnsharedWatch(owner)
        claim(self._tensors, self)
        self._memory: list[int] = []
        if any(local_of(tensor) is not tensor for tensor in self._tensors):
            self.keep_memory()  # FSDP2 moves sharded parameters in and out of the module itself
        elif model is not None:
            self._slots = Slots(model)

    def keep_memory(self) -> None:
        """From now on the tensors must keep their memory, too."""
        self._memory = [local_of(tensor).data_ptr() for tensor in self._tensors]

    def check(self) -> None:
        """Raises RuntimeError naming the parameter, what was done to it, and what to do instead."""
        if self._optimizer is not None:
            now = [p for group in self._optimizer.param_groups for p in group["params"]]
            if len(now) != len(self._tensors) or any(map(operator.is_not, now, self._tensors)):
                self._refuse_groups(self._optimizer, now)
        if self._slots is not None and self._slots.have_changed():
            self._look_through_model(self._slots)
        if [_kind(tensor) for tensor in self._tensors] != self._kinds:
            self._refuse_kinds()
        if not all(local_of(tensor).data_ptr() for tensor in self._not_empty):
            self._refuse_freed()
        for name, tensor, pointer in zip(self._names, self._tensors, self._memory, strict=False):
            if local_of(tensor).data_ptr() != pointer:
                self._refuse(f"{name} was replaced", "load_state_dict(assign=True) or .data = ...")
        self._unshared.look(self._others)

    # Values -------------------------------------------------------------------------------------

    def note_values(self) -> None:
        """The owner has the values that the tensors have now."""
        self._marks = [mark_of(tensor) for tensor in self._tensors]
        self._before_load, self._may_load = None, False

    def allow_load(self) -> None:
        """The owner has values of a saved state. The user loads the model's before or after."""
        self._marks, self._before_load, self._may_load = [], None, True

    def edited(self) -> list[str]:
        """The names of the tensors that may have other values than at the last note_values. (What
        is written through `.data` is not seen.)"""
        places = zip(self._names, self._tensors, self._marks, strict=False)
        return [name for name, tensor, mark in places if mark_of(tensor) != mark]

    def watch_loads(self) -> None:
        """Lets `check_load` find loads. They call a module's own hook alone, so each gets one."""
        if self._model is None:
            return
        hook = ModuleHook(self._note_load)
        modules = hookable_modules(self._model)
        handles = [m.register_load_state_dict_pre_hook(hook) for m in modules]
        remove_hooks_of(self, handles)

    def check_load(self) -> bool:
        """Raises RuntimeError if a load_state_dict of the module has brought other values since the
        last note_values. Returns whether one has brought the same: a model that is loaded to be
        evaluated, and loaded back, is the same."""
        if self._before_load is None:
            return False
        if self._checksums() != self._before_load:
            raise RuntimeError(
                f"the model's values were loaded after {self._owner} was made, which goes on from "
                f"those before. Load them first, or load a state of the {self._owner} with them"
            )
        self.note_values()
        return True

    def _note_load(self, *of_load: object) -> None:
        if self._before_load is None and not self._may_load:
            self._before_load = self._checksums()

    def _checksums(self) -> list[int]:
        return checksums_of([local_of(tensor) for tensor in self._tensors])

    # --------------------------------------------------------------------------------------------

    def _refuse_groups(self, optimizer: Optimizer, now: Sequence[torch.Tensor]) -> None:
        ours, theirs = ({id(t) for t in tensors} for tensors in (self._tensors, now))
        names = {} if self._model is None else {id(t): n for n, t in self._model.named_parameters()}
        kind = name_of(optimizer)
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if id(tensor) not in theirs:
                self._refuse(f"{name} was taken out of the groups of the {kind}", "param_groups")
        for tensor in now:
            if id(tensor) not in ours:
                name = names.get(id(tensor), f"a parameter of shape {list(tensor.shape)}")
                self._refuse(f"{name} was added to the groups of the {kind}", "add_param_group")
        self._refuse(f"the parameters of the {kind} are in another order", "param_groups")

    def _look_through_model(self, before: Slots) -> None:
        """A parameter may have moved to another name, as `parametrize` does."""
        assert self._model is not None
        ours = {id(tensor) for tensor in self._tensors}
        paths = {id(module._parameters): path for path, module in self._model.named_modules()}
        for entries, key, entry, found in before.replaced():
            if id(entry) in ours and isinstance(found, nn.Parameter):
                name = f"{paths.get(id(entries), '')}.{key}".lstrip(".")
                self._refuse(f"{name} was replaced in the module", "load_state_dict(assign=True)")
        here = {id(tensor) for tensor in self._model.parameters()}
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if id(tensor) not in here:
                self._refuse(f"{name} left the module", "putting another layer in its place")
        self._slots = Slots(self._model)
        self._others = self._others_in(self._model)

    def _others_in(self, model: nn.Module) -> list[NamedTensor]:
        ours = {id(tensor) for tensor in self._tensors}
        return [(name, p) for name, p in named_parameters(model) if id(p) not in ours]

    def _refuse_kinds(self) -> None:
        for name, tensor, before in zip(self._names, self._tensors, self._kinds, strict=True):
            if (now := _kind(tensor)) != before:
                was, became = (f"{list(s)} of {d} on {where}" for s, d, where in (before, now))
                self._refuse(f"{name} was {was} and is {became}", "to(...) or .data = ...")

    def _refuse_freed(self) -> None:
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if local_of(tensor).data_ptr() == 0:
                self._refuse(f"the memory of {name} was freed", "untyped_storage().resize_(0)")

    def _refuse(self, what: str, how: str) -> None:
        raise RuntimeError(
            f"{what} after {self._owner} was made, such as by {how}; it exchanges the parameters "
            f"that it was given. Do that first, then make the optimizer and a new {self._owner}"
        )


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def hookable_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Those that TorchScript has not compiled: such a module keeps its layers, and takes no hook of
    a load."""
    return (m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule))
