"""`python -m hardpoint.cli`: the same as the command `hardpoint`."""

from hardpoint.cli.app import main

main()
