"""A report as a page: HTML and SVG written here, without scripts and without anything from a network. That is also what a
notebook can show, and a user needs no plotting package for it.
"""

from html import escape

from ._report_charts import budget_curve, byte_curve, residency_chart, shown_bytes

_STYLE = """
.fsdp-report{font:14px/1.45 system-ui,sans-serif;color:#1c2330;background:#fff;max-width:1080px;margin:0 auto;padding:16px}
.fsdp-report h1{font-size:22px;margin:0 0 12px}
.fsdp-report h2{font-size:16px;margin:28px 0 4px}
.fsdp-report p{margin:2px 0 10px;color:#5a6475}
.fsdp-report .tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px}
.fsdp-report .tile{border:1px solid #dde2ea;border-radius:8px;padding:8px 12px}
.fsdp-report .tile b{display:block;font-size:18px;font-weight:600}
.fsdp-report .tile span{color:#5a6475;font-size:12px}
.fsdp-report .wide{overflow-x:auto}
.fsdp-report table{border-collapse:collapse;width:100%;font-size:13px}
.fsdp-report th,.fsdp-report td{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid #edf0f4;white-space:nowrap}
.fsdp-report th{color:#5a6475;font-weight:500}
.fsdp-report .number{text-align:right;font-variant-numeric:tabular-nums}
.fsdp-report .bar{display:inline-block;height:10px;border-radius:2px;background:#2a6fdb}
.fsdp-report .legend{margin-bottom:6px}
.fsdp-report .legend span{white-space:nowrap;margin-right:14px}
.fsdp-report .legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}
.fsdp-report svg{display:block;width:100%;min-width:880px;height:auto}
.fsdp-report details{margin-top:8px}
.fsdp-report summary{cursor:pointer;color:#2a6fdb}
"""


def _tile(name, value, text):
    return f'<div class="tile"><b data-name="{name}" data-value="{value}">{escape(text)}</b><span>{escape(name)}</span></div>'


def _tiles(report):
    tiles = [
        _tile("rank", report.rank, f"{report.rank} of {report.ranks}"),
        _tile("backend", escape(report.backend), report.backend),
        _tile("bytes of this rank's shards", report.sharded_bytes, shown_bytes(report.sharded_bytes)),
        _tile("most unsharded bytes, last step", report.last_step.peak_bytes, shown_bytes(report.last_step.peak_bytes)),
        _tile("gathered, last step", report.last_step.gathered_bytes, shown_bytes(report.last_step.gathered_bytes)),
        _tile("reduced, last step", report.last_step.reduced_bytes, shown_bytes(report.last_step.reduced_bytes)),
        _tile("host waited, last step", f"{report.last_step.exposed_wait_ms:.6f}",
              f"{report.last_step.exposed_wait_ms:.2f} ms"),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _table(name, heads, rows):
    def cell(tag, value):
        kind = ' class="number"' if isinstance(value, (int, float)) else ""
        text = f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if isinstance(value, float) else value
        return f"<{tag}{kind}>{text}</{tag}>"

    head = "".join(f'<th{" class=number" if is_number else ""}>{escape(text)}</th>' for text, is_number in heads)
    body = "".join("<tr>" + "".join(cell("td", value) for value in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table id="fsdp-{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _groups(report):
    most = max((group.unsharded_bytes for group in report.groups), default=0) or 1
    rows = []
    for group in report.groups:
        name = f'<span style="padding-left:{18 * group.depth}px">{escape(group.name)}</span>'
        bar = f'<span class="bar" style="width:{max(160 * group.unsharded_bytes / most, 1):.0f}px"></span>'
        rows.append((name, group.parameters, group.sharded_bytes, group.unsharded_bytes, bar, escape(group.layout),
                     escape(group.reshard_after_forward)))
    heads = [("group", False), ("parameters", True), ("bytes sharded", True), ("bytes unsharded", True), ("", False),
             ("placement", False), ("reshard after forward", False)]
    return ("<h2>Groups</h2><p>What is gathered and reduced together, in the tree of sharded modules; bytes are of this "
            f"rank.</p>{_table('groups', heads, rows)}")


def _step(report):
    if report.step is None:
        return ("<h2>One step</h2><p>No step has been recorded. Run one inside <code>with fsdp.timeline(model):</code> and "
                "ask for the report again.</p>")
    step = report.step
    collectives = [(f"{escape(each.operation)}", escape(each.group), each.begin_ms, each.end_ms - each.begin_ms, each.bytes)
                   for each in step.collectives]
    waits = [(escape(each.operation), escape(each.group), each.begin_ms, each.end_ms - each.begin_ms)
             for each in step.waits]
    collective_heads = [("operation", False), ("group", False), ("launched at, ms", True), ("until done, ms", True),
                        ("bytes", True)]
    wait_heads = [("operation", False), ("group", False), ("at, ms", True), ("waited, ms", True)]
    return (f"<h2>Residency over one step</h2><p>When each group's unsharded parameters take memory, in the last recorded "
            f"step ({step.duration_ms:.2f} ms, as the host saw it).</p>"
            f'<div class="wide">{residency_chart(report)}</div>'
            "<h2>Bytes over the same step</h2><p>Unsharded parameters, gradients packed for reductions, and live: both and "
            f'the shards.</p><div class="wide">{byte_curve(step)}</div>'
            f"<details><summary>What was communicated when ({len(collectives)})</summary>"
            f"{_table('collectives', collective_heads, collectives)}</details>"
            f"<details><summary>What was waited for ({len(waits)})</summary>{_table('waits', wait_heads, waits)}</details>")


def _budget(report):
    if not report.outlook:
        why = ("A step's forward goes more than once through this order before backward: nothing is planned for that."
               if report.forward_order and report.backward_order else "No step has shown the order of use yet.")
        return f"<h2>Byte budget</h2><p>{why}</p>"
    rows = [(row.budget_bytes, row.all_gathers, row.gathered_bytes) for row in report.outlook]
    heads = [("budget, bytes", True), ("all-gathers a step", True), ("bytes gathered a step", True)]
    now = "none is set" if report.budget_bytes is None else f"{report.budget_bytes:,} bytes are set"
    return ("<h2>Byte budget</h2><p>What a step would gather if unsharded parameters might take so many bytes "
            f'(<code>set_unsharded_byte_budget</code>; {now}).</p><div class="wide">{budget_curve(report)}</div>'
            f"{_table('budget', heads, rows)}")


def fragment(report):
    return (f'<style>{_STYLE}</style><div class="fsdp-report"><h1>Sharded model</h1>{_tiles(report)}{_groups(report)}'
            f"{_step(report)}{_budget(report)}</div>")


def page(report):
    return ('<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1"><title>fsdp report, rank '
            f"{report.rank}</title></head><body style=\"margin:0\">{fragment(report)}</body></html>\n")
