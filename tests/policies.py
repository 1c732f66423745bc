"""Small policies with random weights, made here: nothing is downloaded; two engines that share nothing with ours."""

import copy
from functools import lru_cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rlcourse.batch import Rollout
from rlcourse.policy import Policy
from rlcourse.sampling import Sampling
from tools.embedded.tokenizer import train_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # engines and trainer are tested on a GPU where there is one
# As Llama 3 has it, with few positions: some frequencies stay, some are between, some become an eighth.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {"qwen2": {}, "qwen3": {}, "llama": {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-3, "pad_token_id": None}}
TEXTS = ["user\nassistant\n", "Tom has 3 apples and buys 12 more. #### 15", "Anna has 7+8=15 cards left."] * 20


@lru_cache
def _tokenizer():
    return train_tokenizer(TEXTS, 300)


def make_policy(seed: int = 0, tied: bool = True, architecture: str = "qwen2", **shape) -> Policy:
    """A small Qwen2, Qwen3 or Llama whose next-token distribution is far from uniform, so that mistakes show."""
    tokenizer = copy.deepcopy(_tokenizer())
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "num_hidden_layers": 2, "hidden_size": 32}
    sizes |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    details = tokens | sizes | FAMILIES[architecture] | shape
    config = AutoConfig.for_model(architecture, tie_word_embeddings=tied, initializer_range=0.3, **details)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    eos_ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id)
    return Policy(model.eval().to(DEVICE), tokenizer, eos_ids, tokenizer.pad_token_id)


def log_distribution(logits: torch.Tensor, sampling: Sampling, keep: int | None = None) -> torch.Tensor:
    """The logarithm of the sampling distribution over one vocabulary, by sorting: -inf on what is left out. `keep` is a
    token that belongs to the set in any case."""
    logits = logits / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p == 1:
        return logits.log_softmax(0)
    order = logits.argsort(descending=True).tolist()[: sampling.top_k or None]
    kept, mass = [], 0.0
    probabilities = logits[order].softmax(0).tolist()
    for token, probability in zip(order, probabilities, strict=True):
        if mass >= sampling.top_p:
            break
        kept.append(token)
        mass += probability
    kept += [keep] if keep is not None and keep not in kept else []
    rest = torch.full_like(logits, float("-inf"))
    return rest.scatter(0, torch.tensor(kept, device=logits.device), logits[kept].log_softmax(0))


def logprobs_alone(model, prompt: list[int], completion: list[int], sampling: Sampling | None = None) -> torch.Tensor:
    """Log-probs of a completion's tokens: one row, no padding, no batch, all logits at once; in the model's dtype."""
    logits = model(torch.tensor([prompt + completion], device=DEVICE)).logits[0, len(prompt) - 1 : -1]
    rows = [log_distribution(row, sampling or Sampling(), token) for row, token in zip(logits, completion, strict=True)]
    return torch.stack([row[token] for row, token in zip(rows, completion, strict=True)])


def rollout_of(rows: list[tuple[list[int], list[int]]], logprobs=None, finished=None, pad=0, device=DEVICE) -> Rollout:
    """(prompt, completion) of each row as a Rollout; logprobs: one list of numbers a row, 0 if not given."""
    width, longest = max(len(p) + len(c) for p, c in rows), max(len(c) for _, c in rows)
    lengths = [len(c) for _, c in rows]
    logprobs = logprobs or [[0.0] * n for n in lengths]
    return Rollout(
        ids=torch.tensor([p + c + [pad] * (width - len(p) - len(c)) for p, c in rows], device=device),
        prompt_lengths=torch.tensor([len(p) for p, _ in rows], device=device),
        completion_lengths=torch.tensor(lengths, device=device),
        logprobs=torch.tensor([[*map(float, x), *[0.0] * (longest - len(x))] for x in logprobs], device=device),
        finished=torch.tensor(finished or [True] * len(rows), device=device),
    )


def rows_of(rollout: Rollout) -> list[tuple]:
    """All that a rollout says of each row, without padding: (prompt, completion, logprobs, finished)."""
    columns = (values.tolist() for values in vars(rollout).values())
    return [(ids[:p], ids[p : p + n], logprobs[:n], end) for ids, p, n, logprobs, end in zip(*columns, strict=True)]


class FixedEngine:
    """Answers a prompt with the completions that it was given for it: {prompt: [(completion, logprobs, finished)]}."""

    exact = False

    def __init__(self, completions: dict[tuple[int, ...], list[tuple]]):
        self.completions, self.calls, self.slept, self.cudnn = completions, [], 0, []

    def generate(self, prompts, num_generations, max_new_tokens, sampling):
        self.calls.append((len(prompts), num_generations, max_new_tokens, sampling))
        self.cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
        rows = [(prompt, *answer) for prompt in prompts for answer in self.completions[tuple(prompt)][:num_generations]]
        prompts, completions, logprobs, finished = zip(*rows, strict=True)
        pairs = list(zip(map(list, prompts), completions, strict=True))
        return rollout_of(pairs, list(logprobs), list(finished))

    def sleep(self):
        self.slept += 1


class BruteForce:
    """Runs the whole model on the whole sequence for each new token, and draws by the cumulative distribution."""

    exact = False

    def __init__(self, policy: Policy):
        self.policy, self.slept = policy, 0

    @torch.no_grad()
    def generate(self, prompts, num_generations, max_new_tokens, sampling):
        rows = [list(prompt) for prompt in prompts for _ in range(num_generations)]
        done, logprobs, texts = [False] * len(rows), [[] for _ in rows], [[] for _ in rows]
        for _ in range(max_new_tokens):
            open_rows = [i for i, over in enumerate(done) if not over]
            if not open_rows:
                break
            width = max(len(rows[i]) + len(texts[i]) for i in open_rows)
            ids = [rows[i] + texts[i] + [0] * (width - len(rows[i]) - len(texts[i])) for i in open_rows]
            logits = self.policy.model(torch.tensor(ids, device=self.policy.device)).logits.double().cpu()
            for i, of_row in zip(open_rows, logits, strict=True):
                last = of_row[len(rows[i]) + len(texts[i]) - 1]
                distribution = last.log_softmax(0) if sampling.greedy else log_distribution(last, sampling)
                token = int(last.argmax()) if sampling.greedy else int(torch.multinomial(distribution.exp(), 1))
                texts[i].append(token)
                logprobs[i].append(distribution[token].item())
                done[i] = token in self.policy.eos_ids
        return rollout_of(list(zip(rows, texts, strict=True)), logprobs, done, self.policy.pad_id, self.policy.device)

    def sleep(self):
        self.slept += 1
