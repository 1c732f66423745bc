"""Processes for code that nobody vouches for: a reader's notebook that is graded, a kernel that a model wrote.

`process` starts one where it sees few files, no network and no other process, `namespaces` is how Linux does that, and
`wire` carries values to and from it without trusting a byte.
"""
