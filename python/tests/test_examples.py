"""The examples run, and say what they should; the README shows the first."""
import importlib.util
import os
import re
import subprocess
import sys

import pytest

from common import ROOT, TINY


def needs(*modules):
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


def run(example, *arguments):
    done = subprocess.run([sys.executable, str(ROOT / "examples" / example), *arguments], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_layer():
    assert re.fullmatch(r"cpu\.\w+\.mxfp4: y\[0\] = -?\d\S*\n", run("layer.py", TINY))


def test_readme_shows_it():
    example = (ROOT / "examples/layer.py").read_text()
    assert f"```python\n{example}```\n" in (ROOT / "README.md").read_text()


@needs("torch")
def test_torch_op():
    assert "difference 0" in run("torch_op.py")


@needs("torch", "transformers")
def test_quantize_transformers(tmp_path):
    plot = tmp_path / "plot.png"
    with_plot = importlib.util.find_spec("matplotlib") is not None
    output = run("quantize_transformers.py", TINY, "--tokens", "1024", *(["--plot", str(plot)] if with_plot else []))
    loss = {row[0]: float(row[2]) for row in map(str.split, output.splitlines()[1:]) if len(row) == 4}
    assert list(loss) == ["eager", "int8", "int4_g128", "mxfp4"]
    assert all(abs(bits - loss["eager"]) < 0.1 for bits in loss.values())
    assert plot.exists() == with_plot
