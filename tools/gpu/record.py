"""What the parts find: STAGE.jsonl and STAGE.log in one folder, and all of them once more in two files of another."""

import json
import threading

VERDICTS = ("passed", "failed")
ENDED = (*VERDICTS, "skipped", "cut", "left")


class Record:
    """Appends and flushes at once, so that a run that is cut short loses nothing. copy: a folder that gets everything in
    results.jsonl and log.txt, too, also what was found before; or None. earlier: the copy of a call on another machine."""

    def __init__(self, folder, copy=None, earlier=None):
        self.folder, self.copy, self.lock = folder, copy, threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        if earlier:
            self._take(earlier)
        if copy:
            copy.mkdir(parents=True, exist_ok=True)
            for kind, whole in (("jsonl", "results.jsonl"), ("log", "log.txt")):
                texts = [path.read_text(errors="replace") for path in sorted(folder.glob(f"*.{kind}"))]
                (copy / whole).write_text("".join(texts))

    def _take(self, earlier):
        """Once: lines that are here already stay as they are."""
        here = {json.dumps(line) for line in self.lines()}
        for line in lines_of(earlier / "results.jsonl"):
            if json.dumps(line) not in here:
                self._append(f"{line['stage']}.jsonl", None, json.dumps(line) + "\n")

    def add(self, stage, **fields):
        self._append(f"{stage}.jsonl", "results.jsonl", json.dumps({"stage": stage, **fields}) + "\n")

    def log(self, stage, text):
        self._append(f"{stage}.log", "log.txt", text)

    def lines(self, stage=None):
        """Of one stage, or of all."""
        return [line for path in sorted(self.folder.glob(f"{stage or '*'}.jsonl")) for line in lines_of(path)]

    def last(self, stage, part, status=None):
        """How a part ended the last time, or ended so; or None."""
        found = [line for line in self.lines(stage) if line.get("part") == part
                 and line.get("status") in ((status,) if status else ENDED)]
        return found[-1] if found else None

    def verdict(self, stage, part):
        """passed, failed, or None: what has no result says nothing against one of before."""
        found = [line["status"] for line in self.lines(stage) if line.get("part") == part and line.get("status") in VERDICTS]
        return found[-1] if found else None

    def found(self, stage, part):
        """What it has found since it was begun the last time."""
        mine = [line for line in self.lines(stage) if line.get("part") == part]
        begun = [at for at, line in enumerate(mine) if line.get("status") == "begun"]
        return [line["found"] for line in mine[begun[-1] if begun else 0:] if "found" in line]

    def has_passed(self, stage, part):
        return self.verdict(stage, part) == "passed"

    def _append(self, name, whole, text):
        with self.lock:
            for path in [self.folder / name, *([self.copy / whole] if self.copy and whole else [])]:
                with open(path, "a") as out:
                    out.write(text)


def lines_of(path):
    """Without one that was cut short."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
