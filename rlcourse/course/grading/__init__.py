"""Grade exercise notebooks: the reader's functions run in a process of their own, the tests in the grader's.

`grade` reads and grades one or a folder, and `report` writes what it finds; `student` follows a notebook's run and
calls its functions; `isolation` starts its process, in which `worker` runs the cells. What comes back from there is
data, never code, so that nothing a notebook redefines, overwrites or patches changes a verdict. A kernel comes back as
PTX, and the interpreter runs it there (`rlcourse.course.checks.kernels`).
"""
