"""The command line: parse, call the library, show. Results to stdout, progress and messages to stderr.

Commands are named by module path and imported when they are called, so `--help` does not wait for torch. Exit status:
0 done (or a certificate that holds), 1 a certificate that does not hold, 2 bad usage or bad input.
"""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from fixedformer import __version__
from fixedformer.errors import FixedformerError

app = App(
    name="fixedformer",
    version=__version__,
    suppress_keyboard_interrupt=False,
    help="A fixed transformer computes what any other transformer computes, because a program tells it to.",
)
# name, function, one line of help (kept here so that listing the commands imports none of them)
COMMANDS = [
    ("demo", "demo:demo", "The main job on a real, trained target: compile, run, certify, with a table."),
    ("compile", "embedding:compile_", "Turn a target into the program of a fixed machine."),
    ("port", "embedding:port", "Move a program, compiled or trained, to another machine."),
    ("run", "embedding:run", "Run a program on an input file."),
    ("certify", "embedding:certify", "Check a program against its target; exit status 0 holds, 1 does not hold."),
    ("train", "train:train", "Train a fixed machine's program, a full target, or a looped transformer, on a task."),
    ("evaluate", "evaluate:evaluate", "A trained looped transformer at other numbers of loops."),
    ("reproduce", "reproduce:reproduce", "The papers' tables and figures, row by row."),
    ("bounds", "bounds:bounds", "How wide a universal machine must be: lower and upper bounds, as a table and a plot."),
    ("loop", "loop:app", "Looped transformers: one block whose loops compute a function."),
    (
        "simulate",
        "simulate:simulate",
        "Run an attention layer that a fixed network reads as its prompt; certify it.",
    ),
    (
        "interpolate",
        "interpolate:interpolate",
        "Find the schedule of two frozen blocks that carries X to Y; certify it.",
    ),
    ("decompile", "decompile:decompile", "Read a program back as the narrowest ordinary transformer."),
    ("shrink", "decompile:shrink", "The narrowest target equal to a given one."),
    ("info", "files:info", "Say what a file of ours holds."),
]
for _name, _place, _help in COMMANDS:
    app.command(f"fixedformer.cli.{_place}", name=_name, help=_help)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors are one line with cause and remedy; `--debug` shows the traceback."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in tokens
    if debug:
        tokens.remove("--debug")
    if lost := _overwritten(tokens):
        return _fail(f"-o {lost} is one of the inputs, which would be lost; name another file", debug=False)
    try:
        status = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _fail(f"{error}; see 'fixedformer --help'", debug)
    except BrokenPipeError:  # the reader of stdout (head, less) has gone: nothing left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (FixedformerError, OSError) as error:
        return _fail(f"{type(error).__name__}: {error}", debug)
    except KeyboardInterrupt:
        return _fail("interrupted", debug)
    return status if isinstance(status, int) else 0


def _overwritten(tokens: Sequence[str]) -> str | None:
    """The file named by -o, where another argument names it too."""
    for place, token in enumerate(tokens[:-1]):
        if token in ("-o", "--out") and os.path.isfile(out := tokens[place + 1]):
            others = [*tokens[:place], *tokens[place + 2 :]]
            if any(os.path.isfile(other) and os.path.samefile(other, out) for other in others):
                return out
    return None


def _fail(message: str, debug: bool) -> int:
    if debug:
        raise  # called from an except clause: show the traceback of what was caught
    print(" ".join(message.split()), file=sys.stderr)
    return 2
