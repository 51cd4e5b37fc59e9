"""mkdocs hook: the README is the site's first page, and links to files that are no pages are names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[\w-]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=as_page(readme, ROOT)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri == "index.md":
        return markdown
    return as_page(markdown, (ROOT / "docs" / page.file.src_uri).parent)


def as_page(markdown: str, folder: Path) -> str:
    """Links of a file in `folder`, which may lead to any file of the repository, as a page of docs/ can have them."""

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        if "://" in target:
            return found[0]
        path = (folder / target).resolve()
        if not path.exists():
            return found[0]  # mkdocs says that it is broken
        if not path.is_relative_to(ROOT / "docs"):
            return text
        if folder == ROOT:
            return f"{image}[{text}]({path.relative_to(ROOT / 'docs').as_posix()}{anchor or ''})"
        return found[0]

    return _LINK.sub(link, markdown)
