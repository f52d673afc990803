"""Trains adapters of peft on a model that is sharded by fully_shard, block by block, as its documentation and recipes do.

Usage: peft_adapters.py [--rows NAMES] RECORD_FOLDER
"""

import copy

import peft
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import models
import rows

TARGETS = ["q_proj", "v_proj", "down_proj"]


def by_layers(model, compute=None):
    policy = MixedPrecisionPolicy(param_dtype=compute)
    for layer in [each for each in model.modules() if isinstance(each, LlamaDecoderLayer)]:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def sharded(config, compute=None):
    return by_layers(peft.get_peft_model(models.llama(), config), compute)


def train(model, optimizer, first=0, steps=4, after=None):
    losses = []
    for step in range(first, first + steps):
        batch = models.tokens(rows=4, seed=10 * step + dist.get_rank())
        losses.append(model(input_ids=batch, labels=batch).loss)
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if after:
            after(step)
        optimizer.zero_grad()
    return losses


def optimizer_of(model):
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def trained(config, compute=None):
    model = sharded(config, compute)
    losses = train(model, optimizer_of(model))
    return {"losses": losses, "weights": dict(model.named_parameters()), **rows.described(model)}


def adaptive(allocate):
    """AdaLoRA takes ranks away by its importance scores, which it reads from weights and gradients after each step."""
    config = peft.AdaLoraConfig(init_r=6, target_r=2, tinit=1, tfinal=1, deltaT=1, total_step=5, target_modules=TARGETS)
    model = sharded(config)
    losses = train(model, optimizer_of(model), after=model.base_model.update_and_allocate if allocate else None)
    return {"losses": losses, "weights": dict(model.named_parameters()), **rows.described(model)}


def restored(folder):
    """State dicts of torch.distributed.checkpoint go to a model and an optimizer that are new."""
    config = peft.LoraConfig(r=4, target_modules=TARGETS)
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = sharded(config)
    optimizer = optimizer_of(model)
    train(model, optimizer)
    states = get_model_state_dict(model, options=whole), get_optimizer_state_dict(model, optimizer, options=whole)
    other = sharded(config)
    other_optimizer = optimizer_of(other)
    states = copy.deepcopy(states)  # or both optimizers count steps in the same tensors
    set_model_state_dict(other, states[0], options=whole)
    set_optimizer_state_dict(other, other_optimizer, states[1], options=whole)
    losses = train(other, other_optimizer, first=4)
    assert rows.exact(losses) == rows.exact(train(model, optimizer, first=4))
    return {"losses": losses, "weights": dict(other.named_parameters()), "adapter": peft.get_peft_model_state_dict(other),
            "states": get_optimizer_state_dict(other, other_optimizer)["state"], **rows.described(other)}


def switched(folder):
    """Two adapters, trained in turn; then without any."""
    config = peft.LoraConfig(r=4, target_modules=TARGETS)
    model = peft.get_peft_model(models.llama(), config, adapter_name="first")
    model.add_adapter("second", config)
    by_layers(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(model, optimizer)
    model.set_adapter("second")
    losses += train(model, optimizer)
    with model.disable_adapter():
        batch = models.tokens(rows=4)
        losses.append(model(input_ids=batch, labels=batch).loss)
    return {"losses": losses, "weights": dict(model.named_parameters()), **rows.described(model)}


ROWS = {
    "lora": lambda folder: trained(peft.LoraConfig(r=4, target_modules=TARGETS)),
    "lora_bf16": lambda folder: trained(peft.LoraConfig(r=4, target_modules=TARGETS), torch.bfloat16),
    "lora_embedding": lambda folder: trained(peft.LoraConfig(r=4, target_modules=[*TARGETS, "embed_tokens"],
                                                             modules_to_save=["lm_head"])),
    "rslora_dropout": lambda folder: trained(peft.LoraConfig(r=4, use_rslora=True, lora_dropout=0.1, target_modules=TARGETS)),
    "dora": lambda folder: trained(peft.LoraConfig(r=4, use_dora=True, target_modules=TARGETS)),
    "ia3": lambda folder: trained(peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"],
                                                 feedforward_modules=["down_proj"])),
    "adalora": lambda folder: adaptive(False),
    "adalora_allocation": lambda folder: adaptive(True),
    "vera": lambda folder: trained(peft.VeraConfig(r=8, target_modules=["q_proj", "v_proj"])),
    "oft": lambda folder: trained(peft.OFTConfig(oft_block_size=8, target_modules=["q_proj", "v_proj"])),
    "prompt_tuning": lambda folder: trained(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "restored": restored,
    "switched": switched,
}

if __name__ == "__main__":
    rows.main(ROWS)
