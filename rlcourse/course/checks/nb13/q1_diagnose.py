"""q1: what is wrong with each row of an SFT batch."""

import torch

from rlcourse.course.checks import Question, compare, draw

q1 = Question("q1", "diagnose", hint="Write down the labels that a row should have. Where do those that it has differ?")

IGNORED, PAD, EOS = -100, 0, 1
FINE, PROMPT, PADDING, END, SHIFTED, FIRST = range(6)

MISTAKES = {
    "pads by id": "Padding begins where a row's length ends: some batches pad with the very token that ends an answer.",
    "the prompt's last": "A prompt is learned, too, if only its last token is.",
    "the prompt's first": "A prompt is learned, too, if its first token is left out.",
    "cut off": "A row whose last token is not the end token never learns to stop, whatever its labels are.",
    "end ignored": "An end token whose label is ignored is not learned.",
    "presence": "Compare labels with the ids above them: labels one place too early are no prompt that is learned.",
}


def some_row(kind: int, width: int, pad: int, variant: int) -> tuple[list[int], list[int], int, int]:
    """ids, labels, tokens of the prompt, tokens in all, of a row with that mistake. No token stands in it twice, but
    padding. variant: which of the ways to make it."""
    prompt, answer = draw(3, 6), draw(3, 5)  # the answer's end included
    length = prompt + answer
    ids = (torch.randperm(50)[:length] + 2).tolist()
    ids[-1] = EOS
    if kind == END and variant % 2:
        ids[-1] = 60
    ids += [pad] * (width - length)
    labels = [IGNORED] * prompt + ids[prompt:length] + [IGNORED] * (width - length)
    if kind == PROMPT:
        begin = (0, prompt - 1, 1)[variant % 3]
        labels[begin:prompt] = ids[begin:prompt]
    elif kind == PADDING:
        end = width if variant % 2 else length + 1
        labels[length:end] = ids[length:end]
    elif kind == END and not variant % 2:
        labels[length - 1] = IGNORED
    elif kind == SHIFTED:
        labels = [*labels[1:], IGNORED]
    elif kind == FIRST:
        labels[prompt] = IGNORED
    return ids, labels, prompt, length


def judged(ids: list[int], labels: list[int], prompt: int, length: int, mistake: str = "") -> int:
    """The kind of a row, by tokens that are learned where they should not be or are not where they should."""
    learned = [t for t, label in enumerate(labels) if label != IGNORED]
    if mistake == "pads by id":
        length = next((t for t in range(prompt, len(ids)) if ids[t] in (PAD, EOS)), len(ids))
    if mistake != "presence" and any(labels[t] != ids[t] for t in learned):
        return SHIFTED
    in_prompt = [t for t in learned if t < prompt]
    if mistake == "the prompt's last":
        in_prompt = [t for t in in_prompt if t < prompt - 1]
    if mistake == "the prompt's first":
        in_prompt = [t for t in in_prompt if t == 0]
    if in_prompt:
        return PROMPT
    if any(t >= length for t in learned):
        return PADDING
    if (mistake != "cut off" and ids[length - 1] != EOS) or (mistake != "end ignored" and length - 1 not in learned):
        return END
    return FINE if prompt in learned else FIRST


def check_rows(f, kinds: list[int], pad: int, variants: int = 3) -> None:
    rows, expected, width = [], [], 14
    for variant in range(variants):
        for place in torch.randperm(len(kinds)).tolist():
            rows.append(some_row(kinds[place], width, pad, variant))
            expected.append(kinds[place])
    ids, labels = (torch.tensor([row[part] for row in rows]) for part in (0, 1))
    prompts, lengths = (torch.tensor([row[part] for row in rows]) for part in (2, 3))
    mistakes = {
        sentence: torch.tensor([judged(*row, mistake=mistake) for row in rows])
        for mistake, sentence in MISTAKES.items()
    }
    compare(f(ids, labels, prompts, lengths, EOS), torch.tensor(expected), mistakes, what="the list of mistakes")


@q1.case("rows that are fine, prompts and padding that are learned")
def _(f):
    check_rows(f, [FINE, PROMPT, PADDING, FINE], PAD)


@q1.case("an end that is not learned")
def _(f):
    check_rows(f, [END, FINE, END], PAD)


@q1.case("labels one place off, a first token left out")
def _(f):
    check_rows(f, [SHIFTED, FIRST, FINE, PROMPT], PAD)


@q1.case("all of them, padded with the end token")
def _(f):
    check_rows(f, [FINE, PROMPT, PADDING, END, SHIFTED, FIRST], EOS)
