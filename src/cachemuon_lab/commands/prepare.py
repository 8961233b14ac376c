"""`cachemuon prepare`: text becomes train.bin and val.bin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cachemuon_lab.terminal import documents, say_prepared

app = typer.Typer(
    help="Turn text into train.bin and val.bin. Interrupted, the same command goes on.", no_args_is_help=True
)

Vocabulary = Annotated[
    Path | None,
    typer.Option(help="A folder with GPT-2's encoder.json and vocab.bpe, if they can't be downloaded."),
]
Held = Annotated[float, typer.Option("--validation", help="The fraction of documents to hold out.")]


@app.command("openwebtext")
def prepare_openwebtext(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")] = Path("data/openwebtext"),
    vocabulary_files: Vocabulary = None,
    validation: Held = 0.0005,
) -> None:
    """Stream OpenWebText from its hub and tokenize it."""
    from cachemuon_lab.data.prepare import prepare_openwebtext as prepare

    with documents() as progress:
        meta = prepare(out, vocabulary_files=vocabulary_files, validation=validation, progress=progress)
    say_prepared(meta, out)


@app.command("text")
def prepare_text(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="UTF-8 text files.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")] = Path("data/text"),
    tokenizer: Annotated[str, typer.Option(help="gpt2 or bytes.")] = "gpt2",
    vocabulary_files: Vocabulary = None,
    validation: Held = 0.0005,
) -> None:
    """Tokenize text files."""
    from cachemuon_lab.data.prepare import prepare_text as prepare

    with documents() as progress:
        meta = prepare(
            files,
            out,
            tokenizer,
            vocabulary_files=vocabulary_files,
            validation=validation,
            progress=progress,
        )
    say_prepared(meta, out)
