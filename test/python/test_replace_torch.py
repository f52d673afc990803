"""fsdp.replace_torch: torch's names in torch's modules and in those that have imported them, undone exactly, and nothing
half done where it cannot be."""

import importlib
import os
import subprocess
import sys
import tempfile
import textwrap
import types
import unittest
from pathlib import Path

import rank_results
import launch
from closing_line import main

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining.stage
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import _import_hook

from torch.distributed._composable import replicate_with_fsdp

OF_REPLICATE = ("ReplicateModule", "replicate")
PUBLIC = [*torch.distributed.fsdp._fully_shard.__all__, *OF_REPLICATE]
FUNCTIONS = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
PLACES = ("torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp",
          "torch.distributed._composable.fsdp.fully_shard", "torch.distributed._composable.replicate_with_fsdp")
OWN = {name: getattr(replicate_with_fsdp if name in OF_REPLICATE else torch.distributed.fsdp, name) for name in PUBLIC}


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def held_in_torch():
    """Every attribute of torch's modules that is a public object of torch's fully_shard or ours."""
    ids = {id(value) for name in PUBLIC for value in (OWN[name], getattr(fsdp, name))}
    return {(module_name, attribute): value for module_name, module in list(sys.modules.items())
            if module_name.startswith("torch.") and isinstance(module, types.ModuleType)
            for attribute, value in list(vars(module).items()) if id(value) in ids}


