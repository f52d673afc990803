"""What is packed, by name: where it lies in the archive, and what it was made from. Who packs and who opens knows these."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE, MANIFEST = "libfsdp-gpu.tar.xz", "packed.json"
HEADERS = "packages"


class PackError(Exception):
    pass


def ask(*command, **options):
    """What a program prints."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise PackError(f"{' '.join(map(str, command))} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
