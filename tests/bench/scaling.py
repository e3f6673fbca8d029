"""`distmm bench scaling` beside other programs, in one run: ``python tests/bench/scaling.py``.

All options of `distmm bench scaling` hold. JAX gets the precision that ``--precision`` says ("JAX"), or one of its
algorithms that emulate float32 on tensor cores ("JAX:..."). A program that is not installed is a row that says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import typer
from peers import PROGRAMS

from distmm.bench import Program
from distmm.bench.cases import Device
from distmm.cli.app import Group
from distmm.cli.scaling import PROGRAMS_OF, scaling


def main(arguments: Sequence[str] | None = None) -> None:
    """Take ``--program`` out of the arguments, and run the command with the rest."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="`distmm bench scaling --help` lists the other options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--program",
        action="append",
        choices=[program.name for program in PROGRAMS],
        metavar="NAME",
        help="only this program; may be given several times; by default all that run on the device: %(choices)s",
    )
    asked, rest = parser.parse_known_args(arguments)

    def chosen(device: Device) -> list[Program]:
        if asked.program:
            return [program for program in PROGRAMS if program.name in asked.program]
        return [program for program in PROGRAMS if device in program.kinds]

    app = typer.Typer(cls=Group, add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def beside(context: typer.Context) -> None:
        context.meta[PROGRAMS_OF] = chosen

    app.command()(scaling)
    app(["scaling", *rest])


if __name__ == "__main__":
    main()
