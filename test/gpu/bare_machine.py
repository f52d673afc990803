"""A folder that is like a machine with a GPU as a session gets it: the working tree and what was packed, and nothing else; no
network, no compiler on the PATH, and none of the Debian packages that this machine has."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 64 << 20  # of what travels there
COMPILERS = re.compile(r"(?:[\w]+-linux-gnu-)?(?:gcc|g\+\+|c\+\+|cc|cpp|c89|c99|clang|clang\+\+|ld|as|ccache|cmake|make|ninja|"
                       r"meson|nvcc|pkg-config|pkgconf|patchelf|strip|readelf|objdump)(?:[.-]\d+)*(?:\.\w+)?")
HIDDEN_FOLDERS = ("fmt", "spdlog", "CLI", "nlohmann", "catch2", "isa-l")
HIDDEN_LIBRARIES = ("libfmt", "libspdlog", "libisal")


def make(folder, packed):
    """Files that git knows or does not ignore, as they travel."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            target = folder / "repository" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    shutil.copytree(packed, folder / "repository" / ".cache" / "gpu")
    size = sum(path.stat().st_size for path in (folder / "repository").rglob("*") if path.is_file())
    if size > LIMIT_BYTES:
        raise SystemExit(f"{folder} has {size:,} bytes, and {LIMIT_BYTES:,} can travel")
    make_commands(folder / "bin")
    return size


def make_commands(folder):
    folder.mkdir()
    for place in ("/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        for path in Path(place).iterdir():
            if not COMPILERS.fullmatch(path.name) and not (folder / path.name).is_symlink() and os.access(path, os.X_OK):
                (folder / path.name).symlink_to(path)


def can_unshare():
    return subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode == 0


def hide():
    """Shell commands that put nothing in the place of this machine's packages and its CUDA toolkit."""
    folders = [*(f"/usr/include/{name}" for name in HIDDEN_FOLDERS), os.path.realpath("/usr/local/cuda")]
    libraries = [str(path) for name in HIDDEN_LIBRARIES for path in Path("/usr/lib/x86_64-linux-gnu").glob(f"{name}.so*")
                 if not path.is_symlink()]
    return ([f"mount -t tmpfs none {path}" for path in folders if Path(path).is_dir()]
            + [f"mount --bind /dev/null {path}" for path in libraries])


def call(folder, python, arguments, log=None):
    """One call of tools/gpu_check there, as its exit code. log: a file for what it says, which is shown otherwise."""
    command = [str(python), "tools/gpu_check", *map(str, arguments)]
    environment = {"PATH": str(folder / "bin"), "HOME": str(folder), "LANG": "C.UTF-8"}
    repository = folder / "repository"
    if not can_unshare():
        return subprocess.call(command, cwd=repository, env=environment, stdout=log, stderr=log)
    lines = ["set -e", *hide(), "ip link set lo up", f"cd {shlex.quote(str(repository))}", f"exec {shlex.join(command)}"]
    check_network_is_gone()
    return subprocess.call(["unshare", "--net", "--mount", "bash", "-c", "\n".join(lines)], env=environment, stdout=log,
                           stderr=log)


def check_network_is_gone():
    code = subprocess.call(["unshare", "--net", "bash", "-c", "exec 3<>/dev/tcp/1.1.1.1/53"], stderr=subprocess.DEVNULL)
    if code == 0:
        raise SystemExit("there is a network in a namespace without one")
