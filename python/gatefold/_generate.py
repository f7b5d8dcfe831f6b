"""gatefold generate for models with a tokenizer.json: the C++ tool makes ids of ids, this text of text."""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from . import _tokenize


def wants(arguments):
    """Whether there is a prompt to tokenize, and what with: (directory, prompt, other arguments), or None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--prompt")
    options, others = parser.parse_known_args(arguments)
    directories = [path for path in map(pathlib.Path, others) if (path / _tokenize.FILE).is_file()]
    return (directories[0], options.prompt, others) if directories and options.prompt is not None else None


def main(tool, directory, prompt, others):
    try:
        tokenizer = _tokenize.load(directory)
    except (OSError, ValueError, ImportError) as error:
        print(f"gatefold: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        ids = pathlib.Path(folder) / "ids.npy"
        np.save(ids, np.array(tokenizer.encode(prompt).ids, np.int32))
        command = [tool, "generate", *others, "--tokens", str(ids)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            if "--json" in others:
                print_json(tokenizer, child.stdout.read())
            else:
                print(prompt, end="", flush=True)
                print_tokens(tokenizer, child.stdout)
        return child.returncode


def print_json(tokenizer, output):
    report = json.loads(output)
    if "tokens" in report:
        report["text"] = tokenizer.decode(report["tokens"])
    print(json.dumps(report))


def print_tokens(tokenizer, lines):
    """As they come; a character whose bytes are not all there yet waits."""
    ids, shown = [], ""
    for line in lines:
        if not line.strip():
            continue
        ids.append(int(line))
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            print(text[len(shown):], end="", flush=True)
            shown = text
    print(tokenizer.decode(ids)[len(shown):])
