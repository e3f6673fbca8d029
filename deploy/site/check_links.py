"""Check that the target of every link inside the built site exists: ``python check_links.py build/site``."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["broken"]


class _Page(HTMLParser):
    """The anchors of a page, and the targets of its links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect ``id``, ``href`` and ``src``."""
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def broken(root: Path) -> list[str]:
    """List the links whose targets do not exist, each with its page.

    Parameters
    ----------
    root : Path
        Folder of the built site.

    Returns
    -------
    list of str
    """
    # Not the theme's files, and not Sphinx's pages of sources, whose links back know one public module for each file.
    files = (path for path in sorted(root.rglob("*.html")) if not {"_static", "_modules"} & set(path.parts))
    pages = {path.resolve(): _Page(path) for path in files}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = target in pages or target.is_file()
            if not known or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                found.append(f"{path.relative_to(root.resolve())}: {link}")
    return found


if __name__ == "__main__":
    lost = broken(Path(sys.argv[1]))
    print("\n".join(lost) or "every link leads somewhere")
    sys.exit(bool(lost))
