"""Command line of attnscore: `main` runs a command and turns its result or error into an exit status.

- 0: done; 2: wrong input, described in one line on stderr; 1: any other error, also in one line.
- A traceback is printed only with ATTNSCORE_TRACEBACK=1.
- typer and rich are imported when a command runs; one line names them where they are missing.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from attnscore.errors import AttnscoreError, FrameworkError

DONE, FAILED, WRONG_INPUT = 0, 1, 2
_INTERRUPTED = 130  # typer's status for Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``attnscore`` with the given arguments (default: the process's); return the exit status."""

    def load() -> Any:
        from attnscore.cli.app import app

        return app

    return run(load, sys.argv[1:] if argv is None else list(argv), "attnscore")


def run(load: Callable[[], Any], arguments: list[str], name: str) -> int:
    """Run the commands that `load` imports, as the program `name`; return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # terminals without UTF-8 have no "×"
            stream.reconfigure(errors="replace")
    try:
        return _run(load, arguments, name)
    except BrokenPipeError:
        # The reader closed the pipe (`| head`); Python would fail once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return _fail("interrupted", FAILED, name)
    except AttnscoreError as error:
        # A missing package or a failed run is no mistake in the input.
        input_is_right = isinstance(error, (FrameworkError, RuntimeError))
        return _fail(str(error), FAILED if input_is_right else WRONG_INPUT, name)
    except OSError as error:
        return _fail(f"{error.filename or 'input/output'}: {error.strerror or error}", FAILED, name)
    except MemoryError as error:
        return _fail(f"not enough memory: {error}", FAILED, name)
    except Exception as error:
        if os.environ.get("ATTNSCORE_TRACEBACK"):
            raise
        hint = "(ATTNSCORE_TRACEBACK=1 shows where)"
        return _fail(f"unexpected {type(error).__name__}: {error} {hint}", FAILED, name)


def _run(load: Callable[[], Any], arguments: list[str], name: str) -> int:
    """Run the commands; report a missing package of the command line, and typer's errors (Ctrl-C, wrong usage)."""
    try:
        import rich  # noqa: F401 - so that a missing one is reported like a missing typer
        import typer

        app = load()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("attnscore"):
            raise
        return _fail(f"the command line needs the package {error.name}: pip install 'attnscore[cli]'", FAILED, name)
    try:
        status = app(args=arguments, prog_name=name, standalone_mode=False)
    except typer.Abort:
        return _fail("interrupted", FAILED, name)
    except Exception as error:
        # Usage errors are classes of click or of typer itself, by release; both have these two names.
        if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
            raise
        return _usage(error, name)
    if status == _INTERRUPTED:
        raise KeyboardInterrupt
    return status if isinstance(status, int) else DONE


def _usage(error: Exception, name: str) -> int:
    """Print an error of usage with the command to which it belongs; return the exit status."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed, or is the message
        print(str(error), end="", file=sys.stderr)
        return WRONG_INPUT
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else name
    text = error.format_message()  # type: ignore[attr-defined]  # looked up by name above
    return _fail(f"{text} (see {command} --help)", WRONG_INPUT, command)


def _fail(text: str, status: int, command: str) -> int:
    print(f"{command}: {' '.join(text.split())}", file=sys.stderr)
    return status
