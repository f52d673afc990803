"""tools/check_layers.py: it finds what includes a layer to its right, and lets what is right pass."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from closing_line import main

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_layers.py"


class Layers(unittest.TestCase):
    def check(self, name, *includes):
        """Of a file with these #includes: the exit code, and what was said."""
        with tempfile.TemporaryDirectory() as root:
            file = Path(root, name)
            Path(root, "include", "fsdp").mkdir(parents=True)
            Path(root, "lib").mkdir()
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(f'#include "{include}"\n' for include in includes))
            ran = subprocess.run([sys.executable, TOOL, root], text=True, capture_output=True, timeout=60)
            return ran.returncode, ran.stderr

    def expect_found(self, says, name, *includes):
        code, said = self.check(name, *includes)
        self.assertEqual(code, 1)
        self.assertIn(says, said)

    def test_what_is_to_the_left_may_be_included(self):
        for name, *includes in (("lib/group/a.cpp", "group/b.hpp", "trace/b.hpp", "ATen/ATen.h"),
                                ("lib/root/a.cpp", "group/b.hpp", "schedule/b.hpp"),
                                ("lib/schedule/a.cpp", "schedule/b.hpp", "base/log.hpp", "vector"),
                                ("lib/trace/a.hpp", "mesh/mesh_info.hpp", "fsdp/communicator.hpp", "torch/torch.h"),
                                ("include/fsdp/fully_shard.hpp", "fsdp/policy.hpp")):
            self.assertEqual(self.check(name, *includes), (0, ""))

    def test_what_is_to_the_right_or_beside_may_not(self):
        self.expect_found("lib/trace/a.cpp:2: layer trace includes group/param_group.hpp of layer group",
                          "lib/trace/a.cpp", "base/log.hpp", "group/param_group.hpp")
        self.expect_found("layer schedule includes comm/work.hpp", "lib/schedule/a.cpp", "comm/work.hpp")
        self.expect_found("layer param includes trace/step_meter.hpp", "lib/param/a.hpp", "trace/step_meter.hpp")

    def test_what_executes_does_not_know_what_decides(self):
        self.expect_found("layer group includes schedule/holds.hpp", "lib/group/a.cpp", "schedule/holds.hpp")
        self.expect_found("layer group includes root/root_context.hpp", "lib/group/a.cpp", "root/root_context.hpp")

    def test_what_decides_includes_nothing_of_libtorch(self):
        for header in ("ATen/core/Tensor.h", "c10/core/Stream.h", "torch/csrc/autograd/engine.h"):
            self.expect_found(f"layer schedule includes {header}; it has no tensors", "lib/schedule/a.hpp", header)

    def test_a_public_header_includes_public_ones_alone(self):
        self.expect_found("includes base/log.hpp, which is not installed", "include/fsdp/policy.hpp", "base/log.hpp")

    def test_the_page_about_layers_shows_these(self):
        ran = subprocess.run([sys.executable, TOOL, TOOL.parents[1], "--line"], text=True, capture_output=True, timeout=60)
        page = (TOOL.parents[1] / "docs" / "internals" / "how-it-works.md").read_text()
        self.assertIn(" ".join(ran.stdout.split()), " ".join(page.split()))

    def test_a_folder_that_is_no_layer_is_named(self):
        self.expect_found("lib/new is no layer", "lib/new/a.cpp")


if __name__ == "__main__":
    main()
