"""The files for package managers agree with what is packaged."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PROJECT["project"]["version"]


def text_of(*parts: str) -> str:
    return PACKAGING.joinpath(*parts).read_text(encoding="utf-8")


def requirements(lines: list[str]) -> set[str]:
    return {line.replace(" ", "") for line in lines}


def test_all_have_the_version_of_the_project() -> None:
    assert text_of("debian", "changelog").startswith(f"gradwire ({VERSION}-")
    assert f'version: "{VERSION}"' in text_of("conda", "recipe.yaml")


def test_debian_names_libraries_by_their_soname() -> None:
    soname = VERSION.rpartition(".")[0]
    control = text_of("debian", "control")
    named = set(re.findall(r"^Package: (lib\S*\d)$", control, re.MULTILINE))
    assert named == {f"libgradwire{soname}", f"libgradwire-mpi{soname}"}


def test_each_debian_package_has_files() -> None:
    packages = set(re.findall(r"^Package: (\S+)$", text_of("debian", "control"), re.MULTILINE))
    assert packages == {path.stem for path in (PACKAGING / "debian").glob("*.install")}


def test_conda_asks_for_what_the_project_asks_for() -> None:
    recipe = text_of("conda", "recipe.yaml").partition("name: gradwire\n    build")[2]
    host, run = (
        requirements(re.findall(r"^        - (.*)$", part, re.MULTILINE))
        for part in re.split(r"^      (?:run|host):\n", recipe, flags=re.MULTILINE)[1:]
    )
    wanted = requirements(PROJECT["project"]["dependencies"])
    assert wanted | {f"python{PROJECT['project']['requires-python']}"} <= run
    assert requirements(PROJECT["build-system"]["requires"]) <= host


def test_the_options_of_cmake_exist() -> None:
    folders = (ROOT, ROOT / "cmake", ROOT / "python")
    known = " ".join(
        path.read_text(encoding="utf-8")
        for folder in folders
        for path in (*folder.glob("*.cmake"), *folder.glob("CMakeLists.txt"))
    )
    for name in ("debian/rules", "conda/recipe.yaml", "spack/packages/gradwire/package.py"):
        given = set(re.findall(r"\bD?(GRADWIRE_[A-Z_]+)", text_of(*name.split("/"))))
        assert given, name
        declared = r"(?:option\(|set\(|find_program\()\s*{}\b"
        missing = [option for option in given if not re.search(declared.format(option), known)]
        assert not missing, name


def test_no_text_sends_readers_to_a_package_index_for_gradwire() -> None:
    """The name is free there: whoever took it would get these installations."""
    folders = ("bench", "docs", "examples", "man", "packaging", "python", "scripts")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = [
        f"{path}: {line}"
        for path in [*texts, *ROOT.glob("*.md")]
        if path.suffix in (".md", ".py", ".sh", ".yaml", ".1", "")
        for line in re.findall(r"pip3? install [^`\n]*", path.read_text(encoding="utf-8"))
    ]
    assert any("'.[train" in line for line in found)
    named = re.compile(r"install.*[ '\"]gradwire\b(?![-/])")  # but no wheel and no folder
    assert [line for line in found if named.search(line.partition(": ")[2])] == []


def test_every_hint_names_an_extra() -> None:
    named = {
        extra
        for path in (ROOT / "python" / "gradwire").rglob("*.py")
        for extra in re.findall(r"""missing\(.*["']([a-z]+)["']\)""", path.read_text("utf-8"))
    }
    assert named == {"torch", "train", "report", "flower", "recipes"}
    assert named <= set(PROJECT["project"]["optional-dependencies"])
