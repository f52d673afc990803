"""How large a class, a function, a file or a folder may be."""

import collections
import re

from structure.rule import Rule, full_name, is_in_type, short

FRIEND = re.compile(r"\s*friend\b")
# Lists of settings and of what is told: each member is one line of a manual.
LISTS = ("Options", "Policy", "Config", "Report", "Api")

RULES = [
    Rule("members", 12, "data members", "part the class by what makes each part change"),
    Rule("public members", 0, "public data members in a class", "make it a struct without functions of its own, or hide them"),
    Rule("public functions", 20, "public functions", "part the class; a facade that only forwards may be excepted in FACADES"),
    Rule("flags", 3, "bool members", "make the states that they stand for an enum with a table of its transitions"),
    Rule("sources", 2, "source files that implement one class", "part the class as its files are parted"),
    Rule("header lines", 200, "lines in a header", "one concept a header"),
    Rule("source lines", 300, "lines in a source file", "one concept a file"),
    Rule("function lines", 40, "lines in a function", "name its steps"),
    Rule("files", 30, "source files in a folder", "sub-folders by concept"),
    Rule("friends", 0, "friends", "a public function, or an inner class"),
]
# Classes that only forward to what does the work, and one that has the names of 0.1 beside torch's until the next release.
FACADES = {"FSDPModule", "DeviceMesh", "ForwardingCommunicator"}


def look_at_types(tree, found):
    types = {full_name(tag): tag for tag in tree.tags if tag["kind"] in ("class", "struct")}
    sources = collections.defaultdict(set)
    for tag in tree.tags:
        if not is_in_type(tag):
            continue
        scope, is_class = short(tag["scope"]), types.get(tag["scope"], {}).get("kind") == "class"
        if tag["kind"] == "member" and "static constexpr" not in tag.get("pattern", ""):
            if is_class or not scope.endswith(LISTS):
                found["members"][scope] += 1
            if is_class and tag.get("access") == "public":
                found["public members"][scope] += 1
            if is_class and re.search(r"\bbool\b", tag.get("typeref", "") + tag.get("pattern", "")):
                found["flags"][scope] += 1
        elif tag["kind"] in ("prototype", "function") and is_class and tag["path"].endswith(".hpp"):
            if tag.get("access") == "public" and scope not in FACADES:
                found["public functions"][scope] += 1
        elif tag["kind"] == "function" and tag["path"].endswith(".cpp"):
            if types.get(tag["scope"], {}).get("path", "").endswith(".hpp") and scope not in FACADES:
                sources[scope].add(tag["path"])
    for scope, paths in sources.items():
        found["sources"][scope] = len(paths)


def look_at_functions(tree, found):
    longest = found["function lines"]
    for tag in tree.tags:
        if tag["kind"] == "function":
            subject = f"{tag['path']}: {short(full_name(tag))}"
            longest[subject] = max(longest[subject], tag.get("end", tag["line"]) - tag["line"] + 1)


def look_at_files(tree, found):
    for path in tree.sources:
        name, lines = tree.name(path), tree.text(path).splitlines()
        found["header lines" if path.suffix == ".hpp" else "source lines"][name] = len(lines)
        found["friends"][name] = sum(bool(FRIEND.match(line)) for line in lines)
        if not name.startswith("include/"):
            found["files"][tree.name(path.parent)] += 1


def look(tree, found):
    look_at_types(tree, found)
    look_at_functions(tree, found)
    look_at_files(tree, found)
