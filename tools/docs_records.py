"""Writes the tables of benchmarks' records into the pages, between lines such as

    <!-- record gloo_step-20261121-081732 | impl: | median_s: s | where ranks=2 -->
    <!-- end -->

with a column for each field, under the heading behind it. Into README.md it writes the table of tools/readme-figures.md, where

    {gloo_step median_s where impl=ddp}

stands for a field of the one such line in the record that a page has a table of. Without arguments it renews README.md and
all pages of docs/; with --check it fails if one would change.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
FIGURES = ROOT / "tools" / "readme-figures.md"
README_MARKED = re.compile(r"^<!-- figures -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\{(\w+) (\w+) where (.*?)\}")
MARKED = re.compile(r"^<!-- record (\S+) \| (.*?) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
NAMES = {"fsdp": "libfsdp", "python": "libfsdp in Python", "fsdp2": "FSDP2", "ddp": "DDP",
         "fsdp_kept": "libfsdp, kept after forward", "python_kept": "libfsdp in Python, kept after forward",
         "fsdp2_kept": "FSDP2, kept after forward",
         "raw_read_cold": "raw read, cold", "load_cold": "load, cold",
         "plain": "the plain model in Python, one rank", "plain_cpp": "the plain model in C++, one rank",
         "dcp": "`torch.distributed.checkpoint`", "foreach_adamw": "AdamW, foreach", "fused_adamw": "AdamW, fused",
         "clip_grad_norm_": "`clip_grad_norm_`", "clip": "`clip_grad_norm_`", "fused": "AdamW, fused",
         "foreach": "AdamW, foreach", "plain_tensors": "plain tensors", "local_shards": "local shards",
         "load_unverified": "load, without checksums",
         "raw_write": "raw write", "raw_read": "raw read", "start_save": "start of a save in the background"}


def pages():
    return sorted((ROOT / "docs").rglob("*.md"))


def shown(value):
    if value is None:
        return ""
    if isinstance(value, int) or isinstance(value, float) and value >= 1000:
        return f"{round(value):,}"
    if isinstance(value, float):
        return f"{value:.2f}"
    return NAMES.get(value, str(value))


def is_one_of(value, values):
    """values: as behind "where": a/b, or * for any."""
    return value is not None if values == "*" else str(value) in values.split("/")


def head_of(record):
    """What a record says of itself."""
    with (RESULTS / f"{record}.jsonl").open() as lines:
        return json.loads(next(lines))


def lines_of(record, where):
    """Its lines that meet all conditions, such as "ranks=2, impl=fsdp/ddp"."""
    wanted = [condition.split("=") for condition in where.split(", ")] if where else []
    _, *lines = map(json.loads, (RESULTS / f"{record}.jsonl").read_text().splitlines())
    return [line for line in lines if all(is_one_of(line.get(field), values) for field, values in wanted)]


def table(name, spec):
    """The lines of a record as a table; of equal ones one."""
    columns, _, where = spec.partition(" | where ")
    fields = [(field.strip(), heading.strip()) for field, _, heading in (each.partition(":") for each in columns.split(" | "))]
    rows = []
    for line in lines_of(name, where):
        cells = [shown(line.get(field)) for field, _ in fields]
        if cells not in rows:
            rows.append(cells)
    return "\n".join([
        f"Command: `{head_of(name)['command'].replace(' --no-build', '').replace(' --save', '')}`; record: `{name}.jsonl`.", "",
        "| " + " | ".join(heading for _, heading in fields) + " |", "|" + "---|" * len(fields),
        *("| " + " | ".join(row) + " |" for row in rows)])


def renewed(text):
    return MARKED.sub(
        lambda found: f"<!-- record {found[1]} | {found[2]} -->\n{table(found[1], found[2])}\n\n<!-- end -->", text)


def shown_records():
    """The records that tables are made of, in the order of the pages."""
    markers = [found for page in pages() for found in MARKED.findall(page.read_text())]
    return list(dict.fromkeys(name for name, _ in markers))


def figure(found):
    """One of README.md's."""
    benchmark, field, where = found.groups()
    names = [name for name in shown_records() if name.startswith(f"{benchmark}-")]
    values = {str(line.get(field)): line.get(field) for name in names for line in lines_of(name, where)}
    if len(values) != 1 or not isinstance(*values.values(), int | float):
        sys.exit(f"{FIGURES.relative_to(ROOT)}: {found[0]} is to be one number; "
                 f"{', '.join(names) or 'no table of a page'} has {', '.join(values) or 'none'}")
    return shown(*values.values())


def renewed_readme(text):
    figures = FIGURE.sub(figure, FIGURES.read_text())
    if "{" in figures:
        sys.exit(f"{FIGURES.relative_to(ROOT)}: expected {{BENCHMARK FIELD where CONDITIONS}}, "
                 f"found {figures[figures.index('{'):][:40]}")
    return README_MARKED.sub(lambda _: f"<!-- figures -->\n{figures}\n<!-- end -->", text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for page in [README, *pages()]:
        text = page.read_text()
        after = (renewed_readme if page == README else renewed)(text)
        if after != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(after)
    if check and stale:
        sys.exit(f"not what the records say: {', '.join(stale)}; run python3 tools/docs_records.py")


if __name__ == "__main__":
    main()
