#!/usr/bin/env python3
"""Make .venv and install this checkout into it: python3 install.py [--test]. Standard library only.

Why not pip alone: on Linux, PyPI's torch is a CUDA build of several GB. Where no NVIDIA GPU is seen, and the build that
pip would choose is not a CPU build already (from a local wheel folder, say), torch is taken from PyTorch's own CPU
index first. Versions are pinned by constraints.txt. The folder can be given in FIXEDFORMER_VENV.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def needs_cpu_index(platform: str, gpu: bool, chosen: str) -> bool:
    """Whether torch should come from the CPU index: Linux, no GPU, and pip's choice (a version) is no CPU build."""
    return platform.startswith("linux") and not gpu and not chosen.endswith("+cpu")


def pip(python: Path, *arguments: str, capture: bool = False) -> str:
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if capture else None).stdout or ""


def chosen_torch(python: Path) -> str:
    """The torch version pip would install, with its local label (2.13.0+cpu), without downloading it whole."""
    dry = ("--dry-run", "--no-deps", "--ignore-installed", "--report", "-")
    report = pip(python, *dry, "-c", "constraints.txt", "torch", capture=True)
    return str(json.loads(report[report.index("{") :])["install"][0]["metadata"]["version"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Make .venv and install fixedformer into it.")
    parser.add_argument("--test", action="store_true", help="with what the tests need")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (whichever python3 is at hand runs this file)
        sys.exit(f"fixedformer needs Python 3.11 or newer, this is {sys.version.split()[0]}; run a newer python3")
    os.chdir(ROOT)
    folder = ROOT / os.environ.get("FIXEDFORMER_VENV", ".venv")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=True)
    gpu = shutil.which("nvidia-smi") is not None
    if needs_cpu_index(sys.platform, gpu, chosen_torch(python)):
        print("no NVIDIA GPU: taking the CPU build of torch", file=sys.stderr)
        # Among equal versions pip prefers the one with a label: 2.13.0+cpu over PyPI's 2.13.0.
        pip(python, "-c", "constraints.txt", "torch", "--extra-index-url", CPU_INDEX)
    pip(python, "-c", "constraints.txt", "-e", ".[test]" if options.test else ".")


if __name__ == "__main__":
    main()
