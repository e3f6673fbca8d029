"""The code blocks of the pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "deploy" / "site" / "pages").rglob("*.md")])
READMES = sorted(
    path for folder in ("distmm", "kernels", "deploy", "tests") for path in (ROOT / folder).rglob("README.md")
)

# What a block needs that a test machine lacks, in the word after its language; `script`: a program of its own.
MARKS = {"", "script", "install", "gpu", "cluster", "slurm", "kubernetes"}


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language and mark, and its text."""

    place: str
    language: str
    mark: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The simple commands of a shell block, each as its words."""
        found: list[list[str]] = []
        line = ""
        for part in self.text.replace("\\\n", " ").splitlines():
            line += part
            try:
                words = _words(line)
            except ValueError:  # a quotation that goes on
                line += "\n"
                continue
            line = ""
            found.append([])
            for word in words:
                if set(word) <= set(";&|"):
                    found.append([])
                elif word not in ("until", "while", "do", "done", "if", "then", "else", "fi"):
                    found[-1].append(word)
        assert not line, f"{self.place}: a quotation does not end"
        return [command for command in found if command]


def _words(line: str) -> list[str]:
    words = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    words.whitespace_split = True
    return list(words)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[Block]:
    """Blocks of a page in these languages, in order."""
    text = path.read_text()
    found = []
    for match in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        language, mark, body = match[1], match[2].strip(), match[3]
        if language in languages:
            found.append(Block(f"{name_of(path)}:{text.count(chr(10), 0, match.start()) + 1}", language, mark, body))
    return found
