"""Make a virtual environment with TRL beside the project's own, whose packages it does not share."""

import subprocess
import sys
from pathlib import Path

TRL_PINS = ("torch==2.13.0", "trl==1.16.0", "transformers==5.19.0", "datasets==5.2.0", "accelerate==1.15.0")
DIRECTORY = Path("~/.cache/coati-rl/trl-venv")
HAS_BF16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")  # as scripts/stages.sh has it


def ensure_trl(directory: Path) -> Path:
    """Return the Python of TRL's environment, which is created if it is missing or has other versions."""
    python, stamp, pins = directory / "bin" / "python", directory / "coati-pins.txt", "\n".join(TRL_PINS)
    if python.is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == pins:
        return python
    print(f"making {directory}: {' '.join(TRL_PINS)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, TRL_PINS[0]], check=True)  # first, so that a CPU build stays
    subprocess.run([*install, *TRL_PINS], check=True)
    stamp.write_text(pins, encoding="utf-8")
    return python
