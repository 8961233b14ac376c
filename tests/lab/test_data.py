import hashlib
import pickle
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from cachemuon_lab.data import Batches, keyed_generator
from cachemuon_lab.data.corpus import python_corpus
from cachemuon_lab.data.images import MEAN, OFFICIAL_MD5, STD, ImageBatches, crop_and_flip, read_cifar10
from cachemuon_lab.data.tokens import TokenBatches, TokenFile, Tokens

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def shared(name):
    if not (SHARED / name).is_dir():
        pytest.skip(f"real data is not here: no folder shared/data/{name} beside the repository")
    return SHARED / name


def token_file(path, ids):
    path.write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    return path


@pytest.fixture
def count(tmp_path):
    """Tokens whose ids are their positions."""
    return TokenFile(token_file(tmp_path / "count.bin", range(1000)), vocabulary=1000)


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# Token files


def test_ids_are_read_low_byte_first(tmp_path):
    (tmp_path / "t.bin").write_bytes(b"\x01\x00\x02\x01\x50\xc4")
    assert TokenFile(tmp_path / "t.bin", 50257).ids.tolist() == [1, 258, 50256]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no token file .*t.bin"),
        (b"", "empty"),
        (b"\1\0\1", r"odd number of bytes \(3\): it is truncated"),
    ],
)
def test_a_broken_file_is_refused_at_once(tmp_path, content, message):
    if content is not None:
        (tmp_path / "t.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        TokenFile(tmp_path / "t.bin", 256)


@pytest.mark.parametrize("position", [0, 6, 7, 8, 20])
def test_one_id_outside_the_vocabulary_is_found_wherever_it_is(tmp_path, monkeypatch, position):
    monkeypatch.setattr("cachemuon_lab.data.tokens.CHUNK", 7)
    ids = [255] * 21
    ids[position] = 256
    tokens = TokenFile(token_file(tmp_path / "t.bin", ids), vocabulary=256)
    batches = TokenBatches(tokens, tokens, context=2, batch_size=1, seed=0)
    with pytest.raises(
        ValueError, match=f"t.bin has id 256 at position {position}, but the vocabulary has 256"
    ):
        batches.train(0)
    assert len(TokenFile(tokens.path, vocabulary=257).ids) == 21


def test_too_short_for_the_context_is_refused(count):
    with pytest.raises(ValueError, match=r"count.bin has 1000 tokens, but a context of 1000 needs 1001"):
        TokenBatches(count, count, context=1000, batch_size=1, seed=0)
    inputs, targets = TokenBatches(count, count, context=999, batch_size=2, seed=0).train(0)
    assert torch.equal(inputs, torch.arange(999).expand(2, -1)) and torch.equal(targets, inputs + 1)


def test_tokens_in_memory_have_the_checksum_of_their_file(tmp_path, monkeypatch):
    monkeypatch.setattr("cachemuon_lab.data.tokens.CHUNK", 7)
    path = token_file(tmp_path / "t.bin", range(100))
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert Tokens("memory", np.arange(100, dtype=np.uint8), 256).sha256 == expected
    assert TokenFile(path, 256).describe() == dict(name="t.bin", tokens=100, vocabulary=256, sha256=expected)


@pytest.mark.parametrize("ids", [np.arange(3), np.zeros(3, np.uint32), np.zeros(3, np.float32)])
def test_other_types_of_ids_are_refused(ids):
    with pytest.raises(ValueError, match="must be uint8 or uint16, got"):
        Tokens("x", ids, 256)


# Token batches


def test_windows_are_contiguous_and_targets_one_later(count):
    inputs, targets = TokenBatches(count, count, context=16, batch_size=64, seed=3).train(5)
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == (64, 16)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(16)) and torch.equal(targets, inputs + 1)


def test_every_start_is_possible(tmp_path):
    tokens = TokenFile(token_file(tmp_path / "t.bin", range(12)), 256)
    inputs, targets = TokenBatches(tokens, tokens, context=3, batch_size=1000, seed=0).train(0)
    assert set(inputs[:, 0].tolist()) == set(range(9)) and targets.max() == 11


