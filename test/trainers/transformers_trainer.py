"""Trains with transformers.Trainer and FSDP2, also from a checkpoint of its own and with adapters of peft.

Usage: transformers_trainer.py [--rows NAMES] RECORD_FOLDER
"""

import peft
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

import accelerate_cpu
import models
import rows

KEPT = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")  # of what is logged: not the times


def examples(count, seed):
    return [{"input_ids": row, "labels": row} for row in models.tokens(rows=count, seed=seed)]


def trainer(folder, model=None, kind="SHARDED_STATE_DICT", wrap="LlamaDecoderLayer", fsdp=(), **more):
    accelerate_cpu.forget()
    config = {"version": 2, "transformer_layer_cls_to_wrap": [wrap], "state_dict_type": kind, **dict(fsdp)}
    options = dict(output_dir=str(folder / "out"), use_cpu=True, fsdp=True, fsdp_config=config, max_steps=4, logging_steps=1,
                   per_device_train_batch_size=2, per_device_eval_batch_size=2, learning_rate=1e-2, save_strategy="no",
                   report_to="none", disable_tqdm=True, dataloader_pin_memory=False, seed=3)
    made = Trainer(models.llama() if model is None else model, TrainingArguments(**{**options, **more}),
                   train_dataset=examples(32, 1), eval_dataset=examples(8, 2))
    assert made.is_fsdp_enabled
    return made


def record(made):
    return {"losses": [{name: entry[name] for name in KEPT if name in entry} for entry in made.state.log_history],
            "weights": made.accelerator.get_state_dict(made.model), **rows.described(made.model)}


def trained(folder, **more):
    made = trainer(folder, **more)
    made.train()
    return record(made)


class Ends(TrainerCallback):
    """Training ends after a step, as by an interruption; the schedule is that of the whole."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, arguments, state, control, **_):
        control.should_training_stop = state.global_step == self.step


def resumed(folder, kind, make_model=models.llama):
    """The run that goes on from a checkpoint has the losses of the one that was not interrupted."""
    options = dict(kind=kind, save_strategy="steps", save_steps=2)
    whole = trainer(folder / "whole", model=make_model(), **options)
    whole.train()
    first = trainer(folder, model=make_model(), **options)
    first.add_callback(Ends(2))
    first.train()
    dist.barrier()
    again = trainer(folder, model=make_model(), **options)
    again.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    found = record(again)
    assert found["losses"][:4] == record(whole)["losses"][:4]
    return found


def best(folder):
    """The best of the checkpoints, which the last is not, is loaded when training ends."""
    made = trainer(folder, kind="FULL_STATE_DICT", save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
                   load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=0.3)
    made.train()
    return {**record(made), "best": made.state.best_global_step, "evaluated": made.evaluate()["eval_loss"]}


def lora_model():
    return peft.get_peft_model(models.llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


def saved(folder):
    """save_model's files, read by a model that is not sharded."""
    made = trainer(folder, kind="FULL_STATE_DICT")
    made.train()
    made.save_model(str(folder / "saved"))
    dist.barrier()
    read = type(made.accelerator.unwrap_model(made.model)).__mro__
    plain = next(kind for kind in read if kind.__module__.startswith("transformers.models")).from_pretrained(folder / "saved")
    return {**record(made), "read": plain.state_dict()}


def generated(folder):
    made = trainer(folder)
    made.train()
    made.model.eval()
    found = made.model.generate(models.tokens(rows=2, length=4), max_new_tokens=6, do_sample=False)
    return {**record(made), "generated": found, "predicted": made.predict(examples(4, 5)).predictions.tolist()}


ROWS = {
    "plain": trained,
    "bf16": lambda folder: trained(folder, bf16=True),
    "accumulation": lambda folder: trained(folder, gradient_accumulation_steps=2),
    "activation_checkpointing": lambda folder: trained(folder, fsdp={"activation_checkpointing": True}),
    "compiled": lambda folder: trained(folder, torch_compile=True, torch_compile_backend="aot_eager"),
    "resumed_sharded": lambda folder: resumed(folder, "SHARDED_STATE_DICT"),
    "resumed_full": lambda folder: resumed(folder, "FULL_STATE_DICT"),
    "best": best,
    "saved": saved,
    "generated": generated,
    "lora": lambda folder: trained(folder, model=lora_model()),
    "lora_resumed": lambda folder: resumed(folder, "FULL_STATE_DICT", lora_model),
}

if __name__ == "__main__":
    accelerate_cpu.shard_on_cpus()
    rows.main(ROWS)
