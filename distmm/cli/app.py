"""The application: its commands, and the exit codes of errors."""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from distmm import interrupts
from distmm.cli import demo, jobs, kernels, multiply, options, plan, submit, verify
from distmm.errors import DistmmError, InputError, Stopped, UndecidedError, WrongResultError
from distmm.versions import __version__

WRONG, BAD_INPUT, UNEXPECTED, UNDECIDED, STOPPED, INTERRUPTED = 1, 2, 3, 4, 75, 130


class _PlainHelp:
    """Help as plain text: no column is cut on narrow terminals or in files, and examples keep their lines."""

    help: str | None

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the docstring, whose examples stand in Markdown's code blocks."""
        text = inspect.cleandoc(self.help or "").replace("**", "")
        text = re.sub(r"```text\n(.*?)```", "\b\n\\1", text, flags=re.DOTALL)  # click wraps no paragraph after \b
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text)


class Command(_PlainHelp, TyperCommand):
    """One command."""


class Commands(_PlainHelp, TyperGroup):
    """A group of commands."""


class Group(Commands):
    """Turns exceptions into the exit codes that the help lists."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept ``--debug`` at any position: users add it at the end of the line after an error."""
        ctx.obj = "--debug" in args
        return super().parse_args(ctx, [arg for arg in args if arg != "--debug"])

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and turn its exception into a message and an exit code."""
        for stream in (sys.stdout, sys.stderr):
            # The name of a file may have characters that the encoding does not have: they are escaped.
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")
        try:
            with interrupts.while_started():
                _check_working_folder()
                return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            # Typer handles a closed pipe and its own errors. Some versions take their classes from a copy of click, so
            # their attribute identifies them.
            if hasattr(error, "exit_code") or isinstance(error, (typer.Abort, BrokenPipeError)):
                raise
            if ctx.obj:
                traceback.print_exc()
            message, code = _outcome(error)
            print(message, file=sys.stderr)  # noqa: T201
            raise typer.Exit(code) from None


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise InputError("the working folder of this shell has been removed: change to one that exists") from error


def _outcome(error: BaseException) -> tuple[str, int]:
    """Return the message and the exit code for an error."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, Stopped):
        return f"stopped: {error}", STOPPED
    if isinstance(error, UndecidedError):
        return f"cannot tell: {error}", UNDECIDED
    if isinstance(error, DistmmError):
        return f"error: {error}", WRONG if isinstance(error, WrongResultError) else BAD_INPUT
    if str(error).startswith("A dask config file"):  # Dask reads its configuration when a command imports it
        return f"error: {error}", BAD_INPUT
    return f"unexpected error: {type(error).__name__}: {error} (--debug shows where)", UNEXPECTED


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 wrong result, 2 bad usage or input, 3 unexpected, 4 the check cannot tell, "
    "75 a job that stopped or lost its scheduler (run it again to resume it), 130 interrupted.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"distmm {__version__}")
        raise typer.Exit


@app.callback()
def distmm(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the workers' logs.")] = False,
) -> None:
    """Multiply matrices of any size, on all the GPUs you have, or on the CPU.

    Start with **distmm demo**. Then, with your own matrices (.npy, Zarr, HDF5):

    ```text
    distmm plan A.zarr B.npy
    distmm multiply A.zarr B.npy -o C.zarr
    ```
    """


measurements = typer.Typer(
    cls=Commands, no_args_is_help=True, rich_markup_mode=None, help="Measure kernels on this machine."
)
app.add_typer(measurements, name="bench")
for parent, functions in {
    app: (
        demo.demo, multiply.multiply, multiply.topk, multiply.threshold, jobs.resume, jobs.status, plan.plan,
        verify.verify, submit.submit, demo.examples, kernels.info, kernels.compile,
    ),
    measurements: (kernels.kernels,),
}.items():  # fmt: skip
    for function in functions:
        summary = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0]
        parent.command(cls=Command, short_help=summary)(options.command(function))
