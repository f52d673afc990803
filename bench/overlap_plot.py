"""The plot of all_gather_overlap: exposed communication over the ratio of communication to compute."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  the backend comes first

OTHERS = {"fsdp2": ("FSDP2", "black"), "ddp": ("DDP", "gray")}


def panels(points):
    """{shape: {(network, world): {label: points}}} of the largest size there is."""
    size = max(point.case["size"] for point in points)
    result = {}
    for point in points:
        if point.case["size"] != size or not point.result.compute_us:
            continue
        row = result.setdefault(point.case["shape"], {})
        row.setdefault((point.network, point.world), {}).setdefault(point.label, []).append(point)
    return result


def draw(points, path):
    shown = panels(points)
    columns = len(next(iter(shown.values())))
    figure, axes = pyplot.subplots(len(shown), columns, squeeze=False, sharex=True, sharey=True,
                                   figsize=(2.6 * columns, 0.7 + 2.3 * len(shown)), layout="constrained")
    for row, (shape, networks) in zip(axes, shown.items()):
        row[0].set_ylabel(f"{shape} layers\nexposed, % of communication", fontsize=8)
        for axis, lines in zip(row, networks.values()):
            draw_panel(axis, lines)
    for axis, (network, world) in zip(axes[0], next(iter(shown.values()))):
        axis.set_title(f"{network}, {world} ranks", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("communication / compute", fontsize=8)
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
