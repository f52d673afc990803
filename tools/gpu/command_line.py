"""What tools/gpu_check is asked for."""

import argparse
import re
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import more
import pack
import plan
import report
from call import ALL_PASSED, SOME_FAILED, WRONG_CALL, Call, tell_plan
from record import Record

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
MORE_S = 570


def version():
    (found,) = re.findall(r"^  version: '(.*)',$", (ROOT / "meson.build").read_text(), re.MULTILINE)
    return f"libfsdp {found}"


def make_parser(description):
    parser = argparse.ArgumentParser(prog="tools/gpu_check", description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=plan.NAMES, help="what to run on the machine with the GPU")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="build here, fill DIR with what is to be brought along, "
                        "with --more also for that, and end")
    parser.add_argument("--more", nargs="?", const=",".join(more.NAMES), type=lambda text: text.split(","), metavar="STAGE,...",
                        help=f"instead of a command: what does not fit into the two, of {', '.join(more.NAMES)} (all)")
    parser.add_argument("--part", type=lambda text: text.split(","), metavar="NAME,...",
                        help="these parts of the command alone")
    parser.add_argument("--list", action="store_true", help="tell all parts and what each shows and needs, and end")
    parser.add_argument("--plan", action="store_true", help="tell the command's plan, and end")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, help=f"for this call (first {plan.BUDGETS_S['first']}, second "
                        f"{plan.BUDGETS_S['second']}, --more {MORE_S})")
    parser.add_argument("--slower", type=float, default=1, metavar="X",
                        help="all budgets X times as long, for a machine with fewer cores than 16 (1)")
    parser.add_argument("--again", action="store_true", help="also what has passed before")
    parser.add_argument("--packed", type=Path, default=CACHE / "gpu", metavar="DIR", help="what --pack has filled (.cache/gpu)")
    parser.add_argument("--opened", type=Path, default=CACHE / "gpu_opened", metavar="DIR", help="where that is unpacked to")
    parser.add_argument("--build", type=Path, default=ROOT / "build-gpu", metavar="DIR",
                        help="where --more build builds, if what was packed does not fit (build-gpu)")
    parser.add_argument("--jobs", type=int, help="of that build (as many as there are cores)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="JSON and logs of the parts (.cache/gpu_check/DEVICE)")
    parser.add_argument("--copy", type=Path, metavar="DIR",
                        help="all of that once more, in results.jsonl, log.txt and report.md")
    parser.add_argument("--earlier", type=Path, metavar="DIR", help="what --copy of an earlier call has filled")
    parser.add_argument("--report", type=Path, metavar="DIR",
                        help="write report.md of what --out and --earlier hold, and its results, to DIR "
                        "(bench/results/gpu-DATE), and end")
    parser.add_argument("--version", action="version", version=version())
    return parser


def arguments(description):
    parser = make_parser(description)
    options = parser.parse_args()
    unknown = [name for name in options.more or [] if name not in more.NAMES]
    if unknown:
        parser.error(f"there is no stage {', '.join(unknown)}; there are {', '.join(more.NAMES)}")
    asked = [bool(options.command), bool(options.more) and not options.pack, bool(options.pack), bool(options.report),
             options.list]
    if sum(asked) != 1:
        parser.error("expected one of first, second, --more, --pack, --report and --list, found "
                     f"{'none' if not any(asked) else 'several'}")
    if options.earlier and not (options.earlier / "results.jsonl").exists():
        parser.error(f"--earlier: expected a folder with the results.jsonl of an earlier call, found none in {options.earlier}")
    if options.slower < 1:
        parser.error(f"--slower: expected 1 or more, found {options.slower:g}")
    options.out = (options.out or CACHE / "gpu_check" / options.device).resolve()
    for name in ("packed", "opened", "build"):
        setattr(options, name, getattr(options, name).resolve())
    options.headers = options.opened / pack.HEADERS
    options.seconds = options.seconds or (plan.BUDGETS_S[options.command] if options.command else MORE_S) * options.slower
    return options


class WrongCall(Exception):
    pass


def main(description):
    begin = time.monotonic()
    options = arguments(description)
    try:
        return answer(options, begin)
    except WrongCall as error:
        print(f"tools/gpu_check: {error}", file=sys.stderr)
        return WRONG_CALL


def answer(options, begin):
    if options.pack:
        return make_pack(options)
    if options.list:
        return tell_parts(options)
    if options.report:
        return write_report(options)
    name = options.command or "more"
    if options.plan:
        tell_plan(name, groups_of(options, Record(options.out, earlier=options.earlier)), options, print)
        return ALL_PASSED
    return run(options, name, begin)


def run(options, name, begin):
    """The plan is told before anything is looked at."""
    groups = groups_of(options, Record(options.out, earlier=options.earlier))
    tell_plan(name, groups, options, lambda line: print(line, flush=True))
    return Call(options, begin).run(name, groups)


def groups_of(options, record):
    """With only the parts that --part names."""
    if options.command:
        found = plan.groups(options, options.command, record)
    else:
        found = more_groups(options)
    if not options.part:
        return found
    known = {part.name for group in found for part in group.parts}
    unknown = [name for name in options.part if name not in known]
    if unknown:
        raise WrongCall(f"there is no part {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    found = [replace(group, parts=tuple(part for part in group.parts if part.name in options.part)) for group in found]
    return [group for group in found if group.parts]


def more_groups(options):
    stages = more.stages(options)
    return [plan.Group(f"{name}: {part.name}", part.limit_s, (part,), more.STAGE)
            for name in options.more for part in stages[name]]


def make_pack(options):
    try:
        programs = (*pack.PROGRAMS, *(pack.OF_MORE if options.more else ()))
        pack.build(programs)
        manifest = pack.pack(options.pack.resolve(), programs=programs)
    except pack.PackError as error:
        print(f"tools/gpu_check: {error}", file=sys.stderr)
        return SOME_FAILED
    print(f"{options.pack / pack.ARCHIVE}: {manifest['bytes']:,} bytes, for torch {manifest['torch']} with CUDA "
          f"{manifest['cuda']}, Python {manifest['python']}, glibc {manifest['glibc']} or newer")
    if manifest["python"] != pack.PYTHON:
        print(f"tools/gpu_check: the extension is for Python {manifest['python']}; for {pack.PYTHON} make {pack.VENV.name} and "
              f"{pack.BUILD.name} anew where python{pack.PYTHON} is installed", file=sys.stderr)
    return ALL_PASSED


def tell_parts(options):
    every = [(group.stage, part) for name in plan.NAMES for group in plan.parts_of(options, name) for part in group.parts]
    every += [(more.STAGE, part) for some in more.stages(options).values() for part in some]
    for stage, part in every:
        needs = f"; needs {', '.join(part.needs)}" if part.needs else ""
        print(f"{stage}/{part.name}: at most {part.limit_s:.0f} s{needs}\n    {part.shows}")
    return ALL_PASSED


def write_report(options):
    record = Record(options.out, earlier=options.earlier)
    options.report.mkdir(parents=True, exist_ok=True)
    for path in sorted(options.out.glob("*.jsonl")):
        shutil.copy(path, options.report / path.name)
    (options.report / "report.md").write_text(report.text(record))
    print(f"written to {options.report / 'report.md'}")
    return ALL_PASSED
