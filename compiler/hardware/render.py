"""Devices and nodes of the hardware database as text: the list, everything of one, several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..console import Printer, aligned, bytes_text, coloured, digits, plain_table
from .facts import DeviceFacts, Group, Measured, Rate
from .figures import deviation_text, fact_text, rate_text, significant, tflops_text, value_text
from .node_facts import NodeFacts
from .table import ComparedRow, ListedDevice

_LIST_LEGEND = (
    "Dense TFLOPS of one device as torch shows it, fp32 accumulation, int8 in TOPS. Data: A vendor's text, B secondary "
    "source, C recalled, unverified."
)
_LIST_MARKS = {
    "+": "peaks are the vendor's totals, for planning only",
    "*": "defined or changed by your files",
}
_HALF = ("bf16@fp32", "fp16@fp32", "fp16@fp16")
_FP8 = ("fp8_e4m3@fp32", "fp8_e4m3fnuz@fp32")


# ---- the list ----------------------------------------------------------------------------------------------


def print_list(printer: Printer, devices: Sequence[ListedDevice]) -> None:
    """One line a device in the widest layout that fits, and what its marks mean."""
    cells = [_list_cells(d) for d in devices]
    styles = ["" if d.verified else "dim" for d in devices]
    layouts = [
        aligned(heads, [[row[h] for h in heads] for row in cells], _RIGHT, styles)
        for heads in (_FULL, _WIDE, _MIDDLE, _NARROW)
    ]
    table = next((t for t in layouts if printer.fits(t)), layouts[-1])
    used = [f"{mark} {text}" for mark, text in _LIST_MARKS.items() if any(mark in _trust(d) for d in devices)]
    if any(d.logical_devices_per_card > 1 for d in devices):
        used.append("2 x: that many devices a card")
    printer.print(table, "", "; ".join([f"{len(devices):,} devices. {_LIST_LEGEND}".rstrip("."), *used]) + ".")


_PEAKS = ("fp32", "bf16", "fp16", "fp8", "int8", "data")
_FULL = ("device", "name", "vendor", "family", "ISA", "year", "units", "memory", "bandwidth", *_PEAKS)
_WIDE = ("device", "vendor", "family", "ISA", "year", "units", "memory", "bandwidth", *_PEAKS)
_MIDDLE = ("device", "ISA", "year", "units", "memory", "bandwidth", "fp32", "16-bit", "fp8", "int8", "data")
_NARROW = ("device", "memory", "bandwidth", "fp32", "16-bit", "fp8", "data")
_RIGHT = frozenset({"year", "units", "memory", "bandwidth", "fp32", "bf16", "fp16", "16-bit", "fp8", "int8"})


def _list_cells(d: ListedDevice) -> dict[str, str]:
    card = f"{d.logical_devices_per_card} x " if d.logical_devices_per_card > 1 else ""
    return {
        "device": d.id,
        "name": d.name,
        "vendor": d.vendor,
        "family": d.family,
        "ISA": d.isa,
        "year": str(d.year),
        "units": f"{card}{d.units:,} {d.unit_kind}",
        "memory": bytes_text(d.memory_bytes),
        "bandwidth": rate_text(d.memory_bandwidth_bytes_per_s),
        "fp32": _peak(d, ("fp32@fp32",)),
        "bf16": _peak(d, _HALF[:1]),
        "fp16": _peak(d, _HALF[1:]),
        "16-bit": _peak(d, _HALF),
        "fp8": _peak(d, _FP8),
        "int8": _peak(d, ("int8@int32",)),
        "data": _trust(d),
    }


def _peak(d: ListedDevice, keys: Iterable[str]) -> str:
    """TFLOPS of the first of several formats that a device has."""
    found = next((d.dense_peak_flop_per_s[k] for k in keys if k in d.dense_peak_flop_per_s), None)
    return digits(found / 1e12) if found is not None else ""


def _trust(d: ListedDevice) -> str:
    return f"{d.confidence}{'+' if d.peaks_are_vendor_totals else ''}{'*' if d.overlays else ''}"


def print_nodes(printer: Printer, nodes: Sequence[NodeFacts]) -> None:
    """One line a node."""
    table = plain_table()
    for name in ("node", "devices", "topology", "links per device", "one way", "all-reduce of 1 GB", "data"):
        table.add_column(name, justify="right" if name in ("one way", "all-reduce of 1 GB") else "left")
    for n in nodes:
        links = f"{n.links['links_per_device']} x {n.links['link']}"
        one_way = value_text("one_way_bytes_per_s", n.links["one_way_bytes_per_s_per_device"])
        time = value_text("gigabyte_s", n.collectives["all_reduce"]["gigabyte_s"])
        devices = f"{n.count} x {n.device}"
        table.add_row(Text(n.id, style="bold"), devices, n.topology, links, one_way, time, n.confidence)
    printer.print(
        table, "", f"{len(nodes):,} nodes. Data: A vendor's text, B secondary source, C recalled, unverified."
    )


# ---- one device --------------------------------------------------------------------------------------------


def print_device(printer: Printer, d: DeviceFacts) -> None:
    """Everything that is known of a device, each group of figures with its source."""
    kind = d.kind.upper()
    about = [
        d.vendor,
        d.family if d.family.endswith(kind) else f"{d.family} {kind}",
        d.isa,
        d.segment,
        str(d.year) if d.year else None,
    ]
    title = Text(f"{d.name} ({d.id}): {', '.join(filter(None, about))}", style="bold")
    lines: list[RenderableType] = [
        title,
        Text(d.trust, style="" if d.verified else "yellow"),
        *map(sentence, d.caveats),
    ]
    for what, names in (("other names", d.aliases), ("runtime names", d.runtime_names), ("PCI ids", d.pci_ids)):
        if names:
            lines.append(f"{what}: {', '.join(names)}")
    lines += [
        "",
        *_groups(printer, d),
        "",
        *_rates(printer, d),
        "",
        *_tier(d),
        *_refused(d),
        *_measured(d.measured),
        "",
    ]
    profiles = " from ".join((d.profile, *d.inherits))
    lines.append(f"profile: {profiles}")
    for what, text in (("toolchain", d.toolchain), ("nodes", ", ".join(d.nodes)), ("note", d.note)):
        if text:
            lines.append(f"{what}: {text}")
    printer.print(*lines)


def sentence(text: str) -> Text:
    return Text(f"{text[0].upper()}{text[1:]}.", style="yellow")


def _groups(printer: Printer, d: DeviceFacts) -> list[RenderableType]:
    """Figures by group, with numbers for the sources, and the sources."""
    numbers = {s: i for i, s in enumerate(dict.fromkeys(s for g in d.groups.values() for s in g.sources), 1)}
    table = plain_table()
    for column in ("", "figures", "data", "sources"):
        table.add_column(column)
    stacked: list[RenderableType] = []
    for name, group in d.groups.items():
        figures, sources = _figures(name, group), " ".join(f"[{numbers[s]}]" for s in group.sources)
        table.add_row(Text(name, style="bold"), figures, group.confidence or "", sources)
        stacked.append(Text.assemble((name, "bold"), f"  {figures}  ", (f"{group.confidence or ''} {sources}", "dim")))
    listed = [Text(f"[{i}] {source}", style="dim") for source, i in numbers.items()]
    return [*([table] if printer.fits(table) else stacked), "", *listed]


def _figures(name: str, group: Group) -> str:
    """`units 132 SM, lanes per unit 128, L2 50 MiB`, without the group's own name and what is not known."""
    values = {k: v for k, v in group.values.items() if v is not None}
    kind = values.pop("unit_kind", None)
    texts = []
    for fact, value in values.items():
        words = fact_text(fact).removeprefix(name).strip()
        texts.append(f"{words} {value_text(fact, value)}{f' {kind}' if fact == 'units' else ''}".strip())
    return ", ".join(texts) or "not stated"


