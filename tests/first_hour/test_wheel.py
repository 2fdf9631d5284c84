"""From a wheel in a new environment with an empty home: it leaves torch alone, trains, stops, exports and answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from _runs import arguments, chats, make_model, write_rows

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def run(*words: str | Path, home: Path, code: int = 0) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_", "PIP_TARGET"))}
    result = subprocess.run(
        [str(w) for w in words],
        env=environment | {"HOME": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def environment(home: Path) -> Path:
    """The scripts of a new environment that sees this one's packages, but not this checkout, with the wheel in it."""
    run(sys.executable, "-m", "venv", "--without-pip", "fresh", home=home)  # pip comes with the packages, too
    scripts = home / "fresh" / "bin"
    site = run(scripts / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", home=home).strip()
    packages = sysconfig.get_path("purelib")
    # addsitedir would also follow the path file of an editable install; a plain path does not.
    Path(site, "packages.pth").write_text(packages + "\n", encoding="utf-8")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", ".", ROOT, home=home)
    (wheel,) = home.glob("*.whl")
    before = run(scripts / "python", "-m", "pip", "list", "--format=json", home=home)
    run(scripts / "python", "-m", "pip", "install", "--no-index", "--force-reinstall", "--no-deps", wheel, home=home)
    run(scripts / "python", "-m", "pip", "install", "--no-index", wheel, home=home)  # and every dependency is met
    after = run(scripts / "python", "-m", "pip", "list", "--format=json", home=home)
    assert "No broken requirements" in run(scripts / "python", "-m", "pip", "check", home=home)
    versions = [{p["name"]: p["version"] for p in json.loads(text)} for text in (before, after)]
    assert versions[0] | {"megatrain": versions[1]["megatrain"]} == versions[1]
    return scripts


def test_the_wheel_is_what_is_imported(environment: Path, home: Path) -> None:
    where = run(environment / "python", "-c", "import megatrain; print(megatrain.__file__)", home=home)
    assert where.startswith(str(home / "fresh"))


def test_doctor_reports(environment: Path, home: Path) -> None:
    assert "verdict" in run(environment / "megatrain", "doctor", home=home)


def test_train_generate_and_a_mistake(environment: Path, home: Path) -> None:
    make_model(home / "model")
    write_rows(home / "chats.jsonl", chats(8))
    out = run(environment / "megatrain", "train", *arguments(home), home=home)
    assert "next    megatrain generate" in out
    assert run(environment / "megatrain", "generate", home / "run" / "final", "hello 1?", home=home).strip()
    run(environment / "megatrain", "train", *arguments(home, "optim.lr=-1"), home=home, code=2)
