"""What the README shows, as it stands there."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def python_program():
    """The whole program of the section about Python."""
    section = README.read_text().split("\n## In Python\n")[1].split("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return program


def losses(output):
    """Of each rank, by step, as that program prints them."""
    found = {0: [], 1: []}
    for rank, loss in re.findall(r"rank (\d): loss ([\d.]+)", output):
        found[int(rank)].append(float(loss))
    return found
