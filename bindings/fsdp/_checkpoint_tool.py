"""What fsdp-checkpoint does. Each command takes the options that `_checkpoint_command` has read, and returns the exit code."""

import json
import math
import os
from pathlib import Path

import torch

from . import _C

OPENED = {"strict": False, "convert_dtypes": True, "readers": "all_ranks", "max_extra_bytes": 256 << 20, "rename": None}
FITS = {"missing": [], "unexpected": [], "wrong": []}
# Of a tensor, compared at once: tensors may be larger than the memory.
ELEMENTS_AT_ONCE = 1 << 22
GENERATORS = "rng"
DIFFERENT = 1  # exit code, also for a damaged checkpoint


class Checkpoint:
    """One that is open, on this process alone."""

    def __init__(self, path, arguments, verify=True):
        self.path = str(path)
        self.reader = _C.open_checkpoint(None, self.path, {
            **OPENED, "verify": "while_loading" if verify else "never", "follow_symlinks": arguments.follow_symlinks})
        self.sections = {name: {each["name"]: each for each in self.reader.tensors(name)}
                         for name in self.reader.sections()}

    def other_names(self, section):
        """name -> the other names of a tied tensor."""
        found = {}
        for other, name in self.reader.other_names(section).items():
            found.setdefault(name, []).append(other)
        return found

    def read(self, section, info, begin, end):
        """Elements [begin, end) of a tensor."""
        values = torch.empty(end - begin, dtype=info["dtype"])
        wanted = {"name": info["name"], "local": values, "sizes": info["sizes"], "ranges": [(begin, end)],
                  "other_names": [], "dtype": None}
        self.reader.load(lambda: ({section: [wanted]}, FITS), False)
        return values

    def mapped(self, info):
        """All of a tensor, in the file's own memory where it lies so that it can."""
        count = elements(info)
        if count == 0:
            return torch.empty(info["sizes"], dtype=info["dtype"])
        path = self.path if os.path.isfile(self.path) else os.path.join(self.path, info["file"])
        data = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)
        data = data[info["offset"]:info["offset"] + byte_count(info)]
        if info["offset"] % info["dtype"].itemsize:
            data = data.clone()
        return data.view(info["dtype"]).view(info["sizes"])


def elements(info):
    return math.prod(info["sizes"])


def byte_count(info):
    return elements(info) * info["dtype"].itemsize


