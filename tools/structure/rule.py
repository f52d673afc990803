"""What a rule of structure is, and what the rules read."""

import collections
import json
import re
import subprocess
from dataclasses import dataclass
from functools import cached_property

CODE = ("lib", "include", "bindings/src")


@dataclass(frozen=True)
class Rule:
    name: str
    limit: int
    what: str  # of which there are too many
    way_out: str


class Found:
    """How much of what a rule counts each subject has, and where, as far as the rule says it."""

    def __init__(self):
        self.counts = collections.defaultdict(collections.Counter)
        self.places = collections.defaultdict(list)

    def add(self, rule, subject, *places):
        self.counts[rule][subject] += len(places)
        self.places[rule, subject] += places

    def __getitem__(self, rule):
        return self.counts[rule]


class Tree:
    """A checkout, read once."""

    def __init__(self, root):
        self.root = root
        self.read = set()
        self._texts = {}

    @cached_property
    def tags(self):
        command = ["ctags", "--languages=C++", "--langmap=C++:+.hpp", "--kinds-C++=cmpsfge", "--fields=+aSkstZKneT",
                   "--fields-C++=+{properties}", "--extras=", "--output-format=json", "-o", "-", "-R", *CODE]
        done = subprocess.run(command, cwd=self.root, check=True, text=True, capture_output=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def files(self, folder, pattern):
        return sorted(path for path in (self.root / folder).rglob(pattern) if "__pycache__" not in path.parts)

    @cached_property
    def sources(self):
        return [path for folder in CODE for path in self.files(folder, "*.[ch]pp")]

    def name(self, path):
        return str(path.relative_to(self.root))

    def text(self, path):
        self.read.add(path)
        if path not in self._texts:
            self._texts[path] = path.read_text()
        return self._texts[path]


def short(scope):
    return re.sub(r"(fsdp|__anon\w+)::", "", scope)


def full_name(tag):
    return "::".join(filter(None, (tag.get("scope"), tag["name"])))


def is_in_type(tag):
    return tag.get("scopeKind") in ("class", "struct")
