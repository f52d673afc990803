"""Where files lie, and that documents name what is there."""

import re

from structure.rule import Rule

RULES = [
    Rule("test folders", 0, "tests of files in other layers", "move each to the folder of the layer that it tests"),
    Rule("unlisted tests", 0, "tests that docs/internals/tests.md leaves out", "name it there, or its folder"),
    Rule("dead names", 0, "names of files that are not there", "name what is there"),
]
INDEX = "docs/internals/tests.md"
# What goes through the public interface may stand beside other such tests, whatever implements that.
PUBLIC_TESTS = {"runtime", "trace"}
INCLUDE = re.compile(r'^#include "(\w+)/', re.MULTILINE)
PATHS = ("docs/internals/how-it-works.md", "docs/internals/one-step.md")
PATH = re.compile(r"`((?:lib/)?[a-z_0-9]+/[a-z_0-9/.]*|[a-z_0-9]+\.[ch]pp)`")
STEM = re.compile(r"`([a-z_0-9]+)/?`")
# A row's files: `folder/test_a.cpp`, `test_b.cpp` of the same folder, `folder/`.
LISTED = re.compile(r"`((?:\w+/)*)([\w.*-]*)`")


def look_at_folders(tree, found):
    layers = {path.name for path in (tree.root / "lib").iterdir() if path.is_dir()}
    homes = {}
    for path in tree.files("lib", "*.[ch]pp"):
        homes.setdefault(path.stem, set()).add(path.relative_to(tree.root / "lib").parts[0])
    for path in tree.files("test", "test_*.cpp"):
        folder, tested = path.relative_to(tree.root / "test").parts[0], homes.get(path.stem.removeprefix("test_"), set())
        if not tested or folder in tested or folder not in layers | PUBLIC_TESTS:
            continue
        if folder not in PUBLIC_TESTS or tested & set(INCLUDE.findall(tree.text(path))):
            found.add("test folders", f"test/{folder}", path.name)


def listed(text):
    """Paths below test/ that the index names; folders end in a slash."""
    for line in text.splitlines():
        folder = ""
        for match in LISTED.finditer(line):
            folder = match[1] or folder
            yield folder + match[2]


def look_at_index(tree, found):
    if not (tree.root / INDEX).exists():
        return
    named = set(listed(tree.text(tree.root / INDEX)))
    for path in [*tree.files("test", "test_*.cpp"), *tree.files("test", "test_*.py")]:
        name = str(path.relative_to(tree.root / "test"))
        folders = ["/".join(name.split("/")[:depth]) + "/" for depth in range(1, name.count("/") + 1)]
        if not any(place in named for place in [name, *folders]):
            found.add("unlisted tests", INDEX, name)


def look_at_names(tree, found):
    for page in PATHS:
        path = tree.root / page
        if path.exists():
            for name in PATH.findall(tree.text(path)):
                place = tree.root / "lib" / name.removeprefix("lib/")
                is_there = place.exists() or any(place.parent.glob(f"{place.name}.[ch]pp")) or (tree.root / name).exists()
                found.add("dead names", page, *([] if is_there else [name]))
    for path in tree.files("lib", "README.md"):
        for line in tree.text(path).splitlines():
            # What stands in front of the colon is what the line is about.
            for stem in STEM.findall(line.split(":")[0]) if line.startswith("- ") else ():
                is_there = (path.parent / stem).is_dir() or any(path.parent.glob(f"{stem}.[ch]pp"))
                found.add("dead names", tree.name(path), *([] if is_there else [stem]))


def look(tree, found):
    look_at_folders(tree, found)
    look_at_index(tree, found)
    look_at_names(tree, found)