def counted(count, what):
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def table(rows, header):
    """Columns as wide as what is in them; numbers to the right."""
    cells = [header, *([str(cell) if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for index, row in enumerate(cells):
        is_text = [True] * len(row) if index == 0 else [isinstance(cell, str) for cell in rows[index - 1]]
        print("  ".join(cell.ljust(width) if left else cell.rjust(width)
                        for cell, width, left in zip(row, widths, is_text)).rstrip())


def show_list(arguments):
    checkpoint = Checkpoint(arguments.path, arguments)
    found = {"path": checkpoint.path, "world_size": checkpoint.reader.world_size(), "sections": {},
             "documents": {name: document(checkpoint, name) for name in checkpoint.reader.documents()}}
    for section, tensors in checkpoint.sections.items():
        others = checkpoint.other_names(section)
        found["sections"][section] = [
            {"name": name, "dtype": name_of(info["dtype"]), "sizes": info["sizes"], "bytes": byte_count(info),
             "file": info["file"], "offset": info["offset"], "other_names": others.get(name, [])}
            for name, info in tensors.items()]
    if arguments.json:
        print(json.dumps(found))
        return 0
    ranks = f"saved by {counted(found['world_size'], 'rank')}" if found["world_size"] else "saved by another tool"
    print(f"{checkpoint.path}: {ranks}")
    for section, tensors in found["sections"].items():
        print(f"\n{section}: {counted(len(tensors), 'tensor')}, "
              f"{counted(sum(map(elements, tensors)), 'element')}, "
              f"{counted(sum(each['bytes'] for each in tensors), 'byte')}")
        table([(", ".join([each["name"], *each["other_names"]]), each["dtype"], "x".join(map(str, each["sizes"])),
                each["bytes"], each["file"]) for each in tensors], ("name", "dtype", "sizes", "bytes", "file"))
    if found["documents"]:
        print("\ndocuments: " + ", ".join(found["documents"]))
    return 0


def verify(arguments):
    checkpoint = Checkpoint(arguments.path, arguments, verify=False)
    has_sums = checkpoint.reader.world_size() > 0
    damage = checkpoint.reader.find_damage()
    if arguments.json:
        print(json.dumps({"path": checkpoint.path, "has_checksums": has_sums, "damage": damage}))
    elif damage:
        print("\n".join(damage))
    elif has_sums:
        print(f"{checkpoint.path}: every block has its checksum")
    else:
        print(f"{checkpoint.path}: headers and sizes are sound; there are no checksums in it")
    return DIFFERENT if damage else 0


def compared(section, one, other, name):
    """What differs between two checkpoints' values of a tensor; None: nothing."""
    count, largest, total = 0, 0.0, elements(one.sections[section][name])
    for begin in range(0, total, ELEMENTS_AT_ONCE):
        end = min(total, begin + ELEMENTS_AT_ONCE)
        values = [wide(each.read(section, each.sections[section][name], begin, end)) for each in (one, other)]
        differs = (values[0] != values[1]) & ~(values[0].isnan() & values[1].isnan())
        count += int(differs.sum())
        if differs.any():
            largest = max(largest, float((values[0] - values[1])[differs].abs().nan_to_num(nan=math.inf).max()))
    return {"elements": count, "of": total, "largest": largest} if count else None


def wide(values):
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def differences_of(section, one, other):
    ours, theirs = one.sections.get(section, {}), other.sections.get(section, {})
    found = [{"name": name, "difference": "only in the first"} for name in ours if name not in theirs]
    found += [{"name": name, "difference": "only in the second"} for name in theirs if name not in ours]
    for name in (name for name in ours if name in theirs):
        mine, its = ours[name], theirs[name]
        if mine["sizes"] != its["sizes"]:
            found.append({"name": name, "difference": "sizes", "first": mine["sizes"], "second": its["sizes"]})
            continue
        if mine["dtype"] != its["dtype"]:
            found.append({"name": name, "difference": "dtypes", "first": name_of(mine["dtype"]),
                          "second": name_of(its["dtype"])})
        values = compared(section, one, other, name)
        if values:
            found.append({"name": name, "difference": "values", **values})
    return found


def described(difference):
    if difference["difference"] == "values":
        return (f"{difference['elements']:,} of {difference['of']:,} values differ, by "
                f"{difference['largest']:.6g} at most")
    if "first" in difference:
        return f"{difference['difference']}: {difference['first']} and {difference['second']}"
    return difference["difference"]


def diff(arguments):
    one, other = Checkpoint(arguments.first, arguments), Checkpoint(arguments.second, arguments)
    sections = {name: differences_of(name, one, other) for name in sorted({*one.sections, *other.sections})}
    documents = sorted(name for name in {*one.reader.documents(), *other.reader.documents()}
                       if document(one, name) != document(other, name))
    differs = bool(documents) or any(sections.values())
    if arguments.json:
        print(json.dumps({"first": one.path, "second": other.path, "differ": differs, "sections": sections,
                          "documents": documents}))
    elif not differs:
        print("the checkpoints are equal")
    else:
        rows = [(section, each["name"], described(each)) for section, found in sections.items() for each in found]
        table([*rows, *(("documents", name, "differs") for name in documents)], ("section", "name", "difference"))
    return DIFFERENT if differs else 0


def document(checkpoint, name):
    text = checkpoint.reader.document(name)
    return None if text is None else json.loads(text)


def convert(arguments):
    target = Path(arguments.to)
    if not arguments.overwrite and target.exists() and (target.is_file() or any(target.iterdir())):
        raise ValueError(f"{target}: is there already; --overwrite replaces it")
    checkpoint = Checkpoint(arguments.path, arguments)
    damage = checkpoint.reader.find_damage()
    if damage:
        raise _C.CheckpointError(f"{checkpoint.path} is damaged, and nothing was written:\n" + "\n".join(damage))
    _C.save_checkpoint(None, str(target), lambda: parts_of(checkpoint, getattr(torch, arguments.dtype)),
                       {"max_file_bytes": arguments.max_file_bytes, "keep_last": 0, "rng_state": False})
    left_out = GENERATORS in checkpoint.sections
    if arguments.json:
        print(json.dumps({"path": checkpoint.path, "to": str(target), "dtype": arguments.dtype,
                          "left_out": [GENERATORS] if left_out else []}))
    else:
        print(f"{target}: the model's floating-point tensors are {arguments.dtype} now")
        if left_out:
            print("the state of the random generators, which belongs to each rank that saved it, was left out")
    return 0


def parts_of(checkpoint, dtype):
    sections = {}
    for section in checkpoint.sections:
        if section == GENERATORS:
            continue
        others = checkpoint.other_names(section)
        sections[section] = [
            {"name": name, "local": checkpoint.mapped(info), "sizes": info["sizes"], "ranges": None,
             "other_names": others.get(name, []),
             "dtype": dtype if section == "model" and info["dtype"].is_floating_point else None}
            for name, info in checkpoint.sections[section].items()]
    return sections, {name: checkpoint.reader.document(name) for name in checkpoint.reader.documents()}
