#!/usr/bin/env python3
"""fsdp-timeline: draws a timeline of some ranks, a picture of a file in the Chrome trace format.

Needs matplotlib alone, and not the package, so that it is installed with the C++ library, too.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

# What the host of a rank did is stacked from the outermost slice to the innermost; its collectives
# run beside it and have lanes of their own.
HOST_ROWS = ["phase", "use", "runtime"]
LABELS = {"phase": "step", "use": "group in use", "runtime": "libfsdp", "collective": "collectives"}


class NoTimeline(Exception):
    """What is wrong with the file, in one line."""


def read_slices(path):
    """By rank and category: (begin, end, name), in microseconds."""
    try:
        events = json.loads(Path(path).read_text())["traceEvents"]
    except OSError as error:
        raise NoTimeline(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise NoTimeline(f"{path} is not a timeline in the Chrome trace format") from error
    slices = defaultdict(lambda: defaultdict(list))
    begun = {}
    for event in events:
        rank, category = event["pid"], event.get("cat")
        if event["ph"] == "X":
            slices[rank][category].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif event["ph"] == "b":
            begun[rank, event["id"]] = event
        elif event["ph"] == "e":
            begin = begun.pop((rank, event["id"]))
            slices[rank][category].append((begin["ts"], event["ts"], begin["name"]))
    if not slices:
        raise NoTimeline(f"{path} has no events; record at least one step")
    return slices


def pick_step(slices, number):
    """The span of the step with this number, from its forward to the end of its backward, on any rank."""
    spans = []
    for categories in slices.values():
        phases = sorted(categories["phase"])
        forwards = [i for i, (_, _, name) in enumerate(phases) if name == "forward"]
        if number >= len(forwards):
            raise NoTimeline(f"the timeline has {len(forwards)} steps, so there is no step {number}")
        first = forwards[number]
        last = forwards[number + 1] if number + 1 < len(forwards) else len(phases)
        inside = [slice_ for slice_ in phases[first:last] if slice_[2] in ("forward", "backward")]
        spans.append((inside[0][0], max(end for _, end, _ in inside)))
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def lanes_of(slices):
    """Slices that overlap get lanes of their own, the first that is free."""
    free = []
    for begin, end, name in sorted(slices):
        lane = next((i for i, until in enumerate(free) if until <= begin), len(free))
        if lane == len(free):
            free.append(end)
        free[lane] = end
        yield lane, begin, end, name


def draw(slices, span, out):
    try:
        import matplotlib
    except ImportError as error:
        raise NoTimeline(f"needs matplotlib; run: {sys.executable} -m pip install matplotlib") from error

    matplotlib.use("svg" if out.endswith(".svg") else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "timeline"  # the same file for the same timeline
    from matplotlib import pyplot

    begin, end = span
    palette = pyplot.get_cmap("tab20")
    colors = {}

    def color_of(category, name):
        key = name.split(" (")[0] if category in ("runtime", "phase") else (category, name.split(" ")[0])
        return colors.setdefault(key, palette(len(colors) % 20))

    rows, bars = [], []
    for rank in sorted(slices):
        for category in [*HOST_ROWS, "collective"]:
            inside = [s for s in slices[rank][category] if s[1] > begin and s[0] < end]
            lane_count = 0
            for lane, *bar in lanes_of(inside):
                lane_count = max(lane_count, lane + 1)
                bars.append((len(rows) + lane, category, *bar))
            for lane in range(max(lane_count, 1)):
                rows.append(f"rank {rank}: {LABELS[category]}" if lane == 0 else "")

    figure, axes = pyplot.subplots(figsize=(12, 0.8 + 0.3 * len(rows)))
    for row, category, start, stop, name in bars:
        start, stop = max(start, begin), min(stop, end)
        axes.barh(row, (stop - start) / 1000, left=(start - begin) / 1000, height=0.8,
                  color=color_of(category, name), edgecolor="white", linewidth=0.3)
        if (stop - start) / (end - begin) > 0.011 * len(name) * 0.6:
            axes.text((start - begin) / 1000, row, " " + name, fontsize=6, va="center", clip_on=True)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, (end - begin) / 1000)
    axes.set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.endswith(".svg") else None, dpi=150)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="fsdp-timeline",
                                     description="Draws a step of a timeline in the Chrome trace format.")
    parser.add_argument("--version", action="version", version="libfsdp @VERSION@")
    parser.add_argument("file", help="as fsdp::Timeline::write, fsdp.timeline or tools/train --timeline FILE wrote it")
    parser.add_argument("--out", help="the picture, .svg, .png or .pdf [FILE with .svg]")
    parser.add_argument("--step", type=int, default=0, help="which of the recorded steps, from 0 [%(default)s]")
    arguments = parser.parse_args(arguments)
    out = arguments.out or str(Path(arguments.file).with_suffix(".svg"))
    try:
        slices = read_slices(arguments.file)
        draw(slices, pick_step(slices, arguments.step), out)
    except NoTimeline as error:
        print(f"fsdp-timeline: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
