"""`python -m dsmp`: the command line."""

from __future__ import annotations

from .compiler.cli import main

if __name__ == "__main__":
    main()
