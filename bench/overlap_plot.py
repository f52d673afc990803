"""The plot of all_gather_overlap: exposed communication over the ratio of communication to compute."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  the backend comes first

def panels(points):
    """{(network, world): {label: [(ratio, result)]}} of the largest size and the first shape there are. The ratio is that of
    what the step communicates: within a budget it gathers less than the ratio asked for says."""
    size, shape = max(case["size"] for _, _, case, _, _ in points), points[0][2]["shape"]
    result = {}
    for network, world, case, _, measured in points:
        if case["size"] != size or case["shape"] != shape or not measured.compute_us:
            continue
        ratio = measured.communication_us / measured.compute_us
        memory = f"{case['budget_layers']}-layer budget" if "budget_layers" in case else f"prefetch {case['prefetch']}"
        label = f"{memory}, {'two queues' if case['separate'] else 'one queue'}"
        result.setdefault((network, world), {}).setdefault(label, []).append((ratio, measured))
    return result


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


def draw_panel(axis, lines):
    for number, (label, line) in enumerate(lines.items()):
        ratios = [ratio for ratio, _ in line]
        axis.plot(ratios, [100 * r.exposed_us / r.communication_us for _, r in line], color=f"C{number}", marker="o",
                  markersize=3, linewidth=1, label=label)
        axis.plot(ratios, [100 * (r.bound_us - r.compute_us) / r.communication_us for _, r in line],
                  color=f"C{number}", linestyle=":", linewidth=1)
    axis.set_xscale("log")
    axis.set_xticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)
