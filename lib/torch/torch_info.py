"""Prints what the build needs to know of the torch wheel, one `key=value` a line.

The wheel is LibTorch: headers and libraries are inside. The CUDA toolkit's headers come from the wheels beside torch's, and
from /usr/local/cuda only what those lack: it may be of another version than the libraries that torch loads, and with another
nccl.h ProcessGroupNCCL would get another layout. No file needs nvcc: ATen's and NCCL's kernels are all there are.
"""
import os
import sys
import sysconfig
from pathlib import Path

import cuda_headers

try:
    import torch
except ModuleNotFoundError:
    # pip builds where the environment's own packages are hidden. What it builds is for that environment's torch.
    sys.path.append(sysconfig.get_path("platlib"))
    import torch

cuda = torch.version.cuda or ""
nccl = ".".join(str(part) for part in torch.cuda.nccl.version()) if cuda else ""
# pip's own folder for a build, too, has what the build asked for.
sites = [Path(place) for place in dict.fromkeys([*sys.path, sysconfig.get_path("platlib")])]
major = int(cuda.split(".")[0]) if cuda else 0
includes = cuda_headers.folders(sites, major) if cuda else []
missing = cuda_headers.missing(includes, major) if cuda else []

print(f"version={torch.__version__.split('+')[0]}")
print(f"root={os.path.dirname(torch.__file__)}")
print(f"abi={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
print(f"cuda={cuda}")
print(f"cuda_includes={':'.join(map(str, includes))}")
print(f"cuda_missing={' '.join(missing)}")
print(f"nccl={nccl}")
