"""Instructions that a worker counts between its start and stop requests, by callgrind."""

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import conductor


def check_installed():
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed; install it or pass --no-callgrind for times alone")


def count(name, command, requests, timeout_s=900):
    """{label: instructions}, of every label that the worker stopped counting with."""
    with tempfile.TemporaryDirectory(prefix="fsdp_callgrind_") as folder:
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--dump-line=no",
                    f"--callgrind-out-file={folder}/out"]
        with conductor.Workers() as workers:
            worker = workers.start(name, valgrind + command, timeout_s=timeout_s)
            for request in requests:
                worker.ask(request)
            worker.close(wait_s=120)
        return dict(_read_dump(path) for path in Path(folder).glob("out.*"))


def count_each(command, requests_of):
    """As count does, of a worker for each name in requests_of, one a core at a time: counts do not depend on what else runs."""
    def count_one(name):
        return count(f"{name} under callgrind", command, requests_of[name])

    counts = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for of_one in pool.map(count_one, requests_of):
            counts |= of_one
    return counts


def _read_dump(path):
    label = total = None
    with path.open() as lines:
        for line in lines:
            if line.startswith("desc: Trigger: Client Request: "):
                label = line.rsplit(": ", 1)[1].strip()
            elif line.startswith(("totals: ", "summary: ")):
                total = int(line.split()[1])
    return label, total
