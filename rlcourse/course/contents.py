"""The lessons of the course, in order."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lesson:
    """A lesson's title, its difficulty from 1 to 5, and what the reader has at the end."""

    title: str
    difficulty: int
    holds: str


COURSE = {
    "00_start_here": Lesson(
        "Start here", 1, "a working machine, the map, a small model that fails, and what training changes in it"
    ),
    "01_policy_gradient": Lesson(
        "The policy gradient",
        2,
        "the whole training loop in 25 lines: run, derived, broken, and fixed with a baseline",
    ),
    "02_ppo": Lesson(
        "PPO",
        3,
        "many steps from one rollout, broken and fixed: ratio, clip, critic, GAE; a KL to be trusted",
    ),
    "03_grpo": Lesson(
        "GRPO", 3, "the critic deleted, the group in its place; a thousandth of a point that ruins a run, and the cure"
    ),
    "04_dr_grpo": Lesson(
        "Dr. GRPO: two biases and two deletions",
        4,
        "why GRPO can lead first and lose later; the biases of length and difficulty; a map of the family",
    ),
    "05_full_loop": Lesson(
        "The full loop",
        3,
        "your loop found again in the package; a verifier hacked and closed; curves diagnosed; what a rented GPU costs",
    ),
    "06_where_time_goes": Lesson(
        "Where the time goes", 4, "what each cure can bring, before you try it: ceilings, traces, the floor of a step"
    ),
    "07_static_cache": Lesson(
        "From generate to one CUDA graph a step",
        4,
        "the ladder of decoding, every rung explained; a CUDA graph of your own in 20 lines",
    ),
    "08_first_kernels": Lesson(
        "First kernels in CuTe DSL",
        4,
        "a whole CuTe program; warps, layouts, banks; six small kernels and RMSNorm at the speed of memory",
    ),
    "09_decode_attention": Lesson(
        "Decode attention in one kernel",
        5,
        "online softmax, splits, tensor cores; RoPE and the cache write in the same launch",
    ),
    "10_faster_kernel_slower_loop": Lesson(
        "A faster kernel, a slower loop", 4, "a kernel that wins alone and loses in generate: why, and the way back"
    ),
    "11_engine_for_rl": Lesson(
        "An engine for RL", 4, "a cache in blocks and its schedule; what an update invalidates; one token, one number"
    ),
    "12_update_phase": Lesson(
        "The update phase",
        4,
        "where its seconds and gigabytes go; logits that are never all in memory; two backward passes by hand",
    ),
    "13_sft_and_lora": Lesson(
        "SFT and LoRA before RL", 3, "a start for a model that earns nothing; how much SFT, how much rank, and why"
    ),
    "14_kernel_writer": Lesson(
        "A model that writes kernels",
        4,
        "a language, a compiler and a clock; a policy that learns to fuse; a judge that is cheated",
    ),
    "15_scale_out": Lesson(
        "Scale out",
        3,
        "two processes train one model, by hand; an all-reduce; when it pays; how old a sampler's weights may be",
    ),
}
