"""Writes the metadata of gradwire-lab by which the command finds its commands.

Usage: lab_metadata.py PYPROJECT FOLDER
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
name = project["name"].replace("-", "_")
folder = Path(sys.argv[2]) / f"{name}-{project['version']}.dist-info"
folder.mkdir()
head = {
    "Metadata-Version": "2.4",
    "Name": project["name"],
    "Version": project["version"],
    "Summary": project["description"],
    "License-Expression": project["license"],
}
metadata = "".join(f"{key}: {value}\n" for key, value in head.items())
(folder / "METADATA").write_text(metadata, encoding="utf-8")
lines = []
for group, points in project["entry-points"].items():
    lines += [f"[{group}]", *(f"{command} = {target}" for command, target in points.items())]
(folder / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
