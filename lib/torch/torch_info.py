"""Prints what the build needs to know of the torch wheel, one `key=value` a line.

The wheel is LibTorch: headers and libraries are inside. The CUDA toolkit's headers come from the wheels that torch itself
depends on, not from /usr/local: those may be of another version than the libraries that torch loads, and with another
nccl.h ProcessGroupNCCL would get another layout. No file needs nvcc: ATen's and NCCL's kernels are all there are.
"""
import os

import torch

root = os.path.dirname(torch.__file__)
nvidia = os.path.join(os.path.dirname(root), "nvidia")
cuda_include = os.path.join(nvidia, "cu13", "include")
nccl_include = os.path.join(nvidia, "nccl", "include")
nccl = ".".join(str(part) for part in torch.cuda.nccl.version()) if torch.version.cuda else ""

print(f"version={torch.__version__.split('+')[0]}")
print(f"root={root}")
print(f"abi={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
print(f"cuda={torch.version.cuda or ''}")
print(f"cuda_include={cuda_include if os.path.exists(os.path.join(cuda_include, 'cuda_runtime_api.h')) else ''}")
print(f"nccl_include={nccl_include if os.path.exists(os.path.join(nccl_include, 'nccl.h')) else ''}")
print(f"nccl={nccl}")
