"""Whether two ranks can share what is here: one GPU over NCCL, or on a CPU gloo. Usage: two_ranks.py OUT SECONDS

Starts itself as two processes that gather, sum and average over torch's process group, and looks at the values. They are
ended after SECONDS.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def rank_main(rank, store, limit_s):
    import torch
    import torch.distributed as dist

    on_gpu = os.environ.get("FSDP_TEST_DEVICE", "cuda") == "cuda"
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=0.75 * limit_s))
    own = torch.full((1 << 20,), float(rank + 1), device=device)
    whole = torch.zeros(2 << 20, device=device)
    dist.all_gather_into_tensor(whole, own)
    total = own.clone()
    dist.all_reduce(total)
    found = {"gathered": [whole[0].item(), whole[-1].item()], "sum": total[5].item()}
    if on_gpu:
        piece = torch.zeros(1 << 20, device=device)
        dist.reduce_scatter_tensor(piece, whole * (rank + 1), op=dist.ReduceOp.AVG)
        found["average"] = piece[7].item()
    dist.destroy_process_group()
    wanted = {"gathered": [1.0, 2.0], "sum": 3.0, **({"average": 1.5 * (rank + 1)} if on_gpu else {})}
    print(json.dumps({"rank": rank, "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "", **found}),
          flush=True)
    return 0 if found == wanted else f"rank {rank}: expected {wanted}, found {found}"


def main():
    if sys.argv[1] == "rank":
        return rank_main(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
    out, limit_s = sys.argv[1], float(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([sys.executable, __file__, "rank", str(rank), str(Path(folder) / "store"), str(limit_s)],
                                  stdout=subprocess.PIPE, text=True) for rank in range(2)]
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
    sys.exit(main())
