"""What a program or a library asks of the machine that it is to run on."""

import re
import subprocess

VERSION = re.compile(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)")


def is_elf(path):
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def needed(path):
    """The names of the libraries that it loads."""
    return re.findall(r"\(NEEDED\)\s+Shared library: \[(.*)\]", read("-d", path))


def newest_versions(paths):
    """{GLIBC: 2.34, ...}: the newest of each that one of them asks for."""
    found = {}
    for path in paths:
        for name, version in VERSION.findall(read("-V", path)):
            found[name] = max(found.get(name, "0"), version, key=numbers)
    return found


def numbers(version):
    return tuple(map(int, version.split(".")))


def read(option, path):
    return subprocess.run(["readelf", "-W", option, str(path)], capture_output=True, text=True, check=True).stdout