class Replacing(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        for place in PLACES:
            importlib.import_module(place)
        store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        cls.addClassCleanup(dist.destroy_process_group)
        cls.mesh = init_device_mesh("cpu", (1,))

    def setUp(self):
        self.before = held_in_torch()
        self.addCleanup(lambda: self.assertEqual(held_in_torch(), self.before))
        self.addCleanup(fsdp.restore_torch)

    def library(self, text="from torch.distributed.fsdp import fully_shard as shard, FSDPModule"):
        """A module that has been imported, as a trainer's would be."""
        module = types.ModuleType("trainer")
        sys.modules["trainer"] = module
        self.addCleanup(sys.modules.pop, "trainer", None)
        exec(text, vars(module))
        return module

    def test_torchs_names_are_ours_wherever_torch_has_them(self):
        fsdp.replace_torch()
        for place in PLACES:
            for name in PUBLIC:
                found = vars(sys.modules[place]).get(name)
                # torch's replicate is made in a module of PLACES, and works on there with torch's other names.
                if found is not None and (place != PLACES[-1] or name == "replicate"):
                    self.assertIs(found, getattr(fsdp, name), f"{place}.{name}")
        for name in FUNCTIONS:
            self.assertIsNot(getattr(torch.distributed.fsdp, name), OWN[name])

    def test_every_public_name_of_torchs_has_one_of_ours(self):
        self.assertEqual(set(PUBLIC) - set(fsdp.__all__), set())
        self.assertEqual(set(PUBLIC) - _import_hook.NAMES, set())
        self.assertEqual(_import_hook.PLACES, PLACES)

    def test_the_places_are_all_of_torchs_modules_that_pass_the_names_on(self):
        users = ("torch.distributed.pipelining.", "torch.distributed._tools.", "torch.testing.")
        makers = "torch.distributed.fsdp._fully_shard._"
        for module, attribute in held_in_torch():
            if not module.startswith((*users, makers)):
                self.assertIn(module, PLACES, attribute)

    def test_a_module_that_has_imported_them_by_name_has_ours(self):
        library = self.library()
        replacement = fsdp.replace_torch()
        self.assertIs(library.shard, fsdp.fully_shard)
        self.assertIs(library.FSDPModule, fsdp.FSDPModule)
        self.assertIn("trainer.shard", replacement.replaced)
        replacement.restore()
        self.assertIs(library.shard, OWN["fully_shard"])
        self.assertIs(library.FSDPModule, OWN["FSDPModule"])

    def test_torchs_own_modules_keep_their_own(self):
        fsdp.replace_torch()
        maker = torch.distributed.fsdp._fully_shard._fully_shard
        self.assertIs(maker.FSDPModule, OWN["FSDPModule"])
        self.assertIs(torch.distributed.pipelining.stage.FSDPModule, OWN["FSDPModule"])
        plain = OWN["fully_shard"](nn.Linear(2, 2), mesh=self.mesh)
        plain(torch.ones(1, 2)).sum().backward()  # torch's works on
        plain = OWN["replicate"](nn.Linear(2, 2), mesh=self.mesh)
        self.assertIs(type(plain).__mro__[1], OWN["ReplicateModule"])
        plain(torch.ones(1, 2)).sum().backward()

    def test_replicate_is_ours_and_its_modules_are_torchs_too(self):
        library = self.library("from torch.distributed._composable.replicate_with_fsdp import replicate, ReplicateModule")
        with fsdp.replace_torch():
            replicated = library.replicate(model(), mesh=self.mesh)
            self.assertIsInstance(replicated, fsdp.ReplicateModule)
            self.assertIsInstance(replicated, library.ReplicateModule)
            self.assertIsNotNone(library.replicate.state(replicated).core)
        self.assertIsInstance(replicated, library.ReplicateModule)
        self.assertIs(library.replicate, OWN["replicate"])
        self.assertIsNotNone(library.replicate.state(replicated).core)
        self.assertIsNone(OWN["fully_shard"].state(replicated))
        replicated(torch.ones(1, 4)).sum().backward()
        self.assertIsNotNone(replicated[0].weight.grad)

    def test_this_package_keeps_its_own(self):
        before = {name: dict(vars(module)) for name, module in sys.modules.items() if name.split(".")[0] == "fsdp"}
        fsdp.replace_torch()
        for name, attributes in before.items():
            for attribute, value in attributes.items():
                self.assertIs(vars(sys.modules[name])[attribute], value, f"{name}.{attribute}")

    def test_with_undoes_it_at_the_end_also_of_a_failing_block(self):
        with self.assertRaisesRegex(KeyError, "trainer"), fsdp.replace_torch() as replacement:
            self.assertIs(torch.distributed.fsdp.fully_shard, fsdp.fully_shard)
            raise KeyError("trainer")
        self.assertEqual(held_in_torch(), self.before)
        self.assertEqual(replacement.replaced, [])
        replacement.restore()

    def test_what_another_library_has_put_there_since_stays(self):
        library = self.library()
        replacement = fsdp.replace_torch()
        library.shard = len
        replacement.restore()
        self.assertIs(library.shard, len)
        self.assertIs(library.FSDPModule, OWN["FSDPModule"])

    def test_a_second_one_adds_what_is_there_since_and_undoes_only_that(self):
        fsdp.replace_torch()
        library = types.ModuleType("trainer")
        library.shard = OWN["fully_shard"]
        sys.modules["trainer"] = library
        self.addCleanup(sys.modules.pop, "trainer")
        with fsdp.replace_torch() as second:
            self.assertEqual(second.replaced, ["trainer.shard"])
            self.assertIs(library.shard, fsdp.fully_shard)
        self.assertIs(library.shard, OWN["fully_shard"])
        self.assertIs(torch.distributed.fsdp.fully_shard, fsdp.fully_shard)

    def test_restore_torch_undoes_all_of_them_and_without_any_nothing(self):
        fsdp.restore_torch()
        fsdp.replace_torch()
        library = self.library("from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard")
        fsdp.replace_torch()
        self.assertIs(library.fully_shard, fsdp.fully_shard)
        fsdp.restore_torch()
        self.assertIs(library.fully_shard, OWN["fully_shard"])
        self.assertEqual(held_in_torch(), self.before)

    def test_a_module_of_torchs_that_is_imported_meanwhile_gets_torchs_back(self):
        del sys.modules["torch.distributed._composable.fsdp.fully_shard"]
        del sys.modules["torch.distributed._composable.fsdp"]
        with fsdp.replace_torch():
            from torch.distributed._composable.fsdp import fully_shard

            self.assertIs(fully_shard, fsdp.fully_shard)
        self.assertIs(sys.modules["torch.distributed._composable.fsdp"].fully_shard, OWN["fully_shard"])
        self.assertEqual(held_in_torch(), self.before)

    def test_sharded_modules_are_instances_of_torchs_class_and_stay_sharded(self):
        with fsdp.replace_torch():
            sharded = torch.distributed.fsdp.fully_shard(model(), mesh=self.mesh)
            self.assertIsInstance(sharded, torch.distributed.fsdp.FSDPModule)
            self.assertIsNotNone(torch.distributed.fsdp.fully_shard.state(sharded).core)
        self.assertIsInstance(sharded, OWN["FSDPModule"])
        sharded(torch.ones(1, 4)).sum().backward()
        self.assertIsNotNone(sharded[0].weight.grad)

    def test_policies_from_before_are_accepted(self):
        policies = {"mp_policy": OWN["MixedPrecisionPolicy"](param_dtype=torch.bfloat16),
                    "offload_policy": OWN["CPUOffloadPolicy"](pin_memory=False)}
        with fsdp.replace_torch():
            sharded = torch.distributed.fsdp.fully_shard(model(), mesh=self.mesh, **policies)
            self.assertEqual(sharded(torch.ones(1, 4)).dtype, torch.bfloat16)
            self.assertIsInstance(policies["offload_policy"], torch.distributed.fsdp.OffloadPolicy)

    def test_a_model_that_torch_has_sharded_is_refused_by_name_and_stays_what_it_is(self):
        mixed = model()
        OWN["fully_shard"](mixed[1], mesh=self.mesh)
        before = (type(mixed), dict(mixed.__dict__), list(mixed.parameters()))
        with fsdp.replace_torch():
            shard = torch.distributed.fsdp.fully_shard
            with self.assertRaisesRegex(ValueError, "module '1', FSDPLinear, is sharded by torch's own .*replace_torch"):
                shard(mixed, mesh=self.mesh)
            with self.assertRaisesRegex(ValueError, "the FSDPLinear is sharded by torch's own fully_shard"):
                shard(mixed[1], mesh=self.mesh)
            with self.assertRaisesRegex(ValueError, "register_fsdp_forward_method: the FSDPLinear is sharded by torch"):
                torch.distributed.fsdp.register_fsdp_forward_method(mixed[1], "forward")
        after = (type(mixed), dict(mixed.__dict__), list(mixed.parameters()))
        self.assertEqual(before[:2], after[:2])
        self.assertTrue(all(one is other for one, other in zip(before[2], after[2], strict=True)))
        OWN["fully_shard"](mixed, mesh=self.mesh)
        mixed(torch.ones(1, 4)).sum().backward()

    def test_a_model_that_torch_has_replicated_is_refused_by_name(self):
        mixed = model()
        OWN["replicate"](mixed[1], mesh=self.mesh)
        with self.assertRaisesRegex(ValueError, "replicate: module '1', ReplicateLinear, is sharded by torch's own replicate"):
            fsdp.replicate(mixed, mesh=self.mesh)
        with self.assertRaisesRegex(ValueError, "the ReplicateLinear is sharded by torch's own replicate"):
            fsdp.fully_shard(mixed[1], mesh=self.mesh)
        fsdp.fully_shard(mixed, mesh=self.mesh)  # as torch's, which leaves it alone
        mixed(torch.ones(1, 4)).sum().backward()

    def expect_refusal(self, holder, attribute, value, says):
        library, original = self.library(), getattr(holder, attribute)
        self.addCleanup(setattr, holder, attribute, original)
        setattr(holder, attribute, value)
        found = held_in_torch()
        with self.assertRaisesRegex(RuntimeError, says):
            fsdp.replace_torch()
        self.assertEqual(held_in_torch(), found)
        self.assertIs(library.shard, OWN["fully_shard"])
        setattr(holder, attribute, original)

    def test_another_library_that_was_first_is_named_and_nothing_is_replaced(self):
        other = self.library("import functools\nfrom torch.distributed.fsdp import fully_shard, FSDPModule\n"
                             "@functools.wraps(fully_shard)\ndef wrapped(*args): return fully_shard(*args)\n"
                             "class Module(FSDPModule): pass\npartial = functools.partial(fully_shard)\n")
        sys.modules["other_library"] = other
        self.addCleanup(sys.modules.pop, "other_library")
        other.__file__ = "/somewhere/other_library.py"
        vars(other)["__name__"] = "other_library"
        for place in (torch.distributed.fsdp, sys.modules["torch.distributed._composable.fsdp"]):
            self.expect_refusal(place, "fully_shard", other.wrapped, rf"{place.__name__}.fully_shard is not torch's own, "
                                r"but the function fully_shard of other_library \(/somewhere/other_library.py\)")
        other.Module.__module__ = "other_library"
        self.expect_refusal(torch.distributed.fsdp, "FSDPModule", other.Module, "the class Module of other_library")
        self.expect_refusal(torch.distributed.fsdp, "share_comm_ctx", other.partial, "functools.partial")


class BeforeOurs(unittest.TestCase):
    """What was there before fsdp was imported: in processes of their own."""

    def run_text(self, text):
        environment = launch.environment(PYTHONPATH=rank_results.SEES_PACKAGE)
        return subprocess.run([sys.executable, "-c", textwrap.dedent(text)], env=environment, capture_output=True, text=True,
                              timeout=launch.patience(120))

    def expect_end(self, text, says=""):
        ran = self.run_text(text)
        self.assertIn(says, ran.stderr)
        self.assertEqual(ran.returncode, 1 if says else 0, ran.stderr)
        return ran.stdout

    def test_another_librarys_function_in_the_module_that_makes_it_is_named_too(self):
        self.expect_end("""
            import functools, torch.distributed.fsdp._fully_shard._fully_shard as maker
            own = maker.fully_shard
            maker.fully_shard = functools.wraps(own)(lambda *args: own(*args))
            import fsdp
            fsdp.replace_torch()
            """, "torch.distributed.fsdp._fully_shard's fully_shard is not torch's own, but the function fully_shard of "
                 "__main__")

    def test_another_librarys_function_in_torchs_place_is_not_taken_for_torchs(self):
        printed = self.expect_end("""
            import torch.distributed.fsdp as place
            own, place.fully_shard = place.fully_shard, len
            own_class, place.FSDPModule = place.FSDPModule, dict
            import fsdp
            print(issubclass(fsdp.FSDPModule, own_class))
            try:
                fsdp.replace_torch()
            except RuntimeError as error:
                print(error)
            print(place.share_comm_ctx is fsdp.share_comm_ctx)
            """)
        first, error, last = printed.splitlines()
        self.assertEqual((first, last), ("True", "False"))
        self.assertIn("is not torch's own, but ", error)

    def test_another_torch_is_refused_and_nothing_is_replaced(self):
        self.assertEqual(self.expect_end("""
            import torch, torch.distributed.fsdp as place
            own, torch.__version__ = place.fully_shard, "2.10.1"
            try:
                import fsdp
            except ImportError as error:
                print(error)
            print(place.fully_shard is own)
            """).splitlines()[1:], ["True"])

    def test_a_policy_of_torchs_class_is_accepted_where_ours_is_one_below_it(self):
        # As before torch 2.15, whose class has no param_dtype_override_fn.
        self.expect_end("""
            import dataclasses, tempfile, torch, torch.distributed as dist
            import torch.distributed.fsdp._fully_shard._fsdp_api as api
            fields = [field for field in dataclasses.fields(api.MixedPrecisionPolicy)
                      if field.name != "param_dtype_override_fn"]
            api.MixedPrecisionPolicy = dataclasses.make_dataclass(
                "MixedPrecisionPolicy", [(field.name, field.type, field) for field in fields], frozen=True)
            import fsdp
            assert fsdp.MixedPrecisionPolicy is not api.MixedPrecisionPolicy
            dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
            mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
            for policy in (api.MixedPrecisionPolicy, fsdp.MixedPrecisionPolicy):
                module = fsdp.fully_shard(torch.nn.Linear(2, 2), mesh=mesh, mp_policy=policy(param_dtype=torch.bfloat16))
                assert module(torch.ones(1, 2)).dtype == torch.bfloat16
            dist.destroy_process_group()
            """)


if __name__ == "__main__":
    main()
