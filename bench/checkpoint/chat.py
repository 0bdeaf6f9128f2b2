"""Chat-form training samples built from the corpus: a short request, then a passage of prose."""

import random
import re
from collections import Counter

import numpy as np
from tokenizers import Tokenizer
from vocabulary import turn

ROW = 513  # tokens a row: 512 inputs and the last target

GREETINGS = (
    "hello", "Hello", "hello!", "Hello!", "hi", "Hi", "Hi!", "hey", "Hey there", "Good morning",
    "Good evening", "Hello there.", "test", "Tell me a story", "Tell me a story.",
    "Tell me something", "Write a story", "Write something.", "Story, please", "A story please",
    "Go on", "Begin.", "Start", "What happened?", "Who are you?", "How are you?", "What is this?",
    "Write a short story.", "Please write a story.", "Can you tell me a story?",
)  # fmt: skip
ABOUT = (
    "Tell me a story about {}.", "Tell me about {}.", "Write about {}.",
    "Write a story about {}", "A story about {}, please.", "{}", "Who is {}?",
    "What happened to {}?", "I want to hear of {}.", "Write a short story about {}.",
    "Describe {}.", "What do you know of {}?",
)  # fmt: skip
CONTINUE = (
    "Continue: {}", "Continue this story: {}", "Go on from here: {}", "{}", "{}", "{}",
    "Write the next part: {}", "What comes next? {}", "Finish this: {}",
)  # fmt: skip
OPENINGS = re.compile(
    r"^(Once|There was|There were|It was|One (day|morning|evening|night)|In the|A (certain|very)|"
    r"At (last|length|the)|When|On the|Now|The next)\b"
)
NOUNS = (
    "king queen prince princess wolf fox bear horse dog cat bird fish ship sea island storm forest "
    "mountain river garden castle house door window fire winter summer night morning soldier "
    "sailor captain doctor clergyman father mother sister brother daughter son wife husband friend "
    "letter ball dance wedding journey treasure sword giant witch dwarf whale monster moon star "
    "city village church carriage dinner evening love money secret"
).split()
NOT_NAMES = frozenset("I He She It They You We The A An And But In On At Mr Mrs Miss Sir".split())


def sentences(paragraph: str) -> list[str]:
    """Split at sentence ends, titles such as ``Mr.`` kept whole."""
    parts = re.split(r"(?<!Mr)(?<!Mrs)(?<!Dr)(?<!St)(?<=[.!?])\s+(?=[A-Z\"'])", paragraph)
    return [part for part in parts if part]


def subject(passage: str, rng: random.Random) -> str | None:
    """Something the passage speaks of: its commonest name, or a common noun with an article."""
    names = Counter(re.findall(r"(?<=[a-z,;] )[A-Z][a-z]{2,}(?: [A-Z][a-z]{2,})?", passage))
    names = [name for name, _ in names.most_common(3) if name.split()[0] not in NOT_NAMES]
    found = set(re.findall(r"[a-z]+", passage))
    nouns = [noun for noun in NOUNS if noun in found]
    if names and (not nouns or rng.random() < 0.4):
        return rng.choice(names)
    if nouns:
        return rng.choice(("a ", "the ", "")) + rng.choice(nouns)
    return None


def sample(paragraphs: list[str], openings: list[int], rng: random.Random) -> str:
    """One chat: a user turn and an assistant turn of about 250 to 1700 characters of prose."""
    kind = rng.random()
    start = rng.choice(openings) if kind < 0.35 else rng.randrange(len(paragraphs))
    want, passage = rng.randint(250, 1700), ""
    for paragraph in paragraphs[start:]:
        passage += ("\n\n" if passage else "") + paragraph
        if len(passage) >= want:
            break
    request = None
    if kind < 0.2:
        request = rng.choice(GREETINGS)
    elif kind < 0.55:
        about = subject(passage, rng)
        request = rng.choice(ABOUT).format(about) if about else rng.choice(GREETINGS)
    else:
        first = sentences(paragraphs[start])[0]
        words = first.split()
        if kind < 0.8 and len(first) < len(passage) - 80:
            request = rng.choice(CONTINUE).format(first)
            passage = passage[len(first) :].lstrip()
        elif len(words) > 3:  # an opening phrase, taken up where it stops
            cut = rng.randint(1, min(8, len(words) - 1))
            opening = " ".join(words[:cut])
            request = opening
            if rng.random() < 0.5:
                passage = passage[len(opening) :].lstrip()
        else:
            request = rng.choice(GREETINGS)
    kept, size = [], 0
    for paragraph in passage.split("\n\n"):
        whole = []
        for sentence in sentences(paragraph):
            whole.append(sentence)
            size += len(sentence)
            if size >= want:
                break
        kept.append(" ".join(whole))
        if size >= want:
            break
    return turn("user", request) + turn("assistant", "\n\n".join(kept))


def chat_rows(texts: list[str], tokenizer: Tokenizer, count: int, seed: int = 7) -> np.ndarray:
    """Rows of packed chats, each row starting at a chat's start: uint16 [count, ROW]."""
    rng = random.Random(seed)
    paragraphs = [p for text in texts for p in text.split("\n\n")]
    openings = [i for i, p in enumerate(paragraphs) if OPENINGS.match(p) and len(p) > 120]
    rows = np.zeros((count, ROW), dtype=np.uint16)
    for row in range(count):
        ids: list[int] = []
        while len(ids) < ROW:
            ids += tokenizer.encode(sample(paragraphs, openings, rng)).ids
        rows[row] = ids[:ROW]
    return rows
