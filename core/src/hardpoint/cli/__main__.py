"""`python -m hardpoint.cli`: the same as the command `hardpoint`."""

from hardpoint.cli import main

main()
