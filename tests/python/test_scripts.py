"""The scripts that guard the repository: each must reject the errors that it guards against."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = (ROOT / "pyproject.toml", ROOT / "lab" / "pyproject.toml")
CHECK_INCLUDES = ROOT / "scripts" / "check_includes.py"

CLEAN_TREE = {
    "include/gradwire/status.h": "#pragma once\n#include <cstdint>\n",
    "include/gradwire/codec.h": '#include "gradwire/status.h"\n',
    "src/base/endian.h": '#include "gradwire/status.h"\n',
    "src/stages/kernels.h": '#include "base/endian.h"\n#include <vector>\n',
    "src/stages/simd.cc": '#define HWY_TARGET_INCLUDE "stages/simd.cc"\n#include "hwy/highway.h"\n',
    "src/codecs/codecs.def": "",
    "src/codecs/registry.cc": '#include "codecs/codecs.def"\n#include "stages/kernels.h"\n',
    "src/frame/header.h": '#include "codecs/codecs.def"\n',
    "src/feedback/residual.h": '#include "frame/header.h"\n',
    "src/exchange/sharded.h": '#include "feedback/residual.h"\n',
    "src/capi/handles.h": '#include "exchange/sharded.h"\n',
    "src/engines/loopback/ranks.h": '#include "exchange/sharded.h"\n',
    "python/src/module.cc": '#include "engines/loopback/ranks.h"\n#include <nanobind/nanobind.h>\n',
    "tests/base/endian_test.cc": '#include "base/endian.h"\n#include "tests_data.h"\n',
    "tests/base/tests_data.h": '#include "frame/header.h"\n',
}


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def make_tree(root: Path, changes: dict[str, str]) -> None:
    for name, text in (CLEAN_TREE | changes).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run_check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHECK_INCLUDES), str(root)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_arrows_accept_a_clean_tree(tmp_path: Path) -> None:
    make_tree(tmp_path, {})
    result = run_check(tmp_path)
    assert result.returncode == 0, result.stdout
    assert f"{len(CLEAN_TREE)} files" in result.stdout


def test_arrows_of_this_repository() -> None:
    result = run_check(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "text", "named"),
    [
        ("gradwire.table", "import gradwire_lab.train", "gradwire.table -> gradwire_lab.train"),
        (
            "gradwire_lab.train.bad",
            "from gradwire_lab.plan import predict",
            "gradwire_lab.train.bad -> gradwire_lab.plan.predict",
        ),
        ("gradwire.errors", "import gradwire.torch.hook", "gradwire.errors -> gradwire.torch.hook"),
        (
            "gradwire.torch.network.bad",
            "def f():\n    from gradwire.torch import backend",
            "gradwire.torch.network.bad -> gradwire.torch.backend",
        ),
        (
            "gradwire.torch.resharding.bad",
            "from gradwire.torch import Stats",
            "gradwire.torch.resharding.bad -> gradwire.torch ",
        ),
        ("gradwire.torch.new.bad", "", "new"),
    ],
)
def test_packages_import_one_way(tmp_path: Path, module: str, text: str, named: str) -> None:
    for folder in (ROOT / "python", ROOT / "lab"):
        for package in ("gradwire", "gradwire_lab"):
            for source in (folder / package).rglob("*.py"):
                copy = tmp_path / source.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
    bad = (tmp_path / Path(*module.split("."))).with_suffix(".py")
    bad.parent.mkdir(exist_ok=True)
    (bad.parent / "__init__.py").touch()
    with bad.open("a", encoding="utf-8") as file:
        file.write(f"\n{text}\n")
    # Without the module site, because the installed gradwire would be found before the copy.
    linter = Path(sys.executable).parent / "lint-imports"
    found = subprocess.run(
        [sys.executable, "-S", str(linter), str(ROOT / "pyproject.toml"), "--no-cache"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "COLUMNS": "200"},
        cwd=tmp_path,
    )
    assert found.returncode == 1
    assert named in found.stdout.replace("\n", " \n")


PICKLES = {
    "import pickle\n": 1,
    "from marshal import loads\n": 1,
    "import os\nimport dill as d\n": 2,
    "import torch.distributed as dist\ndist.broadcast_object_list([1])\n": 2,
    "from torch.distributed import gather_object as g\n": 1,
    "torch.load(\n    path\n)\n": 1,
    "torch.load(path, weights_only=False)\n": 1,
    "np.load(path, allow_pickle=True)\n": 1,
}


def check_pickles(root: Path) -> subprocess.CompletedProcess[str]:
    subprocess.run(["git", "init", "-q", root], check=True)
    command = [sys.executable, str(ROOT / "scripts" / "check_pickles.py"), str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("text", "line"), PICKLES.items())
def test_what_unpickles_is_refused(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "one.py").write_text(text)
    (tmp_path / "page.md").write_text(f"A page.\n\n```python\n{text}```\n")
    result = check_pickles(tmp_path)
    assert result.returncode == 1
    places = [line.split(": ")[0] for line in result.stdout.splitlines()]
    assert places == [f"one.py:{line}", f"page.md:{line + 3}"]


def test_what_does_not_unpickle_is_let_through(tmp_path: Path) -> None:
    lines = [
        "import pickle  # pickle: a test of what users do",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "dist.broadcast(tensor)",
    ]
    (tmp_path / "one.py").write_text("\n".join(lines))
    result = check_pickles(tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "text", "line", "reason"),
    [
        # A folder includes a later folder: each neighbouring pair, and one distant pair.
        ("include/gradwire/bad.h", '#include "base/endian.h"\n', 1, "include may not include base"),
        ("src/base/bad.h", '#include "stages/kernels.h"\n', 1, "base may not include stages"),
        ("src/stages/bad.h", '#include "codecs/codecs.def"\n', 1, "stages may not include codecs"),
        ("src/codecs/raw/bad.cc", '#include "frame/header.h"\n', 1, "codecs may not include frame"),
        (
            "src/frame/bad.h",
            '#include "feedback/residual.h"\n',
            1,
            "frame may not include feedback",
        ),
        ("src/feedback/bad.h", '#include "exchange/sharded.h"\n', 1, "feedback may not include ex"),
        ("src/exchange/bad.h", '#include "engines/loopback/ranks.h"\n', 1, "exchange may not incl"),
        ("src/exchange/bad.h", '#include "capi/handles.h"\n', 1, "exchange may not include capi"),
        ("src/base/far.h", '#include "engines/loopback/ranks.h"\n', 1, "base may not include engi"),
        # No layer includes folders outside the layers.
        ("src/engines/bad.cc", '#include "../../tests/base/tests_data.h"\n', 1, "include tests"),
        # Other spellings of the same include.
        ("src/base/angle.h", "#include <stages/kernels.h>\n", 1, "base may not include stages"),
        ("src/base/dots.h", '#include "../stages/kernels.h"\n', 1, "base may not include stages"),
        ("src/base/bare.h", '#include "kernels.h"\n', 1, "base may not include stages"),
        (
            "src/base/space.h",
            '\n\n  #  include\t"stages/kernels.h"\n',
            3,
            "base may not include st",
        ),
        (
            "src/base/after.h",
            '/* a\n*/ #include "stages/kernels.h"\n',
            2,
            "base may not include st",
        ),
        ("src/base/tail.h", '#include "stages/kernels.h"  // why\n', 1, "base may not include sta"),
        ("src/base/splice.h", '\n#inc\\\nlude "stages/kernels.h"\n', 2, "base may not include sta"),
        ("src/base/digits.h", "int n = 1'0;\n#include \"stages/kernels.h\"\n// '\n", 2, "base may"),
        ("src/base/simd.cc", '#define HWY_TARGET_INCLUDE "stages/simd.cc"\n', 1, "base may not in"),
        ("src/base/list.def", '#include "stages/kernels.h"\n', 1, "base may not include stages"),
        # Includes that cannot be followed are errors.
        ("src/base/macro.h", "#include SOME_HEADER\n", 1, "cannot be followed"),
        ("src/misc/new.h", "", 1, "folders of src/ are"),
        ("src/loose.h", "", 1, "folders of src/ are"),
    ],
)
def test_arrows_reject(tmp_path: Path, file: str, text: str, line: int, reason: str) -> None:
    make_tree(tmp_path, {file: text})
    result = run_check(tmp_path)
    assert result.returncode == 1
    assert f"{file}:{line}: " in result.stdout
    assert reason in result.stdout
    assert "1 offending lines" in result.stdout


@pytest.mark.parametrize(
    "text",
    [
        '// #include "stages/kernels.h"\n',
        '/*\n#include "stages/kernels.h"\n*/\n',
        'const char* text = R"(\n#include "stages/kernels.h"\n)";\n',
        '#if __has_include("stages/kernels.h")\n#endif\n',
    ],
)
def test_arrows_pass_over_what_is_no_include(tmp_path: Path, text: str) -> None:
    make_tree(tmp_path, {"src/base/quiet.h": text})
    result = run_check(tmp_path)
    assert result.returncode == 0, result.stdout


def test_arrows_reject_a_circle_of_stages(tmp_path: Path) -> None:
    stages = {
        "src/stages/a/a.h": '#include "stages/b/b.h"\n',
        "src/stages/b/b.h": '#include "stages/c/c.h"\n',
        "src/stages/c/c.h": "",
    }
    make_tree(tmp_path, stages)
    assert run_check(tmp_path).returncode == 0
    make_tree(tmp_path, stages | {"src/stages/c/c.h": '\n#include "stages/a/a.h"\n'})
    result = run_check(tmp_path)
    assert result.returncode == 1
    assert "src/stages/c/c.h:2: " in result.stdout
    assert "3 offending lines" in result.stdout


def test_arrows_of_an_empty_tree_prove_nothing(tmp_path: Path) -> None:
    assert run_check(tmp_path).returncode == 1


def run_bash(script: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_step_that_fails_shows_its_log_and_stops(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "step.log"
    result = run_bash(
        f"source scripts/progress.sh; run_step good '{log}' echo quiet;"
        f"run_step bad '{log}' bash -c 'echo the reason >&2; exit 7'; echo not reached"
    )
    assert result.returncode == 7
    assert "quiet" not in result.stdout
    assert "the reason" in result.stdout
    assert "FAILED bad after" in result.stdout
    assert "not reached" not in result.stdout


def test_test_script_refuses_unknown_stages_and_lists_the_known() -> None:
    listed = run_bash("scripts/test.sh --list").stdout
    assert re.findall(r"^(setup|includes|gcc|asan|lint|cuda|pytest|clang) ", listed, re.M) == [
        *("setup", "includes", "gcc", "lint", "asan", "cuda", "pytest", "clang")
    ]
    result = run_bash("scripts/test.sh includes no-such-stage")
    assert result.returncode == 2
    assert "no-such-stage" in result.stderr
    assert "-->" not in result.stdout, "a stage ran before the arguments were read"


def test_test_script_stops_at_the_first_failure(tmp_path: Path) -> None:
    """In a copy without sources the include check fails: the next stage must not start."""
    (tmp_path / "scripts").mkdir()
    for name in ("test.sh", "progress.sh", "check_includes.py"):
        copy = tmp_path / "scripts" / name
        copy.write_bytes((ROOT / "scripts" / name).read_bytes())
        copy.chmod(0o755)
    result = run_bash("scripts/test.sh includes lint", cwd=tmp_path)
    assert result.returncode == 1
    assert "check_includes: no source files" in result.stdout
    assert re.search(r"^includes +\d+\.\d s +FAILED$", result.stdout, re.M)
    assert not re.search(r"^lint ", result.stdout, re.M)
    assert "FAILED in stage includes" in result.stdout


def test_test_script_says_that_there_is_no_nvcc(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("test.sh", "progress.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cut", "dirname", "env", "mkdir", "sed", "sleep", "tail", "tr", "wc"):
        (tools / name).symlink_to(shutil.which(name) or name)
    script = f"PATH='{tools}' CUDA_HOME='{tmp_path}' scripts/test.sh cuda"
    result = run_bash(script, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert (
        "\n      there is no nvcc here; the codecs on the GPU were not compiled\n" in result.stdout
    )
    assert re.search(r"^cuda +\d+\.\d s +ok$", result.stdout, re.M)


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        ("--arhc 90", 2, "unknown option --arhc"),
        ("--build-only", 1, "--build-only needs --arch"),
        ("--help", 0, ""),
    ],
)
def test_gpu_check_refuses_what_it_cannot_do(arguments: str, status: int, reason: str) -> None:
    result = run_bash(f"scripts/check-gpu.sh {arguments}")
    assert result.returncode == status
    assert reason in result.stderr
    assert (not result.stderr) == (status == 0)


def test_pins_are_exact_and_satisfy_the_package() -> None:
    pins = []
    for file in ("constraints.txt", "constraints-recipes.txt"):
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        pins += [line for line in lines if line and not line.startswith("#")]
    assert pins[0].startswith("torch=="), "torch is installed first"
    versions = {"gradwire": "0.1.0", "gradwire-lab": "0.1.0"}
    for pin in pins:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", pin), pin
        name, _, version = pin.partition("==")
        versions[name.lower().replace("_", "-")] = version
    wanted: list[str] = []
    for pyproject in map(read_toml, PROJECTS):
        wanted += pyproject["build-system"]["requires"] + pyproject["project"]["dependencies"]
        for extra in pyproject["project"]["optional-dependencies"].values():
            wanted += extra
    for text in wanted:
        requirement = Requirement(text)
        assert requirement.specifier.contains(
            versions[requirement.name.lower().replace("_", "-")]
        ), text


def test_the_demo_installs_what_it_imports_and_no_tools() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    demo, _, tools = text.partition("\n# Tools for developers")
    wanted = ["cmake", "ninja"]
    for pyproject in map(read_toml, PROJECTS):
        wanted += pyproject["build-system"]["requires"] + pyproject["project"]["dependencies"]
    wanted += pyproject["project"]["optional-dependencies"]["train"]
    wanted.remove("gradwire==0.1.0")  # the source tree's own
    needed: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        marker = requirement.marker
        name = requirement.name.lower().replace("_", "-")
        if name not in needed and (marker is None or marker.evaluate({"extra": ""})):
            needed.add(name)
            wanted += requires(requirement.name) or []

    def pinned(lines: str) -> set[str]:
        return {name.lower().replace("_", "-") for name in re.findall(r"^([\w-]+)==", lines, re.M)}

    assert pinned(demo) == needed - {"setuptools"}, "setuptools comes with the environment"
    assert {"pytest", "ruff", "mypy"} < pinned(tools)


def test_the_demo_trains_with_valid_options() -> None:
    from gradwire.cli.app import make_command
    from gradwire_lab.train import rivals, settings
    from gradwire_lab.train.config import read_config
    from gradwire_lab.train.options import from_options

    script = (ROOT / "scripts" / "demo.sh").read_text(encoding="utf-8")
    _, _, options = script.partition("exec .venv/bin/gradwire train ")
    words = shlex.split(options.replace("\\\n", "").replace('"$@"', ""))
    given = make_command("train").make_context("train", [*words, "--steps", "400"]).params
    assert given["steps"] == 400, "as the script's head says"
    usual = {name: given[name] for name in settings.options()}
    chosen = from_options(usual | read_config(ROOT / given["config"]))
    assert chosen.codecs[0] == rivals.PLAIN_DDP, "the goal is that of the first codec"
    assert chosen.steps // chosen.eval_every >= 10, "else the time to the goal is not known"
    # The folder that README and the script's head name.
    assert given["plots"] == Path(given["json_path"]).parent == Path("results/demo")


def test_one_version_everywhere() -> None:
    import gradwire

    library, lab = (read_toml(path)["project"] for path in PROJECTS)
    packaged = library["version"]
    assert lab["version"] == packaged
    assert f"gradwire=={packaged}" in lab["dependencies"]
    cmake = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    project = re.search(r"^project\(.*?\bVERSION\s+([0-9.]+)", cmake, re.M | re.S)
    assert project is not None
    assert project.group(1) == packaged
    assert gradwire.__version__ == packaged
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {packaged} " in changelog


def test_fresh_clone_check_reads_the_commands_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("check_fresh.sh", "progress.sh"):
        copy = tmp_path / "scripts" / name
        copy.write_bytes((ROOT / "scripts" / name).read_bytes())
        copy.chmod(0o755)
    (tmp_path / ".gitignore").write_text("/ran\n")
    (tmp_path / "scripts" / "hello.sh").write_text("#!/bin/sh\necho hello from $PWD > ran\n")
    (tmp_path / "scripts" / "hello.sh").chmod(0o755)
    (tmp_path / "scripts" / "fail.sh").write_text("#!/bin/sh\ngrep hello ran\nexit 9\n")
    (tmp_path / "scripts" / "fail.sh").chmod(0o755)
    readme = tmp_path / "README.md"
    readme.write_text(
        "scripts/prose.sh is not a command\n"
        "```sh\ngit clone somewhere\nscripts/hello.sh  # says hello\n```\n"
        "```python\nscripts/python.sh\n```\n"
    )
    commit = "git add -A && git -c user.name=t -c user.email=t@example.org commit -qm message"
    assert run_bash(f"git init -q && {commit}", cwd=tmp_path).returncode == 0

    listed = run_bash("scripts/check_fresh.sh --list", cwd=tmp_path)
    assert listed.stdout == "scripts/hello.sh\n", listed.stderr
    passed = run_bash(f"TMPDIR={tmp_path} scripts/check_fresh.sh", cwd=tmp_path)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert not list(tmp_path.glob("gradwire-fresh-*")), "the clone is removed"
    assert not (tmp_path / "ran").exists(), "it ran in the checkout, not in a clone"

    readme.write_text("```sh\nscripts/hello.sh\nscripts/fail.sh\nscripts/never.sh\n```\n")
    assert run_bash(commit, cwd=tmp_path).returncode == 0
    failed = run_bash(f"TMPDIR={tmp_path} scripts/check_fresh.sh", cwd=tmp_path)
    assert failed.returncode == 1
    assert "hello from" in failed.stdout
    assert "FAILED: scripts/fail.sh" in failed.stdout
    assert "$ scripts/never.sh" not in failed.stdout
