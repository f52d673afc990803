"""Where the headers of CUDA and NCCL are: in the wheels beside torch's, and for what those lack in a toolkit of the machine.

From CUDA 13 on, the toolkit's wheels share a folder; before, each has its own. torch depends on those whose libraries it
loads, and not on all whose headers it includes.
"""
import re
from pathlib import Path

# What LibTorch and NCCL include: the extra of the wheel cuda-toolkit that brings it, and where it is for CUDA 12.
TOOLKIT = {"cuda_runtime_api.h": ("cudart", "cuda_runtime"), "crt/host_config.h": ("crt", "cuda_nvcc"),
           "nv/target": ("cccl", "cuda_cccl"), "cublas_v2.h": ("cublas", "cublas"), "cusparse.h": ("cusparse", "cusparse"),
           "cusolverDn.h": ("cusolver", "cusolver")}


def folders(sites, major, toolkit=Path("/usr/local/cuda")):
    """sites: folders of packages, such as .venv/lib/python3.11/site-packages."""
    names = [f"cu{major}"] if major >= 13 else [folder for _, folder in TOOLKIT.values()]
    found = [folder for site in sites for name in [*names, "nccl"] if (folder := site / "nvidia" / name / "include").is_dir()]
    return found + [toolkit / "include"] if missing(found, major) and toolkit_major(toolkit) == major else found


def toolkit_major(toolkit):
    header = toolkit / "include" / "cuda.h"
    version = re.search(r"#define CUDA_VERSION (\d+)\d{3}\b", header.read_text()) if header.exists() else None
    return int(version.group(1)) if version else 0


def missing(found, major):
    """What pip has to install for the headers that are in none of the folders `found`."""
    def is_missing(header):
        return not any((folder / header).exists() for folder in found)

    extras = [extra for header, (extra, _) in TOOLKIT.items() if is_missing(header)]
    if major < 13:
        extras = ["nvcc" if extra == "crt" else extra for extra in extras]
    return ([f"cuda-toolkit[{','.join(extras)}]"] if extras else []) + (
        [f"nvidia-nccl-cu{major}"] if is_missing("nccl.h") else [])