def test_a_batch_depends_on_seed_step_and_slot_only(count):
    def batches(seed=1):
        return TokenBatches(count, count, context=8, batch_size=4, seed=seed)

    walked = batches()
    history = {(step, micro): walked.train(step, micro) for step in range(3) for micro in range(2)}
    for (step, micro), batch in reversed(history.items()):
        assert same(batches().train(step, micro), batch)
    firsts = [
        batches(seed).train(s, m, r, 2)[0] for seed in (1, 2) for s in (0, 1) for m in (0, 1) for r in (0, 1)
    ]
    assert len({tuple(first.flatten().tolist()) for first in firsts}) == 16


def test_ranks_share_what_one_rank_accumulates(count):
    batches = TokenBatches(count, count, context=8, batch_size=4, seed=1)
    for slot in range(4):
        alone = batches.train(9, micro=slot)
        assert same(alone, batches.train(9, micro=slot // 2, rank=slot % 2, world=2))
        assert same(alone, batches.train(9, rank=slot, world=4))
    with pytest.raises(ValueError, match="rank=2, world=2"):
        batches.train(0, rank=2, world=2)


def test_validation_covers_the_tokens_once_whatever_the_seed(count):
    one, two = (TokenBatches(count, count, context=9, batch_size=5, seed=seed) for seed in (1, 2))
    assert one.validation_batches == 999 // 9 // 5 == 22 and one.tokens_per_batch == 45
    assert all(same(one.validation(i), two.validation(i)) for i in range(22))
    starts = torch.cat([one.validation(i)[0][:, 0] for i in range(22)])
    assert len(set(starts.tolist())) == 110 and (starts % 9 == 0).all()
    assert starts[:10].max() > 500, "the first batches sample all of the text, not its beginning"
    for index in (-1, 22):
        with pytest.raises(IndexError, match="of 22"):
            one.validation(index)


def test_validation_shorter_than_a_batch_is_one_short_batch(count):
    batches = TokenBatches(count, count, context=400, batch_size=5, seed=0)
    assert batches.validation_batches == 1 and batches.validation(0)[0].shape == (2, 400)


def test_real_english():
    folder = shared("english")
    train, val = TokenFile(folder / "train.bin", 50257), TokenFile(folder / "val.bin", 50257)
    assert len(train) == 11_289_544 and len(val) == 164_934
    batches: Batches = TokenBatches(train, val, context=1024, batch_size=8, seed=42)
    inputs, targets = batches.train(0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and inputs.max() <= 50256
    text = torch.from_numpy(train.ids.astype(np.int64))
    starts = (text == inputs[0, 0]).nonzero()[:, 0]
    assert any(torch.equal(text[s : s + 1024], inputs[0]) for s in starts)
    with pytest.raises(ValueError, match="the vocabulary has 50256 ids"):
        _ = TokenFile(folder / "val.bin", 50256).ids


# The corpus


def test_the_corpus_is_the_same_every_time():
    one, two = python_corpus(), python_corpus()
    assert one.sha256 == two.sha256 and one.train.sha256 == two.train.sha256
    assert 5_000_000 < len(one.train) < 50_000_000 and len(one.validation) * 5 < len(one.train)
    for tokens in (one.train, one.validation):
        text = tokens.ids.tobytes()
        assert text.endswith(b"\0") and b"import " in text
    assert one.batches(context=64, batch_size=2, seed=0).train(0)[0].shape == (2, 64)


def test_what_the_corpus_takes_and_holds_out(tmp_path):
    for i in range(11):
        (tmp_path / f"m{i:02}.py").write_text(f"{i}")
    for name in ("site-packages/a.py", "test/b.py", "pkg/tests/c.py", "note.txt", "_sysconfigdata_x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("left out")
    (tmp_path / "m00").mkdir()
    (tmp_path / "m00" / "x.py").write_text("x")
    corpus = python_corpus(tmp_path)
    assert corpus.files == 12
    assert corpus.train.ids.tobytes() == b"0\0x\0" + b"".join(b"%d\0" % i for i in (*range(1, 8), 9, 10))
    assert corpus.validation.ids.tobytes() == b"8\0", "the tenth file: m00/x.py comes after m00.py"
    (tmp_path / "m03.py").rename(tmp_path / "m03b.py")
    assert python_corpus(tmp_path).sha256 != corpus.sha256


def test_a_python_without_sources_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has 0 Python source files"):
        python_corpus(tmp_path)


# CIFAR-10


def random_split(n, seed):
    generator = keyed_generator("test", seed)
    pixels = torch.randint(256, (n, 3072), generator=generator, dtype=torch.uint8)
    return torch.arange(n) % 10, pixels


def write_binary(path, labels, pixels):
    rows = torch.cat([labels[:, None].to(torch.uint8), pixels], 1)
    path.write_bytes(rows.numpy().tobytes())


def write_python(path, labels, pixels):
    """The opcodes of a Python 2 pickle with numpy 1, as the official files have them."""
    data = pixels.numpy().tobytes()
    parts = [
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05(",
        b"".join(b"K" + bytes([label]) for label in labels.tolist()),
        b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08",
        b"K\x00\x85U\x01b\x87Rq\x09(K\x01M" + struct.pack("<H", len(labels)) + b"M\x00\x0c\x86",
        b"cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b",
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
        b"\x89T" + struct.pack("<I", len(data)) + data,
        b"tbU\tfilenamesq\x0c]q\x0d(U\x05a.pngq\x0eeu.",
    ]
    path.write_bytes(b"".join(parts))


@pytest.fixture(params=["binary", "python"])
def cifar(request, tmp_path):
    """Two small training batches and a test batch, in either official format."""
    suffix, write = (".bin", write_binary) if request.param == "binary" else ("", write_python)
    for seed, name in enumerate(("data_batch_1", "data_batch_3", "test_batch")):
        write(tmp_path / f"{name}{suffix}", *random_split(45 if seed < 2 else 120, seed))
    return tmp_path


def open_images(folder, batch_size=8, seed=0, **options):
    return ImageBatches(folder, batch_size, seed, checksums={}, **options)


def test_both_formats_give_the_images_that_were_written(cifar):
    train, test = read_cifar10(cifar, checksums={})
    labels, pixels = (
        torch.cat(parts) for parts in zip(random_split(45, 0), random_split(45, 1), strict=True)
    )
    assert torch.equal(train.labels, labels) and train.labels.dtype == torch.int64
    assert torch.equal(train.images, pixels.reshape(-1, 3, 32, 32)) and train.images.dtype == torch.uint8
    assert len(test.labels) == 120
    assert [name.removesuffix(".bin") for name in train.md5] == ["data_batch_1", "data_batch_3"]


def test_a_file_with_another_checksum_is_refused(cifar):
    with pytest.raises(ValueError, match=r"data_batch_1.* is not the official file: md5 [0-9a-f]{32}, not"):
        ImageBatches(cifar, 8, 0)


def test_what_is_no_cifar_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no CIFAR-10: it must hold test_batch and some of data_batch_1"):
        open_images(tmp_path)
    write_binary(tmp_path / "data_batch_1.bin", *random_split(10, 0))
    with pytest.raises(ValueError, match="has no CIFAR-10"):
        open_images(tmp_path)
    write_binary(tmp_path / "test_batch.bin", torch.full((2,), 10), random_split(2, 1)[1])
    with pytest.raises(ValueError, match=r"test_batch.bin has label 10, labels are 0 to 9"):
        open_images(tmp_path)
    for content in (b"", b"\0" * 3072):
        (tmp_path / "test_batch.bin").write_bytes(content)
        with pytest.raises(
            ValueError, match=f"has {len(content)} bytes: no whole number of 3073-byte records"
        ):
            open_images(tmp_path)


class Exploit:
    def __reduce__(self):
        return (print, ("this must not run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Exploit(), protocol=2), "asks for __builtin__.print"),
        (pickle.dumps({b"data": 1, b"labels": [1]}), "no batch of CIFAR-10's python version"),
        (pickle.dumps({b"labels": [1]}), "data"),
        (b"", "no batch of CIFAR-10's python version"),
        (b"\x80\x02}q", "no batch of CIFAR-10's python version"),
    ],
)
def test_a_forged_or_damaged_pickle_is_refused_and_runs_nothing(tmp_path, capsys, content, message):
    (tmp_path / "data_batch_1").write_bytes(content)
    write_python(tmp_path / "test_batch", *random_split(2, 0))
    with pytest.raises(ValueError, match=message):
        open_images(tmp_path)
    assert capsys.readouterr().out == ""


def test_a_crop_is_a_slice_of_the_padded_image():
    images = random_split(60, 0)[1].reshape(-1, 3, 32, 32)
    top, left, flip = torch.arange(60) % 9, torch.arange(60) // 7, torch.arange(60) % 2 == 1
    crops = crop_and_flip(images, top, left, flip)
    assert crops.dtype == torch.uint8
    for i in range(60):
        padded = np.zeros((3, 40, 40), dtype=np.uint8)
        padded[:, 4:36, 4:36] = images[i].numpy()
        manual = padded[:, top[i] : top[i] + 32, left[i] : left[i] + 32]
        assert np.array_equal(crops[i].numpy(), manual[:, :, ::-1] if flip[i] else manual)


def test_every_epoch_shows_every_image_once_in_another_order(tmp_path):
    labels, pixels = random_split(90, 0)
    pixels[:] = torch.arange(90)[:, None]  # each image is of one grey, which tells its number
    write_binary(tmp_path / "data_batch_1.bin", labels, pixels.to(torch.uint8))
    write_binary(tmp_path / "test_batch.bin", labels, pixels)
    batches = open_images(tmp_path)
    assert batches.steps_per_epoch == 12

    def numbers(step):
        images, labels = batches.train(step)
        grey = (images[:, 0, 16, 16] * STD[0] + MEAN[0]) * 255
        assert torch.equal(labels, grey.round().long() % 10)
        return grey.round().long().tolist()

    first, second = ([numbers(step) for step in range(start, start + 12)] for start in (0, 12))
    assert [len(step) for step in first] == [8] * 11 + [2]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(90)) and first != second


def test_image_batches_are_pure(cifar):
    walked = open_images(cifar)
    history = [walked.train(step) for step in range(15)]
    fresh = open_images(cifar)
    assert all(same(fresh.train(step), history[step]) for step in reversed(range(15)))
    assert not same(open_images(cifar, seed=1).train(0), history[0])
    assert not torch.equal(history[0][0], history[12][0])


def test_calls_of_a_step_share_its_images(cifar):
    for step in (3, 11):  # 11 is the last of an epoch, with 2 images
        images, labels = open_images(cifar, batch_size=8).train(step)
        halves = open_images(cifar, batch_size=4, calls_per_step=2)
        assert halves.steps_per_epoch == 12
        for parts in (
            [halves.train(step, micro=micro) for micro in (0, 1)],
            [halves.train(step, rank=rank, world=2) for rank in (0, 1)],
        ):
            assert all(same(part, (images[i::2], labels[i::2])) for i, part in enumerate(parts))
    with pytest.raises(ValueError, match="micro=1, rank=0, world=2 is beyond calls_per_step=2"):
        halves.train(0, micro=1, world=2)
    with pytest.raises(ValueError, match="last step of an epoch has 2 images for 4 calls"):
        open_images(cifar, batch_size=2, calls_per_step=4)


def test_validation_is_the_test_batch_in_order(cifar):
    batches: Batches = open_images(cifar)
    assert batches.validation_batches == 2
    images, labels = (
        torch.cat(parts) for parts in zip(batches.validation(0), batches.validation(1), strict=True)
    )
    expected_labels, pixels = random_split(120, 2)
    assert torch.equal(labels, expected_labels) and len(batches.validation(0)[1]) == 100
    expected = pixels.reshape(-1, 3, 32, 32).double() / 255
    for c in range(3):
        # float32, values up to 2.7: one rounding each of division, difference and quotient
        torch.testing.assert_close(
            images[:, c].double(), (expected[:, c] - MEAN[c]) / STD[c], rtol=0, atol=2e-6
        )
    with pytest.raises(IndexError, match="2 of 2"):
        batches.validation(2)


def test_real_cifar():
    folder = shared("cifar-10-batches-bin")
    batches = ImageBatches(folder, batch_size=128, seed=42)
    assert batches.steps_per_epoch == 79 and batches.validation_batches == 100
    record = batches.describe()
    assert record["train_images"] == record["validation_images"] == 10_000
    assert record["md5"] == {name: OFFICIAL_MD5[name] for name in ("data_batch_1.bin", "test_batch.bin")}
    images, labels = (torch.cat(parts) for parts in zip(*map(batches.validation, range(20)), strict=True))
    assert torch.bincount(labels).tolist() == [196, 198, 195, 199, 198, 185, 216, 193, 217, 203]
    # The published mean is the training set's; 2,000 test images differ from it by less than 0.05 deviations.
    assert images.mean(dim=(0, 2, 3)).abs().max() < 0.05
    # The published deviation is each image's own, averaged; that of all pixels is a fifth to a third larger.
    assert ((images.std(dim=(0, 2, 3)) - 1.25).abs() < 0.1).all()


def test_augmentation_is_uniform(tmp_path):
    """The place of one bright pixel in an otherwise black image tells its crop and its flip."""
    pixels = torch.zeros(1000, 3, 32, 32, dtype=torch.uint8)
    pixels[:, :, 12, 8] = 255
    for name in ("data_batch_1.bin", "test_batch.bin"):
        write_binary(tmp_path / name, torch.zeros(1000), pixels.flatten(1))
    batches = open_images(tmp_path, batch_size=1000)
    bright = torch.cat([batches.train(step)[0][:, 0] for step in range(10)]).flatten(1).argmax(1)
    rows, columns = bright // 32, bright % 32
    flipped = columns > 16
    top, left = 16 - rows, 12 - torch.where(flipped, 31 - columns, columns)
    # 10,000 draws: a share p of them has a deviation of sqrt(p (1 - p) / 10000); bounds are 5 of those.
    assert abs(flipped.float().mean() - 0.5) < 0.025
    together = torch.bincount(top * 9 + left, minlength=81) / 10_000
    assert len(together) == 81 and (together - 1 / 81).abs().max() < 5 * 0.0011
    for offsets in (top, left):
        assert (torch.bincount(offsets, minlength=9) / 10_000 - 1 / 9).abs().max() < 5 * 0.0032


# Parts of the validation


def test_the_parts_of_the_validation_tokens_share_none():
    ids = np.arange(201, dtype=np.uint8)
    tokens = Tokens("count", ids, vocabulary=256)
    seen = {}
    for part in ("all", "tune", "report"):
        batches = TokenBatches(tokens, tokens.part(part), context=10, batch_size=2, seed=0)
        found = [torch.cat(batches.validation(i), dim=1) for i in range(batches.validation_batches)]
        seen[part] = set(torch.cat(found).flatten().tolist())
    assert max(seen["tune"]) < 100 <= min(seen["report"]) and seen["tune"] | seen["report"] <= set(range(201))
    assert len(seen["tune"]) >= 81 and len(seen["report"]) >= 81  # whole batches of windows of 10
    assert tokens.part("all") is tokens
    assert tokens.part("report").describe()["sha256"] != tokens.describe()["sha256"]


def test_the_parts_of_the_test_images_are_all_of_them(cifar):
    labels = {
        part: torch.cat([one for _, one in _validations(open_images(cifar, part=part))])
        for part in ("all", "tune", "report")
    }
    assert len(labels["tune"]) == len(labels["report"]) == 60
    assert torch.equal(torch.cat([labels["tune"], labels["report"]]), labels["all"])


def _validations(batches):
    return [batches.validation(number) for number in range(batches.validation_batches)]
