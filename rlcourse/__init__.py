"""rlcourse: reinforcement learning for language models, from the policy gradient to a GPU kernel.

Nothing heavy is imported here, so that `import rlcourse` is instant. One training step passes through, in this order:
`tasks` → `rollout` → `tasks.verify` → `advantages` → `logprobs` → `losses`, wired together by `trainer`.
"""

__version__ = "0.1.0"
