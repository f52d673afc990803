"""tools/train's program on two ranks over the native communicator beside the plain model: losses of the same steps.

Usage: train_losses.py [--steps N] [--seconds S] [--out FILE]. On a GPU the two ranks share it, or have one each; with
FSDP_TEST_DEVICE=cpu over gloo.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import shared_gpu

TOLERANCE = 1e-3


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def losses(device, ranks, steps, limit_s, folder, *more):
    program = Path(os.environ["FSDP_BUILD_DIR"]) / "tools" / "llama" / "fsdp_train"
    record = folder / f"{'plain' if more else 'sharded'}.json"
    command = [program, "--data", sysconfig.get_path("stdlib"), "--suffix", ".py", "--device", device, "--steps", str(steps),
               "--sample-bytes", "1", "--eval-bytes", "4096", "--json", record, "--ranks", str(ranks), *more]
    port, processes = str(free_port()), []
    for rank in range(ranks):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if ranks > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port,
                            **shared_gpu.environment(rank)}
        processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
    try:
        codes = [process.wait(limit_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise SystemExit(f"train_losses: {' '.join(map(str, command))} ended with {codes}")
    return json.loads(record.read_text())["losses"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=100, help="for both runs together (default 100)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = os.environ.get("FSDP_TEST_DEVICE", "cuda")
    with tempfile.TemporaryDirectory() as folder:
        plain = losses(device, 1, options.steps, options.seconds / 2, Path(folder), "--no-shard")
        sharded = losses(device, 2, options.steps, options.seconds / 2, Path(folder))
    apart = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(sharded, plain))
    found = {"figure": "losses of two ranks and of the plain model", "steps": len(plain), "first": plain[0],
             "last": sharded[-1], "apart": apart}
    print(json.dumps(found))
    if options.out:
        with open(options.out, "a") as out:
            out.write(json.dumps(found) + "\n")
    if len(sharded) != len(plain) or not apart <= TOLERANCE or not sharded[-1] < plain[0]:
        return f"train_losses: expected equal losses within {TOLERANCE} that fall, found {found}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
