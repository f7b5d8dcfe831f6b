"""Writes rope.txt: rotary frequencies as transformers computes them. Needs torch and transformers 5."""

import pathlib

import torch
import transformers
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

# type, rope parameters, head_dim, max_positions, length of the sequence
CASES = [
    ("default", {"rope_theta": 10000.0}, 32, 128, 100),
    ("default", {"rope_theta": 1000000.0}, 128, 40960, 4096),
    ("linear", {"rope_theta": 10000.0, "factor": 4.0}, 32, 512, 300),
    ("dynamic", {"rope_theta": 10000.0, "factor": 2.0}, 32, 64, 60),
    ("dynamic", {"rope_theta": 10000.0, "factor": 4.0}, 32, 64, 200),
    ("llama3", {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}, 128, 131072, 512),
    ("llama3", {"rope_theta": 10000.0, "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0,
                "original_max_position_embeddings": 64}, 32, 512, 512),
    ("yarn", {"rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768}, 128, 131072, 512),
    ("yarn", {"rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
              "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5}, 64, 2560, 512),
    ("yarn", {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False,
              "attention_factor": 1.25}, 32, 512, 512),
]
KEYS = ["rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
        "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"]
DEFAULTS = [10000.0, 1.0, 0, 1.0, 4.0, 32.0, 1.0, 0.0, 0.0, 0.0, True]

lines = [f"# transformers {transformers.__version__}: type, {', '.join(KEYS)}, head_dim, max_positions, length,",
         "# then the attention factor and the inverse frequencies"]
for kind, parameters, head_dim, max_positions, length in CASES:
    config = Qwen3MoeConfig(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim,
                            max_position_embeddings=max_positions,
                            rope_parameters={"rope_type": kind, **parameters})
    rope = Qwen3MoeRotaryEmbedding(config)
    rope(torch.zeros(1), torch.arange(length)[None])
    fields = [float(parameters.get(key, default)) for key, default in zip(KEYS, DEFAULTS)]
    numbers = [float(rope.attention_scaling)] + rope.inv_freq.tolist()
    lines.append(" ".join(map(str, [kind, *fields, head_dim, max_positions, length] +
                              [f"{number:.9g}" for number in numbers])))
pathlib.Path(__file__).with_name("rope.txt").write_text("\n".join(lines) + "\n")
