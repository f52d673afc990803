"""What the documentation shows, as it stands there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs"


def blocks(page, language):
    """The code blocks of a page (or of the README), from the left margin."""
    found = []
    for indent, code in re.findall(rf"^( *)```{language}\n(.*?)^\1```$", page.read_text(), re.MULTILINE | re.DOTALL):
        found.append("".join(line.removeprefix(indent) for line in code.splitlines(keepends=True)))
    return found


def python_program():
    (program,) = blocks(PAGES / "start" / "quickstart-python.md", "python")
    return program


def cpp_program():
    (program,) = blocks(PAGES / "start" / "quickstart-cpp.md", "cpp")
    return program


def losses(output):
    """Of each rank, by step, as these programs print them."""
    found = {}
    for rank, loss in re.findall(r"rank (\d+): loss ([\d.]+)", output):
        found.setdefault(int(rank), []).append(float(loss))
    return found
