"""Fails if a class, a function, a file or a folder is larger than the rules of this project allow, by what ctags finds.

What was larger when a rule came stands in the ratchet file with its size: it may shrink and not grow, and goes from the
file when it fits. Runs with every build.
"""

import argparse
import collections
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ninja_depfile

CODE = ("lib", "include", "bindings/src")
FRIEND = re.compile(r"\s*friend\b")


@dataclass(frozen=True)
class Rule:
    name: str
    limit: int
    what: str  # of which there are too many
    way_out: str


RULES = {rule.name: rule for rule in [
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
]}
# Public classes that only forward to what does the work, and one that has the names of 0.1 beside torch's until the next release.
FACADES = {"FSDPModule", "DeviceMesh"}


def read_tags(root):
    command = ["ctags", "--languages=C++", "--langmap=C++:+.hpp", "--kinds-C++=cmpsf", "--fields=+aSkstZKneT", "--extras=",
               "--output-format=json", "-o", "-", "-R", *CODE]
    done = subprocess.run(command, cwd=root, check=True, text=True, capture_output=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def short(scope):
    return re.sub(r"(fsdp|__anon\w+)::", "", scope)


def is_in_type(tag):
    return tag.get("scopeKind") in ("class", "struct")


def look_at_types(tags, found):
    types = {"::".join(filter(None, (tag.get("scope"), tag["name"]))): tag for tag in tags if tag["kind"] in ("class", "struct")}
    sources = collections.defaultdict(set)
    for tag in tags:
        if not is_in_type(tag):
            continue
        scope, is_class = short(tag["scope"]), types.get(tag["scope"], {}).get("kind") == "class"
        if tag["kind"] == "member" and is_class and "static constexpr" not in tag.get("pattern", ""):
            found["members"][scope] += 1
            if tag.get("access") == "public":
                found["public members"][scope] += 1
            if re.search(r"\bbool\b", tag.get("typeref", "") + tag.get("pattern", "")):
                found["flags"][scope] += 1
        elif tag["kind"] in ("prototype", "function") and is_class and tag["path"].endswith(".hpp"):
            if tag.get("access") == "public" and scope not in FACADES:
                found["public functions"][scope] += 1
        elif tag["kind"] == "function" and tag["path"].endswith(".cpp"):
            if types.get(tag["scope"], {}).get("path", "").endswith(".hpp") and scope not in FACADES:
                sources[scope].add(tag["path"])
    for scope, paths in sources.items():
        found["sources"][scope] = len(paths)


def look_at_functions(tags, found):
    longest = found["function lines"]
    for tag in tags:
        if tag["kind"] == "function":
            subject = f"{tag['path']}: {short('::'.join(filter(None, (tag.get('scope'), tag['name']))))}"
            longest[subject] = max(longest[subject], tag.get("end", tag["line"]) - tag["line"] + 1)


def files(root):
    return sorted(path for folder in CODE for path in (root / folder).rglob("*.[ch]pp"))


def look_at_files(root, found):
    for path in files(root):
        name, lines = str(path.relative_to(root)), path.read_text().splitlines()
        found["header lines" if path.suffix == ".hpp" else "source lines"][name] = len(lines)
        found["friends"][name] = sum(bool(FRIEND.match(line)) for line in lines)
        if not name.startswith("include/"):
            found["files"][str(path.parent.relative_to(root))] += 1


def find_all(root):
    """Per rule, of what there are too many: how many, by whose they are."""
    tags, found = read_tags(root), collections.defaultdict(collections.Counter)
    look_at_types(tags, found)
    look_at_functions(tags, found)
    look_at_files(root, found)
    return {name: {subject: count for subject, count in sorted(counts.items()) if count > RULES[name].limit}
            for name, counts in found.items()}


def compare(found, ratchet):
    """What has grown or is new; what the ratchet file allows and is no longer needed."""
    worse, better = [], []
    for name, rule in RULES.items():
        now, before = found.get(name, {}), ratchet.get(name, {})
        for subject, count in now.items():
            if count > before.get(subject, rule.limit):
                worse.append(f"{subject} has {count} {rule.what}, {before.get(subject, rule.limit)} are allowed: {rule.way_out}")
        better += [f"{subject}: {before[subject]} {rule.what} are allowed, it has {now.get(subject, f'{rule.limit} or less')}"
                   for subject in before if now.get(subject, 0) < before[subject]]
    return worse, better


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the repository")
    parser.add_argument("--ratchet", type=Path, required=True, help="what was larger than allowed, as JSON")
    parser.add_argument("--tighten", action="store_true", help="take from the ratchet file what is no longer needed")
    parser.add_argument("--stamp", type=Path, help="a file to write if all is well")
    parser.add_argument("--depfile", help="where to write what was read, for ninja")
    options = parser.parse_args()
    found = find_all(options.root)
    ratchet = json.loads(options.ratchet.read_text())
    worse, better = compare(found, ratchet)
    if options.tighten and not worse:
        options.ratchet.write_text(json.dumps({name: rows for name in RULES if (rows := found.get(name))}, indent=1) + "\n")
        better = []
    for line in worse:
        print(line, file=sys.stderr)
    for line in better:
        print(f"{line}; run tools/check_structure.py . --ratchet {options.ratchet} --tighten", file=sys.stderr)
    if worse or better:
        return 1
    if options.depfile:
        read = files(options.root)
        folders = {path.parent for path in read} | {options.root / folder for folder in CODE}
        ninja_depfile.write(options.stamp, options.depfile, {*read, *folders, options.ratchet})
    if options.stamp:
        options.stamp.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
