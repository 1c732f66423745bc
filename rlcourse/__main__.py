"""`python -m rlcourse` is the command `rlcourse`."""

from rlcourse.cli import main

if __name__ == "__main__":  # processes that are spawned import this file, too
    main()
