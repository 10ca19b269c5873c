"""The files for package managers agree with what is packaged."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LAB = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PROJECT["project"]["version"]


def text_of(*parts: str) -> str:
    return PACKAGING.joinpath(*parts).read_text(encoding="utf-8")


def requirements(lines: list[str]) -> set[str]:
    given = (line.replace(" ", "").replace("flit_core", "flit-core") for line in lines)
    return {line.replace("${{version}}", VERSION) for line in given}


def test_all_have_the_version_of_the_project() -> None:
    assert text_of("debian", "changelog").startswith(f"gradwire ({VERSION}-")
    assert f'version: "{VERSION}"' in text_of("conda", "recipe.yaml")


def test_both_distributions_have_the_licence() -> None:
    assert (ROOT / "lab" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_both_distributions_have_a_page_for_an_index() -> None:
    assert (ROOT / PROJECT["project"]["readme"]).is_file()
    assert (ROOT / "lab" / LAB["project"]["readme"]).is_file()


def test_debian_names_libraries_by_their_soname() -> None:
    soname = VERSION.rpartition(".")[0]
    control = text_of("debian", "control")
    named = set(re.findall(r"^Package: (lib\S*\d)$", control, re.MULTILINE))
    assert named == {f"libgradwire{soname}", f"libgradwire-mpi{soname}"}


def test_each_debian_package_has_files() -> None:
    packages = set(re.findall(r"^Package: (\S+)$", text_of("debian", "control"), re.MULTILINE))
    assert packages == {path.stem for path in (PACKAGING / "debian").glob("*.install")}


def test_conda_asks_for_what_the_project_asks_for() -> None:
    packages = text_of("conda", "recipe.yaml").split("  - package:\n")[2:]
    for package, project in zip(packages, (PROJECT, LAB), strict=True):
        assert package.startswith(f"      name: {project['project']['name']}\n")
        host, run = (
            requirements(re.findall(r"^        - (.*)$", part, re.MULTILINE))
            for part in re.split(r"^      (?:run|host):\n", package, flags=re.MULTILINE)[1:]
        )
        wanted = requirements(project["project"]["dependencies"])
        assert wanted | {f"python{project['project']['requires-python']}"} <= run
        assert requirements(project["build-system"]["requires"]) <= host


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
    folders = ("bench", "docs", "examples", "lab", "man", "packaging", "python", "scripts")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = [
        f"{path}: {line}"
        for path in [*texts, *ROOT.glob("*.md")]
        if path.suffix in (".md", ".py", ".sh", ".yaml", ".1", "")
        for line in re.findall(r"pip3? install [^`\n]*", path.read_text(encoding="utf-8"))
    ]
    assert any("'./lab[train" in line for line in found)
    named = re.compile(r"install.*[ '\"]gradwire(?:-lab)?\b(?![-/])")  # but no wheel and no folder
    assert [line for line in found if named.search(line.partition(": ")[2])] == []


def test_every_hint_names_an_extra() -> None:
    hint = re.compile(r"""(?:missing|requiring)\(.*"'(\.[^"]*)'"\)""")
    named = {
        place
        for folder in ("python/gradwire", "lab/gradwire_lab")
        for path in (ROOT / folder).rglob("*.py")
        for place in hint.findall(path.read_text("utf-8"))
    }
    ours = {f".[{extra}]" for extra in PROJECT["project"]["optional-dependencies"]}
    of_lab = {f"./lab[{extra}]" for extra in LAB["project"]["optional-dependencies"]}
    assert named == (ours - {".[dev]"}) | of_lab


def test_the_citation_has_the_version_and_the_date_of_the_release() -> None:
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    cited = dict(line.split(": ", 1) for line in lines if re.match(r"[a-z-]+: ", line))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    head = re.search(rf"^## {re.escape(VERSION)} \((.*)\)$", changelog, re.MULTILINE)
    assert head is not None
    released = head.group(1) if re.fullmatch(r"\d{4}-\d\d-\d\d", head.group(1)) else None
    assert cited["version"] == VERSION
    assert cited.get("date-released") == released
    assert cited["license"] == PROJECT["project"]["license"]
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title"} <= cited.keys()
    assert "authors:" in lines


def test_what_the_page_of_versions_names_exists() -> None:
    page = (ROOT / "VERSIONING.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 250
    named = re.findall(r"`((?:include|lab|man|scripts|src|tests)/[^`]*)`", page)
    assert len(named) > 5
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


def steps_of_the_container() -> list[tuple[str, str]]:
    """(instruction, its words) of the Containerfile; continued lines are joined."""
    text = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_container_starts_from_one_version_of_debian() -> None:
    bases = {rest.split()[0] for word, rest in steps_of_the_container() if word == "FROM"}
    assert bases == {"$BASE"}
    (argument,) = (rest for word, rest in steps_of_the_container() if word == "ARG")
    assert re.fullmatch(r"BASE=docker\.io/library/debian:\d+\.\d+-slim", argument)


def test_the_container_copies_what_a_build_reads() -> None:
    copies = [rest.split() for word, rest in steps_of_the_container() if word == "COPY"]
    sources = {path for words in copies if "--from=build" not in words for path in words[:-1]}
    assert [path for path in sources if not (ROOT / path).exists()] == []
    read = {path.strip("/") for path in PROJECT["tool"]["scikit-build"]["sdist"]["include"]}
    assert read - {"third_party"} <= sources


def test_the_container_has_the_torch_of_the_constraints() -> None:
    runs = [rest for word, rest in steps_of_the_container() if word == "RUN"]
    (install,) = (run.split() for run in runs if re.search(r"\btorch\b", run))
    constraints = install[install.index("--constraint") + 1]
    assert re.search(r"^torch==[\d.]+$", (ROOT / constraints).read_text(encoding="utf-8"), re.M)
    assert install[install.index("--extra-index-url") + 1].endswith("/whl/cpu")
    assert [word for word in install if word.startswith("torch")] == ["torch"]


def test_the_container_runs_as_a_user_without_rights() -> None:
    steps = steps_of_the_container()
    after_last_base = steps[max(i for i, (word, _) in enumerate(steps) if word == "FROM") :]
    users = [rest for word, rest in after_last_base if word == "USER"]
    assert users
    assert int(users[-1]) > 0


def test_the_core_includes_headers_that_macos_has() -> None:
    known = {"fnmatch.h", "sys/mman.h", "sys/types.h", "unistd.h", "xmmintrin.h"}
    folders = [ROOT / "include", *(ROOT / "src").iterdir(), ROOT / "python" / "src"]
    paths = [
        path
        for folder in folders
        if folder.name not in ("cuda", "engines")
        for path in folder.rglob("*.[ch]*")
        if "cuda" not in path.name
    ]
    assert len(paths) > 100
    found = {
        name
        for path in paths
        for name in re.findall(r"^#\s*include <([\w/]+\.h)>", path.read_text("utf-8"), re.M)
    }
    of_others = re.compile(r"(?:hwy|nanobind|gradwire)/|(?:xxhash|Python|mpi)\.h")
    of_c = re.compile(r"(?:std\w+|string|math|float|errno|limits)\.h")
    assert {name for name in found if not (of_others.match(name) or of_c.match(name))} <= known
