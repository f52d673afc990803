"""The plot of all_gather_overlap: exposed communication over the ratio of communication to compute."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  the backend comes first


OTHERS = {"fsdp2": ("FSDP2", "black"), "ddp": ("DDP", "gray")}


def panels(points):
    """{(network, world): {label: points}} of the largest size and the first shape there are."""
    size, shape = max(point.case["size"] for point in points), points[0].case["shape"]
    result = {}
    for point in points:
        if point.case["size"] != size or point.case["shape"] != shape or not point.result.compute_us:
            continue
        result.setdefault((point.network, point.world), {}).setdefault(label(point.case), []).append(point)
    return result


def label(case):
    if "defaults" in case:
        return "defaults"
    memory = f"{case['budget_layers']}-layer budget" if "budget_layers" in case else f"prefetch {case['prefetch']}"
    return f"{memory}, {'two queues' if case['separate'] else 'one queue'}"


def draw(points, path):
    shown = panels(points)
    figure, axes = pyplot.subplots(1, len(shown), squeeze=False, sharex=True, sharey=True,
                                   figsize=(2.6 * len(shown), 3.0), layout="constrained")
    for axis, ((network, world), lines) in zip(axes[0], shown.items()):
        draw_panel(axis, lines)
        axis.set_title(f"{network}, {world} ranks", fontsize=9)
        axis.set_xlabel("communication / compute", fontsize=8)
    axes[0][0].set_ylabel("exposed, % of communication", fontsize=8)
    axes[0][0].legend(fontsize=7, title="dotted: the bound", title_fontsize=7)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def ratio(point):
    """Of what the step communicates: within a budget it gathers less than the ratio asked for says."""
    return point.result.communication_us / point.result.compute_us


def draw_panel(axis, lines):
    for number, (name, line) in enumerate(lines.items()):
        ratios = [ratio(point) for point in line]

        def percent(exposed_us, line=line):
            return [100 * exposed_us(point) / point.result.communication_us for point in line]

        axis.plot(ratios, percent(lambda point: point.result.exposed_us), color=f"C{number}", marker="o", markersize=3,
                  linewidth=1, label=name)
        axis.plot(ratios, percent(lambda point: point.bound_exposed_us), color=f"C{number}", linestyle=":", linewidth=1)
        if name == "defaults":  # of the same communication, the library's
            for impl, (other, color) in OTHERS.items():
                axis.plot(ratios, percent(lambda point, impl=impl: point.exposed_us(impl)), color=color, linestyle="--",
                          linewidth=1, label=other)
    axis.set_xscale("log")
    axis.set_xticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)
