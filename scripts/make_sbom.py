#!/usr/bin/env python3
"""Writes the bill of materials of a release in CycloneDX 1.6 and validates it.

It lists gradwire, what is compiled into its wheels (Highway, xxHash, nanobind's headers) and the
packages that it needs at run time. Needs cyclonedx-python-lib, which scripts/release.sh installs.
"""

import argparse
import hashlib
import json
import sys
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import (
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    XsUri,
)
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def sha256(content: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=content)


def released_file(path: Path) -> Component:
    return Component(
        type=ComponentType.FILE,
        name=path.name,
        bom_ref=f"file:{path.name}",
        hashes=[sha256(hashlib.sha256(path.read_bytes()).hexdigest())],
    )


def library(purl: PackageURL, license_: str | None = None, **further: Any) -> Component:
    """A library of a package index, which its URL identifies."""
    return Component(
        type=ComponentType.LIBRARY,
        name=purl.name,
        version=purl.version,
        purl=purl,
        bom_ref=str(purl),
        licenses=[LicenseExpression(license_)] if license_ else (),
        **further,
    )


def compiled_in(nanobind: str) -> Iterator[Component]:
    """Highway, xxHash and nanobind (its version)."""
    sources = json.loads((ROOT / "cmake" / "third_party.json").read_text(encoding="utf-8"))
    for source in sources.values():
        owner = source["url"].split("/")[3].lower()
        archive = ExternalReference(
            type=ExternalReferenceType.SOURCE_DISTRIBUTION,
            url=XsUri(source["url"]),
            hashes=[sha256(source["sha256"])],
        )
        purl = PackageURL("github", owner, source["name"], source["version"])
        yield library(purl, source["license"], external_references=[archive])
    yield library(PackageURL("pypi", None, "nanobind", nanobind), "BSD-3-Clause")


def needed(requirements: list[str]) -> Iterator[Component]:
    """The packages that pip installs beside gradwire. Their versions are ranges."""
    for requirement in requirements:
        purl = PackageURL("pypi", None, Requirement(requirement).name)
        about = f"needed at run time: {requirement}"
        yield library(purl, description=about, scope=ComponentScope.REQUIRED)


def make_sbom(files: list[Path], nanobind: str, seconds: int) -> str:
    """The document for these files of a release, made `seconds` after the epoch."""
    project, lab = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in (".", "lab")
    )
    # The laboratory also needs gradwire, which is the component itself.
    requirements = dict.fromkeys(project["dependencies"] + lab["dependencies"])
    del requirements[f"gradwire=={project['version']}"]
    purl = PackageURL("pypi", None, project["name"], project["version"])
    released = library(
        purl,
        project["license"],
        description=project["description"],
        components=map(released_file, files),
    )
    components = [*compiled_in(nanobind), *needed(list(requirements))]
    bom = Bom(
        serial_number=uuid5(NAMESPACE_URL, f"{purl} {seconds}"),
        metadata=BomMetaData(component=released, timestamp=datetime.fromtimestamp(seconds, UTC)),
        components=components,
    )
    bom.register_dependency(released, components)
    return JsonV1Dot6(bom).output_as_string(indent=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+", help="wheels, sdist, source tarball")
    parser.add_argument("--nanobind", required=True, help="version of nanobind's headers")
    parser.add_argument("--seconds", type=int, required=True, help="time of the release")
    arguments = parser.parse_args()
    text = make_sbom(arguments.files, arguments.nanobind, arguments.seconds)
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"{arguments.out} does not follow CycloneDX 1.6: {error}")
    arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
