"""Trains with trl's SFTTrainer and DPOTrainer, over FSDP2: a generated tokenizer and generated texts.

Usage: trl_trainers.py [--rows NAMES] RECORD_FOLDER
"""

import peft
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import accelerate_cpu
import models
import rows

SPECIAL = ["<pad>", "<end>", "<unknown>"]


def word_tokenizer():
    """Of one token per word; there are as many as the model has rows."""
    words = SPECIAL + [f"w{number}" for number in range(models.VOCABULARY - len(SPECIAL))]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unknown>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>")


def texts(count, length, seed):
    return [" ".join(f"w{number % 40}" for number in row) for row in models.tokens(count, length, seed).tolist()]


def options(folder, kind, **more):
    accelerate_cpu.forget()
    return kind(**{**dict(output_dir=str(folder / "out"), use_cpu=True, fsdp=True, max_steps=4, logging_steps=1,
                          fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
                          per_device_train_batch_size=2, learning_rate=1e-2, save_strategy="no", report_to="none",
                          disable_tqdm=True, dataloader_pin_memory=False, seed=3, bf16=False, max_length=32,
                          gradient_checkpointing=False), **more})


def record(trainer):
    trainer.train()
    kept = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "rewards/margins")
    return {"losses": [{name: entry[name] for name in kept if name in entry} for entry in trainer.state.log_history],
            "weights": trainer.accelerator.get_state_dict(trainer.model), **rows.described(trainer.model)}


def tuned(folder, adapter=None, **more):
    data = Dataset.from_dict({"text": texts(32, 12, 1)})
    return record(SFTTrainer(models.llama(), options(folder, SFTConfig, **more), train_dataset=data,
                             processing_class=word_tokenizer(), peft_config=adapter))


def completed(folder):
    """Prompts are not trained on."""
    data = Dataset.from_dict({"prompt": texts(32, 6, 1), "completion": texts(32, 6, 2)})
    return record(SFTTrainer(models.llama(), options(folder, SFTConfig, completion_only_loss=True), train_dataset=data,
                             processing_class=word_tokenizer()))


def preferred(folder):
    """The reference model is sharded beside the one that is trained."""
    data = Dataset.from_dict({"prompt": texts(32, 6, 1), "chosen": texts(32, 6, 2), "rejected": texts(32, 6, 3)})
    return record(DPOTrainer(models.llama(), models.llama(), options(folder, DPOConfig), train_dataset=data,
                             processing_class=word_tokenizer()))


ROWS = {
    "sft": tuned,
    "sft_bf16": lambda folder: tuned(folder, bf16=True),
    "sft_packed": lambda folder: tuned(folder, packing=True, packing_strategy="wrapped", max_length=16),
    "sft_gradient_checkpointing": lambda folder: tuned(folder, gradient_checkpointing=True),
    "sft_completions": completed,
    "sft_lora": lambda folder: tuned(folder, adapter=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])),
    "dpo": preferred,
}

if __name__ == "__main__":
    accelerate_cpu.shard_on_cpus()
    rows.main(ROWS)
