"""Every Python that we name, where it is present: the package builds there, and what needs no torch works without."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

KERNEL = """
import numpy as np
from megatrain.kernels import load

kernel = load("native")
n = 1000
rng = np.random.default_rng(0)
master = rng.standard_normal(n, dtype=np.float32)
head, tail = np.empty(n, np.uint16), np.empty(n, np.int16)
kernel.split(master, head, tail)
back = np.empty(n, np.float32)
kernel.join(head, tail, back)
assert (back == master).all()
moments = np.zeros(n, np.float32), np.zeros(n, np.float32)
gradient = rng.standard_normal(n, dtype=np.float32)
settings = dict(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)
kernel.adamw(head, tail, *moments, gradient, **settings)
kernel.join(head, tail, back)
assert np.allclose(back, master - 0.1 * np.sign(gradient), atol=1e-4)
"""


def interpreter(version: str) -> str | None:
    """A Python of this version that starts, from PATH or from a pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [*map(str, sorted(root.glob(f"{version}.*/bin/python"))), shutil.which(f"python{version}")]
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_import_help_and_kernel_on_plain_arrays(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def run(*words: str | Path) -> str:
        done = subprocess.run(
            list(map(str, words)),
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(python, "-m", "venv", "env")
    scripts = tmp_path / "env" / "bin"
    pip = (scripts / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q")
    run(*pip, "numpy", "typer", "rich", "psutil", "pyyaml", "pydantic")
    run(*pip, "--no-deps", ROOT)
    imported = "import megatrain, sys; assert 'torch' not in sys.modules; print(megatrain.__version__)"
    assert run(scripts / "python", "-c", imported).strip()
    assert "megatrain train run.yaml" in run(scripts / "megatrain", "--help")
    run(scripts / "python", "-c", KERNEL)
