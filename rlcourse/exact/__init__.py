"""One set of numbers for sampler and trainer: the log-prob of a token is the same, bit for bit, in both.
`operations.py`: what both compute. `weights.py`: the weights that both read. `pass_kernels.py` and
`backward_kernels.py`: a forward pass over whole sequences and its gradients; `layers.py`: both as autograd knows them;
`captured.py`: the same as CUDA graphs; `head.py`: log-probs of tokens. The decode step is in `rlcourse.rollout`."""

EXACT = {"enable_fp_fusion": False}  # launch option of all kernels that call `operations.py`
KEYS = 128  # of a tile in attention
GROUP = 32  # columns of the residual stream whose squares are added first
VOCABULARY_TILE = 2048  # entries of the vocabulary whose mass is added up first
LOG2_E = 1.4426950408889634
CAPTURED_BYTES = 8e9  # that captured layers take at most: gradients, and what a forward pass keeps for the backward one
