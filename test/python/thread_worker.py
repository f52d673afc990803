"""The parity suite's programs with threads of one process as ranks, over torch's threaded process group.

Usage: thread_worker.py RANKS [PROGRAM...] RESULTS_FOLDER

Writes 0.json: what differs, by program, for those that all ranks have run.
"""

import json
import os
import sys
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.init
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, _install_threaded_pg

import programs
from parity_worker import compare

MODULES = ("arguments", "around", "construction", "controls", "gradients", "registered", "states")
LEFT_OUT = ("compiled",)  # Dynamo's caches and counters are one for the process
DRAWS = {torch.Tensor.uniform_, torch.Tensor.normal_, torch.randn, torch.nn.init.uniform_, torch.nn.init.normal_,
         torch.nn.init.kaiming_uniform_}


PROGRAMS = {name: program for name, program in programs.PROGRAMS.items()
            if not name.startswith(LEFT_OUT) and program.function.__module__.removeprefix("programs.") in MODULES}


class OwnGenerator(TorchFunctionMode):
    """Random numbers of this thread's own, as the default generator is one for the process."""

    of_thread = threading.local()

    def __enter__(self):
        self.of_thread.generator = torch.Generator()
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if function in DRAWS and not kwargs.get("generator") and all(tensor.is_cpu for tensor in tensors):
            kwargs["generator"] = self.of_thread.generator
        return function(*args, **kwargs)

    @classmethod
    def manual_seed(cls, seed):
        cls.of_thread.generator.manual_seed(seed)


class Results:
    def __init__(self, ranks, folder):
        self.ranks, self.file, self.lock = ranks, Path(folder, "0.json"), threading.Lock()
        self.found = {}  # by program, then by rank

    def add(self, rank, name, found):
        with self.lock:
            self.found.setdefault(name, {})[rank] = found
            if len(self.found[name]) == self.ranks and os.environ.get("FSDP_PARITY_VERBOSE"):
                print(name, self.by_program().get(name), flush=True)
            self.file.write_text(json.dumps(self.by_program()))

    def by_program(self):
        return {name: [f"rank {rank}: {line}" for rank, lines in of_ranks.items() for line in lines]
                for name, of_ranks in self.found.items() if len(of_ranks) == self.ranks}


def run_rank(rank, ranks, chosen, store, results):
    try:
        dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        with OwnGenerator():
            for name, program in chosen.items():
                found = compare(program, ranks)
                results.add(rank, name, found)
                if any("raised" in line for line in found):
                    raise RuntimeError(f"{name}: the other ranks may wait for this one")
    except BaseException as error:
        traceback.print_exc()
        ProcessLocalGroup.exception_handle(error)  # ends the others' waits


def main():
    ranks, *names, folder = sys.argv[1:]
    ranks = int(ranks)
    chosen = {name: program for name, program in PROGRAMS.items()
              if ranks in program.ranks and (not names or name in names)}
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # each thread has process groups of its own
    _install_threaded_pg()
    torch.manual_seed = OwnGenerator.manual_seed
    store, results = dist.HashStore(), Results(ranks, folder)
    threads = [threading.Thread(target=run_rank, args=(rank, ranks, chosen, store, results)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
