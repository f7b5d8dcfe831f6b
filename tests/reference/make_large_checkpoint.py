#!/usr/bin/env python3
"""Writes a large, random Qwen3-MoE checkpoint, to measure how fast and in how little memory it converts.

    make_large_checkpoint.py DIRECTORY [--gigabytes 8] [--hidden 2048] [--intermediate 768] [--experts 128]

The weights are normal numbers in bf16, from a pool of 64 Mi that is read from different places, so that the
file is made at the speed of the disk. Needs numpy only.
"""

import argparse
import json
import pathlib

import numpy as np


def make_pool():
    values = np.random.default_rng(0).standard_normal(1 << 26, dtype=np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def layer_tensors(layer, args):
    prefix = f"model.layers.{layer}."
    width, inner = args.hidden, args.intermediate
    yield prefix + "input_layernorm.weight", (width,)
    yield prefix + "post_attention_layernorm.weight", (width,)
    for name in ("q_norm", "k_norm"):
        yield prefix + f"self_attn.{name}.weight", (128,)
    for name, shape in (("q", (4096, width)), ("k", (512, width)), ("v", (512, width)), ("o", (width, 4096))):
        yield prefix + f"self_attn.{name}_proj.weight", shape
    yield prefix + "mlp.gate.weight", (args.experts, width)
    for expert in range(args.experts):
        for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            yield prefix + f"mlp.experts.{expert}.{name}_proj.weight", shape


def write_shard(path, tensors, pool):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors:
        size = int(np.prod(shape)) * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    place = 0
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in tensors:
            left = int(np.prod(shape))
            while left:
                part = min(left, len(pool) - place)
                file.write(pool[place : place + part].data)
                left -= part
                place = (place + part + 12345) % len(pool)
    return at


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    args = parser.parse_args()

    layer_bytes = sum(int(np.prod(shape)) * 2 for _, shape in layer_tensors(0, args))
    layers = max(1, -int(-args.gigabytes * 1e9 // layer_bytes))
    args.directory.mkdir(parents=True)
    pool, weight_map, total = make_pool(), {}, 0
    head = [("model.embed_tokens.weight", (4096, args.hidden)), ("model.norm.weight", (args.hidden,))]
    for layer in range(layers):
        name = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        tensors = list(layer_tensors(layer, args)) + (head if layer == 0 else [])
        total += write_shard(args.directory / name, tensors, pool)
        weight_map.update({tensor: name for tensor, _ in tensors})
        print(f"{name}: {total / 1e9:.1f} GB")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (args.directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "hidden_size": args.hidden, "intermediate_size": 3 * args.intermediate,
        "moe_intermediate_size": args.intermediate, "num_experts": args.experts, "num_experts_per_tok": 8,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 4096, "tie_word_embeddings": True, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "max_position_embeddings": 4096,
    }  # fmt: skip
    (args.directory / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
