"""What the pages of the site are made from. `scripts/test.sh site` builds the site itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import check_search
from site_pages import commands, headers
from site_pages.aligned import as_tables
from site_pages.links import Mirror

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_the_navigation_has_every_page_for_users() -> None:
    named = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    places = ("*.md", "*/*.md", "results/evaluation/*.md")
    pages = {str(page.relative_to(ROOT)) for place in places for page in DOCS.glob(place)}
    assert pages <= named
    made = {f"docs/reference/{name}.md" for name in ("c", "c_mpi", "commands", "cpp")}
    assert {name for name in named - made if not (ROOT / name).exists()} == set()


def test_aligned_lists_become_tables() -> None:
    text = "Takes:\n\ncodec      text,\n           such as a|b\nlr, steps  None: found\n\nAfter it."
    table = "| argument | meaning |\n| --- | --- |\n"
    rows = "| `codec` | text, such as a\\|b |\n| `lr, steps` | None: found |\n"
    assert as_tables(text) == f"Takes:\n\n\n{table}{rows}\n\nAfter it.\n"
    example = "Text.\n\n    a  b\n"
    assert as_tables(example).strip() == example.strip()


def test_links_to_files_lead_to_pages_that_show_them(tmp_path: Path) -> None:
    root, pages = tmp_path / "root", tmp_path / "pages"
    (root / "docs").mkdir(parents=True)
    (root / "code").mkdir()
    (root / "code" / "a.py").write_text("print(1)\n")
    page = root / "docs" / "page.md"
    page.write_text("[a](../code/a.py) [b](../code) [c](other.md#x)\n```\n[d](../code/a.py)\n```\n")
    (root / "docs" / "other.md").write_text("[back](page.md)")
    Mirror(root, pages).add_page(page)
    assert (pages / "docs" / "page.md").read_text() == (
        "[a](../code/a.py.md) [b](../code/README.md) [c](other.md#x)\n```\n[d](../code/a.py)\n```\n"
    )
    assert (pages / "docs" / "other.md").read_text() == "[back](page.md)"
    assert "````python\nprint(1)\n````" in (pages / "code" / "a.py.md").read_text()
    assert "- `a.py`" in (pages / "code" / "README.md").read_text()


@pytest.mark.parametrize(
    ("page", "header"), [("c.md", "gradwire.h"), ("c_mpi.md", "gradwire_mpi.h")]
)
def test_the_reference_of_c_has_every_function_under_its_name(page: str, header: str) -> None:
    folder = ROOT / "include" / "gradwire"
    text = headers.pages(folder)[page]
    declared = re.findall(
        r"GW_API [^;]*?\b(gw_\w+)\(", (folder / header).read_text(encoding="utf-8")
    )
    assert len(declared) > 8
    code = "".join(re.findall(r"```c\n(.*?)```", text, re.DOTALL))
    assert [name for name in declared if f"{name}(" not in code] == []
    assert f"### {declared[0]}\n" in text


def test_the_reference_of_cpp_has_comments_and_public_members() -> None:
    text = headers.pages(ROOT / "include" / "gradwire")["cpp.md"]
    assert "## gradwire/exchange.h\n" in text
    assert "### Exchange\n\nA collective algorithm without input or output" in text
    assert "virtual Status receive(" in text
    assert "\n private:" not in text


def test_the_page_of_commands_has_every_option() -> None:
    text = commands.page()
    assert "## `gradwire report`\n" in text
    assert "* `--html PATH`: Write a web page there" in text
    assert "* `-c, --codec <str>`: " in text
    assert "* `FILE <list[Path]>`: " in text


def test_a_query_that_leads_elsewhere_is_told() -> None:
    def section(location: str, title: str, text: str = "") -> dict[str, object]:
        return {"location": location, "title": title, "text": text, "path": ["Tutorials", title]}

    titles = {
        "docs/start/": "Quickstart",
        "docs/reference/checkpoints/": "Checkpoints: save and resume",
    }
    items = [section(location, title, "getting started") for location, title in titles.items()]
    items += [
        section("docs/start/#install", "Install"),
        section("docs/guides/mpi/", "To install in C"),
    ]
    index = {"config": {"separator": r"[\s:]+"}, "items": items}
    lines = list(check_search.check(index))
    assert lines == [
        "'getting started' finds ['docs/reference/checkpoints/', 'docs/start/'] first, "
        "not docs/start/"
    ]
    items.append(section("docs/guides/mpi/#install", "Install", "<p>in <code>C</code></p>"))
    assert "'install' finds ['docs/guides/mpi/', 'docs/start/'] first" in next(
        check_search.check(index)
    )
    assert "'install' finds nothing first" in next(check_search.check(index | {"items": []}))
