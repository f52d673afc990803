"""Fails if something of the repository is not as the rules of this project have it: sizes (tools/structure/sizes.py), owners
of facts (owners.py), words (words.py) and places of files (places.py).

What broke a rule when it came stands in the ratchet file with its count: it may shrink and not grow, and goes from the
file when it fits. Runs with every build.
"""

import argparse
import json
import sys
from pathlib import Path

import ninja_depfile
from structure import owners, places, sizes, words
from structure.rule import CODE, Found, Tree

KINDS = (sizes, owners, words, places)
RULES = {rule.name: rule for kind in KINDS for rule in kind.RULES}


def find_all(tree):
    """What the rules count, and per rule of what there are too many: how many, by whose they are."""
    found = Found()
    for kind in KINDS:
        kind.look(tree, found)
    return found, {name: {subject: count for subject, count in sorted(counts.items()) if count > RULES[name].limit}
                   for name, counts in found.counts.items()}


def compare(found, too_many, ratchet):
    """What has grown or is new; what the ratchet file allows and is no longer needed."""
    worse, better = [], []
    for name, rule in RULES.items():
        now, before = too_many.get(name, {}), ratchet.get(name, {})
        for subject, count in now.items():
            if count > before.get(subject, rule.limit):
                places = ", ".join(found.places[name, subject])
                worse.append(f"{subject} has {count} {rule.what}{places and f' ({places})'}, {before.get(subject, rule.limit)} are "
                             f"allowed: {rule.way_out}")
        better += [f"{subject}: {before[subject]} {rule.what} are allowed, it has {now.get(subject, f'{rule.limit} or less')}"
                   for subject in before if now.get(subject, 0) < before[subject]]
    return worse, better


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the repository")
    parser.add_argument("--ratchet", type=Path, required=True, help="what broke the rules before, as JSON")
    parser.add_argument("--tighten", action="store_true", help="take from the ratchet file what is no longer needed")
    parser.add_argument("--stamp", type=Path, help="a file to write if all is well")
    parser.add_argument("--depfile", help="where to write what was read, for ninja")
    options = parser.parse_args()
    tree = Tree(options.root)
    found, too_many = find_all(tree)
    ratchet = json.loads(options.ratchet.read_text())
    worse, better = compare(found, too_many, ratchet)
    if options.tighten and not worse:
        options.ratchet.write_text(json.dumps({name: rows for name in RULES if (rows := too_many.get(name))}, indent=1) + "\n")
        better = []
    for line in worse:
        print(line, file=sys.stderr)
    for line in better:
        print(f"{line}; run tools/check_structure.py . --ratchet {options.ratchet} --tighten", file=sys.stderr)
    if worse or better:
        return 1
    if options.depfile:
        folders = {path.parent for path in tree.read} | {options.root / folder for folder in CODE}
        ninja_depfile.write(options.stamp, options.depfile, {*tree.read, *folders, options.ratchet})
    if options.stamp:
        options.stamp.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
