"""The GPUs that ranks are on, and what lets several ranks of NCCL share the only one."""

import functools
import os
import subprocess


@functools.lru_cache
def gpus():
    """Names for CUDA_VISIBLE_DEVICES of those that a rank may have. None with FSDP_TEST_DEVICE=cpu."""
    if os.environ.get("FSDP_TEST_DEVICE", "cuda") == "cpu":
        return ()
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    there = done.stdout.count("GPU ") if done.returncode == 0 else 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(map(str, range(there)))
    return tuple(name.strip() for name in chosen.split(",") if name.strip())[:there]


def environment(rank):
    """NCCL refuses two ranks on one GPU of a host. What it takes for hosts may have equal GPUs: those talk over sockets,
    here of this machine alone, slowly and with the values of any other network."""
    if len(gpus()) != 1:
        return {}
    # Nor is it to look for an NVLink between the hosts.
    return {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0"}
