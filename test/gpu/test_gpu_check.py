"""tools/gpu_check without a GPU: its plans, what it skips and says on each kind of bad machine, and the words of its report."""

import sys
from argparse import Namespace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tools" / "gpu"), str(HERE.parent / "processes")]

import claims
import machine
import more
import packed
import parts
import plan
import report
from closing_line import main
from in_folder import InFolder

H200 = dict(gpu="NVIDIA H200", gpus=1, memory_gib=139.8, driver="580.1", torch="2.11.0", cuda="13.0", nccl="2.28.9",
            toolkit="13.0", sanitizer="/usr/local/cuda/bin/compute-sanitizer", python="3.12.3", cores=16,
            glibc="2.39", compiler="/usr/bin/g++", torch_root="/opt/torch")
PACKED = {"torch": "2.11.0", "cuda": "13.0", "python": "3.12", "glibc": "2.34"}
LIMIT_OF_A_CALL_S = 600


class OnMachine(InFolder):
    def needs(self, unfit="", **differences):
        return machine.Needs(machine.Machine(**{**H200, **differences}), self.record, self.folder / "build", unfit)


class BadMachines(OnMachine):
    def test_nothing_is_missing_on_the_machine_that_it_is_for(self):
        needs = self.needs()
        self.assertEqual([needs.missing(need) for need in ("gpu", "torch", "sanitizer", "memory:70")], [""] * 4)

    def test_without_a_driver_all_that_needs_a_gpu_says_so(self):
        self.assertEqual(self.needs(driver="", gpus=0, gpu="", memory_gib=0.0).missing("gpu"),
                         "no driver: nvidia-smi does not answer")

    def test_a_driver_without_a_gpu_that_torch_can_use_is_named(self):
        self.assertIn("torch 2.11.0 (CUDA 13.0)", self.needs(gpus=0, gpu="").missing("gpu"))

    def test_without_a_toolkit_the_sanitizer_alone_is_skipped(self):
        needs = self.needs(toolkit="", sanitizer="")
        self.assertIn("compute-sanitizer is not on the PATH", needs.missing("sanitizer"))
        self.assertEqual(needs.missing("gpu"), "")

    def test_a_torch_for_cuda_12_is_a_note(self):
        needs = self.needs(cuda="12.8")
        self.assertEqual(needs.missing("gpu"), "")
        self.assertTrue(any("12.8" in note for note in machine.notes(needs.machine)))

    def test_another_gpu_is_a_note_and_no_reason_to_skip(self):
        needs = self.needs(gpu="NVIDIA A10G", memory_gib=22.1)
        self.assertTrue(any("A10G" in note for note in machine.notes(needs.machine)))
        self.assertEqual(needs.missing("gpu"), "")
        self.assertEqual(needs.missing("memory:70"), "needs 70 GiB of GPU memory, here are 22.1")

    def test_two_ranks_need_a_probe_that_has_passed(self):
        self.assertIn("needs first/two_ranks, which has not run", self.needs().missing("two_ranks"))
        self.record.add("first", part="two_ranks", status="failed", why="exit code 1: invalid usage")
        self.assertIn("found it failed: exit code 1: invalid usage", self.needs().missing("two_ranks"))
        self.record.add("first", part="two_ranks", status="passed")
        self.assertEqual(self.needs().missing("two_ranks"), "")
        self.assertEqual(self.needs(gpus=2).missing("two_ranks"), "")

    def test_what_needs_more_machines_says_how_many(self):
        self.assertEqual(self.needs().missing("gpus:2"), "needs 2 GPUs, here is 1")
        self.assertIn("needs 2 nodes", self.needs().missing("nodes:2"))

    def test_what_is_not_built_is_skipped_by_name(self):
        self.assertEqual(self.needs().missing("built:bench/x"), "bench/x is not there: it was not packed")


    def test_binaries_that_do_not_fit_are_named_with_the_reason_and_can_be_built_then(self):
        def why(**differences):
            return packed.why_not(PACKED, machine.Machine(**{**H200, **differences}))

        self.assertEqual(why(), "")
        self.assertEqual(why(torch="2.12.0+cu130"), "they are for torch 2.11.0, here is 2.12.0")
        self.assertEqual(why(torch=""), "they are for torch 2.11.0, here is none")
        self.assertIn("with CUDA 13.0, here is one with CUDA 12.8", why(cuda="12.8"))
        self.assertEqual(why(glibc="2.31"), "they need glibc 2.34, here is 2.31")
        self.assertEqual(why(python="3.11.7"), "", "the programs need no Python")
        other = machine.Machine(**{**H200, "python": "3.11.7"})
        no_extension = packed.why_no_extension(PACKED, other, self.folder)
        self.assertEqual(no_extension, "the packed extension is for Python 3.12, here is 3.11.7")
        needs = machine.Needs(other, self.record, self.folder, "", no_extension)
        self.assertEqual((needs.missing("no_extension"), needs.missing("unfit")[:21]), ("", "the packed binaries f"))
        self.assertIn("here is 3.11.7", needs.missing("built:bindings/fsdp/_C.so"))
        self.assertIn("no need", self.needs().missing("no_extension"))
        self.assertIn("they need glibc 2.34", self.needs("they need glibc 2.34").missing("built:x"))
        self.assertEqual(self.needs("they need glibc 2.34").missing("unfit"), "")
        self.assertIn("nothing has to be built", self.needs().missing("unfit"))
        self.assertIn("no C++ compiler", self.needs(compiler="").missing("compiler"))


