"""The door of the command line: runs a command and turns whatever happens into an exit status.

What this module meets:
- 0: done; 2: the input was wrong, and one line on stderr says what; 1: anything else, also in one line;
- no traceback reaches a user who did not ask for one (ATTNSCORE_TRACEBACK=1 asks);
- typer and rich are imported when a command runs, and missing ones are one clear line.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from attnscore.errors import AttnscoreError, FrameworkError

DONE, FAILED, WRONG_INPUT = 0, 1, 2
_INTERRUPTED = 130  # what typer makes of Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``attnscore`` with the given arguments (default: those of the process); return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal of old has no "×"
            stream.reconfigure(errors="replace")
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except BrokenPipeError:
        # The reader of our output left (`| head`); Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return _say("interrupted", FAILED)
    except AttnscoreError as error:
        # What is missing here, or did not work out, is no mistake in the input.
        ours = isinstance(error, (FrameworkError, RuntimeError))
        return _say(str(error), FAILED if ours else WRONG_INPUT)
    except OSError as error:
        return _say(f"{error.filename or 'input/output'}: {error.strerror or error}", FAILED)
    except MemoryError as error:
        return _say(f"not enough memory: {error}", FAILED)
    except Exception as error:
        if os.environ.get("ATTNSCORE_TRACEBACK"):
            raise
        hint = "(ATTNSCORE_TRACEBACK=1 shows where)"
        return _say(f"unexpected {type(error).__name__}: {error} {hint}", FAILED)


def _run(arguments: list[str]) -> int:
    try:
        import rich  # noqa: F401 - asked for here, so that a missing one is named like a missing typer
        import typer

        from attnscore.commands import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("attnscore"):
            raise
        return _say(f"the command line needs the package {error.name}: pip install 'attnscore[cli]'", FAILED)
    try:
        status = app(args=arguments, prog_name="attnscore", standalone_mode=False)
    except typer.Abort:
        return _say("interrupted", FAILED)
    except Exception as error:
        # Usage errors have been classes of click and of typer itself, by release; both have these two names.
        if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
            raise
        return _usage(error)
    if status == _INTERRUPTED:
        raise KeyboardInterrupt
    return status if isinstance(status, int) else DONE


def _usage(error: Exception) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed, or is the message
        print(str(error), end="", file=sys.stderr)
        return WRONG_INPUT
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "attnscore"
    text = error.format_message()  # type: ignore[attr-defined]  # looked up by name above
    return _say(f"{text} (see {command} --help)", WRONG_INPUT, command)


def _say(text: str, status: int, command: str = "attnscore") -> int:
    print(f"{command}: {' '.join(text.split())}", file=sys.stderr)
    return status