def _rates(printer: Printer, d: DeviceFacts) -> list[RenderableType]:
    """Rates and peaks in the widest layout that fits: with remarks, with remarks below, with peaks only."""
    wide, middle, narrow = _rate_table(d, remarks=True), _rate_table(d, remarks=False), _peak_table(d)
    table = next((t for t in (wide, middle) if printer.fits(t)), narrow)
    lines: list[RenderableType] = [table]
    if table is not wide:
        lines += [f"{r.format}: {'; '.join(r.remarks)}" for r in _last_of_each_format(d.rates) if r.remarks]
    apart = [(r, r.disagreement) for r in d.rates if r.disagreement]
    return [*lines, *(f"derived and stated {r.engine} {_key(r)} disagree: {reason}" for r, reason in apart)]


def _last_of_each_format(rates: Iterable[Rate]) -> list[Rate]:
    return list({r.format: r for r in rates if r.engine == "matrix"}.values())


def _key(r: Rate) -> str:
    return f"{r.format}@{r.accumulate}"


def _rate_table(d: DeviceFacts, *, remarks: bool) -> Table:
    unit = d.groups["structure"].values["unit_kind"]
    table = plain_table()
    for name in ("format", "accumulate", "units"):
        table.add_column(name)
    for name in (f"FLOP/clock/{unit}", "TFLOPS", "stated a card", "off"):
        table.add_column(name, justify="right")
    if remarks:
        table.add_column("to know")
    for r in d.rates:
        rate = significant(r.flop_per_clock_per_unit) if r.flop_per_clock_per_unit is not None else ""
        known = ("; ".join(r.remarks),) if remarks else ()
        table.add_row(
            coloured(r.format), r.accumulate, r.engine, rate, tflops_text(r.peak_flop_per_s), *_stated(r), *known
        )
    return table


