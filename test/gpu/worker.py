"""One process of a world: runs cases one after another and writes what each has found.

Usage: worker.py WORLD RANK FOLDER CASE...
It writes FOLDER/RANK.jsonl, a line for each case, and ends early, with exit code 3, where it cannot go on: what is
behind is to be run by new processes. A case that takes too long ends with the stacks of all threads.
"""

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from cases import CASES, Place, Skip
from limits import case_limit_s
from worlds import WORLDS, join

CANNOT_GO_ON = 3


def outcome(case, place):
    """(status, what it found or why it failed)."""
    try:
        found = case.run(place)
        if place.is_gpu:
            torch.cuda.synchronize()
        return "passed", found
    except Skip as reason:
        return "skipped", str(reason)
    except AssertionError as error:
        return "wrong", str(error) or traceback.format_exc()
    except Exception:
        return "raised", traceback.format_exc()


def main():
    world, rank, folder, names = WORLDS[sys.argv[1]], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    place = Place(join(world, rank, folder / "store"), world.name, rank, world.ranks)
    with open(folder / f"{rank}.jsonl", "w") as results:
        for name in names:
            begin = time.monotonic()
            faulthandler.dump_traceback_later(case_limit_s(), exit=True)
            status, found = outcome(CASES[name], place)
            faulthandler.cancel_dump_traceback_later()
            seconds = round(time.monotonic() - begin, 2)
            results.write(json.dumps({"case": name, "status": status, "found": found, "seconds": seconds}) + "\n")
            results.flush()
            # The device may be in an error, and other ranks may wait in a collective.
            if status == "raised" or (status == "wrong" and world.processes > 1):
                os._exit(CANNOT_GO_ON)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
