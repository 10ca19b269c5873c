"""The documents agree with the repository, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


DOCS = ROOT / "docs"
# Results are read by those who look for one; all else is for everybody.
RESULTS = "docs/results/"
MOST_WORDS = 25_000
MOST_WORDS_BEFORE_REFERENCE = 800
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FOR_USERS = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if not _name(page).startswith(RESULTS)),
]
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_pages_for_users_are_short() -> None:
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in FOR_USERS)
    assert words <= MOST_WORDS


@pytest.mark.parametrize(
    "page", [*FOR_USERS[:1], *DOCS.glob("*.md"), *DOCS.glob("guides/*.md")], ids=_name
)
def test_a_guide_is_short_before_its_reference(page: Path) -> None:
    guide, _, _ = page.read_text(encoding="utf-8").partition("\n## Reference\n")
    assert len(guide.split()) <= MOST_WORDS_BEFORE_REFERENCE


def test_the_program_in_c_is_the_example() -> None:
    """ctest compiles and runs the example itself."""
    text = (DOCS / "guides" / "mpi.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```c\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert program == (ROOT / "examples" / "mpi" / "average.c").read_text(encoding="utf-8")


def test_the_recipes_are_parts_of_the_examples() -> None:
    """tests/recipes runs the examples themselves."""
    parts = CODE.findall((DOCS / "reference" / "frameworks.md").read_text(encoding="utf-8"))
    examples = [path.read_text("utf-8") for path in (ROOT / "examples" / "recipes").glob("*.py")]
    assert len(parts) == 9
    assert [part for part in parts if not any(part in example for example in examples)] == []


@pytest.mark.parametrize(
    ("page", "example"),
    [("ddp", "ddp"), ("adam", "adamw"), ("fsdp", "fsdp"), ("far_apart", "diloco")],
)
def test_the_programs_in_pytorch_are_the_examples(page: str, example: str) -> None:
    """tests/torch runs the examples themselves."""
    programs = CODE.findall((DOCS / "guides" / f"{page}.md").read_text(encoding="utf-8"))
    assert (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8") in programs


def test_the_program_of_servers_is_a_part_of_the_example() -> None:
    """tests/torch runs the example itself."""
    program = CODE.findall((DOCS / "reference" / "servers.md").read_text(encoding="utf-8"))[0]
    example = (ROOT / "examples" / "server.py").read_text(encoding="utf-8")
    parts = program.split("        ...\n")
    assert len(parts) == 3
    assert [part for part in parts if part not in example] == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    headings = {
        path: {_anchor(line) for line in path.read_text(encoding="utf-8").splitlines()}
        for path in PAGES
    }
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        assert not anchor or anchor in headings[target], link


def _anchor(line: str) -> str:
    """GitHub's anchor of a heading; "" for other lines."""
    heading = re.match(r"#+ (.*)", line)
    if heading is None:
        return ""
    return re.sub(r"[^\w -]", "", heading.group(1).lower()).replace(" ", "-")


FOLDERS = (
    ".",
    "docs",
    "docs/*",
    "docs/results/*",
    "docs/results/evaluation/*",
    "spec",
    "src/codecs/*",
    "tests/*",
    "fuzz",
    "rtl",
)
EVERY_PAGE = [page for folder in FOLDERS for page in sorted(ROOT.glob(f"{folder}/*.md"))]


@pytest.mark.parametrize("page", EVERY_PAGE, ids=_name)
def test_lines_of_text_are_short(page: Path) -> None:
    """At most 100 characters, except in tables, pictures and code."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    long = [line for line in text.splitlines() if len(line) > 100]
    assert not [line for line in long if not line.startswith(("    ", "|", "  |", "!["))]


def test_exchanges_of_the_pages_are_those_of_the_library() -> None:
    listed = (ROOT / "src" / "exchange" / "exchanges.def").read_text(encoding="utf-8")
    names = re.findall(r"^GW_EXCHANGE\((\w+)\)", listed, re.MULTILINE)
    page = (DOCS / "reference" / "exchanges.md").read_text(encoding="utf-8")
    costs = page.partition("| exchange | bytes a rank sends")[2].partition("\n\n")[0]
    assert set(names) <= set(re.findall(r"^\| (\w+)(?= \||,)", costs, re.MULTILINE))
    chosen = re.findall(r'^\| `GradwireState\(exchange="(\w+)"\)`', page, re.MULTILINE)
    assert ["sharded", *chosen, "server"] == names  # a server is no exchange of equal ranks