class Plans(OnMachine):
    def options(self, device="cuda"):
        return Namespace(device=device, build=Path("/b"), headers=Path("/h"), jobs=None, opened=Path("/o"))

    def test_the_two_commands_hold_in_their_budgets(self):
        self.assertEqual(plan.BUDGETS_S, {"first": 300, "second": 330})
        for device in ("cuda", "cpu"):
            for name, budget_s in plan.BUDGETS_S.items():
                self.assertLessEqual(plan.most_s(self.options(device), name), budget_s, f"{name} on {device}")

    def test_a_part_has_its_groups_seconds_and_says_what_it_shows(self):
        for name in plan.NAMES:
            some = plan.parts_of(self.options(), name)
            every = [part.name for group in some for part in group.parts]
            self.assertEqual(len(set(every)), len(every))
            for group in some:
                self.assertEqual([part.limit_s for part in group.parts], [group.limit_s] * len(group.parts), group.name)
                self.assertTrue(all(part.shows for part in group.parts), group.name)

    def test_a_plan_says_the_seconds_of_each_group_and_their_sum(self):
        lines = list(plan.lines("first", plan.groups(self.options(), "first", self.record), 1))
        self.assertEqual(lines[0], "plan of first: at most 300 s")
        self.assertIn("    60 s  torch's groups, two ranks: nccl", lines)
        self.assertEqual(lines[-1], "   300 s  in all, 5 s of it to begin")
        self.assertEqual(sum(int(line.split()[0]) for line in lines[1:-1]), 295)
        slower = list(plan.lines("first", plan.groups(self.options("cpu"), "first", self.record), 8))
        self.assertEqual(slower[0], "plan of first: at most 2400 s, 8 times as long as on 16 cores")

    def test_the_second_command_begins_with_what_failed_and_ends_with_what_was_not_reached(self):
        for group in plan.first(self.options()):
            for part in group.parts:
                if part.name not in ("nccl", "graphs_one", "peak_one"):
                    self.record.add("first", part=part.name, status="passed")
        self.record.add("first", part="nccl", status="failed")
        self.record.add("first", part="graphs_one", status="cut")
        groups = plan.groups(self.options(), "second", self.record)
        self.assertEqual([[part.name for part in group.parts] for group in groups],
                         [["nccl"], ["steps"], ["compiled"], ["offload"], ["memcheck"], ["graphs_one"], ["peak_one"]])
        self.assertEqual([group.is_spare for group in groups], [False] * 5 + [True] * 2)
        self.assertEqual([group.stage for group in groups], ["first", *["second"] * 4, "first", "first"])
        self.assertIn("   330 s  in all", "\n".join(plan.lines("second", groups, 1)))

    def test_what_does_not_fit_into_them_has_limits_that_a_call_can_hold(self):
        found = more.stages(self.options())
        self.assertEqual(tuple(found), more.NAMES)
        every = [part for some in found.values() for part in some]
        self.assertEqual(len({part.name for part in every}), len(every))
        for part in every:
            self.assertLessEqual(part.limit_s, LIMIT_OF_A_CALL_S, part.name)
            self.assertTrue(part.shows, part.name)

    def test_every_part_of_the_plan_shows_a_claim_and_every_claim_names_parts_that_there_are(self):
        planned = {f"{name}/{part.name}" for name in plan.NAMES for group in plan.parts_of(self.options(), name)
                   for part in group.parts}
        others = {f"more/{part.name}" for some in more.stages(self.options()).values() for part in some}
        named = {part for claim in claims.CLAIMS for part in claim.parts}
        self.assertEqual(planned - named, set())
        self.assertEqual(named - planned - others, set())


