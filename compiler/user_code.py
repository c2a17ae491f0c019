"""Python code that a user names on the command line: `module:name` or `file.py:name`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from ..errors import DsmpError
from .input_spec import did_you_mean
from .model_building import cause


@contextlib.contextmanager
def user_code(source: str, error: type[DsmpError], what: str, forms: str) -> Iterator[object]:
    """What `module:name` or `file.py:name` names, with its folder on sys.path as long as it is used.

    `what` says what the name stands for ("factory"), `forms` what may be written instead. Raises `error`.
    """
    origin, _, attribute = source.rpartition(":")
    with _import_path(origin):
        yield _find_attribute(_import(origin, error, what, forms), origin, attribute, error, what)


@contextlib.contextmanager
def _import_path(origin: str) -> Iterator[None]:
    """The folder of the user's file (or the working folder) on sys.path, as `python file.py` has it."""
    folder = str(Path(origin).resolve().parent if origin.endswith(".py") else Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _import(origin: str, error: type[DsmpError], what: str, forms: str) -> ModuleType:
    path = Path(origin)
    if origin.endswith(".py") and not path.is_file():
        raise error(f"there is no file {origin}. Give file.py:NAME with a path from {Path.cwd()}.")
    try:
        if not origin.endswith(".py"):
            return importlib.import_module(origin)
        # under a name of its own, so that a user's torch.py does not replace torch; registered, because
        # dataclasses and pickle look modules up by name
        name = f"_dsmp_user_{path.stem}"
        location = importlib.util.spec_from_file_location(name, path)
        if location is None or location.loader is None:
            raise error(f"{origin} cannot be imported as Python.")
        module = importlib.util.module_from_spec(location)
        sys.modules[name] = module
        try:
            location.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    except ModuleNotFoundError as exc:
        if exc.name is None or not (origin == exc.name or origin.startswith(exc.name + ".")):
            raise error(f"importing {origin} failed: {cause(exc)}{place_of(exc)}.") from exc
        raise error(f"there is no module {exc.name!r}. {forms}") from exc
    except (Exception, SystemExit) as exc:
        if isinstance(exc, error):
            raise
        raise error(f"importing {origin} failed: {cause(exc)}{place_of(exc)}.") from exc


def place_of(exc: BaseException) -> str:
    """Where in the user's own code it happened: the last frame outside this package and installed ones."""
    others = (str(Path(__file__).parent), "<", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if not f.filename.startswith(others)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _find_attribute(module: ModuleType, origin: str, attribute: str, error: type[DsmpError], what: str) -> object:
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            hint = did_you_mean(part, names)
            raise error(f"{origin} has no {attribute!r}.{hint} Name a {what} in it.")
        found = getattr(found, part)
    return found
