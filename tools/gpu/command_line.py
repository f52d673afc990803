"""What tools/gpu_check is asked for, and the order in which it goes about it."""

import argparse
import os
import re
import shutil
import sys
import time
from pathlib import Path

import machine as machines
import pack
import parts
import report
import stages
from record import Record

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
ALL_PASSED, SOME_FAILED, WRONG_CALL, TIME_IS_UP, SOME_SKIPPED = range(5)


def version():
    (found,) = re.findall(r"^  version: '(.*)',$", (ROOT / "meson.build").read_text(), re.MULTILINE)
    return f"libfsdp {found}"


def arguments(description):
    parser = argparse.ArgumentParser(prog="tools/gpu_check", description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, metavar="DIR", help="fill DIR with the Debian packages of the build, and end")
    parser.add_argument("--list", action="store_true", help="tell the stages' parts and what each needs, and end")
    parser.add_argument("--stage", type=lambda text: text.split(","), metavar="NAME,...",
                        help=f"of {', '.join(stages.NAMES)} (all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=570, help="for this call; what is left then is for the next (570)")
    parser.add_argument("--slower", type=float, default=1, metavar="X", help="parts have X times their time limits, for a "
                        "machine with fewer cores than 16 (1)")
    parser.add_argument("--jobs", type=int, help="of the build (as many as there are cores)")
    parser.add_argument("--again", action="store_true", help="also what has passed before")
    parser.add_argument("--packages", type=Path, default=CACHE / "gpu_packages", metavar="DIR", help="what --pack has filled")
    parser.add_argument("--build", type=Path, default=ROOT / "build-gpu", metavar="DIR", help="the build folder (build-gpu)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="JSON and logs of the stages (.cache/gpu_check/DEVICE)")
    parser.add_argument("--copy", type=Path, metavar="DIR",
                        help="all of that once more, in results.jsonl, log.txt and report.md")
    parser.add_argument("--report", type=Path, metavar="DIR",
                        help="write report.md of what --out holds, and its results, to DIR (bench/results/gpu-DATE), and end")
    parser.add_argument("--version", action="version", version=version())
    options = parser.parse_args()
    options.out = (options.out or CACHE / "gpu_check" / options.device).resolve()
    for name in ("packages", "build"):
        setattr(options, name, getattr(options, name).resolve())
    unknown = [name for name in options.stage or [] if name not in stages.NAMES]
    if unknown:
        parser.error(f"there is no stage {', '.join(unknown)}; there are {', '.join(stages.NAMES)}")
    return options


def main(description):
    options = arguments(description)
    try:
        if options.pack:
            size, versions = pack.pack(options.pack.resolve())
            listed = ", ".join(f"{name} {version}" for name, version in versions.items())
            print(f"{options.pack}: {size:,} bytes: {listed}")
    except pack.PackError as error:
        print(f"tools/gpu_check: {error}", file=sys.stderr)
        return SOME_FAILED
    if options.pack:
        return ALL_PASSED
    if options.list:
        return tell_parts(options)
    if options.report:
        return write_report(options)
    return Check(options).run()


def tell_parts(options):
    for name, some in stages.all_stages(options).items():
        for part in some:
            needs = f"; needs {', '.join(part.needs)}" if part.needs else ""
            print(f"{name}/{part.name}: at most {part.limit_s:.0f} s{needs}\n    {part.shows}")
    return ALL_PASSED


def write_report(options):
    options.report.mkdir(parents=True, exist_ok=True)
    for path in sorted(options.out.glob("*.jsonl")):
        shutil.copy(path, options.report / path.name)
    (options.report / "report.md").write_text(report.text(Record(options.out).lines()))
    print(f"written to {options.report / 'report.md'}")
    return ALL_PASSED


class Check:
    def __init__(self, options):
        self.options = options
        self.end = time.monotonic() + options.seconds
        self.record = Record(options.out, options.copy)
        self.machine = machines.look(options.device)
        self.needs = machines.Needs(self.machine, self.record, options.build)
        self.statuses = []

    def run(self):
        self.say(f"machine: {report.machine_line(self.machine.facts())}")
        notes = machines.notes(self.machine)
        self.record.add("machine", date=time.strftime("%Y-%m-%d", time.gmtime()), notes=notes, **self.machine.facts())
        for note in notes:
            self.say(f"note: {note}")
        for name, some in stages.all_stages(self.options).items():
            if self.options.stage and name not in self.options.stage:
                continue
            for part in some:
                self.one(name, part)
        if self.statuses.count("left"):
            self.say(f"no time was left for {self.statuses.count('left')} parts; call it again")
        code = self.exit_code()
        self.say(f"{self.closing_counts()} (exit code {code}); {self.options.out}")
        self.copy_report()
        return code

    def one(self, stage, part):
        """Runs it unless it has passed before, lacks something here, or no time is left."""
        if self.record.has_passed(stage, part.name) and not self.options.again:
            self.statuses.append("passed")
            return
        left, limit_s = self.end - time.monotonic(), part.limit_s * self.options.slower
        if left < min(parts.LEAST_S, limit_s):  # before its needs, which what is left may have to make
            self.statuses.append("left")
            return
        why = next(filter(None, map(self.needs.missing, part.needs)), "")
        if why:
            self.skip(stage, part, why)
            return
        self.say(f"{stage}/{part.name} ...")
        status = parts.run(part, stage, self.record, self.environment(), min(limit_s, left))
        # Cut by this call's end and not by its own limit: it has its whole time in the next call.
        if status == "cut" and left < limit_s:
            status = "left"
        last = self.record.last(stage, part.name)
        self.statuses.append(status)
        counts = "{} passed, {} failed, {} skipped; ".format(*last["counts"]) if "counts" in last else ""
        self.say(f"{stage}/{part.name}: {status} in {last['seconds']} s; {counts}{last.get('why', '')}".rstrip("; "))
        self.copy_report()

    def skip(self, stage, part, why):
        self.statuses.append("skipped")
        if (self.record.last(stage, part.name) or {}).get("why") != why:
            self.record.add(stage, part=part.name, status="skipped", why=why, shows=part.shows)
        self.say(f"{stage}/{part.name}: skipped: {why}")

    def environment(self):
        return {**os.environ, "FSDP_BUILD_DIR": str(self.options.build), "PYTHONUNBUFFERED": "1",
                 "PATH": f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin", "FSDP_TEST_DEVICE": self.options.device}

    def exit_code(self):
        for status, code in (("failed", SOME_FAILED), ("cut", SOME_FAILED), ("left", TIME_IS_UP), ("skipped", SOME_SKIPPED)):
            if status in self.statuses:
                return code
        return ALL_PASSED

    def closing_counts(self):
        kinds = ("passed", "failed", "cut", "skipped", "left")
        return ", ".join(f"{self.statuses.count(kind)} {kind}" for kind in kinds)

    def copy_report(self):
        text = report.text(self.record.lines())
        for folder in filter(None, (self.options.out, self.options.copy)):
            (folder / "report.md").write_text(text)

    def say(self, text):
        print(text, flush=True)
