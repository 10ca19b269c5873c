#!/usr/bin/env python3
"""Renders the recipe for conda, as rattler-build does before it builds, for each platform of it.

It needs the package py-rattler-build and no network: compilers and requirements get their names,
but nothing is resolved.

Usage: check_conda.py     exit status 0: the recipe gives its three packages, else an error
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from rattler_build import PlatformConfig, RenderConfig, Stage0Recipe

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "packaging" / "conda" / "recipe.yaml"
PACKAGES = ("libgradwire", "gradwire", "gradwire-lab")
PLATFORMS = ("linux-64", "linux-aarch64")


def render(platform: str) -> list[tuple[str, str]]:
    """Name and version of each package that the recipe gives for ``platform``."""
    config = RenderConfig(PlatformConfig(target_platform=platform))
    variants = Stage0Recipe.from_file(RECIPE).render(render_config=config)
    packages = [variant.recipe.package for variant in variants]
    return [(str(package.name), str(package.version)) for package in packages]


def main() -> int:
    """Prints what differs from the three packages in the project's version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [(name, project["version"]) for name in PACKAGES]
    faults = 0
    for platform in PLATFORMS:
        rendered = render(platform)
        print(f"{platform}: {', '.join('-'.join(package) for package in rendered)}")
        if rendered != wanted:
            print(f"check_conda.py: {RECIPE} should give {wanted}", file=sys.stderr)
            faults += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
