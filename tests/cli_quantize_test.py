"""The commands that write checkpoints, from outside: cli_quantize_test.py TOOL SOURCE_DIR"""
import json
import os
import pty
import signal
import struct
import subprocess
import time

from cli import CliTest, main, read_safetensors, TINY, TOOL, tool, tool_json


def on_terminal(*args):
    """stderr of a run that believes it is on a terminal."""
    leader, follower = pty.openpty()
    child = subprocess.Popen([TOOL, *map(str, args)], stdout=subprocess.DEVNULL, stderr=follower)
    os.close(follower)
    output = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # Linux: the last writer has closed it
            break
        if not part:
            break
        output += part
    os.close(leader)
    assert child.wait() == 0
    return output.decode(errors="replace")


class QuantizeTest(CliTest):
    def test_quantize_and_eval_agree_with_eval_on_load(self):
        for scheme in ("int4_g32_aint8", "nvfp4", "fp8_tensor_afp8"):
            with self.subTest(scheme=scheme):
                target = self.folder / scheme
                report = tool_json("quantize", TINY, target, "--scheme", scheme)
                self.assertEqual(report["shards"], 1)
                self.assertEqual(tool_json("inspect", target)["scheme"], scheme)
                arguments = ["--text", self.text, "--window", 64]
                stored = tool_json("eval", target, *arguments)
                loaded = tool_json("eval", TINY, "--scheme", scheme, *arguments)
                for key in ("scheme", "bits_per_byte", "nats_per_token", "perplexity", "tokens"):
                    self.assertEqual(stored[key], loaded[key], key)
                self.assertEqual(stored["tokens"], 4 * 63)
                self.assertGreater(stored["seconds"], 0)

    def test_recipes_from_recommend_to_compare(self):
        recipe, target = self.folder / "recipe.json", self.folder / "mixed"
        calibration = self.folder / "calibration"
        calibration.write_bytes((TINY / "calibration.txt").read_bytes()[:2048])
        found = tool_json("recommend", TINY, "--budget", 4.4, "--schemes", "uint4_g32,int4_g128", "--calibration",
                          calibration, "-o", recipe)
        chosen = [row["scheme"] for row in found["rows"] if row["chosen"]]
        self.assertEqual((len(found["rows"]), sorted(chosen)), (8, ["int4_g128"] * 2 + ["uint4_g32"] * 2))
        self.assertEqual(found["bits_per_weight"], (4.125 + 4.625) / 2)
        self.assertIn("chosen", tool("recommend", TINY, "--schemes", "mxfp4", "--calibration", calibration, "-o",
                                     recipe).stdout.decode())

        rules = json.loads(recipe.read_text())
        self.assertIn("rtn: 4.2500 bits", rules["comment"])
        rules["rules"][0]["modules"] = r"model\.layers\.[01]\.mlp\.experts"
        rules["rules"].append({"modules": ".*", "scheme": "fp8_block"})
        rules["kv_cache"] = "fp8_e4m3"
        recipe.write_text(json.dumps(rules))
        report = tool_json("quantize", TINY, target, "--recipe", recipe, "--calibration", calibration)
        self.assertEqual(report["recipe"], str(recipe))
        inspected = tool_json("inspect", target)
        self.assertEqual((inspected["scheme"], inspected["kv_cache"]), (None, "fp8_e4m3"))
        self.assertEqual([layers["stored"] for layers in inspected["expert_layers"]], ["mxfp4", "fp8_block"])
        self.assertIn("compressed-tensors float-quantized", {group["convention"] for group in inspected["groups"]})
        self.assertIn("fp8_e4m3", tool("inspect", target).stdout.decode())

        arguments = ["--text", self.text, "--window", 64]
        self.assertEqual(tool_json("eval", target, *arguments)["scheme"], "mxfp4 and fp8_block")
        rows = tool_json("compare", TINY, *arguments, "--recipes", recipe, "--with", target)["rows"]
        self.assertEqual([row["name"] for row in rows], [str(recipe), str(target)])
        for row in rows:
            self.assertEqual(row["scheme"], "mxfp4 and fp8_block")
            self.assertGreater(row["kl"], 0)
        self.assertEqual(tool_json("generate", target, "--prompt", "The", "-n", 3)["scheme"], "mxfp4 and fp8_block")

    def test_convert_there_and_back(self):
        quantized, gptq, back = (self.folder / name for name in ("quantized", "gptq", "back"))
        tool("quantize", TINY, quantized, "--scheme", "uint4_g64")
        report = tool_json("convert", quantized, gptq, "--to", "gptq")
        self.assertEqual((report["convention"], report["shards"]), ("gptq", 1))
        found = tool_json("inspect", gptq)
        self.assertEqual((found["scheme"], found["convention"]), ("uint4_g64", "gptq"))
        conventions = {group["convention"] for group in found["groups"]}
        self.assertEqual(conventions, {"unquantized", "gptq v2, 4 bits, zero points"})
        self.assertIn("gptq v2, 4 bits", tool("inspect", gptq).stdout.decode())
        tool("convert", gptq, back, "--to", "compressed-tensors")
        names = ["model.layers.1.mlp.experts.3.up_proj.weight_packed", "model.norm.weight"]
        before, after = (read_safetensors(path / "model.safetensors") for path in (quantized, back))
        self.assertEqual(before.keys(), after.keys())
        for name in names:
            self.assertEqual(before[name], after[name])
        losses = [tool_json("eval", path, "--text", self.text, "--window", 64)["nats_per_token"] for path in (quantized, gptq)]
        self.assertEqual(*losses)

    def test_convert_refuses_what_would_lose_something(self):
        quantized = self.folder / "quantized"
        tool("quantize", TINY, quantized, "--scheme", "int8_aint8")
        done = tool("convert", quantized, self.folder / "awq", "--to", "awq", code=1)
        self.assertIn("awq cannot say that activations are int8", done.stderr.decode())
        self.assertFalse((self.folder / "awq").exists())

    def test_calibrated_quantization_and_its_loss(self):
        target = self.folder / "gptq"
        arguments = ["--scheme", "int4_g128", "--method", "gptq"]
        done = tool("quantize", TINY, target, *arguments, code=1)
        self.assertIn("--calibration", done.stderr.decode())
        arguments += ["--calibration", TINY / "calibration.txt", "--calibration-tokens", 2048]
        report = tool_json("quantize", TINY, target, *arguments)
        self.assertEqual((report["method"], report["tokens"], report["resumed_layers"]), ("gptq", 2048, 0))
        self.assertEqual(tool_json("inspect", target)["scheme"], "int4_g128")
        rows = tool_json("compare", TINY, "--text", TINY / "valid.txt", "--limit", 4096, "--schemes", "int4_g128",
                         "--with", target)["rows"]
        self.assertEqual([row["name"] for row in rows], ["int4_g128", str(target)])
        self.assertEqual([row["scheme"] for row in rows], ["int4_g128"] * 2)
        self.assertLess(rows[1]["kl"], rows[0]["kl"])
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["gptq", "text"])

    def test_options_that_would_be_ignored_are_refused(self):
        """A calibration that was asked for and did not take place would look like one that did."""
        recipe, missing, target = self.folder / "recipe", self.folder / "missing", self.folder / "target"
        recipe.write_text(json.dumps({"rules": [{"modules": ".*", "scheme": "int8"}], "kv_cache": "fp8_e4m3"}))
        quantize = ["quantize", TINY, target, "--scheme", "int4_g128"]
        recommend = ["recommend", TINY, "-o", target, "--schemes", "mxfp4", "--calibration", self.text]
        calibrated = ["--calibration", self.text, "--method"]
        for args, option, need in (
            (quantize + ["--calibration", missing], "--calibration", "--method gptq"),
            (quantize + ["--method", "rtn", "--calibration", self.text], "--calibration", "kv_cache"),
            (quantize + ["--calibration-tokens", 64], "--calibration-tokens", "--calibration"),
            (quantize + ["--window", 64], "--window", "--calibration"),
            (quantize[:3] + ["--recipe", recipe, "--window", 64], "--window", "--calibration"),
            (quantize[:3] + ["--recipe", recipe, "--calibration", self.text, "--resume"], "--resume", "--method gptq"),
            (quantize + ["--resume"], "--resume", "--method gptq"),
            (quantize + ["--backend", "cuda"], "--backend", "--method gptq"),
            (quantize + ["--damping", 0.1], "--damping", "--method gptq or smoothquant"),
            (quantize + ["--all-experts"], "--all-experts", "--method gptq"),
            (quantize + ["--min-samples", 9], "--min-samples", "--method gptq"),
            (quantize + ["--activation-scale", "mse"], "--activation-scale", "--method awq or smoothquant"),
            (quantize + ["--method", "gptq"], "--method", "--calibration"),
            (quantize + calibrated + ["gptq", "--scale-search"], "--scale-search", "--method rtn"),
            (quantize + calibrated + ["awq", "--allow-nonfinite"], "--allow-nonfinite", "--method rtn"),
            (quantize + calibrated + ["awq", "--damping", 0.1], "--damping", "--method gptq or smoothquant"),
            (quantize + calibrated + ["gptq", "--activation-scale", "mse"], "--activation-scale", "--method awq"),
            (recommend + ["--damping", 0.1], "--damping", "--method gptq"),
            (recommend + ["--all-experts"], "--all-experts", "--method gptq"),
            (recommend + ["--method", "gptq", "--scale-search"], "--scale-search", "--method rtn"),
        ):
            with self.subTest(args=args):
                error = tool_json(*args, code=1)["error"]
                self.assertEqual(error["code"], "invalid_argument")
                self.assertTrue(error["message"].startswith(option + " needs "), error)
                self.assertIn(need, error["message"])
        self.assertFalse(target.exists())
        tool(*quantize, "--method", "rtn", "--scale-search", "--allow-nonfinite", "--backend", "cpu")

    def test_quantize_never_touches_what_exists(self):
        target = self.folder / "target"
        target.mkdir()
        (target / "precious").write_text("x")
        done = tool("quantize", TINY, target, "--scheme", "int8", code=1)
        self.assertIn("target", done.stderr.decode())
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["target", "text"])
        self.assertEqual((target / "precious").read_text(), "x")

    def test_shards(self):
        target = self.folder / "target"
        report = tool_json("quantize", TINY, target, "--scheme", "mxfp4", "--shard-size", "1MB")
        shards = sorted(target.glob("*.safetensors"))
        self.assertEqual(len(shards), report["shards"])
        self.assertGreater(len(shards), 4)
        self.assertTrue(all(shard.stat().st_size < 1_100_000 for shard in shards))
        self.assertTrue((target / "model.safetensors.index.json").exists())
        self.assertEqual(tool_json("inspect", target)["files"], len(shards))

    def large_checkpoint(self):
        """About 1 GB of zeros that take no space on the disk."""
        source = self.folder / "large"
        source.mkdir()
        config = json.loads((TINY / "config.json").read_text())
        layers, experts, hidden, width = 4, 32, 2048, 640
        config.update(num_hidden_layers=layers, hidden_size=hidden, moe_intermediate_size=width)
        config["num_experts" if "num_experts" in config else "num_local_experts"] = experts
        (source / "config.json").write_text(json.dumps(config))
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head = config["head_dim"]
        shapes = {"model.embed_tokens.weight": [256, hidden], "model.norm.weight": [hidden]}
        for layer in range(layers):
            name = f"model.layers.{layer}."
            shapes[name + "input_layernorm.weight"] = shapes[name + "post_attention_layernorm.weight"] = [hidden]
            for key, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                shapes[f"{name}self_attn.{key}_proj.weight"] = [rows * head, hidden]
            shapes[name + "self_attn.o_proj.weight"] = [hidden, heads * head]
            shapes[name + "self_attn.q_norm.weight"] = shapes[name + "self_attn.k_norm.weight"] = [head]
            shapes[name + "mlp.gate.weight"] = [experts, hidden]
            for expert in range(experts):
                for key in ("gate", "up"):
                    shapes[f"{name}mlp.experts.{expert}.{key}_proj.weight"] = [width, hidden]
                shapes[f"{name}mlp.experts.{expert}.down_proj.weight"] = [hidden, width]
        header, end = {}, 0
        for name, shape in shapes.items():
            begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with open(source / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        return source

    def test_an_interrupted_conversion_leaves_nothing(self):
        source = self.large_checkpoint()
        before = sorted(self.folder.iterdir())
        child = subprocess.Popen(
            [TOOL, "quantize", source, self.folder / "target", "--scheme", "int4_g32", "--scale-search", "--threads", "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while sorted(self.folder.iterdir()) == before:  # until it has begun to write
            self.assertIsNone(child.poll())
            time.sleep(0.002)
        child.send_signal(signal.SIGINT)
        stdout, stderr = child.communicate(timeout=120)
        self.assertEqual(child.returncode, 1, stderr)
        self.assertIn(b"cancelled", stderr)
        self.assertEqual(sorted(self.folder.iterdir()), before)

    def test_progress(self):
        arguments = ["quantize", TINY, self.folder / "q", "--scheme", "int8"]
        shown = on_terminal(*arguments)
        self.assertRegex(shown, r"\r.*100 %  14\.\d+ of 14\.\d+ MB .*MB/s .*0 s left")
        arguments[2] = self.folder / "plain"
        plain = tool(*arguments).stderr
        self.assertNotIn(b"\r", plain)
        self.assertNotIn(b"\033", plain)


if __name__ == "__main__":
    main()
