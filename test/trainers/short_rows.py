"""What every run of the tests takes of the rows here: those that need no more than the tests' own environment, in one process
group.

Usage: short_rows.py RECORD_FOLDER
"""

import accelerate_cpu
import accelerate_fsdp2
import rows
import torch_tutorial

ROWS = {**torch_tutorial.ROWS, "accelerate": accelerate_fsdp2.ROWS["plain"]}

if __name__ == "__main__":
    accelerate_cpu.shard_on_cpus()
    rows.main(ROWS)
