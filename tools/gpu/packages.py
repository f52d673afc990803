"""The Debian packages that the build needs, as a folder: headers, shared libraries, licences, and a pkg-config that knows them;
and CUDA's headers that torch's wheels do not depend on, which a machine without the toolkit lacks.

Their development packages have no static libraries but Catch2's; the shared ones of Debian 12 need glibc 2.34 and
libstdc++ of GCC 12 or newer.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# name for pkg-config: (Debian's package, folders and files of headers, library without "lib")
PACKAGES = {
    "fmt": ("libfmt-dev", ("fmt",), "fmt"),
    "spdlog": ("libspdlog-dev", ("spdlog",), "spdlog"),
    "CLI11": ("libcli11-dev", ("CLI",), None),
    "nlohmann_json": ("nlohmann-json3-dev", ("nlohmann",), None),
    "catch2": ("catch2", ("catch2",), None),
    "libisal": ("libisal-dev", ("isa-l", "isa-l.h"), "isal"),
}
# Of the CUDA that torch there is built for, and of each wheel the headers that LibTorch's include.
CUDA = "13.0"
CUDA_WHEELS = {"nvidia-cuda-crt": "crt", "nvidia-cuda-cccl": "nv"}
CUDA_FOLDER = Path("nvidia") / f"cu{CUDA.split('.')[0]}" / "include"  # in the wheels, and where the build looks for them
LIMIT_BYTES = 20 << 20
# Meson asks no other questions. Written in Python, as the machine may have no pkg-config.
PKG_CONFIG = '''#!/usr/bin/env python3
"""Answers for the packages of this folder as pkg-config does."""
import json, pathlib, re, sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
KNOWN = json.loads((ROOT / "packages.json").read_text())
flags = [word for word in sys.argv[1:] if word.startswith("-")]
names = [word for word in sys.argv[1:] if not word.startswith("-") and word in KNOWN]
wanted = [word for word in sys.argv[1:] if not word.startswith("-") and not re.fullmatch(r"[<>=]+|[0-9.]+", word)]
if "--version" in flags:
    print("1.8.1")
elif not wanted or set(wanted) - KNOWN.keys():
    print(f"no package {' '.join(sorted(set(wanted) - KNOWN.keys()))} in {ROOT}", file=sys.stderr)
    sys.exit(1)
else:
    words = []
    if "--modversion" in flags:
        words += [KNOWN[name]["version"] for name in names]
    if "--variable=includedir" in flags:
        words.append(str(ROOT / "include"))
    if "--cflags" in flags:
        words += [f"-I{ROOT / 'include'}"] + [word for name in names for word in KNOWN[name]["flags"]]
    if "--libs" in flags:
        folder = ROOT / "lib"
        words += [word for name in names if KNOWN[name]["library"]
                  for word in (f"-L{folder}", f"-Wl,-rpath,{folder}", f"-l{KNOWN[name]['library']}")]
    print(" ".join(dict.fromkeys(words)))
'''
FLAGS = {"spdlog": ["-DSPDLOG_SHARED_LIB", "-DSPDLOG_COMPILED_LIB", "-DSPDLOG_FMT_EXTERNAL"]}


class PackError(Exception):
    pass


def ask(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise PackError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def version_of(package):
    """Upstream's: of 1:1.10.0+ds-0.4 it is 1.10.0."""
    text = ask("dpkg-query", "-W", "-f", "${Version}", package)
    return re.match(r"(?:\d+:)?([\d.]*\d)", text).group(1), text


def copy_library(name, folder):
    """The library under the name that programs look for (libfmt.so.9), and the one that linkers do."""
    listed = ask("ldconfig", "-p")
    found = re.search(rf"^\s*(lib{name}\.so\.\S+) .*=> (\S+)$", listed, re.MULTILINE)
    if not found:
        raise PackError(f"no lib{name}.so on this machine; tools/setup installs its package")
    shutil.copy(Path(found.group(2)).resolve(), folder / found.group(1))
    (folder / f"lib{name}.so").unlink(missing_ok=True)
    shutil.copy(folder / found.group(1), folder / f"lib{name}.so")  # no link: what carries the folder may drop links


def copy_cuda_headers(folder):
    with tempfile.TemporaryDirectory() as wheels:
        ask(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", wheels,
            *(f"{name}=={CUDA}.*" for name in CUDA_WHEELS))
        for name, headers in CUDA_WHEELS.items():
            (wheel,) = Path(wheels).glob(f"{name.replace('-', '_')}-*.whl")
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(folder, [member for member in packed.namelist()
                                           if member.startswith(f"{CUDA_FOLDER / headers}/") or "licenses" in member.lower()])


def pack(folder, with_cuda=True):
    """Fills the folder anew. with_cuda: also with CUDA's headers, which are downloaded. Returns its bytes, and what is in it as
    {name: Debian's version}."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "packages.json").exists():
        raise PackError(f"{folder} has something else in it; name a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    for sub in ("include", "lib", "bin", "licences"):
        (folder / sub).mkdir(parents=True)
    known, versions = {}, {}
    for name, (package, headers, library) in PACKAGES.items():
        version, versions[name] = version_of(package)
        for header in headers:
            source = Path("/usr/include") / header
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / "include" / header)
        if library:
            copy_library(library, folder / "lib")
        shutil.copy(Path("/usr/share/doc") / package / "copyright", folder / "licences" / package)
        known[name] = {"version": version, "flags": FLAGS.get(name, []), "library": library,
                       "package": f"{package} {versions[name]}"}
    if with_cuda:
        copy_cuda_headers(folder / "python")
    (folder / "packages.json").write_text(json.dumps(known, indent=1) + "\n")
    script = folder / "bin" / "pkg-config"
    script.write_text(PKG_CONFIG)
    script.chmod(0o755)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > LIMIT_BYTES:
        raise PackError(f"{folder} has {size:,} bytes, more than {LIMIT_BYTES:,}")
    return size, versions
