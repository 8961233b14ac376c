import errno
import hashlib
import json
import os
import resource
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from cachemuon_lab.data import corpus, prepare
from cachemuon_lab.data.corpus import PASSAGE, passages
from cachemuon_lab.data.prepare import prepare_openwebtext, prepare_text, progress_bar
from cachemuon_lab.data.tokens import TokenBatches, TokenFile, load_encode

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
FILES = 200


@pytest.fixture
def vocabulary_files(tmp_path, monkeypatch):
    pytest.importorskip("tiktoken", reason="the [lab] extra is not installed")
    if not (SHARED / "gpt2-bpe").is_dir():
        pytest.skip("GPT-2's vocabulary is not here: no folder shared/data/gpt2-bpe beside the repository")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    return SHARED / "gpt2-bpe"


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(prepare, "BATCH", 4)
    monkeypatch.setattr(prepare, "SAVE_EVERY", 16)


@pytest.fixture
def files(tmp_path):
    """Small files, one of them empty, each of them one document."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(FILES):
        (folder / f"{i}.txt").write_text("" if i == 7 else f"Text número {i}.\r\n" * (i % 5 + 1), newline="")
    return [folder / f"{i}.txt" for i in range(FILES)]


def contents(out):
    """Everything in the folder, byte for byte."""
    return {path.name: path.read_bytes() for path in out.iterdir()}


def prepare_bytes(files, out, **options):
    return prepare_text(files, out, "bytes", validation=0.2, **options)


@pytest.fixture
def whole(files, tmp_path):
    """What an uninterrupted run makes."""
    prepare_bytes(files, tmp_path / "whole")
    return contents(tmp_path / "whole")


def test_every_document_is_in_one_file_with_its_end(files, whole):
    assert set(whole) == {"train.bin", "val.bin", "meta.json"}
    parts = {
        split: np.frombuffer(whole[f"{split}.bin"], "<u2").astype(np.uint8) for split in ("train", "val")
    }
    documents = {split: ids.tobytes().removesuffix(b"\0").split(b"\0") for split, ids in parts.items()}
    assert sorted(documents["train"] + documents["val"]) == sorted(
        p.read_bytes() for p in files if p.stat().st_size
    )
    assert 20 <= len(documents["val"]) <= 60, "about a fifth of 199"
    meta = json.loads(whole["meta.json"])
    assert (meta["tokenizer"], meta["vocabulary"], meta["end"], meta["validation"]) == ("bytes", 256, 0, 0.2)
    assert meta["documents"] == 199 and meta["sources"][1] == {
        "name": "1.txt",
        "bytes": files[1].stat().st_size,
    }
    for split in ("train", "val"):
        digest = hashlib.sha256(whole[f"{split}.bin"]).hexdigest()
        assert meta[split] == dict(
            name=f"{split}.bin", tokens=len(parts[split]), vocabulary=256, sha256=digest
        )


def test_the_split_is_by_document_not_by_order(files, whole, tmp_path):
    prepare_bytes(files[::-1], tmp_path / "other")
    for name in ("train.bin", "val.bin"):
        there, here = (np.frombuffer(c[name], "<u2") for c in (contents(tmp_path / "other"), whole))
        assert there.tobytes() != here.tobytes() and np.array_equal(np.sort(there), np.sort(here))


def test_a_long_file_is_cut_at_line_ends_and_loses_nothing(tmp_path):
    line = "Zeile über alles\r\n"
    text = line * (3 * PASSAGE // len(line)) + "the end"
    (tmp_path / "long.txt").write_text(text, newline="", encoding="utf-8")
    parts = list(passages([tmp_path / "long.txt"]))
    assert len(parts) == 3 and "".join(parts) == text
    assert all(part.endswith("\n") for part in parts[:-1])


# Interrupts


class Interrupted(BaseException):
    """Like KeyboardInterrupt, but pytest doesn't stop for it."""


