"""Activation checkpoints where Python's autograd engine is in the process."""

import ctypes
import sys
import unittest

import torch

import launch
from closing_line import main

LIBRARY = launch.BUILD / "test" / "processes" / "libfsdp_test_in_python.so"


class InPython(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.library = ctypes.CDLL(str(LIBRARY))  # calls without the GIL

    def test_a_checkpoint_of_cpp_works_and_leaves_pythons_hooks_alone(self):
        for _ in range(3):
            self.assertEqual(self.library.fsdp_test_checkpoint(), 0)
            packed = []

            def pack(tensor):
                packed.append(tensor)
                return tensor

            x = torch.ones(3, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor * 2):
                y = x.sin()
            y.sum().backward()
            self.assertEqual(len(packed), 1)
            self.assertTrue(torch.allclose(x.grad, torch.cos(torch.full((3,), 2.0))))

    def test_pythons_own_checkpoint_works_beside_it(self):
        self.assertEqual(self.library.fsdp_test_checkpoint(), 0)
        layer = torch.nn.Linear(4, 4)
        x = torch.randn(2, 4, requires_grad=True)
        function = lambda v: torch.tanh(layer(v)).exp()  # noqa: E731
        (expected,) = torch.autograd.grad(function(x).sum(), x)
        for reentrant in (False, True):
            y = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant)
            x.grad = None
            y.sum().backward()
            self.assertTrue(torch.equal(x.grad, expected))

    def test_python_may_come_after_it(self):
        script = "\n".join([
            "import ctypes",
            f"library = ctypes.CDLL({str(LIBRARY)!r})",
            "assert library.fsdp_test_checkpoint() == 0",
            "import torch  # puts its own engine in place",
            "assert library.fsdp_test_checkpoint() == 0",
            "x = torch.ones(2, requires_grad=True)",
            "x.sin().sum().backward()",
            "assert torch.equal(x.grad, x.detach().cos())",
        ])
        result = launch.run([sys.executable, "-c", script])
        self.assertEqual(result.returncode, 0, result.stderr)


if __name__ == "__main__":
    main()
