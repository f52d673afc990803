"""Trains torchtitan's llama3 debug model by torchtitan's own entry point, on CPUs, with a generated tokenizer and text.

Usage: torchtitan_llama3.py [--rows NAMES] RECORD_FOLDER
"""

import json
import os
import shutil
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
import torch._utils
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.attention.flex_attention import create_mask

import models
import rows

WORDS = 500
FOLDER = "tests/assets"  # where the debug model's configuration looks for tokenizer and text


def write_assets(folder):
    """In the working folder of the row, as if that were torchtitan's checkout."""
    tokenizer, text = folder / FOLDER / "tokenizer", folder / FOLDER / "c4_test"
    for each in (tokenizer, text):
        each.mkdir(parents=True)
    words = ["<|begin_of_text|>", "<|end_of_text|>", "<unknown>", *(f"w{number}" for number in range(WORDS))]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unknown>"))
    made.pre_tokenizer = WhitespaceSplit()
    made.add_special_tokens(words[:2])
    made.save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"bos_token": words[0], "eos_token": words[1]}))
    lines = [" ".join(f"w{(17 * number) % WORDS}" for number in row) for row in models.tokens(rows=200, length=60).tolist()]
    (text / "data.json").write_text("\n".join(json.dumps({"text": line}) for line in lines))


def prepare():
    """torchtitan takes the accelerator that torch finds, else CUDA; here it finds the CPU, with what torchtitan asks of one.
    And what torchtitan does where it makes the process group, which is there already."""
    torch.autograd.set_multithreading_enabled(False)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "cpu"
    torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 34)
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None


def dense_attention(query, key, value, *, block_mask, scale, enable_gqa, **_):
    """FlexAttention has no backward on CPUs."""
    mask = create_mask(block_mask.mask_mod, query.size(0), 1, query.size(2), key.size(2), device="cpu")
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


def sum_undivided(model):
    """What torchtitan does where it sharded the model, and without the reduction that multiplies, which gloo has not."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def run(folder, *arguments):
    """What `torchrun -m torchtitan.train --module llama3 --config llama3_debugmodel` does."""
    from torchtitan import train
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.distributed import fsdp, utils
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.trainer import Trainer

    if dist.get_rank() == 0:
        write_assets(folder)
    # Else DTensors get the mesh of an earlier run, which is equal but another object, and FSDP2 refuses that.
    _clear_sharding_prop_cache()
    dist.barrier()
    os.chdir(folder)
    losses, trainers = [], []

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, **_):
        losses.append([step, global_avg_loss, global_max_loss, grad_norm])

    def close(self):
        trainers.append(self)

    argv = ["train.py", "--module", "llama3", "--config", "llama3_debugmodel", "--training.steps", "3", "--debug.seed", "1",
            *arguments]
    replaced = ((sys, "argv", argv), (MetricsProcessor, "log", log), (Trainer, "close", close),
                (dist, "destroy_process_group", lambda: None), (utils, "set_pg_timeouts", lambda **_: None),
                (FlexAttention, "_compiled_flex_attn", dense_attention),
                (fsdp, "disable_fsdp_gradient_division", sum_undivided))
    with ExitStack() as stack:
        for each in replaced:
            stack.enter_context(mock.patch.object(*each))
        train.main()
    model, = trainers[0].model_parts
    return {"losses": losses, "weights": rows.digests(model.named_parameters()), **rows.described(model)}


def checkpointed(folder):
    """What follows a checkpoint is the same as without the interruption."""
    options = [*SMALL, *PARTIAL, "--checkpoint.enable", "--checkpoint.interval", "2"]
    (folder / "whole").mkdir(exist_ok=True)
    whole = run(folder / "whole", *options)
    (folder / "again").mkdir(exist_ok=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(folder / "whole" / "outputs" / "checkpoint" / "step-2",
                        folder / "again" / "outputs" / "checkpoint" / "step-2")
    again = run(folder / "again", *options)
    assert again["losses"] == whole["losses"][2:]
    return again


SMALL = ["--training.seq_len", "64", "--training.local_batch_size", "2"]
CHECKED = ["--debug.spmd_typechecking", "activation-checkpoint:full"]
PARTIAL = ["--parallelism.spmd_backend", "partial_dtensor"]
ROWS = {
    # The default backend: parameters that spmd_types annotates.
    "debug": lambda folder: run(folder, *SMALL),
    "debug_hsdp": lambda folder: run(folder, *SMALL, "--parallelism.data_parallel_replicate_degree", "2",
                                     "--parallelism.data_parallel_shard_degree", "1", *CHECKED),
    "debug_tensor_parallel": lambda folder: run(folder, *SMALL, "--parallelism.tensor_parallel_degree", "2", *CHECKED),
    "full_dtensor": lambda folder: run(folder, *SMALL, "--parallelism.spmd_backend", "full_dtensor"),
    "partial_dtensor": lambda folder: run(folder, *SMALL, *PARTIAL),
    "no_reshard": lambda folder: run(folder, *SMALL, *PARTIAL, "--parallelism.fsdp_reshard_after_forward", "never"),
    "accumulation": lambda folder: run(folder, *SMALL, *PARTIAL, "--training.global_batch_size", "8"),
    "hsdp": lambda folder: run(folder, *SMALL, *PARTIAL, "--parallelism.data_parallel_replicate_degree", "2",
                               "--parallelism.data_parallel_shard_degree", "1"),
    "checkpoint": checkpointed,
    "compiled": lambda folder: run(folder, *SMALL, *PARTIAL, "--compile.enable", "--compile.backend", "aot_eager"),
    "full_recomputation": lambda folder: run(folder, *SMALL, *PARTIAL, "activation-checkpoint:full"),
}

if __name__ == "__main__":
    prepare()
    rows.main(ROWS)
