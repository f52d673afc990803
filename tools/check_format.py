"""Fails if C++ lines that have changed since a commit are not as clang-format 14 (Debian 12's) lays them out.

Lines from before that commit stay as they are: to format them all would hide who wrote them. Prints the changes that
`git clang-format COMMIT` would make.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

# Lines have been held to the formatter from here on.
SINCE = "cccd8a3ffb5bf97c6151061ab211e99b4841b5c8"
FOLDERS = ("lib", "include", "bindings", "test", "bench", "examples")


def run(root, *command):
    return subprocess.run(command, cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def has_commit(root, commit):
    return run(root, "git", "cat-file", "-e", f"{commit}^{{commit}}").returncode == 0


def changes(root, since):
    """What the formatter would change, as a diff; empty: nothing. Raises RuntimeError where it cannot say."""
    version = run(root, "clang-format", "--version").stdout
    if not re.search(r"version 14\.", version):
        raise RuntimeError(f"expected clang-format 14, which .clang-format is written for; found: {version.strip()}")
    folders = [folder for folder in FOLDERS if (Path(root) / folder).is_dir()]
    formatted = run(root, "git", "clang-format", "--diff", "--quiet", since, "--", *folders)
    if formatted.returncode != 0 or (formatted.stdout and not formatted.stdout.startswith("diff ")):
        raise RuntimeError(f"git clang-format {since}: {formatted.stdout.strip()}")
    return formatted.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="of the repository")
    parser.add_argument("--since", default=SINCE, help="a commit; default: the one from which on lines are held to it")
    args = parser.parse_args()
    if not has_commit(args.root, args.since):
        sys.exit(f"commit {args.since} is not here: this needs a clone with its history")
    try:
        found = changes(args.root, args.since)
    except (RuntimeError, FileNotFoundError) as error:
        sys.exit(str(error))
    if found:
        sys.exit(f"{found}\nrun git clang-format {args.since}")


if __name__ == "__main__":
    main()
