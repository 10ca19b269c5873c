"""``gradwire codecs``."""

from __future__ import annotations

import numpy as np

import gradwire
from gradwire.cli.output import JsonOption, print_json, print_table, say, significant

_VALUES = 100_000


def codecs(as_json: JsonOption = False) -> None:
    """List the codecs and their parameters.

    A codec is written as its name and, after a colon, parameters: 3lc:s=1.75,coder=zre
    """
    listed = gradwire.codecs()
    if as_json:
        print_json({"codecs": listed})
        return
    normal = np.random.default_rng(0).standard_normal(_VALUES, np.float32)
    print_table(
        ("codec", "bits", "error feedback", "what it does", "source"),
        [
            (
                codec["name"],
                significant(8 * len(gradwire.encode(normal, codec["name"])) / _VALUES),
                "on" if codec["error_feedback"] else "off",
                codec["summary"],
                codec["source"],
            )
            for codec in listed
        ],
        left=(0, 2, 3, 4),
    )
    say(
        f"bits: of a value, measured now: the first frame of {_VALUES:,} normal values, with the "
        "codec's defaults. Gradients take others: `gradwire bench`.\n"
    )
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
        "In trainings auto:bits=1 or auto:error=0.3 stands for codecs that are chosen at run time: "
        "docs/reference/auto.md."
    )
