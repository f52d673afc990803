"""The charts of a report, as SVG."""

import math
from html import escape

_WIDTH, _LEFT, _RIGHT = 1040, 130, 20
_UNSHARDED, _PACKED, _LIVE, _WAIT, _GATHER = "#2a6fdb", "#d97a12", "#7a8496", "#c42b3a", "#9dc0f5"
_TEXT = 'font-size="12" fill="#5a6475" font-family="system-ui,sans-serif"'


def shown_bytes(count):
    """12,345,678 -> "12.3 MB"."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{count:,} B" if units[0] == "B" else f"{value:.3g} {units[0]}" if value < 999.5 else f"{value:.0f} {units[0]}"


def _ticks(most, count=5):
    """Round numbers from 0 to `most`, about `count` of them."""
    if most <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= most / count)
    return [i * step for i in range(int(most / step) + 1)]


def _svg(height, parts, label):
    return (f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}" '
            f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>')


def _legend(entries):
    keys = "".join(f'<span><i style="background:{color}"></i>{escape(text)}</span> ' for text, color in entries)
    return f'<div class="legend">{keys}</div>'


def _x_axis(most, top, bottom, shown, x):
    for tick in _ticks(most, 6):
        yield f'<line x1="{x(tick):.1f}" y1="{top}" x2="{x(tick):.1f}" y2="{bottom}" stroke="#edf0f4"/>'
        yield f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle" {_TEXT}>{escape(shown(tick))}</text>'


def _y_axis(most, y):
    for tick in _ticks(most, 4):
        yield f'<line x1="{_LEFT}" y1="{y(tick):.1f}" x2="{_WIDTH - _RIGHT}" y2="{y(tick):.1f}" stroke="#edf0f4"/>'
        yield f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end" {_TEXT}>{shown_bytes(round(tick))}</text>'


def _scale(most, first, last):
    return lambda value: first + (last - first) * value / (most or 1)


def _bar(x, y, begin, end, height, color, title, kind):
    return (f'<rect data-kind="{kind}" x="{x(begin):.2f}" y="{y}" width="{max(x(end) - x(begin), 1.2):.2f}" '
            f'height="{height}" rx="1.5" fill="{color}"><title>{escape(title)}</title></rect>')


def _phases(step, x, bottom):
    """Which part of the width is forward and which backward."""
    yield (f'<rect x="{x(step.backward_begin_ms):.1f}" y="18" width="{x(step.duration_ms) - x(step.backward_begin_ms):.1f}" '
           f'height="{bottom - 18}" fill="#f5f7fa"/>')
    yield f'<text x="{x(0)}" y="12" {_TEXT}>forward</text>'
    if step.backward_begin_ms < step.duration_ms:
        yield f'<text x="{x(step.backward_begin_ms):.1f}" y="12" {_TEXT}>backward</text>'


def _short(name):
    return name if len(name) <= 20 else "…" + name[-19:]


def residency_chart(report):
    step = report.step
    groups = list(dict.fromkeys([*report.forward_order, *(group.name for group in report.groups if group.parameters)]))
    row, bottom = 24, 24 + 24 * len(groups)
    x = _scale(step.duration_ms, _LEFT, _WIDTH - _RIGHT)
    parts = [*_phases(step, x, bottom), *_x_axis(step.duration_ms, 18, bottom, lambda tick: f"{tick:g} ms", x)]
    for i, name in enumerate(groups):
        top = 24 + row * i
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end" {_TEXT}>{escape(_short(name))}'
                     f"<title>{escape(name)}</title></text>")
        for each in step.residency:
            if each.group == name:
                parts.append(_bar(x, top, each.begin_ms, each.end_ms, 14, _UNSHARDED,
                                  f"{name} is there from {each.begin_ms:.3f} to {each.end_ms:.3f} ms", "residency"))
        for each in step.collectives:
            if each.group == name and each.operation == "all_gather":
                parts.append(_bar(x, top, each.begin_ms, each.end_ms, 14, _GATHER,
                                  f"{name}: all_gather of {each.bytes:,} bytes from {each.begin_ms:.3f} to "
                                  f"{each.end_ms:.3f} ms", "gather"))
            elif each.group == name:
                parts.append(_bar(x, top + 15, each.begin_ms, each.end_ms, 4, _PACKED,
                                  f"{name}: {each.operation} of {each.bytes:,} bytes from {each.begin_ms:.3f} to "
                                  f"{each.end_ms:.3f} ms", "reduction"))
        for each in step.waits:
            if each.group == name:
                parts.append(_bar(x, top + 5, each.begin_ms, each.end_ms, 4, _WAIT,
                                  f"waited {each.end_ms - each.begin_ms:.3f} ms for {each.operation} of {name}", "wait"))
    legend = _legend([("gather under way", _GATHER), ("unsharded parameters are there", _UNSHARDED),
                      ("reduction under way", _PACKED), ("the host waits", _WAIT)])
    return legend + _svg(bottom + 24, parts, "residency of each group over one step")


def byte_curve(step):
    top, bottom = 24, 204
    most = max((each.live for each in step.bytes), default=0)
    x, y = _scale(step.duration_ms, _LEFT, _WIDTH - _RIGHT), _scale(most, bottom, top)
    parts = [*_phases(step, x, bottom), *_x_axis(step.duration_ms, 18, bottom, lambda tick: f"{tick:g} ms", x),
             *_y_axis(most, y)]
    for name, color in (("live", _LIVE), ("unsharded", _UNSHARDED), ("packed", _PACKED)):
        path, last = [], None
        for each in step.bytes:
            value = getattr(each, name)
            path.append(f"{'M' if last is None else 'H'}{x(each.begin_ms):.1f}")
            path.append(f"{' ' if last is None else 'V'}{y(value):.1f}")
            last = value
        if last is not None:
            path.append(f"H{x(step.duration_ms):.1f}")
            parts.append(f'<path data-kind="{name}" d="{"".join(path)}" fill="none" stroke="{color}" stroke-width="2">'
                         f"<title>{name} bytes</title></path>")
    legend = _legend([("live", _LIVE), ("unsharded", _UNSHARDED), ("packed", _PACKED)])
    return legend + _svg(bottom + 24, parts, "bytes over one step")


def budget_curve(report):
    top, bottom = 14, 174
    rows = report.outlook
    most_budget = max([row.budget_bytes for row in rows] + [report.budget_bytes or 0])
    most = max(row.gathered_bytes for row in rows)
    x, y = _scale(most_budget, _LEFT, _WIDTH - _RIGHT), _scale(most, bottom, top)
    parts = [*_x_axis(most_budget, top, bottom, lambda tick: shown_bytes(round(tick)), x), *_y_axis(most, y)]
    path = f"M{x(rows[0].budget_bytes):.1f} {y(rows[0].gathered_bytes):.1f}"
    for row in rows[1:]:
        path += f"H{x(row.budget_bytes):.1f}V{y(row.gathered_bytes):.1f}"
    parts.append(f'<path d="{path}" fill="none" stroke="{_UNSHARDED}" stroke-width="2"/>')
    for row in rows:
        parts.append(f'<circle data-kind="outlook" cx="{x(row.budget_bytes):.1f}" cy="{y(row.gathered_bytes):.1f}" r="4" '
                     f'fill="{_UNSHARDED}"><title>{row.budget_bytes:,} bytes: {row.all_gathers} all-gathers of '
                     f"{row.gathered_bytes:,} bytes</title></circle>")
    if report.budget_bytes is not None:
        parts.append(f'<line x1="{x(report.budget_bytes):.1f}" x2="{x(report.budget_bytes):.1f}" y1="{top}" '
                     f'y2="{bottom}" stroke="{_WAIT}" stroke-dasharray="5 4"><title>the budget that is set</title></line>')
    return _svg(bottom + 24, parts, "bytes gathered in a step by byte budget")
