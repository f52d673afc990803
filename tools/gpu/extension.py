"""The package's extension, compiled alone where Python is another one than that of what was packed.

Usage: extension.py OPENED, with the torch of the python3 that runs this. What a build said to its compiler is in the manifest.
"""

import functools
import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import archive

KEPT = ("-D", "-f", "-std=", "-O", "-pthread", "--param")
OF_THE_BUILD = ("-ffile-prefix-map", "-fdiagnostics")


def name():
    return "bindings/fsdp/_C" + sysconfig.get_config_var("EXT_SUFFIX")


def flags_of(build, python):
    """How the build has compiled it, with words for the places that are others there."""
    about = "import sysconfig, torch.version; print(sysconfig.get_path('include')); print(torch.version.__file__)"
    include, torch = map(Path, archive.ask(python, "-c", about).split())
    places = (("{torch}", torch.parent), ("{python}", include), ("{build}", build), ("{source}", archive.ROOT))
    database = json.loads(archive.ask(python.with_name("ninja"), "-C", build, "-t", "compdb"))
    (command,) = [entry["command"] for entry in database if "/fsdp/_C." in entry["output"] and " -c " in entry["command"]]
    words, found = iter(shlex.split(command)), []
    for word in words:
        if word in ("-idirafter", "-isystem"):
            found += [word, placed(build / next(words), places)]
        elif word.startswith("-I"):
            found.append("-I" + placed(build / word[2:], places))
        elif word.startswith(KEPT) and not word.startswith(OF_THE_BUILD):
            found.append(word)
    return found


def placed(path, places):
    whole = Path(os.path.normpath(path))
    return next((f"{word}/{whole.relative_to(root)}" for word, root in places if whole.is_relative_to(root)), str(whole))


def made_headers(build):
    return [path for folder in ("include", "lib") for path in sorted((build / folder).rglob("*.h*"))
            if path.suffix in (".h", ".hpp") and not any(part.endswith(".p") for part in path.parts)]


def sources():
    listed = (archive.ROOT / "bindings" / "meson.build").read_text().split("bindings_sources = files(")[1].split(")")[0]
    return [archive.ROOT / "bindings" / line.strip().strip("',") for line in listed.splitlines() if line.strip()]


def main():
    import torch

    opened, compiler = Path(sys.argv[1]), os.environ.get("CXX", "g++")
    there = {"{build}": str(opened), "{source}": str(archive.ROOT), "{torch}": os.path.dirname(torch.__file__),
             "{python}": sysconfig.get_path("include")}
    manifest = json.loads((opened / archive.MANIFEST).read_text())
    flags = [functools.reduce(lambda flag, word: flag.replace(word, there[word]), there, flag)
             for flag in manifest["extension"]]
    unit, target = opened / "extension.cpp", opened / name()
    unit.write_text("".join(f'#include "{path}"\n' for path in sources()))
    libraries = [f"-l:{path.name}" for path in sorted((opened / "lib").glob("*.so*"))]
    command = [compiler, *flags, "-I", str(opened / archive.HEADERS / "include"), "-shared", "-o", str(target), str(unit),
               "-Wl,--allow-shlib-undefined", "-Wl,-rpath,$ORIGIN/../../lib", f"-L{opened / 'lib'}", *libraries,
               f"-L{there['{torch}']}/lib", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    print(shlex.join(command), flush=True)
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main())
