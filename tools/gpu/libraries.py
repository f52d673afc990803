"""Whether what is in FSDP_BUILD_DIR starts with the torch of this python3. Usage: libraries.py OUT"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pack

# What makes a program show that it starts, and do nothing.
ASKS = {pack.NATIVE: ("--list-test-names-only",), pack.RUNTIME: ("--list-test-names-only",), pack.TRAIN: ("--help",),
        pack.CUDA_STEP: (), pack.OVERLAP: ()}


def start(path, arguments):
    """Catch2 answers a list with its length; the benchmarks' programs end with their input."""
    done = subprocess.run([path, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    loaded = "error while loading shared libraries" not in done.stderr and "symbol lookup error" not in done.stderr
    if loaded and done.returncode >= 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]


def main():
    folder, wrong = Path(os.environ["FSDP_BUILD_DIR"]), []
    sys.path.insert(0, str(folder / "bindings"))
    import torch

    import fsdp

    facts = {"figure": "what is here", "torch": torch.__version__, "libfsdp": fsdp.__version__, "package": fsdp.__file__}
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(0), "NCCL that torch loads": ".".join(map(str, torch.cuda.nccl.version()))}
    for name, arguments in ASKS.items():
        if (folder / name).exists():
            why = start(folder / name, arguments)
            facts[Path(name).name] = why or "starts"
            wrong += [f"{name}: {why}"] if why else []
    print(json.dumps(facts), flush=True)
    with open(sys.argv[1], "a") as out:
        out.write(json.dumps(facts) + "\n")
    return "; ".join(wrong) if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
