"""python -m gatefold tokenize, and the rest of the command line."""
import json
import resource
import subprocess
import sys

import numpy as np
import pytest

from common import TINY

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")


def gatefold(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "gatefold", *map(str, arguments)], capture_output=True, text=True, **options)


@pytest.fixture
def model(tmp_path):
    """A byte-level tokenizer whose ids are those of tiny-moe: bytes."""
    characters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    table = {}
    for byte in range(256):
        text = bytes([byte]).decode("latin-1")
        printable = text if text in characters and (33 <= byte <= 126 or byte >= 161) and byte != 173 else None
        table[byte] = printable
    rest = iter(range(256, 512))
    vocabulary = {text or chr(next(rest)): byte for byte, text in table.items()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_ids_and_back(model):
    text = open(TINY + "/valid.txt", encoding="utf-8").read(4000)
    (model / "text").write_text(text, encoding="utf-8")
    ids, back = model / "ids.npy", model / "back"
    assert gatefold("tokenize", model, model / "text", "-o", ids).returncode == 0
    assert np.load(ids).dtype == np.int32 and bytes(np.load(ids).tolist()).decode() == text
    assert gatefold("tokenize", model, ids, "-o", back, "--decode").returncode == 0
    assert back.read_text(encoding="utf-8") == text
    done = gatefold("eval", TINY, "--tokens", ids, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] > 0


def test_failed_writes_leave_nothing(model):
    """What was there stays, and no temporary file, when the disk is full."""
    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    (model / "text").write_text("a" * 4000)
    np.save(model / "ids.npy", np.full(4000, ord("a"), np.int32))
    for source, decode in (("text", []), ("ids.npy", ["--decode"])):
        for output, content in (("new", None), ("old", b"precious")):
            if content:
                (model / output).write_bytes(content)
            before = sorted(model.iterdir())
            done = gatefold("tokenize", model, model / source, "-o", model / output, *decode, preexec_fn=full)
            assert done.returncode == 1 and done.stderr.startswith("gatefold: "), done.stderr
            assert sorted(model.iterdir()) == before
            assert content is None or (model / output).read_bytes() == content
            (model / output).unlink(missing_ok=True)
    shown = gatefold("tokenize", model, model / "ids.npy", "-o", "/dev/stdout", "--decode")
    assert shown.stdout == "a" * 4000, shown.stderr


def test_generate(model):
    """Text of text, as from the same model without a tokenizer."""
    for name in ("config.json", "model.safetensors"):
        (model / name).symlink_to(f"{TINY}/{name}")
    arguments = "--prompt", "The \u00e9t\u00e9 of", "-n", 24
    expected, shown = gatefold("generate", TINY, *arguments), gatefold("generate", model, *arguments)
    assert shown.returncode == 0 and shown.stdout == expected.stdout, shown.stderr
    expected, shown = (json.loads(gatefold("generate", of, *arguments, "--json").stdout) for of in (TINY, model))
    assert shown["tokens"] == expected["tokens"] and shown["text"] == expected["text"]
    refused = gatefold("generate", model, "--prompt", "a", "--scheme", "int5")
    assert refused.returncode != 0 and "int5" in refused.stderr
    (model / "tokenizer.json").write_text("{")
    refused = gatefold("generate", model, "--prompt", "a")
    assert refused.returncode == 1 and "tokenizer.json" in refused.stderr


def test_bad_input(model):
    (model / "text").write_text("a")
    for arguments, message in [
        (("tokenize", model / "none", model / "text", "-o", model / "x.npy"), "none/tokenizer.json: no such file"),
        (("tokenize", model, model / "none", "-o", model / "x.npy"), "No such file"),
        (("tokenize", model, model / "tokenizer.json", "-o", model / "x", "--decode"), "gatefold: "),
        (("tokenize", TINY, model / "text", "-o", model / "x.npy"), "tokenizer.json"),
    ]:
        done = gatefold(*arguments)
        assert done.returncode == 1 and message in done.stderr
    assert not (model / "x.npy").exists()
