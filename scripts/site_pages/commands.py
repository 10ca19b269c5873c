"""The page of the command line's options, from which the manual pages are made too."""

from __future__ import annotations

import inspect

from gradwire.cli.app import LAB_COMMANDS, LIBRARY_COMMANDS, function_of
from make_man import EXIT_STATUS, CliParameter, read_parameters


def page() -> str:
    """All commands in Markdown."""
    parts = [f"# Options of the commands\n\nExit status. {EXIT_STATUS}\n"]
    return "\n".join([*parts, *map(_section, (*LIBRARY_COMMANDS, *LAB_COMMANDS))])


def _section(name: str) -> str:
    function = function_of(name)
    parameters = list(read_parameters(name, function))
    synopsis = "".join(f" {parameter.value}" for parameter in parameters if not parameter.options)
    rows = "\n".join(_row(parameter) for parameter in parameters)
    described = inspect.getdoc(function) or ""
    return f"""## gradwire {name}

```console
$ gradwire {name} [options]{synopsis}
```

{described}

| option | meaning |
| --- | --- |
{rows}
"""


def _row(parameter: CliParameter) -> str:
    name = f"{', '.join(parameter.options)} {parameter.value}".strip()
    text = parameter.text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
    return f"| `{name}` | {text} |"
