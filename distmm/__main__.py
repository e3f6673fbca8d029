"""``python -m distmm``: the command line, for places that know the interpreter and not the path of its scripts."""

from distmm.cli import main

main()
