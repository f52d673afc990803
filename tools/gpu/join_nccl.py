"""Makes libnccl.so.2 out of the pieces of tools/gpu_check --pack-nccl. Usage: join_nccl.py PIECES TARGET"""

import ctypes
import sys
from pathlib import Path

import nccl_pieces


def main():
    pieces, target = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        nccl_pieces.join(pieces, target)
    except nccl_pieces.NcclError as error:
        print(f"join_nccl: {error}")
        return 1
    version = ctypes.c_int()
    ctypes.CDLL(str(target)).ncclGetVersion(ctypes.byref(version))
    print(f"{target}: NCCL {version.value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
