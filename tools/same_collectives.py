"""Compares what two builds communicated: records that the tests made with FSDP_TEST_RECORD=FILE.

Prints each test, call and rank that differs, and fails if one does. Lines in which two records of one build differ hang on
time: give that build's other record with --again, and they are left out.
"""

import argparse
import collections
import re
import sys
from pathlib import Path

# test, call and rank: number of collectives, hash, hash without names of groups and parameters.
LINE = re.compile(r"(?P<call>.* #\d+ rank \d+): (?P<count>\d+) (?P<hash>[0-9a-f]{16}) (?P<bare>[0-9a-f]{16})")


def read(path, without_subject):
    """For each call and rank: its lines, since programs of several tests write one file."""
    lines = collections.defaultdict(list)
    for number, text in enumerate(Path(path).read_text().splitlines(), 1):
        match = LINE.fullmatch(text)
        if match is None:
            raise SystemExit(f"{path}:{number}: expected 'TEST #CALL rank RANK: COUNT HASH HASH', found '{text}'")
        lines[match["call"]].append((match["count"], match["bare" if without_subject else "hash"]))
    return {call: sorted(found) for call, found in lines.items()}


def differences(before, after, again):
    """One line for each call that differs or that only one of the two has."""
    steady = {call for call in before if again is None or again.get(call) == before[call]}
    for call in sorted(steady | (after.keys() - before.keys())):
        if call not in after or call not in before:
            yield f"{call}: only {'before' if call in before else 'after'}"
        elif before[call] != after[call]:
            counts = [" and ".join(count for count, _ in lines[call]) for lines in (before, after)]
            yield f"{call}: {counts[0]} collectives before, {counts[1]} after"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="the record of the build before the change")
    parser.add_argument("after", help="that of the build with it")
    parser.add_argument("--again", help="another record of the build before")
    parser.add_argument("--without-subject", action="store_true", help="names of groups and parameters may differ")
    args = parser.parse_args()
    before, after = (read(path, args.without_subject) for path in (args.before, args.after))
    again = read(args.again, args.without_subject) if args.again else None
    found = list(differences(before, after, again))
    print("\n".join(found + [f"{len(before)} calls before, {len(after)} after, {len(found)} differ"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
