"""What README.md shows is what there is: readme_test.py TOOL SOURCE_DIR [--update]"""
import pathlib
import re
import subprocess
import sys
import unittest

TOOL, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])
README = SOURCE / "README.md"


def blocks():
    matrix = subprocess.run([TOOL, "schemes", "--markdown"], capture_output=True, check=True).stdout.decode()
    example = (SOURCE / "examples/layer.cpp").read_text()
    return {"schemes": matrix, "example": f"```cpp\n{example}```\n"}


def replace(text, name, content):
    pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
    text, count = re.subn(pattern, lambda m: m[1] + content + m[2], text, flags=re.S)
    assert count == 1, f"README.md: {count} blocks '{name}'"
    return text


class ReadmeTest(unittest.TestCase):
    def test_blocks(self):
        for name, content in blocks().items():
            with self.subTest(block=name):
                self.assertIn(f"<!-- {name}:begin -->\n{content}<!-- {name}:end -->", README.read_text(),
                              "run readme_test.py with --update")

    def test_commands_exist(self):
        commands = set(re.findall(r"^    gatefold (\w+)", README.read_text(), re.M))
        self.assertGreaterEqual(len(commands), 8)
        for command in commands:
            subprocess.run([TOOL, command, "--help"], capture_output=True, check=True)


if __name__ == "__main__":
    if "--update" in sys.argv:
        text = README.read_text()
        for name, content in blocks().items():
            text = replace(text, name, content)
        README.write_text(text)
    else:
        unittest.main(argv=sys.argv[:1])
