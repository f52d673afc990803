"""Fails if a file of lib/ or include/ includes a header of a layer to its right, one of group/ a header of schedule/, or one
of schedule/ a header of LibTorch.

--line prints the layers. Runs with every build. With --stamp and --depfile it tells ninja what it has read, folders too, so that it
runs again when a file changes, comes or goes.
"""

import argparse
import re
import sys
from pathlib import Path

import ninja_depfile

# Layers of one line do not include each other.
LAYERS = [
    ["base"],
    ["comm", "schedule"],
    ["mesh"],
    ["tensor"],
    ["dtensor"],
    ["collectives", "dispatch"],
    ["param", "trace"],
    ["group"],
    ["root"],
    ["module"],
    ["api"],
    ["checkpoint"],
]
RANK = {layer: rank for rank, layers in enumerate(LAYERS) for layer in layers}

# The layer that a public header belongs to; one that is not here belongs to api.
DEFAULT = "api"
PUBLIC = {
    "all_gather_extension.hpp": "base",
    "api.hpp": "base",
    "error.hpp": "base",
    "launch_environment.hpp": "base",
    "local_ranges.hpp": "base",
    "log.hpp": "base",
    "policy.hpp": "base",
    "reshard_after_forward.hpp": "base",
    "sanitizer.hpp": "base",
    "schedule_check_options.hpp": "base",
    "statistics.hpp": "base",
    "timeline_events.hpp": "base",
    "version.hpp": "base",
    "all_reduce_hook.hpp": "comm",
    "communicator.hpp": "comm",
    "custom_comm.hpp": "comm",
    "process_group.hpp": "comm",
    "simulated_clock.hpp": "comm",
    "simulated_network.hpp": "comm",
    "testing/recording.hpp": "comm",
    "device_mesh.hpp": "mesh",
    "mesh_dims.hpp": "mesh",
    "param_placement.hpp": "mesh",
    "placement.hpp": "mesh",
    "dtensor.hpp": "dtensor",
    "reduce_scatter_start.hpp": "schedule",
    "async_handles.hpp": "module",
    "fsdp_module.hpp": "module",
    "fully_shard.hpp": "module",
    "fully_shard_options.hpp": "module",
    "checkpoint.hpp": "checkpoint",
    "checkpoint_parts.hpp": "checkpoint",
    "checkpoint_saver.hpp": "checkpoint",
    "fsdp.hpp": "checkpoint",
}

# What executes does what it is asked to: what decides is not its business, though it stands to the left.
APART = {("group", "schedule")}

# What decides does so over numbers: without tensors, devices or streams.
WITHOUT_TENSORS = {"schedule"}
LIBTORCH = ("ATen/", "c10/", "torch/")

# Folders of lib/ that are no layer: the build's own.
NO_LAYER = {"pch", "torch"}

INCLUDE = re.compile(r'^\s*#\s*include\s*["<](?P<path>[^">]+)[">]')


def layer_line():
    """The layers as documents show them, lowest first; those in braces do not include each other."""
    return " <- ".join(layers[0] if len(layers) == 1 else f"{{ {' | '.join(layers)} }}" for layers in LAYERS)


def layer_of_include(path):
    """The layer of what an #include names; None if it is not ours."""
    folder, _, name = path.partition("/")
    if folder == "fsdp":
        return PUBLIC.get(name, DEFAULT)
    return folder if folder in RANK else None


def may_include(layer, included):
    return layer == included or (RANK[included] < RANK[layer] and (layer, included) not in APART)


def sources(root):
    """(file, its layer, whether it is public) for each file that belongs to a layer."""
    for path in sorted((root / "include" / "fsdp").rglob("*.hpp")):
        yield path, PUBLIC.get(str(path.relative_to(root / "include" / "fsdp")), DEFAULT), True
    for folder in sorted(path for path in (root / "lib").iterdir() if path.is_dir()):
        if folder.name in NO_LAYER:
            continue
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".hpp", ".cpp", ".h"):
                yield path, folder.name, False


def find_violations(root):
    for path, layer, is_public in sources(root):
        if layer not in RANK:
            yield f"{path.relative_to(root)}: lib/{layer} is no layer; add it to tools/check_layers.py"
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            match = INCLUDE.match(line)
            included = layer_of_include(match["path"]) if match else None
            place = f"{path.relative_to(root)}:{number}"
            if match and layer in WITHOUT_TENSORS and match["path"].startswith(LIBTORCH):
                yield f"{place}: layer {layer} includes {match['path']}; it has no tensors"
            if included is None:
                continue
            if is_public and not match["path"].startswith("fsdp/"):
                yield f"{place}: a public header includes {match['path']}, which is not installed"
            elif not may_include(layer, included):
                yield f"{place}: layer {layer} includes {match['path']} of layer {included}"


def write_depfile(root, stamp, depfile):
    read = {path for path, _, _ in sources(root)}
    ninja_depfile.write(stamp, depfile, read | {path.parent for path in read} | {root / "lib"})


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the repository")
    parser.add_argument("--line", action="store_true", help="print the layers, lowest first, and end")
    parser.add_argument("--stamp", help="a file to write if all is well")
    parser.add_argument("--depfile", help="where to write what was read, for ninja")
    options = parser.parse_args()
    if options.line:
        print(layer_line())
        return 0

    violations = list(find_violations(options.root))
    for violation in violations:
        print(violation, file=sys.stderr)
    if violations:
        return 1
    if options.depfile:
        write_depfile(options.root, options.stamp, options.depfile)
    if options.stamp:
        Path(options.stamp).touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
