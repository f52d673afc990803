"""Runs the benchmarks of the documentation's tables again, and says which records are older than what they measure."""

import argparse
import datetime
import shlex
import subprocess
import sys
import time
from pathlib import Path

import docs_records

ROOT = Path(__file__).resolve().parents[1]
# What every benchmark measures, beside its own files.
MEASURED = ["lib", "include", "bindings"]


def last_change(benchmark):
    """(when, the commit) of what the benchmark measures and of its own files."""
    own = [str(path.relative_to(ROOT)) for path in (ROOT / "bench").rglob(f"*{benchmark}.*")
           if docs_records.RESULTS not in path.parents]
    line = subprocess.run(["git", "-C", ROOT, "log", "-1", "--format=%cI %h", "--", *MEASURED, *own], check=True, text=True,
                          stdout=subprocess.PIPE).stdout
    when, commit = line.split()
    return datetime.datetime.fromisoformat(when), commit


def list_stale(records):
    stale = []
    for record in records:
        head = docs_records.head_of(record)
        changed, commit = last_change(head["benchmark"])
        if datetime.datetime.fromisoformat(head["date"]) < changed:
            stale.append(record)
            print(f"{record}: {head['benchmark']} or what it measures has changed since, last in {commit} of {changed:%F}")
    return stale


def measure(record):
    """Runs a record's command again; the name of the new one."""
    words = shlex.split(docs_records.head_of(record)["command"])[1:]
    command = [word for word in words if word != "--no-build"]
    before = set(docs_records.RESULTS.glob("*.jsonl"))
    print(f"=== {shlex.join(command)}", flush=True)
    begin = time.monotonic()
    ended = subprocess.run([sys.executable, ROOT / "bench" / "run.py", *command])
    if ended.returncode != 0:
        sys.exit(f"tools/figures: {shlex.join(command)} ended with exit code {ended.returncode}; its table stays as it was")
    print(f"=== {time.monotonic() - begin:.0f} s for {command[0]}", flush=True)
    (made,) = set(docs_records.RESULTS.glob("*.jsonl")) - before
    return made.stem


def show(old, new):
    """Takes a new record in the place of an old one, which goes."""
    for page in docs_records.pages():
        text = page.read_text()
        if old in text:
            page.write_text(docs_records.renewed(text.replace(old, new)))
    docs_records.README.write_text(docs_records.renewed_readme(docs_records.README.read_text()))
    (docs_records.RESULTS / f"{old}.jsonl").unlink()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--stale", action="store_true")
    options = parser.parse_args()
    records = docs_records.shown_records()
    benchmarks = {docs_records.head_of(record)["benchmark"] for record in records}
    unknown = set(options.names) - benchmarks
    if unknown:
        sys.exit(f"tools/figures: no table is of {', '.join(sorted(unknown))}; there are {', '.join(sorted(benchmarks))}")
    chosen = [record for record in records if not options.names or docs_records.head_of(record)["benchmark"] in options.names]
    if options.stale:
        sys.exit(1 if list_stale(chosen) else 0)
    for record in chosen:
        show(record, measure(record))
    print("Sentences beside tables have figures, too: read README.md, docs/internals/benchmarks.md and overlap.md")


if __name__ == "__main__":
    main()
