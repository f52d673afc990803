"""fsdp-checkpoint; the checkpoints are saved by this process, which has no process group."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import rank_results
from closing_line import main

import torch
import torch.nn as nn
from safetensors.torch import load_file, save_file

import fsdp
from fsdp import _checkpoint_command as command


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(300, 1000)  # 1.2 MB: two blocks
        self.second = nn.Linear(3, 2)
        self.third = nn.Linear(3, 2)
        self.third.weight = self.second.weight
        self.register_buffer("table", torch.arange(4))


def run(*arguments):
    """(exit code, output, errors), in this process: the import of torch takes seconds."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = command.main([str(each) for each in arguments])
        except SystemExit as ended:
            code = ended.code
    return code, out.getvalue(), error.getvalue()


class Command(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.net.second(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        self.path = self.folder / "c"
        fsdp.save_checkpoint(self.path, self.net, self.optimizer, {"epoch": 1})

    def changed(self, name="d", extra=None):
        """Another checkpoint: one weight is another."""
        with torch.no_grad():
            self.net.first.weight[7, 8] += 0.5
        path = self.folder / name
        fsdp.save_checkpoint(path, self.net, self.optimizer, extra or {"epoch": 1})
        return path

    def test_list_shows_every_tensor(self):
        code, out, _ = run("list", self.path, "--json")
        self.assertEqual(code, 0)
        found = json.loads(out)
        self.assertEqual((found["world_size"], found["documents"]["extra.json"]), (1, {"epoch": 1}))
        by_name = {each["name"]: each for each in found["sections"]["model"]}
        self.assertEqual(set(by_name), {"first.weight", "first.bias", "second.weight", "second.bias", "third.bias",
                                        "table"})
        self.assertEqual(by_name["first.weight"]["sizes"], [1000, 300])
        self.assertEqual(by_name["first.weight"]["bytes"], 1_200_000)
        self.assertEqual(by_name["table"]["dtype"], "int64")
        self.assertEqual(by_name["second.weight"]["other_names"], ["third.weight"])
        self.assertEqual({each["name"] for each in found["sections"]["optimizer"]},
                         {f"second.{name}.{field}" for name in ("weight", "bias")
                          for field in ("step", "exp_avg", "exp_avg_sq")})
        code, out, _ = run("list", self.path)
        self.assertEqual(code, 0)
        lines = out.splitlines()
        self.assertIn("model: 6 tensors", out)
        [line] = [line for line in lines if line.startswith("first.weight")]
        self.assertEqual(line.split(), ["first.weight", "float32", "1000x300", "1,200,000", "model.safetensors"])
        self.assertIn("second.weight, third.weight", out)
        self.assertIn("documents: extra.json, optimizer.json", out)

    def test_verify_names_each_damaged_block(self):
        self.assertEqual(run("verify", self.path)[0], 0)
        file = self.path / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[1000] ^= 4
        data[-1] ^= 4
        file.write_bytes(data)
        (self.path / "extra.json").write_text('{"epoch": 2}')
        code, out, _ = run("verify", self.path, "--json")
        self.assertEqual(code, 1)
        damage = json.loads(out)["damage"]
        self.assertEqual(len(damage), 3, damage)
        self.assertIn("extra.json", damage[0])
        self.assertIn("'first.weight'", damage[1])
        self.assertIn("bytes 1048576 to", damage[2])
        code, out, _ = run("verify", self.path)
        self.assertEqual((code, len(out.splitlines())), (1, 3))

    def test_verify_says_that_foreign_files_have_no_checksums(self):
        save_file({"a": torch.ones(2)}, self.folder / "a.safetensors")
        code, out, _ = run("verify", self.folder / "a.safetensors")
        self.assertEqual(code, 0)
        self.assertIn("no checksums", out)
        data = (self.folder / "a.safetensors").read_bytes()
        (self.folder / "a.safetensors").write_bytes(data[:-1])
        code, _, error = run("verify", self.folder / "a.safetensors")
        self.assertEqual(code, 2)
        self.assertIn("a.safetensors", error)

    def test_diff_tells_what_differs(self):
        code, out, _ = run("diff", self.path, self.path)
        self.assertEqual((code, out), (0, "the checkpoints are equal\n"))
        other = self.changed(extra={"epoch": 2})
        code, out, _ = run("diff", self.path, other, "--json")
        self.assertEqual(code, 1)
        found = json.loads(out)
        [difference] = found["sections"]["model"]
        self.assertEqual((difference["name"], difference["elements"], difference["of"]), ("first.weight", 1, 300_000))
        self.assertAlmostEqual(difference["largest"], 0.5, places=6)
        self.assertEqual((found["sections"]["optimizer"], found["documents"]), ([], ["extra.json"]))
        one, two = self.folder / "one.safetensors", self.folder / "two.safetensors"
        nothing = torch.full((2,), float("nan"))
        save_file({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2), "e": nothing}, one)
        save_file({"a": torch.ones(2).half(), "b": torch.ones(4), "d": torch.ones(2), "e": nothing}, two)
        code, out, _ = run("diff", one, two)
        self.assertEqual(code, 1)
        rows = {tuple(line.split(maxsplit=2)) for line in out.splitlines()[1:]}
        self.assertEqual(rows, {("model", "a", "dtypes: float32 and float16"), ("model", "b", "sizes: [3] and [4]"),
                                ("model", "c", "only in the first"), ("model", "d", "only in the second")})

    def test_convert_changes_the_models_floating_point_tensors(self):
        target = self.folder / "converted"
        code, out, error = run("convert", self.path, target, "--dtype", "bfloat16")
        self.assertEqual(code, 0, error)
        self.assertIn("random generators", out)
        found = load_file(target / "model.safetensors")
        for name, value in self.net.state_dict().items():
            if name != "third.weight":
                expected = value.to(torch.bfloat16) if value.is_floating_point() else value
                self.assertTrue(torch.equal(found[name], expected), name)
        other = Net()
        optimizer = torch.optim.AdamW(other.parameters())
        loaded = fsdp.load_checkpoint(target, other, optimizer, convert_dtypes=True)
        self.assertEqual(loaded.extra, {"epoch": 1})
        self.assertTrue(torch.equal(optimizer.state[other.second.weight]["exp_avg"],
                                    self.optimizer.state[self.net.second.weight]["exp_avg"]))
        self.assertEqual(run("verify", target)[0], 0)
        code, _, error = run("convert", self.path, target, "--dtype", "float16")
        self.assertEqual(code, 2)
        self.assertIn("--overwrite", error)
        self.assertEqual(run("convert", target, target, "--dtype", "float32", "--overwrite")[0], 0)
        self.assertEqual(load_file(target / "model.safetensors")["first.weight"].dtype, torch.float32)
        save_file({"a": torch.ones(2, dtype=torch.int8), "b": torch.arange(3.0)}, self.folder / "a.safetensors")
        code, _, error = run("convert", self.folder / "a.safetensors", self.folder / "b", "--dtype", "float64")
        self.assertEqual(code, 0, error)
        found = load_file(self.folder / "b" / "model.safetensors")
        self.assertTrue(torch.equal(found["b"], torch.arange(3.0).double()))

    def test_a_damaged_checkpoint_is_not_converted(self):
        file = self.path / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 4
        file.write_bytes(data)
        code, _, error = run("convert", self.path, self.folder / "e", "--dtype", "float16")
        self.assertEqual(code, 2)
        self.assertIn("damaged", error)
        self.assertFalse((self.folder / "e").exists())

    def test_it_is_a_program(self):
        environment = {**os.environ, "PYTHONPATH": str(rank_results.PACKAGE), "OMP_NUM_THREADS": "1"}
        for arguments, code in ((["diff", self.path, self.path], 0), (["diff", self.path, self.changed()], 1)):
            ran = subprocess.run([sys.executable, "-m", "fsdp._checkpoint_command", *map(str, arguments)], env=environment,
                                 text=True, capture_output=True, timeout=120)
            self.assertEqual(ran.returncode, code, ran.stderr)

    def test_wrong_calls_end_with_2(self):
        for arguments, text in ((["list", self.folder / "nothing"], "no such file"),
                                (["list", self.folder], "no checkpoint"),
                                (["convert", self.path, self.folder / "e", "--dtype", "int8"], "invalid choice"),
                                ([], "COMMAND"), (["show"], "invalid choice")):
            code, _, error = run(*arguments)
            self.assertEqual(code, 2, error)
            self.assertIn(text, error)


if __name__ == "__main__":
    main()
