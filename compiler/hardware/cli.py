"""The command line of the hardware database: `dsmp hardware list`, `show`, `compare`, `detect`, `calibrate`.

Only detection and calibration load torch; `show` and `compare` do so where `auto` or `cpu` is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import InvalidOptionError
from ..cli_support import Debug, HardwareFiles, Json, errors, load

RUNNING = ("auto", "cpu")
"""Names that mean a device of this machine."""

hardware_app = typer.Typer(no_args_is_help=True, help="What accelerators, CPUs and nodes can do, with sources.")


@hardware_app.command("list")
def list_(
    vendors: Annotated[
        list[str] | None, typer.Option("--vendor", metavar="V", help="Such as nvidia; repeated: any of them.")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="F", help="Only what multiplies in F, such as bf16; repeated: in each."),
    ] = None,
    min_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Such as 80GB or 79GiB: what the card is sold with.")
    ] = None,
    min_bandwidth: Annotated[str | None, typer.Option(metavar="RATE", help="Of the memory, such as 2TB/s.")] = None,
    kind: Annotated[str | None, typer.Option(metavar="K", help="Only gpu, cpu or npu.")] = None,
    segment: Annotated[
        str | None, typer.Option(metavar="S", help="Only datacenter, workstation, consumer, edge or integrated.")
    ] = None,
    year: Annotated[str | None, typer.Option(metavar="Y", help="Such as 2022, 2020-2023 or 2022-.")] = None,
    verified: Annotated[bool, typer.Option("--verified", help="Only figures that were read in some source.")] = False,
    nodes: Annotated[bool, typer.Option("--nodes", help="Machines of several such devices instead.")] = False,
    as_json: Json = False,
    files: HardwareFiles = None,
    debug: Debug = False,
) -> None:
    """List devices, one a line: structure, memory and dense peaks. Filters combine."""
    with errors(debug):
        filters, commands = load("hardware.selection"), load("hardware.commands")
        selection = filters.Selection(
            vendors=tuple(v.strip().lower() for v in vendors or ()),
            formats=tuple(f.strip().lower() for f in formats or ()),
            kind=_lower(kind),
            segment=_lower(segment),
            min_memory_bytes=filters.parse_size("--min-memory", min_memory),
            min_bandwidth_bytes_per_s=filters.parse_size("--min-bandwidth", min_bandwidth),
            years=filters.parse_years("--year", year),
            verified=verified,
        )
        (commands.list_nodes if nodes else commands.list_devices)(selection, files=files or (), as_json=as_json)


@hardware_app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A device or node, such as h800 or dgx-h100; auto, cpu.")],
    as_json: Json = False,
    files: HardwareFiles = None,
    debug: Debug = False,
) -> None:
    """Show everything that is known of a device or node, with the source of each group of figures."""
    with errors(debug):
        commands = load("hardware.commands")
        commands.show(name, running=_running([name], files or ()), files=files or (), as_json=as_json)


@hardware_app.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="A B [C...]", help="Devices, such as a100 h800 mi250x.")],
    differing: Annotated[bool, typer.Option("--diff", help="Only the rows in which they differ.")] = False,
    as_json: Json = False,
    files: HardwareFiles = None,
    debug: Debug = False,
) -> None:
    """Show devices side by side. Rows in which they differ are marked; ratios are to the first."""
    with errors(debug):
        if len(names) < 2:
            raise InvalidOptionError("A B [C...]", names[0], "at least two devices")
        commands = load("hardware.commands")
        commands.compare_devices(
            names, running=_running(names, files or ()), files=files or (), differing=differing, as_json=as_json
        )


@hardware_app.command()
def detect(as_json: Json = False, files: HardwareFiles = None, debug: Debug = False) -> None:
    """Show what this machine's devices say of themselves and what they were taken for."""
    with errors(debug):
        load("hardware.detection_commands").detect_hardware(files=files or (), as_json=as_json)


@hardware_app.command()
def calibrate(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.toml", help="Instead of one in your own folder.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller shapes: rougher, sooner done.")] = False,
    formats: Annotated[
        list[str] | None, typer.Option("--format", metavar="F", help="Only these formats; default: all it has.")
    ] = None,
    as_json: Json = False,
    files: HardwareFiles = None,
    debug: Debug = False,
) -> None:
    """Measure the running device and write a data file that later plans use.

    GEMMs per format and shape, memory bandwidth, casts, quantisation, kernel launches; collectives under torchrun.
    """
    with errors(debug):
        load("calibration.commands").calibrate(
            output=output, quick=quick, formats=formats or None, files=files or [], as_json=as_json
        )


def _running(names: Iterable[str], files: Sequence[Path]) -> dict[str, Any]:
    """The devices of this machine among `names`; torch is loaded for these only."""
    here = [n for n in names if n.strip().lower() in RUNNING]
    return {n: load("hardware.detection_commands").running_device(n, files) for n in here}


def _lower(text: str | None) -> str | None:
    return text.strip().lower() if text is not None else None
