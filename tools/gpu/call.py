"""One call of tools/gpu_check on the machine with the GPU: groups of parts one after another, within a budget."""

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import claims
import machine as machines
import packed
import parts
import plan
import report
from record import Record

ALL_PASSED, SOME_FAILED, WRONG_CALL, TIME_IS_UP, SOME_SKIPPED = range(5)
CASE_LIMIT_S = 20  # so that one that hangs says where, and leaves time for others
CLOSING_S = 1  # of a budget, for the report


class Call:
    """options.seconds: of this call, all in all, from its beginning."""

    def __init__(self, options, begin):
        self.options = options
        self.end = begin + options.seconds - CLOSING_S
        self.record = Record(options.out, options.copy, options.earlier)
        self.machine = machines.look(options.device)
        self.build, self.unfit, self.no_extension = self.find_build()
        self.needs = machines.Needs(self.machine, self.record, self.build, self.unfit, self.no_extension)
        self.statuses = []

    def find_build(self):
        """(where the programs are, why those that were packed are of no use here, why Python's extension is not)"""
        manifest = packed.open_archive(self.options.packed, self.options.opened)
        if manifest is None:
            return self.options.build, f"there is no {self.options.packed / packed.pack.ARCHIVE}, which --pack makes", ""
        why = packed.why_not(manifest, self.machine)
        if why:
            return self.options.build, f"the packed binaries do not fit: {why}", ""
        return self.options.opened, "", packed.why_no_extension(manifest, self.machine, self.options.opened)

    def run(self, name, groups):
        self.say(f"machine: {report.machine_line(self.machine.facts())}")
        notes = machines.notes(self.machine)
        if self.unfit:
            notes.append(f"{self.unfit}; tools/gpu_check --more build compiles them here, in up to ten minutes")
        if self.no_extension:
            notes.append(f"{self.no_extension}; tools/gpu_check --more build compiles it here, in up to five minutes")
        self.record.add("machine", date=time.strftime("%Y-%m-%d", time.gmtime()), notes=notes, command=name,
                        **self.machine.facts())
        for note in notes:
            self.say(f"note: {note}")
        with ended_by_signals():
            for group in groups:
                self.group(group)
            return self.close(name)

    def group(self, group):
        todo = [part for part in group.parts if self.options.again or not self.record.has_passed(group.stage, part.name)]
        self.statuses += ["passed"] * (len(group.parts) - len(todo))
        able = [part for part in todo if self.has_all(group.stage, part)]
        left = 0 if parts.STOP.is_set() else self.end - time.monotonic()
        limit_s = min(group.limit_s * self.options.slower, left)
        if limit_s < min(parts.LEAST_S, group.limit_s):
            for part in able:
                self.leave(group.stage, part)
            return
        if not able:
            return
        self.say(f"{group.name}: {', '.join(part.name for part in able)} ... (at most {limit_s:.0f} s)")
        with ThreadPoolExecutor(len(able)) as side_by_side:
            list(side_by_side.map(lambda part: self.one(group.stage, part, limit_s), able))
        self.copy_report()

    def has_all(self, stage, part):
        """What it needs; else it is skipped, with the reason."""
        why = next(filter(None, map(self.needs.missing, part.needs)), "")
        if not why:
            return True
        self.statuses.append("skipped")
        if (self.record.last(stage, part.name) or {}).get("why") != why:
            self.record.add(stage, part=part.name, status="skipped", why=why, shows=part.shows)
        self.say(f"{stage}/{part.name}: skipped: {why}")
        return False

    def leave(self, stage, part):
        self.statuses.append("left")
        self.record.add(stage, part=part.name, status="left", why="no time was left", shows=part.shows)
        self.say(f"{stage}/{part.name}: left: no time was left")

    def one(self, stage, part, limit_s):
        status = parts.run(part, stage, self.record, self.environment(), min(limit_s, part.limit_s * self.options.slower))
        last = self.record.last(stage, part.name)
        self.statuses.append(status)
        counts = "{} passed, {} failed, {} skipped; ".format(*last["counts"]) if "counts" in last else ""
        self.say(f"{stage}/{part.name}: {status} in {last['seconds']} s; {counts}{last.get('why', '')}".rstrip("; "))

    def environment(self):
        found = {**os.environ, "FSDP_BUILD_DIR": str(self.build), "PYTHONUNBUFFERED": "1",
                 "PATH": f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin", "FSDP_TEST_DEVICE": self.options.device,
                 "FSDP_TEST_CASE_LIMIT_S": str(CASE_LIMIT_S * self.options.slower)}
        # All ranks are on this machine, whose name and network may lead nowhere.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            found.setdefault(name, "lo")
        if not self.unfit:
            found["LD_LIBRARY_PATH"] = packed.library_path(self.machine)
        return found

    def close(self, name):
        self.copy_report()
        found = claims.states(self.record)
        later = plan.NAMES[plan.NAMES.index(name) + 1:] + ("more",) if name in plan.NAMES else ()
        others = tuple(f"{other}/" for other in later)
        for word in (claims.FAILED, claims.NOT_REACHED):
            for claim, state, why in found:
                if state == word and not claim.parts[0].startswith(others):
                    self.say(f"{word}: {claim.text} ({why})")
        is_rehearsal = self.machine.device == "cpu"
        counts = ", ".join(f"{sum(state == word for _, state, _ in found)} {report.word(word, is_rehearsal)}"
                           for word in (claims.SHOWN, claims.FAILED, claims.NOT_REACHED))
        code = self.exit_code()
        kinds = ("passed", "failed", "cut", "skipped", "left")
        self.say(f"parts: {', '.join(f'{self.statuses.count(kind)} {kind}' for kind in kinds)}; claims: {counts} (exit code "
                 f"{code}); {self.options.copy or self.options.out}")
        return code

    def exit_code(self):
        for status, code in (("failed", SOME_FAILED), ("cut", TIME_IS_UP), ("left", TIME_IS_UP), ("skipped", SOME_SKIPPED)):
            if status in self.statuses:
                return code
        return ALL_PASSED

    def copy_report(self):
        text = report.text(self.record)
        for folder in filter(None, (self.options.out, self.options.copy)):
            (folder / "report.md").write_text(text)

    def say(self, text):
        print(text, flush=True)


@contextlib.contextmanager
def ended_by_signals():
    """Parts have sessions of their own: with this program alone they would not end."""
    before = {number: signal.signal(number, lambda *_: parts.STOP.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        parts.STOP.clear()


def tell_plan(name, groups, options, say):
    for line in plan.lines(name, groups, options.slower) if name in plan.NAMES else more_lines(groups, options):
        say(line)


def more_lines(groups, options):
    yield f"plan of --more: at most {options.seconds:.0f} s; what is left then, the next call does"
    for group in groups:
        yield f"{group.limit_s * options.slower:6.0f} s  {group.name}"
