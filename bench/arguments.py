"""Types of command-line options. argparse says what they refuse, with the option's name."""

import argparse
import math
import re
from pathlib import Path


def whole(least):
    """A whole number."""
    return _one(int, lambda value: value >= least, f"a whole number, {least} or more")


def wholes(least):
    """Whole numbers."""
    return _several(int, lambda value: value >= least, f"whole numbers, {least} or more, with commas between")


def positive(text):
    """A number above 0."""
    return _one(float, _is_positive, "a number above 0")(text)


def positives(text):
    """Numbers above 0."""
    return _several(float, _is_positive, "numbers above 0 with commas between")(text)


def names(known):
    """Some of the names."""
    return _several(str, lambda value: value in known, f"some of {', '.join(known)}, with commas between")


def rates(text):
    """Of links, as tools/cluster takes them."""
    is_rate = re.compile(r"\d+(\.\d+)?[kmg]bit").fullmatch
    return _several(str, is_rate, "rates such as 100mbit or 1gbit, with commas between")(text)


def new_file(suffix=""):
    """A file that can be written, by its folder and name: found before hours of measuring, not after."""
    def parse(text):
        path = Path(text)
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r} to write {path.name!r} to")
        if path.is_dir() or not path.name.endswith(suffix):
            expected = f"a file whose name ends in {suffix}" if suffix else "a file"
            raise argparse.ArgumentTypeError(f"expected {expected}, found {'a folder' if path.is_dir() else repr(path.name)}")
        return path

    return parse


def folder(text):
    """A folder that is there."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return text


def _is_positive(value):
    return math.isfinite(value) and value > 0


def _one(kind, is_good, expected):
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not is_good(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
        return value

    return parse


def _several(kind, is_good, expected):
    one = _one(kind, is_good, expected)

    def parse(text):
        try:
            return [one(part) for part in text.split(",")]
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}") from None

    return parse
