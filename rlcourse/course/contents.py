"""The lessons of the course, in order."""

from typing import NamedTuple


class Lesson(NamedTuple):
    """A lesson's title, its difficulty and what's in it."""

    title: str
    difficulty: int  # from 1 to 5
    holds: str


COURSE = {
    "00_start_here": Lesson("Start here", 1, "a small model fails, trains for a minute, and you see what changed"),
    "01_policy_gradient": Lesson(
        "The policy gradient", 2, "you write the training loop, five functions, and it trains"
    ),
    "02_ppo": Lesson("PPO", 3, "why PPO clips, and what a clip can't do; critic and GAE"),
    "03_grpo": Lesson("GRPO", 3, "no critic; what a bonus of 0.001 does to a run; the KL"),
    "04_dr_grpo": Lesson(
        "Dr. GRPO: two biases and two deletions", 4, "drop a length, drop a deviation: what each is worth"
    ),
    "05_full_loop": Lesson("The full loop", 3, "pay for sound work; a real model, three outcomes"),
    "06_where_time_goes": Lesson("Where the time goes", 4, "Amdahl's law bounds a speedup before you try it"),
    "07_static_cache": Lesson(
        "From generate to one CUDA graph per step", 4, "a thousand launches become one: a CUDA graph in 20 lines"
    ),
    "08_first_kernels": Lesson("First kernels in CuTe DSL", 4, "GPU kernels that you run, and break, without a GPU"),
    "09_decode_attention": Lesson(
        "Decode attention in one kernel", 5, "a softmax that never sees all its scores at once"
    ),
    "10_faster_kernel_slower_loop": Lesson(
        "A faster kernel, a slower loop", 4, "one kernel, timed alone and in the loop"
    ),
    "11_engine_for_rl": Lesson("An engine for RL", 4, "one token, two probabilities: how to make them agree"),
    "12_update_phase": Lesson("The update phase", 4, "a loss over 151,936 tokens whose logits never all exist"),
    "13_sft_and_lora": Lesson("SFT and LoRA before RL", 3, "worked answers for a model that earns nothing"),
    "14_kernel_writer": Lesson("A model that writes kernels", 4, "it learns to fuse; then its reward goes on trial"),
    "15_scale_out": Lesson("Scale out", 3, "two processes, one model; when a second GPU doesn't pay"),
}
