"""What a device does in some steps, from torch.profiler: how long it is idle, and how often and long it copies."""

import json
import re
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
# Copies: the driver's, and the kernels that torch and FSDP2 use for them.
COPIES = re.compile(r"memcpy|copy|CatArray|chunk_cat|split_with_sizes", re.IGNORECASE)


def record(step, steps, device):
    """What the device did from the first to the last kernel of `steps` steps, issued without a wait between them."""
    on_gpu = device.type == "cuda"
    return summary(events_of(step, steps, on_gpu, shown_of(device)), steps)


def shown_of(device):
    """Categories of a trace's events that stand for what the device does."""
    return ON_DEVICE if device.type == "cuda" else {"cpu_op"}


def events_of(step, steps, on_gpu, wanted):
    """The trace's events of such steps, of the categories that are wanted."""
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return events_in(path, wanted)


def events_in(path, wanted):
    events = json.loads(Path(path).read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and event.get("cat") in wanted]


def summary(events, steps):
    if not events:
        raise RuntimeError("the profiler saw no kernels")
    begin = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events)
    gaps = idle_gaps(sorted((event["ts"], event["ts"] + event["dur"]) for event in events))
    times = defaultdict(float)
    for event in events:
        times[event["name"]] += event["dur"]
    counts = Counter(event["name"] for event in events)
    copies = [name for name in counts if COPIES.search(name)]
    return {
        "span_us": round((end - begin) / steps, 1),
        "idle_us": round(sum(gaps) / steps, 1),
        "idle_fraction": round(sum(gaps) / (end - begin), 4),
        "longest_gap_us": round(max(gaps, default=0.0), 1),
        "gaps_over_5_us": round(sum(gap > 5 for gap in gaps) / steps, 1),
        "streams": len({event.get("tid") for event in events}),
        "kernels": round(len(events) / steps, 1),
        "copies": round(sum(counts[name] for name in copies) / steps, 1),
        "copies_us": round(sum(times[name] for name in copies) / steps, 1),
        "nccl_us": round(sum(time for name, time in times.items() if "nccl" in name.lower()) / steps, 1),
        "names": {name[:160]: [round(counts[name] / steps, 2), round(times[name] / steps, 1)] for name in counts},
    }


def idle_gaps(intervals):
    """Between intervals in order of their begins, in which no stream is busy."""
    gaps, busy_until = [], intervals[0][0]
    for begin, end in intervals:
        if begin > busy_until:
            gaps.append(begin - busy_until)
        busy_until = max(busy_until, end)
    return gaps
