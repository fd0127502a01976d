"""The command line: ``octavo pull | models | run | serve | convert | train | bench | cache``.

Nothing here imports torch before a command needs it, so that ``octavo --help`` answers at once.
"""

from octavo.cli.app import app, main

__all__ = ["app", "main"]
