"""The command line: python -m gatefold, or gatefold. All commands but `tokenize` are those of the C++ tool."""
import importlib.resources
import os
import sys

from . import _tokenize


def main():
    if sys.argv[1:2] == ["tokenize"]:
        return _tokenize.main(sys.argv[2:])
    tool = importlib.resources.files(__package__) / "gatefold-tool"
    os.execv(str(tool), ["gatefold", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
