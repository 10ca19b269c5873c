#!/usr/bin/env python3
"""Writes the bill of materials of a release, CycloneDX 1.6 in JSON: gradwire, what is compiled into
its wheels (Highway, xxHash, nanobind's headers) and the packages that it needs at run time.
scripts/release.sh checks it against the schema."""

import argparse
import hashlib
import json
import re
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def sha256(path: Path) -> dict[str, str]:
    return {"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}


def compiled_in(nanobind: str) -> list[dict[str, Any]]:
    """Highway, xxHash and nanobind (its version), as components."""
    sources = json.loads((ROOT / "cmake" / "third_party.json").read_text(encoding="utf-8"))
    components: list[dict[str, Any]] = []
    for source in sources.values():
        owner = source["url"].split("/")[3]
        purl = f"pkg:github/{owner.lower()}/{source['name']}@{source['version']}"
        components.append(
            {
                "type": "library",
                "bom-ref": purl,
                "name": source["name"],
                "version": source["version"],
                "licenses": [{"expression": source["license"]}],
                "purl": purl,
                "externalReferences": [
                    {
                        "type": "source-distribution",
                        "url": source["url"],
                        "hashes": [{"alg": "SHA-256", "content": source["sha256"]}],
                    }
                ],
            }
        )
    purl = f"pkg:pypi/nanobind@{nanobind}"
    components.append(
        {
            "type": "library",
            "bom-ref": purl,
            "name": "nanobind",
            "version": nanobind,
            "licenses": [{"expression": "BSD-3-Clause"}],
            "purl": purl,
        }
    )
    return components


def needed(requirements: list[str]) -> list[dict[str, Any]]:
    """The packages that pip installs beside gradwire. Their versions are ranges."""
    components = []
    for requirement in requirements:
        name = re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0]
        purl = f"pkg:pypi/{name}"
        components.append(
            {
                "type": "library",
                "bom-ref": purl,
                "name": name,
                "description": f"needed at run time: {requirement}",
                "scope": "required",
                "purl": purl,
            }
        )
    return components


def make_sbom(files: list[Path], nanobind: str, seconds: int) -> dict[str, Any]:
    """The document for these files of a release, made `seconds` after the epoch."""
    project, lab = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in (".", "lab")
    )
    # The laboratory needs gradwire, the component itself, and packages that gradwire needs too.
    requirements = dict.fromkeys(project["dependencies"] + lab["dependencies"])
    del requirements[f"gradwire=={project['version']}"]
    components = compiled_in(nanobind) + needed(list(requirements))
    purl = f"pkg:pypi/{project['name']}@{project['version']}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "library",
                "bom-ref": purl,
                "name": project["name"],
                "version": project["version"],
                "description": project["description"],
                "licenses": [{"expression": project["license"]}],
                "purl": purl,
                "components": [
                    {
                        "type": "file",
                        "bom-ref": f"file:{file.name}",
                        "name": file.name,
                        "hashes": [sha256(file)],
                    }
                    for file in files
                ],
            },
        },
        "components": components,
        "dependencies": [
            {"ref": purl, "dependsOn": [component["bom-ref"] for component in components]}
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+", help="wheels, sdist, source tarball")
    parser.add_argument("--nanobind", required=True, help="version of nanobind's headers")
    parser.add_argument("--seconds", type=int, required=True, help="time of the release")
    arguments = parser.parse_args()
    text = json.dumps(make_sbom(arguments.files, arguments.nanobind, arguments.seconds), indent=2)
    arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
