"""Configures and builds what the stages run, for the torch of the python3 that runs this.

Usage: build.py configure|build SOURCE BUILD PACKAGES JOBS [TARGET...]
PACKAGES: the folder of tools/gpu_check --pack; where it is none, the machine's own packages are taken. JOBS: 0: as many as
there are cores.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path


def tool(name, module):
    """The command beside python3, on the PATH, or python's module."""
    for path in (str(Path(sys.executable).with_name(name)), shutil.which(name)):
        if path and os.access(path, os.X_OK):
            return [path]
    if importlib.util.find_spec(module.split(".")[0]):
        return [sys.executable, "-m", module]
    sys.exit(f"build: no {name} here; bring its wheel along and install it")


def environment(packages):
    found = dict(os.environ)
    if (packages / "packages.json").exists():
        found["PKG_CONFIG"] = str(packages / "bin" / "pkg-config")
        # Where headers of CUDA are looked for beside torch's.
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages / "python"), found.get("PYTHONPATH", "")]))
    else:
        print(f"build: {packages} is no folder of tools/gpu_check --pack: the machine's own packages are taken", flush=True)
    ninja = tool("ninja", "ninja")
    if len(ninja) == 1:
        found["NINJA"] = ninja[0]
    return found


def configure(source, build, packages):
    if (build / "build.ninja").exists():
        return 0
    shutil.rmtree(build, ignore_errors=True)
    return subprocess.call([*tool("meson", "mesonbuild.mesonmain"), "setup", str(build), str(source),
                            f"-Dpython={sys.executable}", "-Dcuda=auto"], env=environment(packages))


def main():
    what, source, build, packages, jobs, targets = sys.argv[1], *map(Path, sys.argv[2:5]), int(sys.argv[5]), sys.argv[6:]
    if what == "configure":
        return configure(source, build, packages)
    known = {line.split()[1].rstrip(":") for line in (build / "build.ninja").read_text().splitlines()
             if line.startswith("build ")}
    missing = [target for target in targets if target not in known]
    command = [*tool("ninja", "ninja"), *([f"-j{jobs}"] if jobs else []), "-C", str(build),
               *(target for target in targets if target in known)]
    code = subprocess.call(command, env=environment(packages))
    if missing:
        print(f"build: without {', '.join(missing)}: something that they need is missing, which configuring has said")
    return code or len(missing)


if __name__ == "__main__":
    sys.exit(main())
