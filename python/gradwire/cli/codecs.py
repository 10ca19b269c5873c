"""``gradwire codecs``."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from typer import Option

import gradwire
from gradwire._core import codec_names
from gradwire.cli.output import JsonOption, print_json, print_table, say, significant

_VALUES = 100_000
_USUAL = (*(known["name"] for known in codec_names()), "bf16", "raw")


def codecs(
    everything: Annotated[
        bool, Option("--all", help="List every codec, with parameters and sources.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the codecs that one needs; with --all every codec and its parameters.

    A codec is written as its name and, after a colon, parameters: 3lc:s=1.00,coder=rice
    """
    listed = gradwire.codecs()
    if as_json:
        print_json({"names": codec_names(), "codecs": listed})
    elif everything:
        _print_all(listed)
    else:
        _print_usual(listed)


def _print_usual(listed: list[dict[str, Any]]) -> None:
    stands_for = {known["name"]: known["codec"] for known in codec_names()}
    summary_of = {entry["name"]: entry["summary"] for entry in (*listed, *codec_names())}
    print_table(
        ("codec", "bits", "stands for", "what it is"),
        [(name, _bits_of(name), stands_for.get(name, ""), summary_of[name]) for name in _USUAL],
        left=(0, 2, 3),
    )
    _say_bits()
    print("`gradwire codecs --all` lists the others, and all parameters.")


def _print_all(listed: list[dict[str, Any]]) -> None:
    print_table(
        ("codec", "bits", "error feedback", "what it does", "source"),
        [
            (
                codec["name"],
                _bits_of(codec["name"]),
                "on" if codec["error_feedback"] else "off",
                codec["summary"],
                codec["source"],
            )
            for codec in listed
        ],
        left=(0, 2, 3, 4),
    )
    _say_bits()
    print_table(
        ("codec", "parameter", "default", "values", "what it sets"),
        [
            (codec["name"], *(parameter[key] for key in ("name", "default", "values", "help")))
            for codec in listed
            for parameter in codec["parameters"]
        ],
        left=range(5),
        keys=2,
    )
    print(
        "In training runs auto:bits=1 or auto:error=0.3 stands for codecs that are chosen at run "
        "time: docs/reference/auto.md."
    )


def _bits_of(codec: str) -> str:
    normal = np.random.default_rng(0).standard_normal(_VALUES, np.float32)
    return significant(8 * len(gradwire.encode(normal, codec)) / _VALUES)


def _say_bits() -> None:
    say(
        f"bits: of a value, measured now: the first frame of {_VALUES:,} normal values, with the "
        "codec's defaults. Gradients take others: `gradwire bench`.\n"
    )
