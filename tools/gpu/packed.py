"""Opens what --pack has packed, and says whether it fits this machine."""

import json
import os
import tarfile
from pathlib import Path

import elf
import extension
import pack


def open_archive(folder, target):
    """The manifest of what lies in target then. None where the folder holds no archive."""
    archive = folder / pack.ARCHIVE
    if not archive.exists():
        return None
    marker = target / "opened-from"
    content = f"{archive} {archive.stat().st_size} {archive.stat().st_mtime_ns}"
    if not marker.exists() or marker.read_text() != content:
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as packed:
            packed.extractall(target, filter="data")
        marker.write_text(content)
    return json.loads((target / pack.MANIFEST).read_text())


def why_not(manifest, machine):
    """Why the binaries do not run here, in words that go behind "the packed binaries do not fit"; empty where they do."""
    here = machine.torch.split("+")[0]
    if here != manifest["torch"]:
        return f"they are for torch {manifest['torch']}, here is {here or 'none'}"
    if manifest["cuda"] and machine.cuda.split(".")[0] != manifest["cuda"].split(".")[0]:
        other = f"with CUDA {machine.cuda}" if machine.cuda else "without"
        return f"they are for a torch with CUDA {manifest['cuda']}, here is one {other}"
    if elf.numbers(machine.glibc or "0") < elf.numbers(manifest["glibc"]):
        return f"they need glibc {manifest['glibc']}, here is {machine.glibc or 'another C library'}"
    return ""


def why_no_extension(manifest, machine, opened):
    """Why the package does not load here, where the programs do. What was compiled here stands beside what was packed."""
    if (opened / extension.name()).exists():
        return ""
    return f"the packed extension is for Python {manifest['python']}, here is {machine.python}"


def library_path(machine):
    """Of the environment in which packed programs find torch, and torch the driver as before."""
    return os.pathsep.join(filter(None, [str(Path(machine.torch_root) / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]))
