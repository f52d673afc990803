"""Whether two ranks can share what is here: one GPU over NCCL, or on a CPU gloo. Usage: two_ranks.py OUT SECONDS

Starts itself as two processes that gather, sum and average over torch's process group, and looks at the values. They are
ended after SECONDS. It also tells, without a judgement, what this torch makes of a bfloat16 sum that NCCL is to scale.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test" / "gpu"))

import shared_gpu  # noqa: E402

NUMEL = 1 << 16


def values(on_gpu, rank, device):
    """(found, wanted) of collectives over two ranks, of which rank r gives r + 1."""
    import torch
    import torch.distributed as dist

    own = torch.full((NUMEL,), float(rank + 1), device=device)
    whole = torch.zeros(2 * NUMEL, device=device)
    dist.all_gather_into_tensor(whole, own)
    total = own.clone()
    dist.all_reduce(total)
    found = {"gathered": [whole[0].item(), whole[-1].item()], "sum": total[5].item()}
    wanted = {"gathered": [1.0, 2.0], "sum": 3.0}
    if on_gpu:  # gloo has no average
        for dtype in (torch.float32, torch.bfloat16):
            piece = torch.zeros(NUMEL, device=device, dtype=dtype)
            dist.reduce_scatter_tensor(piece, whole.to(dtype), op=dist.ReduceOp.AVG)
            name = f"average, {str(dtype).removeprefix('torch.')}"
            found[name], wanted[name] = piece[7].item(), float(rank + 1)
    return found, wanted


def scaled_by_nccl(device):
    """A half of 1 + 1 in bfloat16: 0 where torch hands NCCL the half in four bytes, of which it reads two."""
    import torch
    import torch.distributed as dist

    one = torch.ones(NUMEL, device=device, dtype=torch.bfloat16)
    try:
        dist.all_reduce(one, op=dist._make_nccl_premul_sum(0.5))
    except (AttributeError, RuntimeError) as error:
        return f"refused: {str(error).splitlines()[0]}"
    return one[3].item()


def rank_main(rank, store, limit_s):
    import torch
    import torch.distributed as dist

    on_gpu = os.environ.get("FSDP_TEST_DEVICE", "cuda") == "cuda"
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=0.75 * limit_s))
    begin = time.monotonic()
    found, wanted = values(on_gpu, rank, device)
    facts = {"seconds": round(time.monotonic() - begin, 2)}
    if on_gpu:
        facts |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "half of 2, scaled by NCCL": scaled_by_nccl(device)}
    dist.destroy_process_group()
    print(json.dumps({"figure": f"two ranks, rank {rank}", **facts, **found}), flush=True)
    return 0 if found == wanted else f"rank {rank}: expected {wanted}, found {found}"


def run(out, limit_s):
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([sys.executable, __file__, "rank", str(rank), str(Path(folder) / "store"), str(limit_s)],
                                  stdout=subprocess.PIPE, text=True, env={**os.environ, **shared_gpu.environment(rank)})
                 for rank in range(2)]
        try:
            texts = [rank.communicate(timeout=limit_s)[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            for rank in ranks:
                rank.kill()
            return f"two ranks did not end within {limit_s:.0f} s"
    with open(out, "a") as record:
        record.write("".join(line + "\n" for text in texts for line in text.splitlines() if line.startswith("{")))
    failed = [rank for rank, process in enumerate(ranks) if process.returncode != 0]
    return f"rank {', '.join(map(str, failed))} failed; two ranks cannot share what is here" if failed else 0


if __name__ == "__main__":
    sys.exit(rank_main(int(sys.argv[2]), sys.argv[3], float(sys.argv[4])) if sys.argv[1] == "rank"
             else run(sys.argv[1], float(sys.argv[2])))
