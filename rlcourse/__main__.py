"""`python -m rlcourse` is the command `rlcourse`."""

from rlcourse.cli import main

main()
