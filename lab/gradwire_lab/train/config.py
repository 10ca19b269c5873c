"""Settings from a file: TOML that somebody wrote, or the JSON of an earlier result."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from gradwire_lab.json_fields import parse_object, read_fields
from gradwire_lab.train.settings import Rule, SettingsError, TrainSettings, format_bandwidth

OPTION = "--config"
_LISTS = ("codecs", "exclude", "rules")  # of texts


def read_config(path: Path) -> dict[str, Any]:
    """The settings that a file gives, by the names in TrainSettings, as `from_options` takes them.

    In TOML, `bandwidth` and `rules` are texts as on the command line. A file that ends in .json is
    a result, whose `settings` are taken. Raises SettingsError, which names the file and the
    setting, and OSError.
    """
    try:
        if path.suffix == ".json":
            values = _of_result(parse_object(path.read_bytes()))
        else:
            values = tomllib.loads(path.read_bytes().decode())
        _check(values)
        for name in ("init", "data_dir"):
            if name in values:
                values[name] = Path(values[name])
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError, too
        raise SettingsError(OPTION, f"{path}: {error}") from None
    return values


def _of_result(document: dict[str, Any]) -> dict[str, Any]:
    """The settings of a result as TOML has them, which has no null."""
    if not isinstance(document.get("settings"), dict):
        raise ValueError("no `settings` are there, as in a result of gradwire train --json")
    found = TrainSettings.read(document["settings"])
    written = {name: value for name, value in found.to_json().items() if value is not None}
    bandwidth, rules = format_bandwidth(found.bandwidth), [_written(rule) for rule in found.rules]
    return written | {"bandwidth": bandwidth, "rules": rules}


def _written(rule: Rule) -> str:
    way = "" if rule.direction == "both" else f"@{rule.direction}"
    return f"{rule.pattern}={rule.codec}{way}"


def _check(values: dict[str, Any]) -> None:
    """Raises ValueError for a key that is no setting, and for a value of another type."""
    valid = [field.name for field in fields(TrainSettings)]
    for name in values:
        if name not in valid:
            raise ValueError(f"unknown key '{name}'; valid are {', '.join(valid)}")
    for name in _LISTS:
        value = values.get(name, [])
        if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise ValueError(f"`{name}` must be a list of texts")
    if not isinstance(values.get("bandwidth", ""), str):
        raise ValueError("`bandwidth` must be a text, such as '10mbit' or 'none'")
    own_form = ("bandwidth", "rules")
    read_fields(TrainSettings, {k: v for k, v in values.items() if k not in own_form})
