"""One rank of the parity suite: runs every program with torch's fully_shard and with ours, and writes what differs.

Usage: parity_worker.py [--programs PACKAGE] [PROGRAM...] RESULTS_FOLDER
"""

import argparse
import datetime
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.tensor import DTensor

import fsdp
from shared_gloo import share_gloo_thread

# Two ranks add two numbers, in whichever order: equal bits. More add up in another order than FSDP2's gloo.
TOLERANCE = {2: 0.0, 4: 2e-5}


def flatten(value, path=""):
    """(path, leaf) for every leaf; DTensors as their local tensors, with what else they are beside."""
    if isinstance(value, dict):
        yield path, f"dict of {sorted(map(str, value))}"
        for key in value:
            yield from flatten(value[key], f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        yield path, f"{len(value)} values"
        for index, element in enumerate(value):
            yield from flatten(element, f"{path}[{index}]")
    elif isinstance(value, DTensor):
        yield path, f"DTensor {tuple(value.shape)} {value.placements} over {value.device_mesh.shape}"
        yield from flatten(value.to_local(), path + ".local")
    elif isinstance(value, torch.Tensor):
        yield path, f"{tuple(value.shape)} {value.dtype}"
        yield path + ".values", value.detach().clone()
    else:
        yield path, value


def differences(ours, theirs, tolerance):
    ours, theirs = list(flatten(ours)), list(flatten(theirs))
    found = []
    for (path, mine), (other_path, other) in zip(ours, theirs):
        if path != other_path:
            found.append(f"{path} stands where FSDP2 has {other_path}")
            break
        if isinstance(mine, torch.Tensor):
            if not isinstance(other, torch.Tensor) or mine.shape != other.shape:
                found.append(f"{path}: {mine} and {other}")
                continue
            scale = other.double().abs().max().item() if other.numel() else 0.0
            apart = (mine.double() - other.double()).abs().max().item() if mine.numel() else 0.0
            if apart > tolerance * max(scale, 1e-3) or apart != apart:
                found.append(f"{path}: {apart:.3g} apart, where the largest is {scale:.3g}")
        elif mine != other:
            found.append(f"{path}: ours {mine}, FSDP2's {other}")
    if not found and len(ours) != len(theirs):
        found.append(f"{len(ours)} values, FSDP2 has {len(theirs)}")
    return found


def outcome(program, api, ranks):
    try:
        return program.run(api, ranks), None
    except Exception:
        return None, traceback.format_exc()


def compare(program, ranks):
    theirs, their_error = outcome(program, torch.distributed.fsdp, ranks)
    ours, our_error = outcome(program, fsdp, ranks)
    if their_error:
        return [f"FSDP2 raised:\n{their_error}"]
    if our_error:
        return [f"ours raised:\n{our_error}"]
    return differences(ours, theirs, max(TOLERANCE[ranks], program.tolerance))


def run_all(compare, programs=None, backend="gloo"):
    """Runs `compare` on every program for that many ranks, or on those named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", default="programs", metavar="PACKAGE")
    parser.add_argument("chosen", nargs="*", metavar="PROGRAM")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    share_gloo_thread()
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = {}
    for name, program in (programs or importlib.import_module(arguments.programs).PROGRAMS).items():
        is_chosen = not arguments.chosen or name in arguments.chosen
        if ranks not in program.ranks or program.missing() or not is_chosen:
            continue
        # An error on one rank leaves the others in a collective: then the whole run ends, by its timeout.
        results[name] = compare(program, ranks)
        (arguments.folder / f"{rank}.json").write_text(json.dumps(results))
        if os.environ.get("FSDP_PARITY_VERBOSE") and rank == 0:
            print(name, "equal" if not results[name] else "\n".join(results[name]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_all(compare)
