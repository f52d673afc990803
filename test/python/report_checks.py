"""The checks of test_report.py: functions (rank, ranks) that run on every rank. Their figures are worked out from shapes."""

import datetime
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

import fsdp

CHECKS = {}
WIDTHS = {"0": (6, 8), "1": (8, 8), "2": (8, 8)}  # of the layers: in, out. Pieces of a multiple of 16 bytes, so without padding
ROOT = (8, 3)  # of the parameter that the root has itself
ITEM = 4


def check(function):
    CHECKS[function.__name__] = function
    return function


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*[nn.Linear(*width) for width in WIDTHS.values()])
        self.last = nn.Parameter(torch.ones(ROOT))

    def forward(self, x):
        return super().forward(x).to(self.last.dtype) @ self.last


def make(step=True):
    torch.manual_seed(0)
    model = Net()
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    if step:
        train(model)  # shows the order
    return model


def train(model):
    model(torch.ones(2, 6, requires_grad=True)).sum().backward()
    model.zero_grad()


def shapes_of(group):
    if group == "root":
        return [ROOT]
    width_in, width_out = WIDTHS[group]
    return [(width_out, width_in), (width_out,)]


def sharded_bytes(group, ranks):
    """Rows of the first dimension, as many on every rank as the first has."""
    return ITEM * sum(-(-shape[0] // ranks) * int(torch.tensor(shape[1:]).prod()) for shape in shapes_of(group))


def unsharded_bytes(group, ranks):
    """With the padding that travels."""
    return ranks * sharded_bytes(group, ranks)


@check
def the_report_has_the_bytes_of_the_shapes(rank, ranks):
    report = fsdp.report(make())
    groups = {group.name: group for group in report.groups}
    assert list(groups) == ["root", *WIDTHS], groups
    for name, group in groups.items():
        assert group.sharded_bytes == sharded_bytes(name, ranks), group
        assert group.unsharded_bytes == unsharded_bytes(name, ranks), group
        assert group.parameters == len(shapes_of(name)) and group.depth == (name != "root"), group
        assert group.trainable_bytes + group.frozen_bytes == ITEM * sum(int(torch.tensor(s).prod()) for s in shapes_of(name))
        assert group.frozen_bytes == 0
    assert report.sharded_bytes == sum(sharded_bytes(name, ranks) for name in groups)
    assert (report.rank, report.ranks, report.backend) == (rank, ranks, "gloo")
    assert set(report.forward_order) == set(groups)
    assert [name for name in report.backward_order if name != "root"] == ["2", "1", "0"], report.backward_order
    assert [name for name in report.forward_order if name != "root"] == list(WIDTHS), report.forward_order
    assert "sharded modules" in str(report) and "order of use" in str(report)
    assert report.step is None and "No step has been recorded" in report._repr_html_()
    assert report.budget_bytes is None


@check
def before_a_step_the_report_knows_no_order(rank, ranks):
    report = fsdp.report(make(step=False))
    assert report.forward_order == () and report.outlook == () and report.last_step.all_gathers == 0
    assert "No step has shown the order" in report._repr_html_()


@check
def the_outlook_ends_where_everything_is_gathered_once(rank, ranks):
    model = make()
    model.set_unsharded_byte_budget(10**6)
    train(model)
    report = fsdp.report(model)
    assert report.budget_bytes == 10**6
    budgets = [row.budget_bytes for row in report.outlook]
    assert budgets == sorted(set(budgets)), budgets
    if ranks > 1:
        assert report.outlook[-1].gathered_bytes == sum(unsharded_bytes(name, ranks) for name in ["root", *WIDTHS])
        assert report.outlook[-1].all_gathers == 4


@check
def a_step_of_the_timeline_has_what_the_statistics_count(rank, ranks):
    model = make()
    before = model.statistics()
    with fsdp.timeline(model) as seen:
        train(model)
    after = model.statistics()
    step = fsdp.report(model).step
    gathers = [each for each in step.collectives if each.operation == "all_gather"]
    reductions = [each for each in step.collectives if each.operation == "reduce_scatter"]
    assert len(gathers) == after["all_gathers"] - before["all_gathers"]
    assert sum(each.bytes for each in gathers) == after["gathered_bytes"] - before["gathered_bytes"]
    assert len(reductions) == after["reductions"] - before["reductions"], (len(reductions), before, after)
    assert len(reductions) == 4 or ranks == 1, reductions
    for each in step.collectives:
        assert each.bytes == unsharded_bytes(each.group, ranks), each
        assert 0 <= each.begin_ms <= each.end_ms <= step.duration_ms, each
    # The schedule: backward ends with the first layer's gradients.
    assert [each.group for each in reductions if each.group != "root"] == ["2", "1", "0"][:len(reductions)], reductions
    if ranks > 1:
        first_pass = [each.group for each in gathers if each.begin_ms < step.backward_begin_ms]
        assert [name for name in first_pass if name != "root"] == list(WIDTHS), first_pass
    assert 0 < step.backward_begin_ms < step.duration_ms
    assert seen.rank == rank and seen.dropped == 0
    assert {event.name for event in seen.events if event.kind == "use"} == {"root", *WIDTHS}


@check
def the_bytes_at_any_time_are_those_of_the_groups_that_are_there(rank, ranks):
    model = make()
    with fsdp.timeline(model) as seen:
        train(model)
    report = fsdp.report(model)
    shards = sum(sharded_bytes(name, ranks) for name in ["root", *WIDTHS])
    step = report.step
    if ranks > 1:
        assert max(each.unsharded for each in step.bytes) == report.last_step.peak_bytes > 0
        assert max(each.packed for each in step.bytes) >= max(unsharded_bytes(name, ranks) for name in WIDTHS)
        for each in step.bytes[1:]:
            # What the bars of the page show is what was counted.
            there = sum(unsharded_bytes(one.group, ranks) for one in step.residency
                        if one.begin_ms <= each.begin_ms < one.end_ms)
            between = [one for one in step.residency if abs(one.begin_ms - each.begin_ms) < 0.2
                       or abs(one.end_ms - each.begin_ms) < 0.2]
            slack = sum(unsharded_bytes(one.group, ranks) for one in between)
            assert abs(there - each.unsharded) <= slack, (there, each, between)
    for each in seen.bytes:
        assert each.live == shards + each.unsharded + each.packed, each
    assert seen.bytes[-1].packed == 0
    assert seen.bytes[-1].unsharded == report.unsharded_bytes


@check
def the_trace_has_counters_and_one_track_for_each_root(rank, ranks):
    models = [make(), make()]
    with tempfile.TemporaryDirectory() as folder, fsdp.timeline(nn.ModuleList(models), path=f"{folder}/{{rank}}.json") as seen:
        for model in models:
            train(model)
        assert seen.events == []  # filled at its end
    with tempfile.TemporaryDirectory() as folder:
        seen.write(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {rank}
    assert {event["tid"] for event in events} == {0, 1}
    for suffix in ("", " of root 1"):
        of_root = {what: [event["args"]["bytes"] for event in events
                          if event["ph"] == "C" and event["name"] == f"{what} bytes{suffix}"]
                   for what in ("unsharded", "packed", "live")}
        shards = sum(sharded_bytes(name, ranks) for name in ["root", *WIDTHS])
        assert [live - unsharded - packed for unsharded, packed, live in zip(*of_root.values(), strict=True)] == \
            [shards] * len(of_root["live"])
        assert of_root["live"]


@check
def timelines_that_cannot_be_are_refused(rank, ranks):
    model = make()
    for wrong in (lambda: fsdp.timeline(nn.Linear(2, 2)), lambda: fsdp.timeline(model, max_events=0)):
        try:
            with wrong():
                raise AssertionError("accepted")
        except ValueError:
            pass
    with fsdp.timeline(model):
        try:
            with fsdp.timeline(model[0]):
                raise AssertionError("accepted")
        except RuntimeError as refused:
            assert "already" in str(refused)
        train(model)
    assert fsdp.report(model).step is not None
    try:
        fsdp.report(nn.ModuleList([make(), make()]))
        raise AssertionError("accepted")
    except ValueError as refused:
        assert "with 2" in str(refused)


@check
def the_statistics_tell_the_last_steps_wait(rank, ranks):
    model = make()
    waits = []
    for _ in range(3):  # a rank that is late on a busy machine waits less
        dist.barrier()
        if rank == ranks - 1:
            time.sleep(0.2)  # the others wait for this one's first gather
        train(model)
        waits.append(model.statistics()["exposed_wait_ms"])
    assert (max(waits) > 50) == (ranks > 1 and rank == 0) or rank > 0, waits
    if ranks == 1:
        assert waits == [0, 0, 0], waits
    with fsdp.timeline(model):
        train(model)
    report = fsdp.report(model)
    waited = report.last_step.exposed_wait_ms
    assert waited == model.statistics()["exposed_wait_ms"]
    # Of this step alone: the ranges around the waits, which are a little longer.
    assert waited <= sum(each.end_ms - each.begin_ms for each in report.step.waits) + 1e-6


@check
def a_profiler_sees_fsdp2s_names(rank, ranks):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    torch.manual_seed(0)
    model = Net()
    for layer in model:
        fsdp.fully_shard(layer, mp_policy=policy)
    fsdp.fully_shard(model, mp_policy=policy)
    train(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(model)
    names = {event.name for event in profile.events()}
    wanted = {"FSDP::root_pre_forward", "FSDP::root_post_backward_callback", "FSDP::cast_forward_inputs",
              "FSDP::cast_forward_outputs"}
    wanted |= {f"FSDP::{what} ({layer})" for layer in WIDTHS for what in (
        "pre_forward", "pre_backward", "post_forward", "post_backward_reshard", "post_backward_reduce")}
    if ranks > 1:
        wanted |= {f"FSDP::{what} ({layer})" for layer in WIDTHS for what in ("all_gather", "all_gather_copy_out")}
        wanted |= {"FSDP::forward_prefetch for 1", "FSDP::backward_prefetch for 0"}
    assert wanted <= names, (wanted - names, sorted(name for name in names if name.startswith("FSDP")))


def page_and_figures(rank, ranks):
    model = make()
    with fsdp.timeline(model):
        train(model)
    report = fsdp.report(model)
    with tempfile.TemporaryDirectory() as folder:
        report.to_html(f"{folder}/report.html")
        text = Path(folder, "report.html").read_text()
    names = ["root", *WIDTHS]
    return text, {
        "groups": [[name, str(sharded_bytes(name, ranks)), str(unsharded_bytes(name, ranks))] for name in names],
        "collectives": [[each.operation, each.group, str(unsharded_bytes(each.group, ranks))]
                        for each in report.step.collectives],
        "sharded_bytes": str(sum(sharded_bytes(name, ranks) for name in names)),
    }


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, function in CHECKS.items():
        try:
            function(rank, ranks)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    found["page"], found["figures"] = page_and_figures(rank, ranks)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
