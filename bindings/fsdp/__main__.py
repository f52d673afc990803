"""`python -m fsdp train.py ARGS`: a program whose libraries import torch's fully_shard runs with this package's."""

import argparse
import builtins
import importlib.util
import io
import os
import runpy
import sys
import types
import zipfile

from . import replace_torch
from ._build import VERSION
from ._enabling import EnablingError, disable, enable, is_enabled, status

NOT_ENABLED = 1  # exit code; what is wrong is 2, as argparse has it

DESCRIPTION = """Runs a Python program in which the names of torch's fully_shard (torch.distributed.fsdp.fully_shard,
FSDPModule and so on) are those of fsdp, as fsdp.replace_torch() makes them. On several ranks:
torchrun --nproc-per-node 2 -m fsdp train.py ARGS"""
EPILOG = """enable writes two files into this environment's site-packages, with which FSDP_REPLACE_TORCH=1 does the same
for any program of the environment, also for the processes that it starts; disable removes them; status says whether they
are there (exit code 1: not). A program that has such a name is ./enable."""


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m fsdp", description=DESCRIPTION, epilog=EPILOG,
        usage="%(prog)s [-h | --version] PROGRAM [ARGS ...]\n       %(prog)s -m MODULE [ARGS ...]\n       %(prog)s {enable,disable,status}")
    parser.add_argument("--version", action="version", version=f"libfsdp {VERSION}")
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module, as for python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a file, a folder or a zip file, as for python; what follows it is "
                        "the program's; or enable, disable or status")
    return parser


def _split(arguments):
    """What is ours, up to the program, and what is the program's, whatever it looks like."""
    ours = next((index for index, each in enumerate(arguments, 1) if not each.startswith("-")), len(arguments))
    return arguments[:ours], arguments[ours:]


def _run_file(program, arguments, parser):
    if not os.path.exists(program):
        parser.error(f"there is no program {program} ({os.path.abspath(program)})")
    file = os.path.join(os.getcwd(), program)
    sys.argv[:] = [program, *arguments]
    replace_torch()
    # What python -m has put first into sys.path is the working folder.
    has_folder = not getattr(sys.flags, "safe_path", False)
    if os.path.isdir(file) or zipfile.is_zipfile(file):
        if has_folder:
            del sys.path[0]
        runpy.run_path(file, run_name="__main__")
    else:
        if has_folder:
            sys.path[0] = os.path.dirname(os.path.realpath(file))
        _run_script(file)


def _run_script(file):
    """As runpy.run_path does it, but with sys.argv[0] as it is, and for good: threads and what runs at the end of Python
    find their `__main__`."""
    main_module = types.ModuleType("__main__")
    vars(main_module).update(__file__=file, __builtins__=builtins, __cached__=None)
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec")
    sys.modules["__main__"] = main_module
    exec(code, vars(main_module))


def _run_module(name, arguments, parser):
    replace_torch()
    try:
        found = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError) as error:
        parser.error(f"there is no module {name}: {error}")
    if found is None:
        parser.error(f"there is no module {name} in {', '.join(sys.path[:2])} or where else Python looks (sys.path)")
    sys.argv[:] = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _manage(command, arguments, parser):
    if arguments:
        parser.error(f"{command} takes no arguments, found {' '.join(arguments)}; a program of that name is ./{command}")
    try:
        print({"enable": enable, "disable": disable, "status": status}[command]())
    except (EnablingError, RuntimeError) as error:
        parser.error(str(error))
    sys.exit(NOT_ENABLED if command == "status" and not is_enabled() else 0)


def main():
    parser = _parser()
    ours, rest = _split(sys.argv[1:])
    chosen = parser.parse_args(ours)
    if chosen.is_module:
        _run_module(chosen.program, rest, parser)
    elif chosen.program in ("enable", "disable", "status"):
        _manage(chosen.program, rest, parser)
    else:
        _run_file(chosen.program, rest, parser)


if __name__ == "__main__":
    main()
