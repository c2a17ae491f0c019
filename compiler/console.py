"""Text on a console: streams, tables and figures as people read them. Imports no torch.

A table is shown in the widest of its layouts that fits; where the output is no terminal, layouts are chosen for 200
columns and no line is broken. Results go to standard output, progress and warnings to standard error.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_UNLIMITED = 10_000
_PLAIN_WIDTH = 200
_STYLES = {"fp64": "dim", "fp32": "dim", "tf32": "green", "bf16": "cyan", "fp16": "cyan"}


class Printer:
    """Writes to a text stream: coloured and within its width on a terminal, plain and with unbroken lines otherwise."""

    def __init__(self, stream: TextIO | None = None, *, width: int | None = None) -> None:
        """`stream` None is standard output. `width` replaces the stream's own."""
        self.stream = stream if stream is not None else sys.stdout
        terminal = Console(file=self.stream)
        self.is_terminal = terminal.is_terminal
        self.line_width = width or _UNLIMITED
        self.width = width or (terminal.width if terminal.is_terminal else _PLAIN_WIDTH)

    def print(self, *renderables: RenderableType) -> None:
        """Write renderables one below the other, without blanks at the ends of lines where nothing is coloured."""
        if self.is_terminal:
            self._console(self.stream, width=self.width).print(*renderables, sep="\n")
            return
        text = io.StringIO()
        self._console(text, width=self.line_width, color_system=None).print(*renderables, sep="\n")
        self.stream.write("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))
        self.stream.flush()

    def _console(self, stream: Any, **options: Any) -> Console:
        # keys and file names may hold brackets and colons, which are not meant as markup
        return Console(file=stream, highlight=False, markup=False, emoji=False, **options)

    def fits(self, renderable: RenderableType) -> bool:
        """Whether a renderable's lines need no breaking."""
        console = Console(file=io.StringIO(), width=_UNLIMITED, markup=False, emoji=False)
        return Measurement.get(console, console.options, renderable).maximum <= self.width


def write_text(text: str) -> None:
    """Text to standard output as UTF-8, whatever the locale: plans are UTF-8 files."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.buffer.flush()


def write_json(data: Any) -> None:
    """Data to standard output as JSON."""
    write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


class Stages:
    """Named stages of a run: their seconds, and a spinner on standard error while they last, if that is a terminal."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, text: str) -> Iterator[Callable[[str, int, int], None]]:
        """Measure a stage under `name` and show `text`; stages of one name are added up.

        What it yields shows how far things are: what is done, how much of it, of how much (0: not known).
        """
        console = Console(file=sys.stderr)
        started = time.perf_counter()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(text, total=None)

            def tell(what: str, done: int, total: int) -> None:
                progress.update(task, description=f"{text}: {what}{f' {done}/{total}' if total else ''}")

            try:
                yield tell
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def plain_table(gap: int = 2) -> Table:
    """A table without lines but one below its head, and `gap` blanks between columns."""
    padding = (0, gap - 1, 0, 0)  # the box itself puts one blank between columns
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding, header_style="bold")


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], right: Container[str], styles: Sequence[str]) -> Text:
    """A plain table as one text: for hundreds of rows, on which rich's own tables take seconds.

    `right` has the heads of columns of numbers, `styles` one style a row; the first column is bold.
    """
    widths = [max(map(cell_len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> list[str]:
        pads = [" " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True)]
        return [p + c if h in right else c + p for h, c, p in zip(head, cells, pads, strict=True)]

    text = Text("  ".join(line(head)), style="bold")
    parts = [text, Text("─" * text.cell_len)]
    for cells, style in zip(rows, styles, strict=True):
        first, *others = line(cells)
        parts.append(Text.assemble((first, "bold"), "  ", "  ".join(others), style=style))
    return Text("\n").join(parts)


def coloured(name: str, text: str | None = None) -> Text:
    """A format's name (or `text` about it) in the colour of its width."""
    return Text(text or name, style=_STYLES.get(name, "magenta"))


# ---- figures ----------------------------------------------------------------------------------------------


def bytes_text(count: float) -> str:
    """Bytes in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def time_text(time_us: float) -> str:
    """Microseconds with three digits."""
    return digits(time_us)


def digits(value: float) -> str:
    """A number with three significant digits, never in exponent form: 0.0025, 21.3, 1,234."""
    if value == 0:
        return "0"
    if value >= 99.995:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.2g}" if value >= 1e-4 else "<0.0001"
