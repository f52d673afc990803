"""fsdp-checkpoint: shows, checks, compares and converts checkpoints of libfsdp, and .safetensors files of others."""

import argparse
import sys

WRONG = 2  # exit code
DTYPES = ("float32", "float16", "bfloat16", "float64")


def parsed(arguments):
    parser = argparse.ArgumentParser(prog="fsdp-checkpoint", description=__doc__.partition(": ")[2],
                                     epilog="Exit codes: 0; 1: damaged, or different; 2: a wrong call, or a checkpoint "
                                            "that cannot be read or written.")
    parser.add_argument("--version", action="version", version="libfsdp @VERSION@")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="one JSON object in place of a table")
    shared.add_argument("--follow-symlinks", action="store_true", help="read files that are symbolic links, too")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add(name, text):
        return commands.add_parser(name, parents=[shared], help=text, description=text)

    what = "a checkpoint, a folder of .safetensors files with their index, or one such file"
    add("list", "shows the tensors: names, dtypes, sizes and files").add_argument("path", help=what)
    add("verify", "reads everything and compares it with its checksums").add_argument("path", help=what)
    comparing = add("diff", "compares names, sizes, dtypes and values of two checkpoints")
    comparing.add_argument("first", help=what)
    comparing.add_argument("second", help=what)
    converting = add("convert", "writes a checkpoint with the model's floating-point tensors in another dtype")
    converting.add_argument("path", help=what)
    converting.add_argument("to", help="the folder to write")
    converting.add_argument("--dtype", required=True, choices=DTYPES)
    converting.add_argument("--max-file-bytes", type=int, default=4 << 30, help="of a file [4 GiB]")
    converting.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there")
    return parser.parse_args(arguments)


def main(arguments=None):
    arguments = parsed(arguments)
    # Only now: it takes seconds to import torch.
    from . import _C, _checkpoint_tool

    commands = {"list": _checkpoint_tool.show_list, "verify": _checkpoint_tool.verify, "diff": _checkpoint_tool.diff,
                "convert": _checkpoint_tool.convert}
    try:
        return commands[arguments.command](arguments)
    except (ValueError, _C.Error, OSError) as error:
        print(f"fsdp-checkpoint: {error}", file=sys.stderr)
        return WRONG


if __name__ == "__main__":
    sys.exit(main())