def interrupted(documents, after):
    for number, document in enumerate(documents):
        if number == after:
            raise Interrupted
        yield document


@pytest.mark.parametrize("after", [0, 1, 4, 50, 198])
def test_an_interrupted_run_continues_to_the_same_bytes(
    files, whole, tmp_path, monkeypatch, small_batches, after
):
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(prepare, "passages", lambda paths: interrupted(passages(paths), after))
        prepare_bytes(files, out)
    assert not {"train.bin", "val.bin", "meta.json"} & set(contents(out)), "no partial file looks complete"
    done = []
    meta = prepare_bytes(files, out, progress=lambda documents, tokens: done.append((documents, tokens)))
    assert contents(out) == whole
    assert done[0][0] == min(after // 4 * 4 + 4, 199), "what was written is not done again"
    assert done[-1] == (199, meta["train"]["tokens"] + meta["val"]["tokens"])


@pytest.mark.parametrize("at", [4, 12, 16, 20, 100, 199])
def test_a_killed_run_continues_from_what_was_on_the_disk(files, whole, tmp_path, small_batches, at):
    out = tmp_path / "out"

    def kill(documents, _):
        if documents == at:
            shutil.copytree(tmp_path / "living", out)  # as the disk is now, without a last save

    prepare_bytes(files, tmp_path / "living", progress=kill)
    assert not {"train.bin", "val.bin", "meta.json"} & set(contents(out))
    with (out / "train.bin.partial").open("ab") as file:
        file.write(b"half a docum")
    prepare_bytes(files, out)
    assert contents(out) == whole


@pytest.mark.parametrize("call", range(4), ids=["progress.json", "train.bin", "val.bin", "meta.json"])
def test_an_interrupt_while_finishing_continues(files, whole, tmp_path, monkeypatch, call):
    out, calls, replace = tmp_path / "out", [], os.replace

    def failing(source, target):
        calls.append(target.name)
        if len(calls) == call + 1:
            raise Interrupted
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(os, "replace", failing)
        prepare_bytes(files, out)
    assert calls[: call + 1] == ["progress.json", "train.bin", "val.bin", "meta.json"][: call + 1]
    assert "meta.json" not in contents(out)
    prepare_bytes(files, out, progress=pytest.fail)
    assert contents(out) == whole


def test_a_full_disk_keeps_what_was_written(files, tmp_path, small_batches):
    """A limit on the size of files makes the kernel refuse in the middle of a write, as a full disk does."""
    files, out = files[:60], tmp_path / "out"
    for path in files:
        path.write_text(path.name * 200)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_000, hard))
    try:
        with pytest.raises(
            OSError, match=r"out: .*File too large; \d+ documents are kept, the same"
        ) as caught:
            prepare_bytes(files, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.__cause__.errno == errno.EFBIG
    kept = json.loads((out / "progress.json").read_text())["documents"]
    assert 16 <= kept < 60 and f"; {kept} documents" in str(caught.value)
    done = []
    prepare_bytes(files, out, progress=lambda documents, _: done.append(documents))
    prepare_bytes(files, tmp_path / "whole")
    assert done[0] == kept + 4 and contents(out) == contents(tmp_path / "whole")


def test_a_finished_folder_is_left_as_it_is(files, tmp_path):
    first = prepare_bytes(files, tmp_path / "out")
    stamp = (tmp_path / "out" / "train.bin").stat().st_mtime_ns
    assert prepare_bytes(files, tmp_path / "out", progress=pytest.fail) == first
    assert (tmp_path / "out" / "train.bin").stat().st_mtime_ns == stamp


# Refusals


def test_other_settings_don_t_continue_a_folder(files, tmp_path, monkeypatch, small_batches):
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(prepare, "passages", lambda paths: interrupted(passages(paths), 50))
        prepare_bytes(files, tmp_path)
    with pytest.raises(ValueError, match=r"progress.json was made with validation=0.2, not 0.1; use another"):
        prepare_text(files, tmp_path, "bytes", validation=0.1)
    with pytest.raises(ValueError, match=r"progress.json was made with sources="):
        prepare_bytes(files[:-1], tmp_path)
    (tmp_path / "train.bin.partial").write_bytes(b"")
    with pytest.raises(ValueError, match=r"train.bin.partial is shorter than progress.json says"):
        prepare_bytes(files, tmp_path)


def test_files_of_unknown_origin_are_not_overwritten(files, tmp_path):
    (tmp_path / "train.bin").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"already holds a train.bin or val.bin that was not made here"):
        prepare_bytes(files, tmp_path)
    assert (tmp_path / "train.bin").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(files=[]), "files is empty"),
        (dict(files=["nowhere.txt"]), "there is no text file nowhere.txt"),
        (dict(tokenizer="words"), "tokenizer must be one of gpt2, bytes, got 'words'"),
        (dict(validation=0), "validation must be between 0 and 1, got 0"),
        (dict(validation=1.5), "validation must be between 0 and 1, got 1.5"),
    ],
)
def test_wrong_arguments(files, tmp_path, change, message):
    arguments = dict(files=files, tokenizer="bytes", validation=0.2) | change
    with pytest.raises(ValueError, match=message):
        prepare_text(out=tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_undecodable_text_names_the_file_and_keeps_the_rest(files, tmp_path, small_batches):
    files[100].write_bytes(b"caf\xe9 noir")
    with pytest.raises(ValueError, match=r"100.txt is not UTF-8 text: invalid continuation byte b'\\xe9'"):
        prepare_bytes(files, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "progress.json").read_text())["documents"] == 96


