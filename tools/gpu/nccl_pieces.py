"""NCCL 2.30.7, which lets two ranks share a GPU, out of PyPI's wheel and in pieces that can be brought along one by one."""

import hashlib
import json
import lzma
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "2.30.7"
WHEEL = f"nvidia-nccl-cu13=={VERSION}"
LIBRARY = "libnccl.so.2"
PIECE_BYTES = 52 << 20  # beside the repository in a transfer of 64 MiB
CHUNK = 1 << 22
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]


class NcclError(Exception):
    pass


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def download(folder):
    """pip's own check of the wheel against the index's hash is behind it."""
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                           "--only-binary=:all:", "--dest", folder, WHEEL], capture_output=True, text=True)
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise NcclError(f"pip could not download {WHEEL}: {done.stderr.strip()[-500:]}")
    return wheels[0]


class Pieces:
    """A file in pieces: writes the next one when one is full."""

    def __init__(self, folder):
        self.folder, self.names, self.out, self.left = folder, [], None, 0

    def write(self, data):
        while data:
            if self.left == 0:
                self.close()
                self.names.append(f"nccl.{len(self.names):02d}")
                self.out, self.left = open(self.folder / self.names[-1], "wb"), PIECE_BYTES
            part, data = data[: self.left], data[self.left:]
            self.out.write(part)
            self.left -= len(part)

    def close(self):
        if self.out:
            self.out.close()


def pack(folder):
    """Returns the pieces by name, with their bytes and hashes."""
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(download(temporary)) as wheel:
        (name,) = [entry for entry in wheel.namelist() if entry.endswith("/" + LIBRARY)]
        with wheel.open(name) as library:
            return cut(library, folder)


def cut(library, folder):
    """Compresses what the file `library` holds into pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("nccl.*"):
        old.unlink()
    pieces, digest = Pieces(folder), hashlib.sha256()
    compressor = lzma.LZMACompressor(format=lzma.FORMAT_XZ, filters=FILTERS)
    while chunk := library.read(CHUNK):
        digest.update(chunk)
        pieces.write(compressor.compress(chunk))
    pieces.write(compressor.flush())
    pieces.close()
    about = {"version": VERSION, "library": LIBRARY, "sha256": digest.hexdigest(),
             "pieces": {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
                        for name in pieces.names}}
    (folder / "nccl.json").write_text(json.dumps(about, indent=1) + "\n")
    return about["pieces"]


def join(folder, target):
    """Makes the library at `target` out of the pieces, unless it is there already. Throws NcclError saying what is missing."""
    manifest = folder / "nccl.json"
    if not manifest.exists():
        raise NcclError(f"no {manifest}; make it with tools/gpu_check --pack-nccl and bring it along")
    about = json.loads(manifest.read_text())
    if target.exists() and sha256(target) == about["sha256"]:
        return
    missing = [name for name in about["pieces"] if not (folder / name).exists()]
    if missing:
        raise NcclError(f"{', '.join(missing)} of {len(about['pieces'])} pieces are not in {folder}; bring them along")
    bad = [name for name, piece in about["pieces"].items() if sha256(folder / name) != piece["sha256"]]
    if bad:
        raise NcclError(f"{', '.join(bad)} in {folder} {'has' if len(bad) == 1 else 'have'} another hash than nccl.json says")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(target.name + ".new")
    digest, decompressor = hashlib.sha256(), lzma.LZMADecompressor()
    with open(beside, "wb") as out:
        for name in about["pieces"]:
            data = decompressor.decompress((folder / name).read_bytes())
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != about["sha256"]:
        raise NcclError(f"the joined {about['library']} has another hash than nccl.json says")
    beside.rename(target)
