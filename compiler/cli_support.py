"""What all commands share: options, exit codes, one-line errors, and modules that are loaded when a command runs.

Loads no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import DsmpError

ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, everything else on standard error.")]
HardwareFiles = Annotated[
    list[Path] | None,
    typer.Option("--hardware-file", metavar="FILE.toml", help="Data file that adds or corrects devices; repeatable."),
]


def load(module: str) -> Any:
    """A module that does the work, loaded with a word on the terminal: torch takes seconds to import."""
    console = Console(file=sys.stderr)
    with console.status("loading") if console.is_terminal else contextlib.nullcontext():
        return import_module(f".{module}", __package__)


def given(**options: object) -> list[str]:
    """The names of the options that were set."""
    return [f"--{name.replace('_', '-')}" for name, value in options.items() if value]


@contextlib.contextmanager
def errors(debug: bool) -> Iterator[None]:
    """Turn what goes wrong into one line and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except DsmpError as error:
        if debug:
            traceback.print_exc()
        _print_error(error)
        raise typer.Exit(ERROR) from error
    except KeyboardInterrupt as error:
        if debug:
            traceback.print_exc()
        Console(file=sys.stderr).print("interrupted", style="red")
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError as error:
        # what is still buffered must not raise again when the interpreter flushes at exit
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from error
    except OSError as error:
        if debug:
            traceback.print_exc()
        _print_error(error)
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(ERROR) from error


def _print_error(error: DsmpError | OSError) -> None:
    text = " ".join(str(error).split())
    Console(file=sys.stderr, markup=False, emoji=False, highlight=False, soft_wrap=True).print(
        f"error: {text}", style="red"
    )
