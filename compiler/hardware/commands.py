"""`dsmp hardware list`, `show` and `compare`: what needs only the data, no torch.

JSON goes to standard output alone; everything else that is worth a word then goes to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ...errors import NodeIsNoDeviceError
from ...hardware_db.capability import Device
from ...hardware_db.catalog import Catalog, load_catalog
from ...hardware_db.topology import Node
from ..console import Printer, write_json
from .facts import device_facts
from .node_facts import node_facts
from .render import print_comparison, print_device, print_list, print_node, print_nodes
from .selection import Selection, check_different
from .table import compare, listed


def list_devices(selection: Selection, *, files: Sequence[Path], as_json: bool) -> None:
    """`dsmp hardware list`: one line for each device that passes the filters, by vendor and year."""
    catalog = load_catalog(files)
    found = [listed(catalog, d) for d in catalog.devices() if selection.admits(catalog, d)]
    found.sort(key=lambda d: (d.vendor, d.year, d.family, d.id))
    if as_json:
        write_json([asdict(d) for d in found])
    if found and not as_json:
        print_list(Printer(), found)
    if not found:
        _nothing(f"none of {len(catalog.rows)} devices passes all filters", as_json=as_json)


def list_nodes(selection: Selection, *, files: Sequence[Path], as_json: bool) -> None:
    """`dsmp hardware list --nodes`: one line for each node whose device passes the filters."""
    catalog = load_catalog(files)
    nodes = [n for n in catalog.nodes.values() if selection.admits(catalog, catalog.device(n.device))]
    found = [node_facts(catalog, n) for n in nodes]
    if as_json:
        write_json([asdict(n) for n in found])
    if found and not as_json:
        print_nodes(Printer(), found)
    if not found:
        _nothing(f"the device of none of {len(catalog.nodes)} nodes passes all filters", as_json=as_json)


def show(name: str, *, running: Mapping[str, Device], files: Sequence[Path], as_json: bool) -> None:
    """`dsmp hardware show`: everything known of a device or node.

    `running` has the devices that `auto` and `cpu` mean here. Raises UnknownHardwareError and AmbiguousHardwareError.
    """
    catalog = load_catalog(files)
    found = running[name] if name in running else _find(catalog, name)
    if isinstance(found, Node):
        node = node_facts(catalog, found)
        write_json(asdict(node)) if as_json else print_node(Printer(), node)
    else:
        device = device_facts(catalog, found)
        write_json(asdict(device)) if as_json else print_device(Printer(), device)


def compare_devices(
    names: Sequence[str], *, running: Mapping[str, Device], files: Sequence[Path], differing: bool, as_json: bool
) -> None:
    """`dsmp hardware compare`: the facts of several devices side by side, all or the differing ones.

    Raises InvalidOptionError, UnknownHardwareError and AmbiguousHardwareError.
    """
    catalog = load_catalog(files)
    devices = [running[n] if n in running else catalog.resolve(n) for n in names]
    # a running device may have fewer units than the product of its id
    labels = [f"{d.id} ({n})" if n in running else d.id for n, d in zip(names, devices, strict=True)]
    check_different("A B [C...]", names, labels)
    rows = compare([device_facts(catalog, d) for d in devices])
    if as_json:
        shown = [row for row in rows if row.differs or not differing]
        write_json({"devices": labels, "facts": [{**asdict(row), "differs": row.differs} for row in shown]})
    else:
        print_comparison(Printer(), labels, rows, differing=differing)


def _find(catalog: Catalog, name: str) -> Device | Node:
    """The device or, failing that, the node of this name."""
    try:
        return catalog.resolve(name)
    except NodeIsNoDeviceError:
        return catalog.resolve_node(name)


def _nothing(sentence: str, *, as_json: bool) -> None:
    Printer(sys.stderr if as_json else None).print(f"{sentence}.")
