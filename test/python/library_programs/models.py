"""Models of `transformers` built from a config, and adapters of `peft`."""

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from programs.common import EPS, full, gradients, mesh_of, shown, weights
from programs.saved import shared_folder

from .table import program

VOCABULARY = 64
SMALL = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=32)


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, **more))


def mixtral(**more):
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, output_router_logits=True, **more))


MODELS = {
    "llama": llama,
    "llama_tied": lambda: llama(tie_word_embeddings=True),
    "mixtral": mixtral,
}


def token_batches(steps):
    generator = torch.Generator().manual_seed(100 + torch.distributed.get_rank())
    return [torch.randint(0, VOCABULARY, (2, 8), generator=generator) for _ in range(steps)]


def shard_layers(api, model, layers, **options):
    for layer in layers:
        api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


def train_language(model, inputs):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=EPS)
    losses, norms = [], []
    for tokens in inputs:
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, "norms": norms, "gradients": gradients(model), "weights": weights(model)}


@program(ranks=(2,), needs=("transformers",), variants=[(name,) for name in MODELS])
def language_model(api, ranks, name):
    model = MODELS[name]()
    shard_layers(api, model, model.model.layers, mesh=mesh_of(ranks))
    before = shown(model)
    trained = train_language(model, token_batches(3))
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=token_batches(1)[0]).logits
    return {"before": before, "trained": trained, "logits": logits, "state": model.state_dict()}


@program(ranks=(2,), needs=("transformers",))
def language_model_in_bfloat16_with_checkpointing(api, ranks):
    model = llama()
    model.gradient_checkpointing_enable()
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_layers(api, model, model.model.layers, mesh=mesh_of(ranks), mp_policy=policy)
    model.train()
    return train_language(model, token_batches(2))


@program(ranks=(2,), needs=("transformers",))
def generation(api, ranks):
    model = llama()
    shard_layers(api, model, model.model.layers, mesh=mesh_of(ranks), reshard_after_forward=False)
    model.eval()
    tokens = torch.arange(4).unsqueeze(0)  # on all ranks the same length
    with torch.no_grad():
        return model.generate(tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False)


@program(ranks=(2,), needs=("transformers", "peft"), variants=[(name,) for name in ("llama", "llama_tied")])
def adapters(api, ranks, name):
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    model = get_peft_model(MODELS[name](), LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.0))
    shard_layers(api, model, model.base_model.model.model.layers, mesh=mesh_of(ranks))
    before = shown(model)
    trained = train_language(model, token_batches(3))
    adapted = {key: full(value) for key, value in get_peft_model_state_dict(model).items()}
    with model.disable_adapter(), torch.no_grad():
        plain = model(input_ids=token_batches(1)[0]).logits
    return {"before": before, "trained": trained, "adapted": adapted, "plain": plain}


@program(ranks=(2,), needs=("transformers",))
def saved_as_transformers_do(api, ranks):
    """The whole weights in a folder, where a plain model finds them."""
    model = llama()
    shard_layers(api, model, model.model.layers, mesh=mesh_of(ranks))
    train_language(model, token_batches(1))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with shared_folder() as folder:
        if torch.distributed.get_rank() == 0:
            model.save_pretrained(folder, state_dict=whole)
        torch.distributed.barrier()
        return type(llama()).from_pretrained(folder).state_dict()


@program(ranks=(2,), needs=("transformers",))
def built_on_meta_and_filled_from_rank0(api, ranks):
    whole = llama().state_dict() if torch.distributed.get_rank() == 0 else {}
    with torch.device("meta"):
        model = llama()
    shard_layers(api, model, model.model.layers, mesh=mesh_of(ranks))
    before = shown(model)
    model.to_empty(device="cpu")
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # In no state dict: made from the config.
    rotary = model.model.rotary_emb
    rotary.inv_freq = type(rotary)(model.config).inv_freq
    return {"before": before, "trained": train_language(model, token_batches(2))}
