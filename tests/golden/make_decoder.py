"""Writes decoder/*: tiny random models and the logits that transformers computes for them in f32.

Needs torch, safetensors and transformers 5. The same seeds give the same models."""

import json
import pathlib
import shutil

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

COMMON = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None)
LENGTH = 160
MODELS = {
    "mixtral-sliding-llama3": (torch.bfloat16, MixtralConfig(
        **COMMON, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, sliding_window=24,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32})),
    "mixtral-f16-tied-linear": (torch.float16, MixtralConfig(
        **COMMON, intermediate_size=24, num_local_experts=3, num_experts_per_tok=1, tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})),
    "qwen2-moe-dynamic": (torch.bfloat16, Qwen2MoeConfig(
        **COMMON, intermediate_size=40, moe_intermediate_size=16, shared_expert_intermediate_size=24,
        num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})),
    "qwen3-moe-mlp-yarn": (torch.bfloat16, Qwen3MoeConfig(
        **COMMON, intermediate_size=40, moe_intermediate_size=16, head_dim=16, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[0],
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                         "original_max_position_embeddings": 32})),
    "qwen3-moe-f32-bias": (torch.float32, Qwen3MoeConfig(
        **COMMON, intermediate_size=24, moe_intermediate_size=8, head_dim=8, num_experts=3, num_experts_per_tok=3,
        norm_topk_prob=False, decoder_sparse_step=2, attention_bias=True, use_sliding_window=True,
        sliding_window=70)),
}

root = pathlib.Path(__file__).parent / "decoder"
shutil.rmtree(root, ignore_errors=True)
for seed, (name, (dtype, config)) in enumerate(MODELS.items()):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key:
                value.copy_(1 + 0.2 * torch.randn_like(value))
            else:
                # Large enough that attention and routing are far from uniform.
                value.copy_(torch.randn_like(value) * (1.0 if "embed" in key else 2.0 * value.shape[-1] ** -0.5))
            if name == "qwen3-moe-f32-bias" and "experts" in key:
                value.copy_(value.bfloat16())  # experts run in 16 bits whatever the rest is
    model.to(dtype).save_pretrained(root / name)
    (root / name / "generation_config.json").unlink(missing_ok=True)

    reference = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32,
                                                     attn_implementation="eager").eval()
    ids = torch.randint(0, config.vocab_size, (1, LENGTH))
    with torch.no_grad():
        logits = reference(ids).logits[0]
    rows = torch.arange(9, LENGTH, 10)
    save_file({"input_ids": ids[0].int(), "rows": rows.int(), "logits": logits[rows].contiguous()},
              root / name / "reference.safetensors")
    print(name, json.dumps({"logits_std": float(logits.std())}))
