"""The programs that train through others' libraries, and their rows: equal to FSDP2 to the bit, but for what is said here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """tolerance: of every number, with the reason why it is not 0. fails: what is raised without fsdp, too, as a regular
    expression; such a row is counted as skipped."""

    tolerance: float = 0
    reason: str = ""
    fails: str = ""


@dataclass(frozen=True)
class Program:
    needs: tuple[str, ...]  # modules
    rows: dict[str, Row]
    ranks: int = 2
    timeout_s: int = 120  # of one run, on an idle machine


def rows(names, **special):
    return {**{name: Row() for name in names.split()}, **special}


SHORT = "short_rows.py"  # in every run of the tests; the others by tools/test --suite trainers
PROGRAMS = {
    SHORT: Program(("accelerate", "transformers"), rows("tutorial accelerate")),
    "accelerate_fsdp2.py": Program(("accelerate", "transformers"), rows(
        "quick_tour plain bf16 fp16 accumulation no_reshard activation_checkpointing activation_offload cpu_offload "
        "size_based_wrap no_wrap tied ignored_modules efficient_loading saved_sharded saved_full exported compiled_blocks "
        "compiled_whole",
        cpu_offload_pinned=Row(fails="Found no NVIDIA driver|No CUDA GPUs are available",
                               reason="memory is pinned by an accelerator; fsdp goes on without one"),
        size_based_wrap_of_list=Row(fails="containers that do not implement forward",
                                    reason="accelerate wraps each module that is large enough, lists of modules, too"))),
    "transformers_trainer.py": Program(("accelerate", "transformers", "peft"), rows(
        "plain bf16 accumulation activation_checkpointing compiled resumed_sharded resumed_full best saved generated lora "
        "lora_resumed")),
    "transformers_sharded.py": Program(("transformers",), rows("fsdp tied mixed_precision hsdp whole_layers")),
    "peft_adapters.py": Program(("transformers", "peft"), rows(
        "lora lora_bf16 lora_embedding rslora_dropout dora ia3 adalora vera oft prompt_tuning restored switched",
        adalora_allocation=Row(fails=r"tolist\(\) is not supported",
                               reason="peft's update_and_allocate calls tolist() on importances, which are DTensors here"))),
    "lightning_model_parallel.py": Program(("lightning",), rows(
        "plain bf16 bf16_true accumulation clipping compiled hsdp_replicates hsdp_shards tensor_parallel resumed_distributed "
        "resumed_full")),
    "trl_trainers.py": Program(("trl", "datasets", "peft"), rows(
        "sft sft_bf16 sft_packed sft_gradient_checkpointing sft_completions sft_lora dpo")),
    "torchtitan_llama3.py": Program(("torchtitan", "spmd_types"), rows(
        "debug debug_hsdp debug_tensor_parallel full_dtensor partial_dtensor no_reshard accumulation hsdp checkpoint compiled "
        "full_recomputation"), timeout_s=240),
    "torchao_weights.py": Program(("torchao",), rows(
        " ".join(f"{kind}{variant}" for variant in ("", "_bf16", "_offloaded", "_restored")
                 for kind in ("float8", "float8_precomputed", "int8_mixed_precision", "int8_quantized", "bitnet", "nf4")
                 if kind + variant != "int8_quantized_restored"),
        int8_quantized_restored=Row(fails="unimplemented operator/function.*aten.is_pinned",
                                    reason="torchao's class cannot be asked for is_pinned, which checkpoints do"))),
    "four_ranks.py": Program(("accelerate", "transformers", "lightning", "torchtitan"), rows(
        "accelerate_hsdp transformers_hsdp transformers_tensor_parallel lightning_hsdp lightning_tensor_parallel "
        "torchtitan_hsdp torchtitan_tensor_parallel"), ranks=4),
}