def test_an_empty_split_is_refused(files, tmp_path):
    with pytest.raises(
        ValueError, match=r"none of 1 documents is for (val|train).bin: delete .*progress.json"
    ):
        prepare_bytes(files[:1], tmp_path / "out")
    assert set(contents(tmp_path / "out")) == {"train.bin.partial", "val.bin.partial", "progress.json"}


def test_no_documents_are_refused_and_bind_nothing(files, tmp_path):
    with pytest.raises(ValueError, match="none of 0 documents"):
        prepare_bytes([files[7]], tmp_path)
    prepare_text(files, tmp_path, "bytes", validation=0.3)


# GPT-2's tokenizer


def test_gpt2_round_trip(vocabulary_files, tmp_path):
    text = "Hello world, it's naïve: 数学 🙂\n\n  def f(x):\n\treturn x ** 2  # <|endoftext|>\r\n"
    import tiktoken

    ids = load_encode("gpt2", vocabulary_files)([text, "Hello world"])
    assert list(ids[1]) == [15496, 995], "as in the original GPT-2 code"
    assert 50256 not in ids[0], "the end token stands only where a document ends"
    files = []
    for i in range(40):
        files.append(tmp_path / f"{i}.txt")
        files[-1].write_text(f"{i} {text}", newline="", encoding="utf-8")
    out = tmp_path / "out"
    meta = prepare_text(files, out, vocabulary_files=vocabulary_files, validation=0.2)
    assert (meta["tokenizer"], meta["vocabulary"]) == ("gpt2", 50257)
    train, val = (TokenFile(out / f"{split}.bin", 50257) for split in ("train", "val"))
    assert (train.ids == 50256).sum() + (val.ids == 50256).sum() == 40
    TokenBatches(train, val, context=32, batch_size=2, seed=0).train(0)
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(
        str(vocabulary_files / "vocab.bpe"), str(vocabulary_files / "encoder.json")
    )
    pieces = {rank: piece for piece, rank in ranks.items()} | {50256: b"\0"}
    decoded = b"".join(pieces[i] for i in (*train.ids.tolist(), *val.ids.tolist())).decode()
    assert sorted(decoded.removesuffix("\0").split("\0")) == sorted(f"{i} {text}" for i in range(40))