def _peak_table(d: DeviceFacts) -> Table:
    table = plain_table()
    for name in ("format", "units", "TFLOPS", "stated", "off"):
        table.add_column(name, justify="left" if name in ("format", "units") else "right")
    for r in d.rates:
        table.add_row(coloured(r.format, _key(r)), r.engine, tflops_text(r.peak_flop_per_s), *_stated(r))
    return table


def _stated(r: Rate) -> tuple[str, str]:
    stated = r.stated_peak_flop_per_s_per_card
    off = deviation_text(r.deviation) if r.deviation is not None else ""
    return tflops_text(stated) if stated is not None else "", off


def _tier(d: DeviceFacts) -> list[RenderableType]:
    return [
        f"default formats for {name}: {' > '.join(ladder)}" for name, ladder in d.ladders.items() if name != "other"
    ]


def _refused(d: DeviceFacts) -> list[RenderableType]:
    limits = [f"limit: {format} {text}" for format, text in d.limits.items()]
    return [*limits, *(f"not offered: {format}: {reason}" for format, reason in d.refusals.items())]


def _measured(m: Measured | None) -> list[RenderableType]:
    if m is None:
        return []
    speeds = [
        f"{key} at best {tflops_text(peak)} TFLOPS; {significant(m.gemm_speed_over_fp32[key])} times as fast as fp32 "
        "in the mean over shapes"
        for key, peak in m.best_gemm_flop_per_s.items()
        if key in m.gemm_speed_over_fp32 and key != "fp32@fp32"
    ]
    bandwidth, launch = rate_text(m.memory_bandwidth_bytes_per_s), value_text("launch_s", m.launch_overhead_s)
    head = f"measured on {m.date}, in place of the assumed efficiency: memory {bandwidth}, launch {launch}"
    return ["", head, *(f"measured GEMMs in {speed}" for speed in speeds)]


# ---- one node ----------------------------------------------------------------------------------------------


def print_node(printer: Printer, n: NodeFacts) -> None:
    """Everything that is known of a node."""
    title = Text(f"{n.name} ({n.id}): {n.count} x {n.device}, {n.topology}", style="bold")
    lines: list[RenderableType] = [title]
    if n.aliases:
        lines.append(f"other names: {', '.join(n.aliases)}")
    for values in filter(None, (n.links, n.fabric)):
        lines.append(", ".join(f"{fact_text(k)} {value_text(k, v)}" for k, v in values.items()))
    table = plain_table()
    table.add_column("collective")
    for name in ("latency", "bus bandwidth", "1 MB", "1 GB"):
        table.add_column(name, justify="right")
    for op, cost in n.collectives.items():
        table.add_row(op, *(value_text(k, v) for k, v in cost.items()))
    lines += ["", table, "", f"data: {n.confidence}; {'; '.join(n.sources)}"]
    printer.print(*lines, *((f"note: {n.note}",) if n.note else ()))


# ---- several devices ---------------------------------------------------------------------------------------


def print_comparison(
    printer: Printer, ids: Sequence[str], rows: Sequence[ComparedRow], *, differing: bool = False
) -> None:
    """Devices side by side; rows in which they differ are marked, quantities have their ratio to the first device's.

    With `differing` only those rows are shown.
    """
    table = plain_table()
    for name in ("", "fact", *ids):
        table.add_column(name)
    shown = [row for row in rows if row.differs or not differing]
    for row in shown:
        table.add_row(
            "≠" if row.differs else "", fact_text(row.fact), *_compared(row), style="" if row.differs else "dim"
        )
    if printer.fits(table):
        printer.print(table)
    else:
        printer.print(*(_stacked(ids, row) for row in shown))
    count = sum(row.differs for row in rows)
    printer.print("", f"≠ {count} of {len(rows)} facts differ; ratios are to {ids[0]}. Peaks are dense.")


def _compared(row: ComparedRow) -> list[str]:
    """Values with their ratios, which say nothing of the first device itself or of equal ones."""
    shown: list[str] = []
    for value, ratio in zip(row.values, row.ratios, strict=True):
        text = value_text(row.fact, value)
        shown.append(f"{text} ({ratio:.2f}x)" if ratio is not None and row.differs and shown else text)
    return shown


def _stacked(ids: Sequence[str], row: ComparedRow) -> Text:
    if not row.differs:
        return Text(f"  {fact_text(row.fact)}: {value_text(row.fact, row.values[0])}", style="dim")
    values = (f"\n    {name}: {text}" for name, text in zip(ids, _compared(row), strict=True))
    return Text(f"≠ {fact_text(row.fact)}{''.join(values)}")
