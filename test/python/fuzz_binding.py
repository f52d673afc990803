"""Calls every entry point of the binding with right and wrong arguments, in any order, and looks for crashes.

    fuzz_binding.py [--seconds N] [--seed FIRST]     # draws in processes of their own until the time is over
    fuzz_binding.py --draws FIRST COUNT              # these draws in this process: what a finding names

A draw is a sequence of calls that its seed decides. Whatever Python exception a call raises is right here; what is
found is a process that dies, one that does not go on for a while, an error that no user should see (SystemError, an
assertion of torch's), and a fresh model that no longer trains afterwards.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

DRAWS_A_PROCESS = 100
# A draw takes well below a second, of the processor's time too. Others may work on this machine: a process that gets
# little of it does not hang.
BUSY_LIMIT_S = 60  # of the processor's time without a new draw
IDLE_LIMIT_S = 120  # of the clock's without one, and with next to none of the processor's
INTERNAL = ("INTERNAL ASSERT", "returned a result with an exception set", "returned NULL without setting",
            "Unable to cast", "bad any cast", "std::bad_", "vector::_M_range", "basic_string::", "map::at", "vector::")


def is_internal(error):
    return isinstance(error, SystemError) or any(text in str(error) for text in INTERNAL)


def is_private(error):
    """What only the package's own files see, of calls that only they make."""
    calls = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return "Unable to cast" in str(error) and any(name.startswith(("native_", "python_side")) for name in calls)


def draw_one(seed, mesh):
    """The errors of this draw that no user should see."""
    import fuzz_actions
    import fuzz_native_actions  # adds its own

    draw, found = random.Random(seed), []
    pool = fuzz_actions.Pool(draw, mesh)
    for _ in range(draw.randrange(4, 30)):
        action = draw.choice(fuzz_actions.ACTIONS)
        try:
            action(draw, pool)
        except (Exception, SystemExit) as error:
            if is_internal(error) and not is_private(error):
                found.append(f"{action.__name__}: {type(error).__name__}: {str(error)[:500]}")
    return found


def check_training(mesh):
    """A fresh model trains beside a plain one: what came before has spoilt nothing that outlives it."""
    import copy

    import torch
    import torch.nn as nn

    import fsdp

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    model = copy.deepcopy(plain)
    fsdp.fully_shard(model[0], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    x = torch.randn(3, 4)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    for expected, found in zip(plain.parameters(), model.parameters()):
        if mesh.size() == 1:  # with ranks that are not there, values are wrong
            torch.testing.assert_close(found.to_local(), expected)


def run_draws(first, count):
    """In this process, which may die of it. A line before each draw says which one it is."""
    import faulthandler
    import logging

    faulthandler.enable()
    import torch
    import torch._dynamo  # which a first hook reads otherwise
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    # Every other process: one rank over gloo, or the first of four that are not there.
    if (first // DRAWS_A_PROCESS) % 2 == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))
    for seed in range(first, first + count):
        print(f"draw {seed}", flush=True)
        torch.manual_seed(seed)
        for found in draw_one(seed, mesh):
            print(f"found {found!r}", flush=True)
        with torch.random.fork_rng(), torch.enable_grad():
            try:
                check_training(mesh)
            except Exception as error:
                text = f"a fresh model does not train: {type(error).__name__}: {str(error)[:500]}"
                print(f"found {text!r}", flush=True)
    print("done", flush=True)
    os._exit(0)  # the interpreter's end is another test's


class Watched:
    """A process with some draws, and what it has come to."""

    def __init__(self, first, folder):
        self.first = first
        self.output = Path(folder, f"{first}.txt")
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen([sys.executable, "-X", "faulthandler", __file__, "--draws", str(first),
                                             str(DRAWS_A_PROCESS)], stdout=output, stderr=subprocess.STDOUT)

    def run(self, until):
        """Until it ends, or no draw has begun for a while, or the time is over. What was found."""
        size, since, busy_since, hangs = -1, 0.0, 0.0, False
        while self.process.poll() is None:
            time.sleep(0.05)
            now, busy = time.monotonic(), self.processor_s()
            if self.output.stat().st_size != size:
                size, since, busy_since = self.output.stat().st_size, now, busy
            busy -= busy_since
            hangs = busy > BUSY_LIMIT_S or (busy < 0.2 and now - since > IDLE_LIMIT_S)
            if hangs or (now > until and self.seeds()):
                # It says where its threads are; then it goes.
                self.process.send_signal(signal.SIGABRT)
                time.sleep(0.5)
                self.process.kill()
                self.process.wait()
                break
        else:
            if self.process.returncode != 0:
                return [f"the process ended with {self.process.returncode} {self.where()}"]
        return ([f"nothing goes on {self.where()}"] if hangs else []) + self.errors()

    def processor_s(self):
        try:
            user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        except OSError:
            return 0.0  # it has ended
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def lines(self):
        return self.output.read_text(errors="replace").splitlines()

    def seeds(self):
        return [int(line.split()[1]) for line in self.lines() if line.startswith("draw ")]

    def where(self):
        seeds = self.seeds() or [self.first]
        text = "\n".join(self.lines()[-60:])
        return (f"in draw {seeds[-1]}; again: fuzz_binding.py --draws {seeds[-1]} 1, or --draws {self.first} "
                f"{seeds[-1] - self.first + 1}\n{text}")

    def errors(self):
        found, seed = [], self.first
        for line in self.lines():
            if line.startswith("draw "):
                seed = int(line.split()[1])
            elif line.startswith("found "):
                found.append(f"draw {seed}: {line[6:]}")
        return found


def fuzz(seconds, seed=0, report=print):
    """Draws for so many seconds. (number of draws, what was found)."""
    until, draws, found = time.monotonic() + seconds, 0, []
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until:
            watched = Watched(seed, folder)
            now = watched.run(until)
            draws += len(watched.seeds())
            for each in now:
                report(each, flush=True)
            found += now
            seed += DRAWS_A_PROCESS
    return draws, found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0, help=f"of the first draw; a multiple of {DRAWS_A_PROCESS}")
    parser.add_argument("--draws", type=int, nargs=2, metavar=("FIRST", "COUNT"))
    arguments = parser.parse_args()
    if arguments.draws:
        run_draws(*arguments.draws)
    draws, found = fuzz(arguments.seconds, arguments.seed)
    print(f"{draws} draws, {len(found)} findings", flush=True)
    sys.exit(len(found) > 0)


if __name__ == "__main__":
    main()