def test_gpt2_tokens_are_those_of_the_real_data(vocabulary_files):
    """Text decoded from real tokens is tokenized to the same ids again."""
    if not (SHARED / "english").is_dir():
        pytest.skip("real data is not here: no folder shared/data/english beside the repository")
    ids = TokenFile(SHARED / "english" / "val.bin", 50257).ids.tolist()
    ends = [i for i, token in enumerate(ids) if token == 50256]
    documents = [ids[a + 1 : b] for a, b in pairwise(ends)][:20]
    encoder = json.loads((vocabulary_files / "encoder.json").read_text(encoding="utf-8"))
    characters = {token: piece for piece, token in encoder.items()}
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    texts = [bytes(table[c] for t in doc for c in characters[t]).decode() for doc in documents]
    assert [list(found) for found in load_encode("gpt2", vocabulary_files)(texts)] == documents


def test_a_wrong_vocabulary_is_refused(vocabulary_files, tmp_path):
    with pytest.raises(OSError, match=r"vocab.bpe"):
        load_encode("gpt2", tmp_path)
    shutil.copy(vocabulary_files / "encoder.json", tmp_path)
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n")
    with pytest.raises(ValueError, match=r"Hash mismatch .*vocab.bpe"):
        load_encode("gpt2", tmp_path)


def test_without_a_network_the_message_says_what_to_do(vocabulary_files, monkeypatch):
    import tiktoken

    def offline(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(OSError, match=r"pass vocabulary_files, a folder with .* \(no route\)"):
        load_encode("gpt2")


# OpenWebText


def rows():
    return [{"text": f"Page {i}: " + "word " * (i % 7)} for i in range(60)]


def test_openwebtext_is_streamed_by_datasets(vocabulary_files, tmp_path, monkeypatch, small_batches):
    """The real code path on a local data set, interrupted once."""
    pytest.importorskip("datasets", reason="the [lab] extra is not installed")
    local = tmp_path / "hub"
    local.mkdir()
    (local / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    monkeypatch.setattr(corpus, "OPENWEBTEXT", str(local))
    options = dict(vocabulary_files=vocabulary_files, validation=0.2)

    def stop(documents, _):
        if documents == 40:
            raise Interrupted

    with pytest.raises(Interrupted):
        prepare_openwebtext(tmp_path / "out", progress=stop, **options)
    done = []
    streamed = prepare_openwebtext(tmp_path / "out", progress=lambda n, _: done.append(n), **options)
    assert done[0] == 44 and streamed["sources"] == [{"name": "Skylion007/openwebtext"}]
    given = prepare_openwebtext(tmp_path / "given", rows(), **options)
    assert given["train"] == streamed["train"] and given["val"] == streamed["val"]
    assert given["sources"] == [{"name": "rows"}]


def test_a_lost_connection_is_one_message_and_keeps_what_was_written(
    vocabulary_files, tmp_path, monkeypatch, small_batches
):
    datasets = pytest.importorskip("datasets", reason="the [lab] extra is not installed")

    def broken(*_, **__):
        yield from rows()[:10]
        raise RuntimeError("peer closed the connection")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    message = "openwebtext could not be streamed: peer closed the connection; 8 documents are kept"
    with pytest.raises(OSError, match=message):
        prepare_openwebtext(tmp_path / "out", vocabulary_files=vocabulary_files)


def test_rows_with_lone_surrogates_are_written(vocabulary_files, tmp_path):
    odd = [{"text": f"{i} \ud800"} for i in range(40)]
    assert (
        prepare_openwebtext(tmp_path, odd, vocabulary_files=vocabulary_files, validation=0.2)["documents"]
        == 40
    )


def test_progress_bar(files, tmp_path, capsys):
    pytest.importorskip("rich", reason="the [lab] extra is not installed")
    with progress_bar(total=199) as progress:
        prepare_bytes(files, tmp_path / "out", progress=progress)
    assert "199/199" in capsys.readouterr().out
