"""Figures as lines of JSON, for who looks on and for a file that others read."""

import json


def tell(line, out):
    """out: a file to which the line is appended, or None."""
    text = json.dumps(line)
    print(text, flush=True)
    if out:
        with open(out, "a") as file:
            file.write(text + "\n")
