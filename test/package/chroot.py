"""Runs the commands of Dockerfiles in chroots of plain Debian, where Docker is not.

Usage: python3 test/package/chroot.py DOCKERFILE...
As root, with debootstrap (Debian: debootstrap). Of a Dockerfile it knows FROM debian:NAME, COPY of files of the tree, and RUN.
What pip downloads stays in .cache/chroots.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "chroots"
# Behind a proxy, pip has to trust what this machine trusts.
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# In namespaces of its own, what a command has mounted or left running goes with it.
ALONE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
ENTER = """
mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && mkdir -p "$1/root/.cache" &&
mount --bind "$2" "$1/root/.cache" &&
exec chroot "$1" /usr/bin/env -i HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
  $4 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /bin/sh -c "$3"
"""


def instructions(dockerfile):
    """(name, argument) of each, without comments and with continued lines in one."""
    lines = [line for line in dockerfile.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [tuple(line.split(None, 1)) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def start_from(image, folder):
    repository, _, suite = image.partition(":")
    if repository != "debian":
        raise ValueError(f"FROM {image}: expected debian:NAME, such as debian:bookworm")
    run([*ALONE, "debootstrap", "--variant=minbase", suite, folder])
    for name in ("hosts", "resolv.conf"):
        shutil.copy(Path("/etc", name), folder / "etc")
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, folder / "etc" / "machine.crt")


def copy(sources, target, folder):
    for source in sources:
        found = sorted(ROOT.glob(source))
        if not found:
            raise FileNotFoundError(f"COPY {source}: no such file in {ROOT}; tools/wheel --sdist makes those of dist/")
        destination = folder / target.lstrip("/")
        destination.mkdir(parents=True, exist_ok=True)
        for path in found:
            shutil.copy(path, destination)


def run(command):
    subprocess.run([str(part) for part in command], check=True, stdin=subprocess.DEVNULL)


def carry_out(dockerfile, folder):
    for name, argument in instructions(dockerfile):
        print(f"--- {dockerfile.name}: {name} {argument}", flush=True)
        if name == "FROM":
            start_from(argument, folder)
        elif name == "COPY":
            *sources, target = shlex.split(argument)
            copy(sources, target, folder)
        elif name == "RUN":
            certificates = "PIP_CERT=/etc/machine.crt" if CERTIFICATES.exists() else ""
            run([*ALONE, "sh", "-c", ENTER, "sh", folder, CACHE, argument, certificates])
        else:
            raise ValueError(f"{name}: expected FROM, COPY or RUN")


def main(dockerfiles):
    if not dockerfiles or os.geteuid() != 0 or shutil.which("debootstrap") is None:
        sys.exit(__doc__)
    CACHE.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(CACHE / "pip" / "wheels", ignore_errors=True)  # what pip has compiled, of earlier sources by the same name
    failed = 0
    for dockerfile in map(Path, dockerfiles):
        with tempfile.TemporaryDirectory(prefix="fsdp-chroot-") as folder:
            os.chmod(folder, 0o755)  # apt's own user has to read there
            try:
                carry_out(dockerfile, Path(folder))
            except subprocess.CalledProcessError as error:
                failed += 1
                print(f"=== failed: {dockerfile}: exit code {error.returncode} of the last instruction above", flush=True)
            except (OSError, ValueError) as error:
                failed += 1
                print(f"=== failed: {dockerfile}: {error}", flush=True)
    print(f"{len(dockerfiles) - failed} passed, {failed} failed, 0 skipped")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
