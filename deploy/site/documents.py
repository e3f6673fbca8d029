"""The files elsewhere in the repository that are pages of the site, and the names of these pages.

A README is the page of its folder, so its text exists once. Links between files work in the repository and on the site,
since each page keeps its own path as the place from which its links start.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.project import Project

PAGES = "deploy/site/pages/"
FRONT = Path(__file__).with_name("front.md")

# Files whose pages are not named after their folders.
NAMED = {
    "README.md": "index",
    "CHANGELOG.md": "development/changelog",
    "CONTRIBUTING.md": "development/contributing",
    "tests/README.md": "development/tests",
    "tests/bench/README.md": "development/measurements",
    "deploy/site/README.md": "development/site",
    "deploy/SECURITY.md": "reference/security",
    ".github/SECURITY.md": "reference/reporting",
    "deploy/monitoring/README.md": "reference/metrics",
}
PATTERNS = (
    f"{PAGES}**/*.md",
    f"{PAGES}reference/functions/*.rst",
    "distmm/**/README.md",
    "kernels/**/README.md",
    "deploy/**/README.md",
)
NOTEBOOKS = "distmm/examples/*.ipynb"


def page_of(path: str) -> str:
    """Return the name of the page of a file.

    >>> [page_of(x) for x in ("deploy/site/pages/start/laptop.md", "kernels/README.md", "CHANGELOG.md")]
    ['start/laptop', 'kernels/index', 'development/changelog']
    """
    if path in NAMED:
        return NAMED[path]
    name = path.removeprefix(PAGES).rpartition(".")[0]
    if path.endswith(".ipynb"):
        return f"examples/{Path(name).name}"
    return f"{name.removesuffix('README')}index" if name.endswith("/README") else name


class Documents(Project):
    """The files above, under the names above; Sphinx's own names are paths without their endings."""

    def discover(self, exclude_paths: Any = (), include_paths: Any = ()) -> set[str]:
        """Find the files."""
        found = {path for pattern in (*PATTERNS, NOTEBOOKS) for path in Path(self.srcdir).glob(pattern)}
        found |= {Path(self.srcdir, name) for name in NAMED}
        self._docname_to_path = {page_of(str(path)): path for path in sorted(x.relative_to(self.srcdir) for x in found)}
        self._path_to_docname = {path: name for name, path in self._docname_to_path.items()}
        self.docnames.clear()
        self.docnames.update(self._docname_to_path)
        return self.docnames

    def path2doc(self, filename: str | os.PathLike[str]) -> str | None:
        """Return the page of a file. For a file without a page return None: links to it become downloads."""
        path = Path(os.path.relpath(Path(self.srcdir, filename), self.srcdir))
        return self._path_to_docname.get(path)


def _front(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the site's cards below the picture of README.md, in place of its links to the documentation."""
    if page == "index":
        before, rest = source[0].split("## Documentation\n")
        picture, text = re.split(r"(?<=\.svg\)\n)", before)
        source[0] = picture + "\n" + FRONT.read_text() + text + rest[rest.index("## Cite") :]


def _install(app: Sphinx) -> None:
    app.project = app.env.project = Documents(app.srcdir, app.config.source_suffix)


def setup(app: Sphinx) -> dict[str, Any]:
    """Extend Sphinx."""
    app.connect("builder-inited", _install)
    app.connect("source-read", _front)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
