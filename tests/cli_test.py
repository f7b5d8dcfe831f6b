"""The command line tool from outside: cli_test.py TOOL SOURCE_DIR"""
import json
import os
import pathlib
import re
import struct
import subprocess
import tempfile

from cli import CliTest, main, read_safetensors, SOURCE, TEXT, TINY, TOOL, tool, tool_json, without_noreplace


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def floats(content):
    return struct.unpack(f"<{len(content) // 4}f", content)


def relative_error(values, expected):
    difference = sum((a - b) ** 2 for a, b in zip(values, expected, strict=True))
    return (difference / sum(b * b for b in expected)) ** 0.5


class CommandsTest(CliTest):
    def test_schemes_lists_every_row_of_the_table(self):
        table = (SOURCE / "include/gatefold/schemes.def").read_text()
        names = re.findall(r"^GATEFOLD_SCHEME\((\w+),", table, re.M)
        rows = tool_json("schemes")["schemes"]
        self.assertEqual([row["name"] for row in rows], names)
        for row in rows:
            self.assertTrue(row["kernels"], row)
        self.assertEqual(next(row for row in rows if row["name"] == "int4_g128")["bits_per_weight"], 4.125)
        lines = tool("schemes").stdout.decode().splitlines()
        self.assertEqual([line.split()[0] for line in lines[1:]], names)
        self.assertEqual(tool("schemes", "--markdown").stdout.decode().count("\n"), len(names) + 2)

    def test_instruction_set_of_the_environment_is_followed_or_refused(self):
        bench = ["bench", "--shape", "64,64,2,1", "--weight-bytes", "1MB", "--scheme", "int8", "--tokens", "1",
                 "--seconds", "0.1"]
        done = tool(*bench, "--json", env={**os.environ, "GATEFOLD_CPU": "portable"})
        self.assertIn("portable", json.loads(done.stdout)["rows"][0]["kernel"])
        done = tool(*bench, code=1, env={**os.environ, "GATEFOLD_CPU": "z80"})
        self.assertIn(b'GATEFOLD_CPU is "z80", not one of amx, ', done.stderr)

    def test_bad_usage_exits_with_2(self):
        for args in (
            [],
            ["nonsense"],
            ["inspect"],
            ["inspect", TINY, "--nonsense"],
            ["schemes", "--cpu", "z80"],
            ["quantize", TINY, "x"],
            ["quantize", TINY, "x", "--scheme", "int3"],
            ["quantize", TINY, "x", "--scheme", "int8", "--recipe", "r.json"],
            ["eval", TINY, "--text", self.text, "--scheme", "int8", "--recipe", "r.json"],
            ["recommend", TINY, "--calibration", self.text],
            ["recommend", TINY, "--calibration", self.text, "-o", "x", "--budget", "-1"],
            ["recommend", TINY, "-o", "x"],
            ["quantize", TINY, "x", "--scheme", "int8", "--shard-size", "many"],
            ["convert", TINY, "x"],
            ["convert", TINY, "x", "--to", "gguf"],
            ["eval", TINY],
            ["eval", TINY, "--text", "a", "--tokens", "b"],
            ["eval", TINY, "--text", self.text, "--window", "1"],
            ["compare", TINY, "--text", self.text, "--schemes", "int8,int3"],
            ["generate", TINY, "--prompt", "a", "-n", "-1"],
            ["generate", TINY, "--prompt", "a", "--temperature", "-1"],
            ["bench", "--scheme", "int8"],
            ["bench", "--scheme", "int8", "--shape", "1,2,3"],
            ["bench", "--scheme", "int8", "--model", "gpt-7"],
            ["bench", "--scheme", "int8", "--shape", "64,64,2,1", "--from", "nothing"],
            ["bench", "--scheme", "int8", "--shape", "64,64,2,1", "--routing", "all"],
            ["completion", "csh"],
        ):
            with self.subTest(args=args):
                done = tool(*args, code=2)
                self.assertEqual(done.stdout, b"")
                self.assertTrue(done.stderr)

    def test_bad_input_exits_with_1_and_names_it(self):
        missing = self.folder / "missing"
        write_safetensors(self.folder / "narrow.safetensors", {"hidden": ("F32", [1, 4], bytes(16))})
        write_safetensors(self.folder / "integers.safetensors", {"hidden": ("I32", [1, 256], bytes(1024))})
        write_safetensors(self.folder / "other.safetensors", {"output": ("F32", [1, 256], bytes(1024))})
        run = ["run", TINY, "--layer", 0, "--output", self.folder / "out", "--input"]
        for args, words in (
            (["inspect", missing], ["missing"]),
            (["quantize", missing, self.folder / "q", "--scheme", "int8"], ["missing"]),
            (["eval", TINY, "--text", missing], ["missing"]),
            (["eval", TINY, "--text", self.text, "--recipe", missing], ["missing"]),
            (["compare", TINY, "--text", self.text, "--recipes", missing], ["missing"]),
            (["recommend", TINY, "--calibration", missing, "-o", self.folder / "r"], ["missing"]),
            (["eval", TINY, "--text", self.text, "--window", 100000], ["100000", str(len(TEXT))]),
            (["generate", TINY, "--prompt", ""], ["prompt"]),
            (run + [missing], ["missing"]),
            (run + [self.folder / "narrow.safetensors"], ["narrow", "hidden", "[1, 4]", "256"]),
            (run + [self.folder / "integers.safetensors"], ["integers", "hidden", "I32"]),
            (run + [self.folder / "other.safetensors"], ["other", "hidden"]),
        ):
            with self.subTest(args=args):
                done = tool(*args, code=1)
                self.assertEqual(done.stdout, b"")
                for word in words:
                    self.assertIn(word, done.stderr.decode())
                error = tool_json(*args, code=1)["error"]
                self.assertIn(words[0], error["message"])
        self.assertFalse((self.folder / "out").exists())

    def test_a_full_disk_is_an_error(self):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([TOOL, "schemes"], stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"No space", done.stderr)

    def test_inspect(self):
        found = tool_json("inspect", TINY)
        self.assertEqual(found["model_type"], "qwen3_moe")
        self.assertEqual((found["layers"], found["experts"], found["top_k"]), (4, 16, 4))
        self.assertEqual((found["scheme"], found["convention"]), ("bf16", "unquantized"))
        self.assertEqual(found["bytes"], sum(group["bytes"] for group in found["groups"]))
        self.assertEqual(found["tensors"], sum(group["count"] for group in found["groups"]))
        self.assertEqual(found["largest"][0]["bytes"], 131072)
        self.assertIn("layers 0-3", tool("inspect", TINY).stdout.decode())

    def hidden(self, layer):
        reference = read_safetensors(TINY / "reference.safetensors")
        path = self.folder / f"hidden{layer}.safetensors"
        write_safetensors(path, {"hidden": reference[f"layers.{layer}.mlp.input"]})
        return path, floats(reference[f"layers.{layer}.mlp.output"][2])

    def test_run_agrees_with_transformers(self):
        for layer in (0, 3):
            path, expected = self.hidden(layer)
            for precision, tolerance in (("f32", 1e-5), ("native", 4e-3)):
                output = self.folder / f"{layer}.{precision}"
                tool("run", TINY, "--layer", layer, "--input", path, "--output", output, "--precision", precision)
                tensors = read_safetensors(output)
                self.assertEqual(tensors["output"][:2], ("F32", [512, 256]))
                self.assertEqual(tensors["topk_ids"][:2], ("I32", [512, 4]))
                self.assertEqual(tensors["topk_weights"][:2], ("F32", [512, 4]))
                self.assertLess(relative_error(floats(tensors["output"][2]), expected), tolerance)

    def test_run_takes_ids_and_weights(self):
        path, _ = self.hidden(0)
        run = ["run", TINY, "--layer", 0, "--scheme", "fp8_block_afp8", "--input"]
        tool(*run, path, "--output", self.folder / "a")
        routed = read_safetensors(self.folder / "a")
        ids = struct.unpack("<2048i", routed["topk_ids"][2])
        given = self.folder / "given"
        tensors = {"hidden": read_safetensors(path)["hidden"], "topk_weights": routed["topk_weights"]}
        write_safetensors(given, {**tensors, "topk_ids": ("I64", [512, 4], struct.pack("<2048q", *ids))})
        report = tool_json(*run, given, "--output", self.folder / "b")
        self.assertEqual((report["tokens"], report["scheme"]), (512, "fp8_block_afp8"))
        self.assertEqual(read_safetensors(self.folder / "b"), routed)

        write_safetensors(given, tensors)
        self.assertIn(b"topk_ids", tool(*run, given, "--output", self.folder / "c", code=1).stderr)
        for bad in (16, -1, 1 << 40):
            content = struct.pack("<2048q", *ids[:-1], bad)
            write_safetensors(given, {**tensors, "topk_ids": ("I64", [512, 4], content)})
            message = tool(*run, given, "--output", self.folder / "c", code=1).stderr.decode()
            self.assertIn(str(bad), message)
        self.assertFalse((self.folder / "c").exists())

    def test_run_options(self):
        path, _ = self.hidden(0)
        output = self.folder / "out"
        run = ["run", TINY, "--layer", 0, "--input", path, "--output", output]
        tool(*run)
        first = output.read_bytes()
        self.assertIn(b"exists", tool(*run, "--scheme", "int8", code=1).stderr)
        self.assertEqual(output.read_bytes(), first)
        tool(*run, "--scheme", "int8_aint8", "--force")
        quantized = output.read_bytes()
        self.assertNotEqual(quantized, first)
        tool(*run, "--scheme", "int8_aint8", "--weights-only", "--force")
        self.assertNotEqual(output.read_bytes(), quantized)
        described = tool(*run, "--force", "--describe", "--backend", "portable").stderr.decode()
        self.assertIn("cpu.portable.bf16", described)
        self.assertRegex(described, r"weights: \d+ bytes as panels, \d+ % in 2 MiB pages")
        self.assertIn("sparc", tool(*run, "--force", "--backend", "sparc", code=1).stderr.decode())
        on_gpu = subprocess.run([TOOL, *map(str, run), "--force", "--backend", "cuda"], capture_output=True, text=True)
        if on_gpu.returncode == 0:
            self.assertIn("kernel cuda.sm_90a.bf16", on_gpu.stdout)
        else:  # no GPU here, or none that the kernels run on, or no CUDA in the build
            self.assertRegex(on_gpu.stderr, "no NVIDIA GPU|needs? sm_90|no CUDA backend")
        self.assertIn("4", tool(*run[:3], 4, *run[4:], "--force", code=1).stderr.decode())
        portable = tool_json(*run, "--force", "--cpu", "portable")
        self.assertEqual(portable["kernel"], "cpu.portable.bf16")
        write_safetensors(path, {"hidden": ("BF16", [0, 256], b"")})
        self.assertEqual(tool_json(*run, "--force")["tokens"], 0)

    def test_run_writes_where_a_rename_cannot_be_exclusive(self):
        path, _ = self.hidden(0)
        output = self.folder / "out"
        run = ["run", TINY, "--layer", 0, "--input", path, "--output", output]
        tool(*run, preexec_fn=without_noreplace)
        first = output.read_bytes()
        self.assertIn(b"exists", tool(*run, code=1, preexec_fn=without_noreplace).stderr)
        tool(*run, "--force", preexec_fn=without_noreplace)
        self.assertEqual(output.read_bytes(), first)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["hidden0.safetensors", "out", "text"])
        target = self.folder / "quantized"
        tool("quantize", TINY, target, "--scheme", "int8", preexec_fn=without_noreplace)
        self.assertTrue((target / "config.json").exists())

    def test_eval_takes_token_ids(self):
        header = str({"descr": "<i4", "fortran_order": False, "shape": (len(TEXT),)})
        header = header.ljust(117) + "\n"
        npy = self.folder / "tokens.npy"
        npy.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
                        + struct.pack(f"<{len(TEXT)}i", *TEXT))
        from_ids = tool_json("eval", TINY, "--tokens", npy, "--window", 64)
        from_text = tool_json("eval", TINY, "--text", self.text, "--window", 64)
        self.assertEqual(from_ids["bits_per_byte"], from_text["bits_per_byte"])

    def test_generate(self):
        arguments = ["generate", TINY, "--prompt", "The function returns", "-n", 12]
        first = tool_json(*arguments, "--scheme", "mxfp4")
        self.assertEqual(len(first["tokens"]), 12)
        self.assertEqual(bytes(first["tokens"]).decode(), first["text"])
        plain = tool(*arguments, "--scheme", "mxfp4").stdout.decode()
        self.assertEqual(plain, "The function returns" + first["text"] + "\n")
        drawn = [tool_json(*arguments, "--temperature", 1, "--seed", seed)["tokens"] for seed in (1, 1, 2)]
        self.assertEqual(drawn[0], drawn[1])
        self.assertNotEqual(drawn[0], drawn[2])
        self.assertEqual(tool_json(*arguments[:-1], 0)["tokens"], [])

    def test_compare(self):
        arguments = ["compare", TINY, "--text", self.text, "--window", 64, "--schemes", "int4_g32,bf16"]
        rows = tool_json(*arguments)["rows"]
        self.assertEqual([row["scheme"] for row in rows], ["int4_g32", "bf16"])
        self.assertEqual((rows[0]["bits_per_weight"], rows[1]["bits_per_weight"]), (4.5, 16))
        self.assertGreater(rows[0]["kl"], 1e-4)
        self.assertEqual((rows[1]["kl"], rows[1]["top1_agreement"]), (0, 1))
        loss = tool_json("eval", TINY, "--text", self.text, "--window", 64)
        self.assertEqual(rows[1]["bits_per_byte"], loss["bits_per_byte"])
        lines = tool(*arguments, "--limit", 128).stdout.decode().splitlines()
        self.assertEqual([line.split()[0] for line in lines], ["scheme", "int4_g32", "bf16"])

    def test_bench(self):
        arguments = ["--shape", "128,64,4,2", "--scheme", "mxfp4,int8", "--tokens", "1,3", "--seconds", "0.01"]
        rows = tool_json("bench", *arguments, "--weight-bytes", "1MB")["rows"]
        self.assertEqual([(r["scheme"], r["tokens"]) for r in rows],
                         [("mxfp4", 1), ("mxfp4", 3), ("int8", 1), ("int8", 3)])
        for row in rows:
            self.assertLessEqual(row["us_min"], row["us_median"])
            self.assertAlmostEqual(row["read_ratio"], row["gb_per_s"] / row["read_gb_per_s"], places=6)
            self.assertGreater(min(row["weight_bytes"], row["gb_per_s"], row["gflop_per_s"]), 0)

        from_codes = ["bench", "--shape", "64,64,2,1", "--from", "codes", "--scheme"]
        for words, complaint in ((["int8_aint8"], "GPUs only"), (["int8", "--backend", "cuda"], "int8 leaves")):
            self.assertIn(complaint, tool(*from_codes, *words, code=1).stderr.decode())

        # By the layer's own router: of 64 experts, 32 tokens choose most, but not the same ones.
        alone = ["bench", "--shape", "64,64,64,4", "--scheme", "int8", "--tokens", "1,32", "--seconds", "0.01",
                 "--weight-bytes", "1MB", "--from", "ids,hidden"]
        rows = tool_json(*alone)["rows"]
        self.assertEqual([row["from"] for row in rows], ["ids", "hidden"] * 2)
        each = [row["weight_bytes"] for row in rows]
        self.assertEqual(each[0], each[1])  # 4 experts
        self.assertGreater(each[3], 10 * each[1])
        self.assertIn("uniformly", tool(*alone, "--routing", "skew", code=1).stderr.decode())

    def test_bench_routing(self):
        # Two tokens hit as few experts as one, half of all or more, and something between: of 64, 32 each.
        arguments = ["bench", "--shape", "64,32,64,32", "--scheme", "int8", "--tokens", "2", "--seconds", "0.01",
                     "--weight-bytes", "1MB", "--from", "ids,logits"]
        each = {}
        for routing in "uniform", "skew", "single":
            done = tool_json(*arguments, "--routing", routing)
            self.assertEqual(done["routing"], routing)
            self.assertEqual([row["from"] for row in done["rows"]], ["ids", "logits"])
            each[routing] = [row["weight_bytes"] for row in done["rows"]]
            for row in done["rows"]:
                self.assertAlmostEqual(row["us_floor"], max(row["us_read"], row["us_multiply"]))
                self.assertAlmostEqual(row["us_read"], row["weight_bytes"] / row["read_gb_per_s"] / 1e3)
        for i in range(2):
            self.assertLess(each["single"][i], each["skew"][i])
            self.assertLess(each["skew"][i], each["uniform"][i])

    def test_tune(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "cache" / "tuning.json"
            shape = ["--shape", "256,128,16,4", "--scheme", "mxfp4", "--tokens", "1"]
            tuned = tool_json("tune", *shape, "--seconds", "0.001", "--weight-bytes", "1MB", "-o", file)["rows"]
            self.assertEqual([(r["scheme"], r["tokens"]) for r in tuned], [("mxfp4", 1)])
            bench = ["bench", *shape, "--seconds", "0.001", "--weight-bytes", "1MB"]
            for text, complaint in ((None, ""), ("{", "tuning.json"), (json.dumps({"gatefold_tuning": 1, "entries": [
                    {**json.loads(file.read_text())["entries"][0], "cpu": "another"}]}), "nothing for this CPU")):
                if text is not None:
                    file.write_text(text)
                done = subprocess.run([TOOL, *bench], capture_output=True, text=True, check=True,
                                      env={**os.environ, "GATEFOLD_TUNING": str(file)})
                self.assertEqual(len(done.stderr.splitlines()), 1 if complaint else 0, done.stderr)
                self.assertIn(complaint, done.stderr)
            failed = tool("tune", *shape, "-o", file.parent, code=1)
            self.assertIn(file.parent.name, failed.stderr.decode())

    def complete(self, *words):
        """What bash offers for the last of these words."""
        script = tool("completion", "bash").stdout.decode()
        script += 'COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _gatefold; printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", script, "bash", "gatefold", *words], capture_output=True, check=True)
        self.assertEqual(done.stderr, b"")
        return done.stdout.decode().split()

    def test_completion(self):
        help_text = tool("--help").stdout.decode()
        commands = re.findall(r"^  (\w+) ", help_text.split("Subcommands:")[1], re.M)
        self.assertEqual(self.complete("")[: len(commands)], commands)
        self.assertEqual(self.complete("qu"), ["quantize"])
        self.assertEqual(self.complete("quantize", "a", "b", "--scheme", "nv"), ["nvfp4", "nvfp4_anvfp4"])
        self.assertEqual(self.complete("eval", str(TINY), "--cpu", "p"), ["portable"])
        self.assertIn("--temperature", self.complete("generate", "--"))
        self.assertEqual(self.complete("run", "--input", str(TINY / "conf")), [str(TINY / "config.json")])
        for shell in ("zsh", "fish"):
            script = tool("completion", shell).stdout.decode()
            for command in commands:
                self.assertIn(command, script)

    def test_version(self):
        self.assertRegex(tool("--version").stdout.decode(), r"^gatefold \d+\.\d+\.\d+\n$")


if __name__ == "__main__":
    main()
