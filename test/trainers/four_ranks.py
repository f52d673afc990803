"""What takes four ranks: replicas of two shards, and tensor parallelism beside shards.

Usage: four_ranks.py [--rows NAMES] RECORD_FOLDER
"""

import accelerate_cpu
import accelerate_fsdp2
import lightning_model_parallel
import rows
import torchtitan_llama3
import transformers_sharded


def torchtitan(folder, *options):
    torchtitan_llama3.prepare()
    return torchtitan_llama3.run(folder, *torchtitan_llama3.SMALL, *torchtitan_llama3.PARTIAL, *options)


ROWS = {
    "accelerate_hsdp": accelerate_fsdp2.hybrid,
    "transformers_hsdp": lambda folder: transformers_sharded.trained(folder, fsdp_size=2, dp_replicate_size=2),
    "transformers_tensor_parallel": lambda folder: transformers_sharded.trained(
        folder, clips=False, fsdp_size=2, tp_size=2, tp_plan="auto"),
    "lightning_hsdp": lambda folder: lightning_model_parallel.hybrid(folder, 2, 2),
    "lightning_tensor_parallel": lambda folder: lightning_model_parallel.trained(
        folder, lightning_model_parallel.Model(tensor_parallel=True), data=2, tensor=2),
    "torchtitan_hsdp": lambda folder: torchtitan(folder, "--parallelism.data_parallel_replicate_degree", "2",
                                                 "--parallelism.data_parallel_shard_degree", "2"),
    "torchtitan_tensor_parallel": lambda folder: torchtitan(folder, "--parallelism.tensor_parallel_degree", "2"),
}

if __name__ == "__main__":
    accelerate_cpu.shard_on_cpus()
    rows.main(ROWS)
