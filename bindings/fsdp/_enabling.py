"""The two files by which an environment's programs replace torch's names where FSDP_REPLACE_TORCH=1 (_import_hook.py)."""

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path

from . import _import_hook


class EnablingError(Exception):
    """A file that cannot be written or removed."""


def files():
    """(the .pth file, the module) of this environment."""
    folder = Path(sysconfig.get_path("purelib"))
    return folder / "fsdp_replace_torch.pth", folder / f"{_import_hook.MODULE}.py"


def enable():
    """Writes the files, the one that Python runs last, and returns what to say."""
    line, module = files()
    try:
        _write(module, Path(_import_hook.__file__).read_text())
        _write(line, _import_hook.LINE)
    except OSError as error:
        raise EnablingError(
            f"{line.parent}, where this Python's packages are, cannot be written to ({error.strerror}); run this as a user who "
            "may write there, or in an environment of your own (python -m venv), or start programs by python -m fsdp, which "
            "writes nothing") from error
    return (f"wrote {line}\nwrote {module}\nWith FSDP_REPLACE_TORCH=1 every program of this environment has torch's "
            "fully_shard replaced.")


def disable():
    """Removes the files and returns what to say."""
    there = [file for file in files() if file.exists()]
    for file in there:
        try:
            file.unlink()
            Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
        except OSError as error:
            raise EnablingError(f"{file} cannot be removed ({error.strerror}); run this as a user who may write to "
                                f"{file.parent}, or unset FSDP_REPLACE_TORCH") from error
    return "\n".join(f"removed {file}" for file in there) or f"not enabled: there is no {files()[0]}"


def is_enabled():
    return all(file.exists() for file in files())


def status():
    """What to say of the files and the variable."""
    line, module = files()
    if not is_enabled():
        return f"not enabled: there is no {next(file for file in (line, module) if not file.exists())}"
    found = f"enabled: {line}, {module}"
    if (line.read_text(), module.read_text()) != (_import_hook.LINE, Path(_import_hook.__file__).read_text()):
        found += "\nThese files are of another version of fsdp; python -m fsdp enable writes this version's."
    now = "replaces torch's names" if _import_hook.asked_for() else "changes nothing; FSDP_REPLACE_TORCH=1 does"
    return f"{found}\nFSDP_REPLACE_TORCH as it is now {now}."


def _write(file, text):
    """All of it or nothing: a Python that starts meanwhile reads one or the other."""
    handle, written = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.chmod(written, 0o644)
        os.replace(written, file)
    except BaseException:
        os.unlink(written)
        raise
