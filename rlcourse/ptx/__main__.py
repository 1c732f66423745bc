"""python -m rlcourse.ptx FILE.ptx: what is in it."""

import sys
from pathlib import Path

from rlcourse.ptx.parse import parse
from rlcourse.ptx.summary import summary

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m rlcourse.ptx FILE.ptx ...")
    for path in sys.argv[1:]:
        for found in parse(Path(path).read_text()):
            print(summary(found))
