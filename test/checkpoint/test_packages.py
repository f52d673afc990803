"""What libfsdp saves, read by the Python packages that others read it with."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "processes"))
import closing_line  # noqa: E402

SAVES = 3
BLOCK = 1 << 20


# Castagnoli's polynomial, reflected, a byte at a time.
CRC_TABLE = list(range(256))
for _ in range(8):
    CRC_TABLE = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in CRC_TABLE]


def crc32c(data):
    found = 0xFFFFFFFF
    for byte in data:
        found = found >> 8 ^ CRC_TABLE[found & 0xFF ^ byte]
    return found ^ 0xFFFFFFFF


class Packages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        saver = os.environ["FSDP_CHECKPOINT_SAVER"]
        subprocess.run([saver, cls.folder.name, "1", str(SAVES)], check=True, timeout=120, stdout=subprocess.DEVNULL)
        cls.path = Path(cls.folder.name) / "c"

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_safetensors_reads_every_tensor_through_the_index(self):
        index = json.loads((self.path / "model.safetensors.index.json").read_text())
        self.assertEqual(set(index["weight_map"]),
                         {"first.weight", "first.bias", "second.weight", "second.bias", "table"})
        self.assertEqual(len(set(index["weight_map"].values())), 2)
        total = 0
        for name, file in index["weight_map"].items():
            value = load_file(self.path / file)[name]
            total += value.numel() * value.element_size()
            expected = torch.arange(7) if name == "table" else torch.full_like(value, SAVES)
            self.assertTrue(torch.equal(value, expected), name)
        self.assertEqual(index["metadata"]["total_size"], total)

    def test_each_file_names_the_format_that_transformers_asks_for(self):
        for file in self.path.glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                self.assertEqual(opened.metadata()["format"], "pt")

    def test_the_manifests_sums_are_crc_32c(self):
        manifest = json.loads((self.path / "fsdp_manifest.json").read_text())["manifest"]
        self.assertEqual(set(manifest["files"]) | {"fsdp_manifest.json"}, {file.name for file in self.path.iterdir()})
        for name, entry in manifest["files"].items():
            data = (self.path / name).read_bytes()
            self.assertEqual(len(data), entry["bytes"])
            sums = "".join(f"{crc32c(data[at:at + BLOCK]):08x}" for at in range(0, len(data), BLOCK))
            self.assertEqual(sums, entry["sums"], name)


if __name__ == "__main__":
    closing_line.main()
