"""JSON as RFC 8259 defines it, for the headers of files that come from anywhere.

Python's parser also takes NaN and keys that occur twice, and refuses integers of many digits.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

_MOST_DIGITS = 19
_LARGE = 10**_MOST_DIGITS
# A parsed header takes up to 26 times its bytes. Headers of files with 30,000 tensors are smaller,
# and those of larger files a small part of them.
HEADER_BYTES = 2**22
_BYTES_PER_HEADER_BYTE = 16


def most_header_bytes(file_bytes: int, least: int = HEADER_BYTES) -> int:
    """The longest header that is parsed, in a file of this size: so memory is a small multiple of
    the file's size. least: that of any file."""
    return least + file_bytes // _BYTES_PER_HEADER_BYTE


def parse_json(text: bytes, nesting: int) -> Any:
    """The value that `text` holds in UTF-8. nesting: arrays and objects in one another, at most.

    An integer of more than 19 digits is given as 10^19 with its sign: no header needs more, and
    int() takes the square of the length. Raises ValueError.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=unique_pairs,
            parse_int=_integer,
            parse_constant=refuse_constant,
        )
    except RecursionError:
        raise ValueError("arrays or objects stand too deep in one another") from None
    if not _fits(value, nesting):
        raise ValueError(f"arrays or objects stand more than {nesting} deep in one another")
    return value


def _fits(value: Any, nesting: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    members = value.values() if isinstance(value, dict) else value
    return nesting > 0 and all(_fits(one, nesting - 1) for one in members)


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object_pairs_hook. Raises ValueError."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key occurs twice in an object")
    return mapping


def _integer(digits: str) -> int:
    if len(digits) <= _MOST_DIGITS:
        return int(digits)
    return -_LARGE if digits.startswith("-") else _LARGE


def refuse_constant(constant: str) -> NoReturn:
    """A parse_constant. Raises ValueError."""
    raise ValueError(f"{constant} is no JSON")
