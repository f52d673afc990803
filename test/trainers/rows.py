"""What the programs share that train through others' libraries: rows by name in one process group, and each rank's record.

None of it knows of fsdp: what is sharded shows by the classes that the modules have.
"""

import argparse
import hashlib
import json
import os
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def exact(value):
    """What JSON keeps to the bit: tensors as lists, of the whole tensor where it is sharded."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {str(name): exact(each) for name, each in value.items()}
    return [exact(each) for each in value] if isinstance(value, (list, tuple)) else value


def digests(named):
    """Of whole tensors, where there are too many numbers to write down: the same for the same bits."""
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in named}
    return {name: hashlib.sha256(each.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
            for name, each in whole.items()}


def described(model):
    """Which modules are sharded, as what, and how each parameter is placed."""
    sharded = {name: each for name, each in model.named_modules() if isinstance(each, FSDPModule)}
    return {"classes": sorted({f"{kind.__module__}.{kind.__qualname__}" for each in sharded.values()
                               for kind in type(each).__mro__}),
            "sharded": sorted(sharded),
            "placements": {name: str(param.placements) if isinstance(param, DTensor) else "plain"
                           for name, param in model.named_parameters()}}


def main(rows):
    """`PROGRAM [--rows NAMES] RECORD_FOLDER`: calls each row with a folder of its own, which all ranks share, and writes what
    it returns into RANK.json. A row that raises leaves its error there: other ranks are expected to raise, too.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default=",".join(rows), help="names, between commas")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))  # a rank that waits for one that failed ends, too
    rank, records = dist.get_rank(), {}
    for name in arguments.rows.split(","):
        folder = arguments.folder / name
        folder.mkdir(exist_ok=True)
        try:
            records[name] = exact(rows[name](folder))
        except (Exception, SystemExit) as error:
            records[name] = {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
        (arguments.folder / f"{rank}.json").write_text(json.dumps(records))
    dist.barrier()
    # Libraries leave threads that are not joined, with which Python sometimes aborts; the records are there.
    os._exit(0)
