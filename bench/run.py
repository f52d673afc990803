"""Lists the benchmarks, or builds what one needs and runs it. `tools/bench` calls this."""

import argparse
import importlib
import sys

import harness
from conductor import WorkerError

BENCHMARKS = ("host_overhead", "dtensor_step", "memory", "gather_bandwidth", "gloo_step", "all_gather_overlap",
              "scale", "compare_fsdp2", "checkpoint", "cuda_step")


def summary(name):
    return importlib.import_module(name).__doc__.splitlines()[0]


def list_benchmarks():
    print("tools/bench NAME [--json] [--quick] [--save] [options]; tools/bench NAME --help lists the options\n")
    for name in BENCHMARKS:
        print(f"  {name:<18} {summary(name)}")


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help", "list"):
        list_benchmarks()
        return 0
    name = sys.argv[1]
    if name not in BENCHMARKS:
        print(f"there is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(name)
    parser = argparse.ArgumentParser(prog=f"tools/bench {name}", description=module.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_common_options(parser)
    options = harness.parse(parser, module, sys.argv[2:])
    report = harness.Report(name, options)
    try:
        failed = module.run(options, report)  # what went wrong where the rest is worth keeping
    except WorkerError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    report.save()
    if failed:
        print(f"{name}: {failed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
