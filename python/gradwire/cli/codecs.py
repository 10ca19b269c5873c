"""``gradwire codecs``."""

from __future__ import annotations

import gradwire
from gradwire.cli.output import JsonOption, print_json, print_table


def codecs(as_json: JsonOption = False) -> None:
    """List the codecs and their parameters.

    A codec is written as its name and, after a colon, parameters: 3lc:s=1.75,coder=zre
    """
    listed = gradwire.codecs()
    if as_json:
        print_json({"codecs": listed})
        return
    print_table(
        ("codec", "error feedback", "what it does", "source"),
        [
            (
                codec["name"],
                "on" if codec["error_feedback"] else "off",
                codec["summary"],
                codec["source"],
            )
            for codec in listed
        ],
        left=range(4),
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
        "docs/auto.md."
    )
