"""The command line: python -m gatefold, or gatefold. All commands but `tokenize` are those of the C++ tool; `generate`
takes and gives text where the model has a tokenizer.json."""
import importlib.resources
import os
import sys

from . import _generate, _tokenize


def main():
    if sys.argv[1:2] == ["tokenize"]:
        return _tokenize.main(sys.argv[2:])
    tool = str(importlib.resources.files(__package__) / "gatefold-tool")
    if sys.argv[1:2] == ["generate"] and (wanted := _generate.wants(sys.argv[2:])):
        return _generate.main(tool, *wanted)
    os.execv(tool, ["gatefold", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
