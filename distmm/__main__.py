"""``python -m distmm``: the command line, for programs that know the interpreter but not the path of ``distmm``."""

from distmm.cli import main

main()
