"""The command `cachemuon`: its commands are in `commands`. `main` is where errors end.

What takes long is imported by the command that needs it, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from cachemuon_lab.commands import bench, flops, prepare, results, training

INTERRUPTED, WRONG = 130, 2

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 if all went well, 2 with one line on stderr if not, 130 on Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(arguments, prog_name="cachemuon", standalone_mode=False) or 0
        if code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            code = _interrupted("interrupted", arguments)
    except typer.TyperException as error:
        message = error.format_message()  # none where the help was shown instead
        code = _wrong(message) if message else WRONG
    except OSError as error:
        code = _wrong(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ModuleNotFoundError as error:
        code = _wrong(f"{error.name} is not installed: in a clone, pip install '.[lab]'")
    except ValueError as error:
        code = _wrong(str(error))
    except Exception as error:
        from cachemuon_lab.train import Interrupted

        if isinstance(error, Interrupted):
            code = _interrupted(f"stopped after step {error.step} of {error.folder}", arguments)
        elif isinstance(error, MemoryError) or "allocate memory" in str(error):  # torch's is a RuntimeError
            code = _wrong(f"there is not enough memory: {error}")
        else:
            raise
    sys.exit(code)


def _wrong(message: str) -> int:
    print("cachemuon:", " ".join(message.split()), file=sys.stderr)
    return WRONG


def _interrupted(what: str, arguments: list[str]) -> int:
    again = [word for word in arguments if word not in ("--overwrite", "--resume")]
    again += ["--resume"] if again[:1] == ["train"] else []
    print(f"cachemuon: {what}; to go on: cachemuon {shlex.join(again)}", file=sys.stderr)
    return INTERRUPTED


def _version(asked: bool) -> None:
    if asked:
        from cachemuon import __version__

        print("cachemuon", __version__)
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Which version this is.")
    ] = False,
) -> None:
    """CacheMuon's laboratory: the paper's experiments, one command each."""


app.command()(training.demo)
app.add_typer(prepare.app, name="prepare")
for _command in (
    *(training.train, training.compare, training.sweep, training.diagnose),
    *(results.figures, results.report, flops.flops, bench.bench),
):
    app.command()(_command)


if __name__ == "__main__":
    main()
