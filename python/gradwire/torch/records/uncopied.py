"""The base of objects that hold connections to other ranks."""

from __future__ import annotations

from typing import NoReturn


class Uncopied:
    """Refuses copy, deepcopy, pickle and torch.save: a copy would lack the connections."""

    def __getstate__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"a {name} can't be copied or pickled, because it holds connections to other ranks: "
            f"save its state_dict() instead, and load that into another {name}"
        )
