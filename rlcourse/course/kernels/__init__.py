"""Kernels that the lessons build, each like those of `rlcourse.kernels`: reference, kernel, operation, EXAMPLES.

Decoding (lessons 08 to 11): `vector_add`, `rms_norm`, `swiglu`, `rope`, `sampler` and the steps to decode attention,
`decode_simple`, `decode_split`, `decode_ahead`.

A layer's training pass, forward and backward: `rms_norm_backward`, which lesson 12 takes apart; `residual_norm`,
`rotate`, `swiglu`, `attention`, `embedding` and `token_logprob` with their gradients; `adamw`; `column_sum`, which adds
up the parts of a weight's gradient. `python -m tools.bench layer` measures them beside `torch.compile`.
"""
