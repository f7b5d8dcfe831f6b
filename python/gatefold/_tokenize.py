"""gatefold tokenize: text to token ids and back, by a model's tokenizer.json."""
import argparse
import os
import pathlib
import sys

import numpy as np

FILE = "tokenizer.json"


def main(arguments):
    parser = argparse.ArgumentParser(prog="gatefold tokenize", description=(
        "Writes the token ids of a text, for gatefold eval, generate and quantize --calibration, or the text of token "
        "ids. Needs the package tokenizers."))
    parser.add_argument("DIR", type=pathlib.Path, help="checkpoint directory with a tokenizer.json")
    parser.add_argument("FILE", type=pathlib.Path, help="UTF-8 text; with --decode token ids (.npy)")
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True, help="ids (.npy); with --decode text")
    parser.add_argument("--decode", action="store_true", help="from ids to text")
    parser.add_argument("--special", action="store_true", help="add the tokens that begin and end a text")
    options = parser.parse_args(arguments)
    try:
        convert(options)
    except (OSError, ValueError, ImportError) as error:
        print(f"gatefold: {error}", file=sys.stderr)
        return 1
    return 0


def load(directory):
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError("text of a model with a tokenizer needs the package tokenizers: pip install tokenizers") from None
    file = directory / FILE
    if not file.is_file():
        raise OSError(f"{file}: no such file")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{file}: {error}") from None


def write(file, content):
    """What `content` writes into a binary file: whole, or the file stays as it was. Pipes and devices are no files."""
    if file.exists() and not file.is_file():
        with open(file, "wb") as out:
            content(out)
        return
    temporary = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with open(temporary, "xb") as out:
            content(out)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def convert(options):
    tokenizer = load(options.DIR)
    if options.decode:
        ids = np.load(options.FILE, allow_pickle=False)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{options.FILE}: is {ids.dtype} {list(ids.shape)}, expected a vector of integers")
        text = tokenizer.decode(ids.tolist()).encode()
        write(options.output, lambda out: out.write(text))
        return
    text = options.FILE.read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=options.special).ids
    write(options.output, lambda out: np.save(out, np.array(ids, np.int32)))
