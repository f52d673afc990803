"""One word a thing, one thing a word; comments are sentences; lines that a screen holds."""

import collections
import re

from structure.rule import Rule, full_name, short

COLUMNS = 128
RULES = [
    Rule("homes", 1, "files that define a type of this name", "one type name, one file: name each after what it is"),
    Rule("fragments", 0, "comments on declarations that begin without a subject", "begin with a sentence that has a verb"),
    Rule("foreign ids", 0, "ids of a document that is not in the repository", "the sentence that the id stands for"),
    Rule("long lines", 0, f"lines over {COLUMNS} columns", "break them"),
]
FRAGMENT = re.compile(r"(?:Of|That|Those|The same|As above|Behind|Beside|Before|From|By)\b")
ID = re.compile(r"(?<![\w.\"`-])[AMST]\d{1,2}(?![\w\"`-])")
# Where words stand in code.
WORDS = {".md": re.compile(r".*"), ".py": re.compile(r"#.*|def test_.*|^\s*\"\"\".*"), ".cpp": re.compile(r"//.*|TEST_CASE.*"),
         ".hpp": re.compile(r"//.*")}
# Models of that name.
NOT_IDS = {"T5"}
TEXTS = [(folder, pattern) for folder in ("lib", "include", "bindings", "test", "bench", "docs", "examples")
         for pattern in ("*.[ch]pp", "*.py", "*.md")]


def look_at_homes(tree, found):
    homes = collections.defaultdict(set)
    for tag in tree.tags:
        if tag["kind"] not in ("class", "struct") or tag["name"].startswith("__anon") or tag["path"].startswith("include/"):
            continue
        if tag["name"] != "Options" or not tag.get("scope"):
            homes[tag["name"]].add(tag["path"])
    for name, paths in homes.items():
        found.add("homes", name, *sorted(paths))


def fragments(path, text):
    before = ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line.startswith("/// ") and not before.startswith("///") and FRAGMENT.match(line[4:]):
            yield f"{path.name}:{number}"
        before = line


def ids(path, text):
    for line in text.splitlines():
        words = WORDS[path.suffix].search(line)
        yield from (found for found in ID.findall(words[0] if words else "") if found not in NOT_IDS)


def look(tree, found):
    look_at_homes(tree, found)
    for path in tree.sources:
        name, text = tree.name(path), tree.text(path)
        found.add("long lines", name, *(str(number) for number, line in enumerate(text.splitlines(), 1) if len(line) > COLUMNS))
        if path.suffix == ".hpp":
            found.add("fragments", tree.name(path.parent), *fragments(path, text))
    for folder, pattern in TEXTS:
        for path in tree.files(folder, pattern):
            found.add("foreign ids", tree.name(path), *ids(path, tree.text(path)))
