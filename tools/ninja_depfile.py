"""Tells ninja what a check has read, so that it runs again when a file changes; of folders, when one comes or goes."""

from pathlib import Path


def write(stamp, depfile, read):
    names = " ".join(str(path).replace(" ", "\\ ") for path in sorted(read))
    Path(depfile).write_text(f"{stamp}: {names}\n")
