"""What the stages find: STAGE.jsonl and STAGE.log in one folder, and all of them once more in two files of another."""

import json

ENDED = ("passed", "failed", "skipped", "cut")


class Record:
    """Appends and flushes at once, so that a run that is cut short loses nothing. copy: a folder that gets everything in
    results.jsonl and log.txt, too, also what was found before; or None."""

    def __init__(self, folder, copy=None):
        self.folder, self.copy = folder, copy
        folder.mkdir(parents=True, exist_ok=True)
        if copy:
            copy.mkdir(parents=True, exist_ok=True)
            for kind, whole in (("jsonl", "results.jsonl"), ("log", "log.txt")):
                texts = [path.read_text(errors="replace") for path in sorted(folder.glob(f"*.{kind}"))]
                (copy / whole).write_text("".join(texts))

    def add(self, stage, **fields):
        self._append(f"{stage}.jsonl", "results.jsonl", json.dumps({"stage": stage, **fields}) + "\n")

    def log(self, stage, text):
        self._append(f"{stage}.log", "log.txt", text)

    def lines(self, stage=None):
        """Of one stage, or of all."""
        paths = sorted(self.folder.glob(f"{stage or '*'}.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.endswith("}")]

    def last(self, stage, part):
        """How a part ended the last time, or None."""
        found = [line for line in self.lines(stage) if line.get("part") == part and line.get("status") in ENDED]
        return found[-1] if found else None

    def has_passed(self, stage, part):
        last = self.last(stage, part)
        return bool(last) and last["status"] == "passed"

    def _append(self, name, whole, text):
        for path in [self.folder / name, *([self.copy / whole] if self.copy else [])]:
            with open(path, "a") as out:
                out.write(text)
