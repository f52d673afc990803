"""The package's public names are documented, annotated and typed, and its stub says what the extension has."""

import ast
import ctypes
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import rank_results
from closing_line import main

import fsdp
from fsdp import _C

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "bindings" / "fsdp"
OURS = ("fsdp", "_C")


def public_functions():
    """(name, function) of every public function, and of the methods of every public class, that are ours."""
    for name in fsdp.__all__:
        value = getattr(fsdp, name)
        if not isinstance(value, type):
            yield name, value
            continue
        for method, function in vars(value).items():
            if not method.startswith("_") and inspect.isfunction(function) and function.__module__.startswith(OURS):
                yield f"{name}.{method}", function


# Of what Python programs do not use: activation_checkpoint, clone, torch::save, torch::optim, and settings of C++.
CPP_ONLY = ("lib/api/recompute/", "lib/api/shard/clone.cpp", "lib/dtensor/torch_save.cpp", "lib/api/state_dict/optimizer_params",
            "fsdp::init_parameters", "fsdp::saved_dtype", "fault_outside_step")


def messages():
    """(file, text) of every string literal in the core, those that follow each other joined."""
    for path in sorted((HERE.parents[1] / "lib").rglob("*.?pp")):
        code = re.sub(r"//[^\n]*|#include[^\n]*", "", path.read_text())
        for run in re.finditer(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+', code):
            yield f"{path.relative_to(HERE.parents[1])}", "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', run.group(0)))


class Messages(unittest.TestCase):
    """What C++ says is written for C++ programs."""

    def test_each_name_in_one_is_a_name_of_python(self):
        found = 0
        for file, text in messages():
            if not re.search(r"\b(fsdp|torch)::|->", text) or any(of in file or of in text for of in CPP_ONLY):
                continue
            found += 1
            shown = _C.in_python_words(re.sub(r"^(fsdp::\w+)$", r"\1: ", text))  # a caller's name, that an error begins with
            self.assertNotRegex(shown, r"::|->", file)
            for name in re.findall(r"\bfsdp\.(\w+)", shown):
                self.assertTrue(hasattr(fsdp, name), f"{file}: fsdp.{name} in {shown!r}")
        self.assertGreater(found, 20)

    def test_names_that_are_not_the_librarys_stay(self):
        for text in ("aten::add of c10::Half", "FSDP::all_gather (blocks.0)", "a -> b", "myfsdp::x"):
            self.assertEqual(_C.in_python_words(text), text)


class Names(unittest.TestCase):
    def test_each_has_a_docstring(self):
        for name in fsdp.__all__:
            self.assertTrue((getattr(fsdp, name).__doc__ or "").strip(), f"fsdp.{name}")
        for name, function in public_functions():
            self.assertTrue((function.__doc__ or "").strip(), name)

    def test_each_function_says_what_it_takes_and_returns(self):
        for name, function in public_functions():
            if "raises NotImplementedError" in (function.__doc__ or ""):
                continue  # of torch's class, which says it
            signature = inspect.signature(function)
            for parameter in signature.parameters.values():
                if parameter.name != "self":
                    self.assertIsNot(parameter.annotation, parameter.empty, f"{name}: {parameter.name}")
            self.assertIsNot(signature.return_annotation, signature.empty, f"{name}: what it returns")

    def test_each_function_that_takes_something_says_more_than_its_name(self):
        for name, function in public_functions():
            self.assertGreaterEqual(len(function.__doc__.split()), 4, f"{name}: {function.__doc__}")

    def test_the_stub_has_what_the_extension_has(self):
        tree = ast.parse((SOURCES / "_C.pyi").read_text())
        stub = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        self.assertEqual(set(stub), {name for name in dir(_C) if not name.startswith("_")})
        for name, node in stub.items():
            if isinstance(node, ast.ClassDef) and not issubclass(getattr(_C, name), BaseException):
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                found = {each for each in vars(getattr(_C, name)) if not each.startswith("_")}
                self.assertEqual(methods, found, name)


class Version(unittest.TestCase):
    def test_it_is_that_of_the_library(self):
        maps = Path("/proc/self/maps").read_text().splitlines()
        library = next(line.split()[-1] for line in maps if "/libfsdp.so" in line)  # as the extension has loaded it
        version = ctypes.CDLL(library)["_ZN4fsdp7versionEv"]
        version.restype = ctypes.c_char_p
        self.assertEqual(fsdp.__version__, version().decode())


class Typing(unittest.TestCase):
    @unittest.skipUnless(importlib.util.find_spec("mypy"), "mypy is not installed in this environment")
    def test_a_users_program_type_checks_but_for_its_mistakes(self):
        program = HERE / "typed_program.py"
        with tempfile.TemporaryDirectory() as folder:
            # The sources and the stub, as they are installed.
            package = Path(folder, "fsdp")
            package.mkdir()
            for source in [*SOURCES.glob("*.py"), *SOURCES.glob("*.pyi"), SOURCES / "py.typed",
                           rank_results.PACKAGE / "fsdp" / "_build.py"]:
                Path(package, source.name).write_bytes(source.read_bytes())
            ran = subprocess.run([sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", folder, program],
                                 env={**os.environ, "MYPYPATH": folder}, capture_output=True, text=True, timeout=800)
        found = {int(line) for line in re.findall(r"typed_program\.py:(\d+): error", ran.stdout)}
        wrong = {number for number, line in enumerate(program.read_text().splitlines(), 1) if line.endswith("# wrong")}
        self.assertEqual(found, wrong, ran.stdout + ran.stderr)
        self.assertNotIn("/fsdp/", ran.stdout)


if __name__ == "__main__":
    main()
