"""Others' trainers, as they are, on gloo ranks: each program of table.py twice, by `torchrun PROGRAM` with FSDP2 and by
`torchrun -m fsdp PROGRAM`, and each of its rows compared. With --short, only what every run of the tests has.
"""

import importlib.util
import json
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "processes"))
import launch  # noqa: E402
import table  # noqa: E402
from closing_line import main  # noqa: E402

OURS = "fsdp._module.FSDPModule"
PATH = os.pathsep.join([str(launch.BUILD / "bindings"), *filter(None, [os.environ.get("PYTHONPATH")])])


def start(ranks, *program, timeout_s):
    """Each rank's record, and how the run ended."""
    with tempfile.TemporaryDirectory() as folder:
        command = [part for part in launch.torchrun(ranks, *program, folder) if part != "--no-python"]
        ran = launch.run(command, timeout_s=timeout_s, PYTHONPATH=PATH, HF_HUB_OFFLINE=1, HF_DATASETS_CACHE=f"{folder}/cache",
                         CUDA_VISIBLE_DEVICES="")
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        return ([json.loads(file.read_text()) if file.exists() else {} for file in files],
                f"exit code {ran.returncode}: {ran.stderr[-3000:]}")


def run(program, *options):
    """The records of `program` with FSDP2 and with fsdp; none of a library that is not installed."""
    known = table.PROGRAMS[program]
    for needed in known.needs:
        if importlib.util.find_spec(needed) is None:
            raise unittest.SkipTest(f"not installed: {needed}; tools/test --suite trainers does it")
    return [start(known.ranks, *under, HERE / program, *options, timeout_s=known.timeout_s)
            for under in ((), ("-m", "fsdp"))]


def differences(theirs, ours, tolerance=0, place=""):
    """Where two records are not the same, or numbers differ by more: in words."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        for name in theirs:
            yield from differences(theirs[name], ours[name], tolerance, f"{place}/{name}")
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, each in enumerate(theirs):
            yield from differences(each, ours[index], tolerance, f"{place}/{index}")
    elif isinstance(theirs, float) and isinstance(ours, float) and abs(theirs - ours) <= tolerance:
        return
    elif theirs != ours:
        yield f"{place}: {str(theirs)[:200]} with FSDP2, {str(ours)[:200]} with fsdp"


class TrainersCase(unittest.TestCase):
    """Of one program, which runs before its rows are looked at."""

    program = ""

    @classmethod
    def setUpClass(cls):
        cls.runs = run(cls.program)
        for records, ended in cls.runs:
            for rank, record in enumerate(records):
                names = set(table.PROGRAMS[cls.program].rows)
                if set(record) != names:
                    raise AssertionError(f"rank {rank}: has {sorted(record)}, not {sorted(names - set(record))}; {ended}")

    def expect_row(self, name):
        row = table.PROGRAMS[self.program].rows[name]
        for theirs, ours in zip(*(records for records, _ in self.runs)):
            self.expect_record(row, theirs[name], ours[name])
        if row.fails:
            self.skipTest(f"fails without fsdp, too: {row.reason}")

    def expect_record(self, row, theirs, ours):
        if row.fails:
            self.assertRegex(theirs.get("error", "no error"), row.fails)
            return
        self.assertNotIn("error", theirs, theirs.get("where"))
        self.assertNotIn("error", ours, ours.get("where"))
        self.assertNotIn(OURS, theirs.pop("classes"))
        self.assertIn(OURS, ours.pop("classes"))
        self.assertTrue(theirs["sharded"] and theirs["losses"] and theirs["placements"])
        found = list(differences(theirs, ours, row.tolerance))
        self.assertEqual(found, [], f"{len(found)} differences")


def row_test(row):
    return lambda case: case.expect_row(row)


def add_cases(namespace, programs):
    for program in programs:
        name = "".join(part.capitalize() for part in program.removesuffix(".py").split("_"))
        namespace[name] = type(name, (TrainersCase,), {
            "program": program, "__module__": __name__,
            **{f"test_{row}": row_test(row) for row in table.PROGRAMS[program].rows}})


def add_examples(namespace):
    """The program of examples/ for a library that the tests' own environment does not have."""
    class Examples(unittest.TestCase):
        @unittest.skipIf(importlib.util.find_spec("lightning") is None, "not installed: lightning")
        def test_lightning_trains(self):
            ran = launch.run([sys.executable, launch.ROOT / "examples" / "train_lightning.py"], PYTHONPATH=PATH)
            self.assertEqual(ran.returncode, 0, ran.stderr[-3000:])
            (first, last), = re.findall(r"rank 0: loss ([\d.]+) -> ([\d.]+)", ran.stdout)
            self.assertLess(float(last), 0.75 * float(first))

    namespace["Examples"] = Examples


if __name__ == "__main__":
    is_short = "--short" in sys.argv
    if is_short:
        sys.argv.remove("--short")
    add_cases(globals(), [table.SHORT] if is_short else table.PROGRAMS)
    if not is_short:
        add_examples(globals())
    main()
