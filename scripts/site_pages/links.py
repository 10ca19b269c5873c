"""A folder of pages that mirrors the repository, with links that lead to pages."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

LANGUAGES = {
    **dict.fromkeys((".cc", ".h", ".cu"), "cpp"),
    ".c": "c",
    ".py": "python",
    ".sh": "bash",
    ".txt": "text",
    ".def": "c",
    ".sv": "verilog",
}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_CODE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)


class Mirror:
    """The pages of `root` that were added, in `target`."""

    def __init__(self, root: Path, target: Path) -> None:
        self._root, self._target = root, target
        self._pages: set[Path] = set()
        self.count = 0

    def add_page(self, page: Path) -> None:
        """Copies a page in Markdown, with the pages, pictures and files that it links to."""
        if page in self._pages:
            return
        self._pages.add(page)
        text = page.read_text(encoding="utf-8")
        parts, at = [], 0
        for code in _CODE.finditer(text):  # code has no links
            parts += [self._follow(text[at : code.start()], page), code.group()]
            at = code.end()
        parts.append(self._follow(text[at:], page))
        self.write(str(page.relative_to(self._root)), "".join(parts))

    def write(self, name: str, text: str) -> None:
        """name: the path from the root."""
        path = self._target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.count += 1

    def _follow(self, text: str, page: Path) -> str:
        def replace(link: re.Match[str]) -> str:
            place, hash_, anchor = link.group(2).partition("#")
            if not place or "://" in place:
                return link.group()
            target = (page.parent / place).resolve()
            if not target.is_relative_to(self._root) or not target.exists():
                return link.group()  # mkdocs reports it
            place = place.rstrip("/") + self._show(target)
            return f"{link.group(1)}{place}{hash_}{anchor}{link.group(3)}"

        return _LINK.sub(replace, text)

    def _show(self, target: Path) -> str:
        """Makes the target part of the mirror. Returns what its link needs at its end."""
        if target.suffix == ".md":
            self.add_page(target)
            return ""
        name = target.relative_to(self._root)
        if target.is_dir():
            if not (target / "README.md").exists():
                listed = "\n".join(f"- `{path.name}`" for path in sorted(target.iterdir()))
                self.write(f"{name}/README.md", f"# {name}\n\n{listed}\n")
            return "/README.md"
        if target.suffix in (".png", ".svg"):
            (self._target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, self._target / name)
            return ""
        code = target.read_text(encoding="utf-8")
        language = LANGUAGES.get(target.suffix, "text")
        self.write(f"{name}.md", f"# {name}\n\n````{language}\n{code}````\n")
        return ".md"
