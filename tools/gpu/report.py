"""The report, Markdown, from what the parts have written down."""

import claims
import more
import plan
from parts import BAD
from record import ENDED

STAGES = (*plan.NAMES, more.STAGE)


def machine_line(facts):
    gpu = f"{facts['gpus']} x {facts['gpu']} of {facts['memory_gib']:g} GiB" if facts["gpu"] else "no GPU"
    driver = f"driver {facts['driver']}" if facts["driver"] else "no driver"
    toolkit = f"CUDA toolkit {facts['toolkit']}" if facts["toolkit"] else "no CUDA toolkit"
    return (f"{gpu}, {driver}, {toolkit}, torch {facts['torch'] or '(none)'}, NCCL {facts['nccl'] or '(none)'}, "
            f"Python {facts['python']}, {facts['cores']} cores")


def text(record):
    lines = record.lines()
    heads = [line for line in lines if line["stage"] == "machine"]
    head = heads[-1] if heads else None
    written = ["# tools/gpu_check" + (f", {head['date']}" if head else "")]
    if head:
        written += ["", f"On {head['device']}: {machine_line(head)}."]
        written += [f"\nNote: {note}." for note in head["notes"]]
    written += ["", *claim_table(record, head and head["device"] == "cpu")]
    for name in STAGES:
        written += stage(name, record)
    return "\n".join(written) + "\n"


def word(state, is_rehearsal):
    return "rehearsed" if is_rehearsal and state == claims.SHOWN else state


def claim_table(record, is_rehearsal):
    rows = ["## Claims", ""]
    if is_rehearsal:
        rows += ["A rehearsal on a CPU, which shows nothing of a GPU: the parts of what is `rehearsed` run to their end.", ""]
    rows += ["| claim | is | by | why not |", "|---|---|---|---|"]
    for claim, state, why in claims.states(record):
        rows.append(f"| {claim.text} | {word(state, is_rehearsal)} | {', '.join(claim.parts)} | {cell(why)} |")
    return rows


def ends_of(name, record):
    """{part: how it ended the last time}. What did not begin again says nothing against a result of before."""
    found = {}
    for line in record.lines(name):
        if line.get("status") in ENDED and (line["status"] != "left" or line["part"] not in found):
            found[line["part"]] = line
    return found


def stage(name, record):
    lines, ends = record.lines(name), ends_of(name, record)
    if not lines:
        return []
    written = ["", f"## {name}", "", "| part | shows | ended | tests | seconds |", "|---|---|---|---|---|"]
    for part, line in ends.items():
        shows = next((other["shows"] for other in lines if other["part"] == part and other.get("shows")), "")
        counts = "{} passed, {} failed, {} skipped".format(*line["counts"]) if "counts" in line else ""
        ended = line["status"] + (f": {line['why']}" if line.get("why") else "")
        written.append(f"| {part} | {shows} | {cell(ended)} | {counts} | {line.get('seconds', '')} |")
    for part in ends:
        written += details(part, record.found(name, part))
    return written


def details(part, found):
    failed = [line for line in found if line.get("status") in BAD]
    figures = [line for line in found if "measured" in line or "left_out" in line]
    left = [line["case"] for line in found if line.get("status") == "left"]
    other = [line for line in found if "figure" in line]
    written = []
    if failed:
        written += ["", f"Failed in {part}:", "", *(f"- {line.get('world', '')} {line['case']}: "
                                                     f"{cell(str(line.get('found', ''))[:400])}" for line in failed)]
    if left:
        written += ["", f"Left in {part}: {', '.join(left)}."]
    if figures:
        written += step_table(part, figures)
    if other:
        written += ["", f"{part}:", "", *(f"- {line['figure']}: " + ", ".join(
            f"{name} {value}" for name, value in line.items() if name not in ("figure", "case", "rank")) for line in other)]
    return written


COLUMNS = (("step ms", "step", "median_ms"), ("p10", "step", "p10_ms"), ("p90", "step", "p90_ms"),
           ("of FSDP2", "of_fsdp2", "median_ratio"), ("exposed ms", "exposed", "median_ms"), ("host ms", "issue", "median_ms"))
KERNELS = ("idle_fraction", "kernels", "copies", "beyond_plain_a_collective")


def step_table(part, found):
    rows = {}
    for line in found:
        if "left_out" in line:
            continue
        rows.setdefault((line["world"], line["measured"] == "host", line["tokens"], line["impl"]), {}).update(
            {line["measured"]: line})
    written = ["", f"{part}:", "", "| world | tokens | model | " + " | ".join(name for name, *_ in COLUMNS)
               + " | idle | kernels | copies | beyond plain a collective | peak GB | reserved GB |",
               "|" + "---|" * (len(COLUMNS) + 9)]
    for (world, is_host, tokens, impl), measured in rows.items():
        times = measured.get("host" if is_host else "step", {})
        cells = [times.get(field, {}).get(key, "") for _, field, key in COLUMNS]
        kernels = [measured.get("kernels", {}).get(key, "") for key in KERNELS]
        memory = measured.get("memory", {})
        peaks = [f"{memory[key] / 1e9:.2f}" if memory.get(key) else "" for key in ("peak_bytes", "reserved_bytes")]
        name = f"{impl} (narrow)" if is_host else impl
        written.append("| " + " | ".join(map(shown, [world, tokens, name, *cells, *kernels, *peaks])) + " |")
    left = [line["left_out"] for line in found if "left_out" in line]
    return written + (["", "Left out for want of time: " + "; ".join(left) + "."] if left else [])


def shown(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def cell(text):
    return text.replace("|", "\\|").replace("\n", " ")


