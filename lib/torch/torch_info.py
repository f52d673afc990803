"""Prints what the build needs to know of LibTorch, one `key=value` a line.

    torch_info.py          that of the environment's torch wheel, which has headers and libraries inside
    torch_info.py FOLDER   that of an unpacked LibTorch archive

The CUDA toolkit's headers come from the wheels beside torch's, and from /usr/local/cuda only what those lack: it may be of
another version than the libraries that torch loads, and with another nccl.h ProcessGroupNCCL would get another layout. No file
needs nvcc: ATen's and NCCL's kernels are all there are.
"""
import ctypes
import os
import re
import sys
import sysconfig
from pathlib import Path

import cuda_headers


def of_wheel():
    try:
        import torch
    except ModuleNotFoundError:
        # pip builds where the environment's own packages are hidden. What it builds is for that environment's torch.
        sys.path.append(sysconfig.get_path("platlib"))
        import torch

    cuda = torch.version.cuda or ""
    return {"version": torch.__version__.split("+")[0], "root": os.path.dirname(torch.__file__),
            "abi": int(torch._C._GLIBCXX_USE_CXX11_ABI), "cuda": cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else ""}


def of_archive(root):
    build = root / "build-version"  # "2.15.0+cu130"
    if not build.exists() or not (root / "lib" / "libtorch_cpu.so").exists():
        sys.exit(f"-Dtorch_root={root}: expected an unpacked LibTorch archive, with build-version and lib/libtorch_cpu.so")
    version, _, variant = build.read_text().strip().partition("+")
    cuda = re.fullmatch(r"cu(\d+)(\d)", variant)
    return {"version": version, "root": root, "abi": 1,  # of all archives from 2.7 on
            "cuda": ".".join(cuda.groups()) if cuda else "", "nccl": nccl_in(root / "lib") if cuda else ""}


def nccl_in(folder):
    """The version of NCCL that is in its own library, or inside LibTorch's; "": the library does not load here."""
    number = ctypes.c_int()
    for name in ("libnccl.so.2", "libtorch_cuda.so"):
        try:
            ctypes.CDLL(folder / name).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return ""


def with_cuda_headers(info):
    if not info["cuda"]:
        return info | {"cuda_includes": "", "cuda_missing": ""}
    # pip's own folder for a build, too, has what the build asked for.
    sites = [Path(place) for place in dict.fromkeys([*sys.path, sysconfig.get_path("platlib")])]
    major = int(info["cuda"].split(".")[0])
    includes = cuda_headers.folders(sites, major)
    return info | {"cuda_includes": ":".join(map(str, includes)),
                   "cuda_missing": " ".join(cuda_headers.missing(includes, major))}


for key, value in with_cuda_headers(of_archive(Path(sys.argv[1]).resolve()) if sys.argv[1:] else of_wheel()).items():
    print(f"{key}={value}")