class Reports(OnMachine):
    CLAIM = claims.of("it works", "first/a", "first/b")

    def state(self):
        return claims.state(self.CLAIM, self.record)

    def test_a_claim_is_shown_failed_or_not_reached(self):
        self.assertEqual(self.state(), ("not reached", "first/a has not begun; first/b has not begun"))
        self.record.add("first", part="a", status="passed")
        self.record.add("first", part="b", status="cut", why="left: case 3")
        self.assertEqual(self.state(), ("not reached", "first/b cut: left: case 3"))
        self.record.add("first", part="b", status="failed", why="failed: case 3")
        self.assertEqual(self.state(), ("failed", "first/b failed: failed: case 3"))
        self.record.add("first", part="b", status="left", why="no time was left")
        self.assertEqual(self.state()[0], "failed", "that it was not tried again is no better result")
        self.record.add("first", part="b", status="passed")
        self.assertEqual(self.state(), ("shown", ""))

    def test_a_claim_of_some_cases_is_as_they_ended(self):
        claim = claims.of("it works", "first/a", case="late")

        def state(*statuses, part="passed"):
            self.record.add("first", part="a", status="begun")
            for at, status in enumerate(statuses):
                self.record.add("first", part="a", found={"case": f"late_{at}", "status": status})
            self.record.add("first", part="a", found={"case": "other", "status": "failed"})
            self.record.add("first", part="a", status=part)
            return claims.state(claim, self.record)[0]

        self.assertEqual(state("passed", "passed", part="failed"), "shown")
        self.assertEqual(state("passed", "raised"), "failed")
        self.assertEqual(state("passed", "left", part="cut"), "not reached")
        self.assertEqual(state("skipped", "skipped"), "not reached")
        self.assertEqual(state(), "not reached")

    def test_the_report_has_each_claim_with_its_word(self):
        self.record.add("first", part="libraries", status="passed", seconds=1.0)
        self.record.add("first", part="train", status="failed", why="exit code 1: apart", seconds=1.0)
        text = report.text(self.record)
        self.assertRegex(text, r"run with this torch \| shown \| first/libraries \|  \|")
        self.assertRegex(text, r"\| failed \| first/train \| first/train failed: exit code 1: apart \|")
        self.assertRegex(text, r"under torch.compile \| not reached \| second/compiled \| second/compiled has not begun \|")
        self.assertEqual(sum(f"| {word} |" in line for line in text.splitlines()
                             for word in (claims.SHOWN, claims.FAILED, claims.NOT_REACHED)), len(claims.CLAIMS))

    def test_the_page_for_whoever_has_a_gpu_has_each_claim_and_both_commands(self):
        page = (HERE.parents[1] / "docs" / "gpu.md").read_text()
        for claim in claims.CLAIMS:
            self.assertIn(f"| {claim.text} | {', '.join(claim.parts)} |", page)
        for name, budget_s in plan.BUDGETS_S.items():
            self.assertRegex(page, rf"tools/gpu_check {name} .*# at most {budget_s} s")

    def test_on_a_cpu_it_says_that_nothing_is_shown_of_a_gpu(self):
        self.record.add("machine", date="2026-01-01", notes=[], **machine.Machine(device="cpu").facts())
        self.record.add("first", part="libraries", status="passed", seconds=1.0)
        text = report.text(self.record)
        self.assertIn("A rehearsal on a CPU", text)
        self.assertIn("run with this torch | rehearsed |", text)
        self.assertNotIn("| shown |", text)

    def test_it_has_a_table_of_steps_and_what_was_left_out(self):
        self.record.add("second", part="x", status="begun", shows="step time")
        self.record.add("second", part="x", found={"world": "one", "measured": "step", "impl": "python", "tokens": 128,
                                                   "step": {"median_ms": 12.5}, "issue": {}, "exposed": {}})
        self.record.add("second", part="x", found={"world": "one", "left_out": "steps of 8192 tokens"})
        self.record.add("second", part="x", status="passed", seconds=3.0)
        text = report.text(self.record)
        self.assertIn("| one | 128 | python | 12.5 |", text)
        self.assertIn("Left out for want of time: steps of 8192 tokens.", text)
        self.assertIn("| x | step time | passed |", text)


if __name__ == "__main__":
    main()
