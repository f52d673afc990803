"""Prints pairs of source files that changed together in most of their commits: what is one thing in two places.

A pair counts when both files changed in at least COMMITS commits and in more than SHARE of the rarer one's. Header and source
of one name are one file here. Commits of many files (renames, formats) say nothing and are left out. Renames are followed.
"""

import argparse
import collections
import itertools
import subprocess
import sys
from pathlib import Path, PurePosixPath

COMMITS = 10
SHARE = 0.6
MANY = 40  # files in one commit
FOLDERS = ("lib", "include", "bindings")
SUFFIXES = (".hpp", ".cpp", ".py")


def changes(root, last):
    """For each of the last commits, newest first: [(status, old path, new path)]."""
    log = subprocess.run(["git", "-C", str(root), "log", f"-{last}", "--no-merges", "-M40", "--name-status", "--format=%x00"],
                         capture_output=True, text=True, check=True).stdout
    for commit in log.split("\0")[1:]:
        rows = [line.split("\t") for line in commit.splitlines() if line]
        yield [(row[0][0], row[1], row[-1]) for row in rows]


def unit_of(path):
    """What a file is a part of: its path without suffix, for sources that are looked at; else None."""
    pure = PurePosixPath(path)
    if pure.suffix not in SUFFIXES or pure.parts[0] not in FOLDERS:
        return None
    return str(pure.with_suffix(""))


def count(commits):
    """(commits by unit, commits by pair of units), under the names that they have now."""
    alone, together = collections.Counter(), collections.Counter()
    names = {}  # older path -> today's
    gone = set()
    for rows in commits:
        touched = set()
        for status, old, new in rows:
            today = names.get(new, new)
            if status == "R":
                names[old] = today
            if status == "D":
                gone.add(old)
            unit = unit_of(today)
            if unit and today not in gone:
                touched.add(unit)
        if len(rows) > MANY:
            continue
        alone.update(touched)
        together.update(itertools.combinations(sorted(touched), 2))
    return alone, together


def find_pairs(alone, together):
    """[(share, commits together, commits of the rarer one, pair)], the closest pair first."""
    found = []
    for pair, both in together.items():
        rarer = min(alone[unit] for unit in pair)
        if rarer >= COMMITS and both > SHARE * rarer and PurePosixPath(pair[0]).name != PurePosixPath(pair[1]).name:
            found.append((both / rarer, both, rarer, pair))
    return sorted(found, reverse=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--commits", type=int, default=300, help="how many of the last commits to look at [%(default)s]")
    arguments = parser.parse_args()
    try:
        alone, together = count(changes(arguments.root, arguments.commits))
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"co_change.py: no history to look at: {getattr(error, 'stderr', None) or error}")
    pairs = [pair for pair in find_pairs(alone, together)
             if all(any((arguments.root / (unit + suffix)).exists() for suffix in SUFFIXES) for unit in pair[3])]
    for _, both, rarer, (first, second) in pairs:
        print(f"{first} and {second} changed together in {both} of {rarer} commits")
    if not pairs:
        print(f"no two files changed together in more than {SHARE:.0%} of {COMMITS} or more commits")


if __name__ == "__main__":
    main()
