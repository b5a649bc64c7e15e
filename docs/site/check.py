"""Checks a built site: every link and picture of every page leads to a file of it, every anchor to an element."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LINKS = {"a": "href", "img": "src", "link": "href", "script": "src", "source": "src"}


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {name for key in ("id", "name") if (name := values.get(key))}
        if link := values.get(_LINKS.get(tag, "")):
            self.links.append(link)


def dead_links(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere; links out of the site are not followed."""
    pages = {file.resolve(): _Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    return [line for file in pages for line in _dead_of(file, pages, site.resolve())]


def _dead_of(file: Path, pages: dict[Path, _Page], site: Path) -> Iterator[str]:
    for link in dict.fromkeys(pages[file].links):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        goal = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        anchor = unquote(parts.fragment)
        if not goal.is_file():
            yield f"{file.relative_to(site)}: {link} leads to no file"
        elif anchor and goal in pages and anchor not in pages[goal].anchors:
            yield f"{file.relative_to(site)}: {link} leads to no element"
