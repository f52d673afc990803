"""Ranks that share the only GPU: NCCL takes them for ranks of several hosts, each with that GPU."""

import io
import os
import subprocess
import sys
import tempfile
import unittest
from argparse import Namespace
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools" / "gpu"), str(HERE.parent / "processes")]

import run_cases
import run_native
import shared_gpu
import train_losses

from closing_line import main
from worlds import WORLDS


class Started(Exception):
    """Enough processes were started."""


class Ranks(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        shared_gpu.gpus.cache_clear()
        self.addCleanup(shared_gpu.gpus.cache_clear)

    def environments(self, start, gpus, **variables):
        """Of the two processes that are ranks, on a machine with so many GPUs."""
        found, real = [], subprocess.Popen

        def note(command, *arguments, env=None, **options):
            if command[0] == "nvidia-smi":
                return real(command, *arguments, env=env, **options)
            found.append(env if env is not None else dict(os.environ))
            if len(found) == 2:
                raise Started
            return mock.Mock(returncode=0)

        smi = self.folder / "nvidia-smi"
        smi.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {at}: one of them'\n" for at in range(gpus)))
        smi.chmod(0o755)
        given = {"PATH": f"{self.folder}:{os.environ['PATH']}", "FSDP_TEST_DEVICE": "cuda",
                 "FSDP_BUILD_DIR": str(self.folder), **variables}
        with mock.patch.dict(os.environ, given), mock.patch.object(subprocess, "Popen", note), \
                mock.patch("sys.stdout", new_callable=io.StringIO), self.assertRaises(Started):
            for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
                os.environ.pop(name, None)
            start()
        return found

    def starts(self):
        def native():
            options = Namespace(program="program", processes=2, nccl_log=False)
            run_native.Program(options).run(["a case"], 10, lambda *_: None)

        yield "cases", lambda: run_cases.run_once(WORLDS["nccl"], ["a case"], 10, lambda *_: None)
        yield "native", native
        yield "train", lambda: train_losses.losses("cuda", 2, 1, 10, self.folder)

    def test_on_one_gpu_each_rank_is_a_host_of_its_own_that_talks_over_sockets(self):
        for name, start in self.starts():
            with self.subTest(name):
                shared_gpu.gpus.cache_clear()
                ranks = self.environments(start, gpus=1)
                self.assertEqual([rank.get("NCCL_HOSTID") for rank in ranks], ["0", "1"])
                self.assertEqual([rank.get("NCCL_SOCKET_IFNAME") for rank in ranks], ["lo", "lo"])

    def test_with_a_gpu_each_or_none_nothing_is_changed(self):
        for gpus, variables in ((2, {}), (0, {"FSDP_TEST_DEVICE": "cpu"}), (1, {"FSDP_TEST_DEVICE": "cpu"})):
            for name, start in self.starts():
                with self.subTest(name, gpus=gpus):
                    shared_gpu.gpus.cache_clear()
                    for rank in self.environments(start, gpus, **variables):
                        self.assertNotIn("NCCL_HOSTID", rank)
                        self.assertNotIn("NCCL_SOCKET_IFNAME", rank)

    def test_one_of_several_that_is_visible_is_the_only_one(self):
        for name, start in self.starts():
            with self.subTest(name):
                shared_gpu.gpus.cache_clear()
                ranks = self.environments(start, gpus=8, CUDA_VISIBLE_DEVICES="3")
                self.assertEqual([rank.get("NCCL_HOSTID") for rank in ranks], ["0", "1"])
                self.assertEqual([rank["CUDA_VISIBLE_DEVICES"] for rank in ranks], ["3", "3"])


if __name__ == "__main__":
    main()
