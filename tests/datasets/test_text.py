"""BERT's data: vocabularies, pairs and masks, samples in HDF5, the embedded text, and what is wrong with a file."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.datasets.kinds import Checking, RawText, TextSamples
from dlbench.datasets.making.computed_recipes import TextDocument, TextRecipe, python_documents
from dlbench.datasets.making.production import Recipe
from dlbench.datasets.text.corpus import SPECIAL, TextCorpus, load_vocabulary, read_corpus
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.node.data.reader import BadSampleError, BatchReader
from dlbench.node.data.text import (
    PretrainingHdf5Reader,
    SampleMaker,
    TextReader,
    mask_tokens,
    num_predictions,
    open_text,
)
from dlbench.specs.workload import BertModel, TextData

h5py = pytest.importorskip("h5py")
pytest.importorskip("tokenizers")
torch.set_num_threads(1)

PAD, UNKNOWN, CLS, SEP, MASK = range(5)
WITH_VOCABULARY = Checking(vocabulary="english-4096")
BERT = BertModel(
    family="bert", vocab_size=4096, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=64
)


def sentences(num_documents: int, seed: int = 0) -> str:
    """Documents of 1 to 12 sentences of 1 to 30 words."""
    rng = np.random.default_rng(seed)
    entries = load_vocabulary("english-4096").entries
    words = np.array([w for w in entries if w.isalpha() and w.isascii() and len(w) > 3])
    documents = [
        "\n".join(" ".join(rng.choice(words, rng.integers(1, 31))) for _ in range(rng.integers(1, 13)))
        for _ in range(num_documents)
    ]
    return "\n\n".join(documents) + "\n"


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(sentences(150), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def corpus(text_file: Path) -> TextCorpus:
    return read_corpus(text_file, load_vocabulary("english-4096"))


def text_spec(source: str = "x", **changes: Any) -> TextData:
    return TextData.model_validate(
        {"format": "text", "source": source, "sequence_length": 64, "max_predictions": 10, **changes}
    )


def unmasked(arrays: dict[str, Any]) -> list[int]:
    """The ids before masking, without padding."""
    ids = arrays["input_ids"].copy()
    used = arrays["masked_weights"] > 0
    ids[arrays["masked_positions"][used]] = arrays["masked_ids"][used]
    return list(ids[arrays["attention_mask"] == 1])


# Masks


def binomial_bounds(count: int, share: float) -> tuple[float, float]:
    """Six standard deviations around the expected share: a right draw fails once in 500 million."""
    spread = 6 * (share * (1 - share) / count) ** 0.5 + 1 / count
    return share - spread, share + spread


@given(
    words=st.integers(2, 509),
    split=st.floats(0, 1),
    max_predictions=st.integers(1, 100),
    probability=st.floats(0.01, 0.9),
    seed=st.integers(0, 2**32),
)
def test_masks_follow_the_published_rule(
    words: int, split: float, max_predictions: int, probability: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    used, length = words + 3, words + 3 + int(rng.integers(0, 20))
    middle = 1 + min(words - 1, 1 + int(split * (words - 1)))
    ids = np.zeros(length, dtype=np.int64)
    ids[:used] = rng.integers(5, 1000, used)
    ids[0], ids[middle], ids[used - 1] = CLS, SEP, SEP
    candidates = np.setdiff1d(np.arange(used), [0, middle, used - 1])
    before = ids.copy()
    num = num_predictions(used, max_predictions, probability)
    hidden, positions, labels = mask_tokens(ids, candidates, num, rng, mask_id=MASK, words=np.arange(5, 1000))
    assert (ids == before).all()
    assert len(positions) == min(words, max_predictions, max(1, round(used * probability)))
    assert (np.diff(positions) > 0).all()
    assert np.isin(positions, candidates).all()
    assert (labels == before[positions]).all()
    others = np.setdiff1d(np.arange(length), positions)
    assert (hidden[others] == before[others]).all()
    assert (hidden[positions] >= MASK).all()


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_eighty_ten_ten(seed: int) -> None:
    count, words = 20_000, np.arange(5, 4096)
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, 4096, count)
    hidden, positions, labels = mask_tokens(ids, np.arange(count), count, rng, mask_id=MASK, words=words)
    assert len(positions) == count
    masked, kept = (hidden == MASK).mean(), (hidden == labels).mean()
    # A random word is the right one in one of 4,091 cases.
    for share, expected in ((masked, 0.8), (kept, 0.1 + 0.1 / len(words)), (1 - masked - kept, 0.1 - 0.1 / len(words))):
        low, high = binomial_bounds(count, expected)
        assert low <= share <= high


def test_published_numbers_of_predictions() -> None:
    assert num_predictions(128, 20, 0.15) == 19
    assert num_predictions(512, 76, 0.15) == 76
    assert num_predictions(512, 80, 0.15) == 77
    assert num_predictions(5, 20, 0.15) == 1


# Samples


def check_sample(a: dict[str, Any], length: int, predictions: int) -> None:
    used = int(a["attention_mask"].sum())
    assert a["attention_mask"].tolist() == [1] * used + [0] * (length - used)
    assert not a["input_ids"][used:].any()
    ids = unmasked(a)
    assert (ids[0], ids[-1]) == (CLS, SEP)
    middle = ids.index(SEP)
    assert 1 < middle < used - 2  # both segments have a word
    assert (ids.count(SEP), ids.count(CLS)) == (2, 1)
    types = [0] * (middle + 1) + [1] * (used - middle - 1) + [0] * (length - used)
    assert a["token_type_ids"].tolist() == types
    num = int(a["masked_weights"].sum())
    assert num == min(predictions, max(1, round(used * 0.15)))
    assert a["masked_weights"].tolist() == [1.0] * num + [0.0] * (predictions - num)
    places = a["masked_positions"][:num]
    assert (np.diff(places) > 0).all()
    assert not {0, middle, used - 1} & set(places.tolist())
    assert not a["masked_positions"][num:].any()
    assert not a["masked_ids"][num:].any()
    assert a["masked_ids"][:num].min() >= 5


@pytest.mark.parametrize("length", [5, 6, 17, 64, 512])
def test_form_of_a_sample_made_on_the_fly(corpus: TextCorpus, length: int) -> None:
    data = TextReader(corpus, text_spec(sequence_length=length, max_predictions=8), seed=1)
    for index in range(0, data.num_samples, max(1, data.num_samples // 150)):
        check_sample(data.read((2, index)).arrays, length, 8)


def test_pairs_follow_or_come_from_another_document(corpus: TextCorpus) -> None:
    maker = SampleMaker(corpus, text_spec(sequence_length=64, max_predictions=10))
    ends = corpus.sentence_offsets[corpus.document_offsets]
    tokens = [corpus.tokens[a:b].tolist() for a, b in itertools.pairwise(ends)]
    labels = []
    for number, ((start, end), document) in enumerate(zip(*maker.runs(), strict=True)):
        generator = np.random.default_rng([3, number])
        sample = maker.sample(maker.draw_pair(int(document), int(start), int(end), generator), generator)
        ids = unmasked(sample)
        middle = ids.index(SEP)
        first, second = ids[1:middle], ids[middle + 1 : -1]
        labels.append(int(sample["next_sentence"]))
        assert contains(tokens[document], first)
        if not labels[-1]:
            assert contains(tokens[document], second)
        elif len(second) > 2:  # one or two words may stand in several documents
            assert not contains(tokens[document], second)
            assert any(contains(other, second) for other in tokens)
    low, high = binomial_bounds(len(labels), 0.5)
    assert low <= np.mean(labels) <= high


def contains(whole: list[int], part: list[int]) -> bool:
    return f" {' '.join(map(str, part))} " in f" {' '.join(map(str, whole))} "


def test_every_sentence_is_in_one_run(corpus: TextCorpus) -> None:
    runs, documents = SampleMaker(corpus, text_spec(sequence_length=32)).runs()
    assert [s for start, end in runs for s in range(start, end)] == list(range(len(corpus.sentence_offsets) - 1))
    for (start, end), document in zip(runs, documents, strict=True):
        assert corpus.document_offsets[document] <= start < end <= corpus.document_offsets[document + 1]
        tokens = corpus.sentence_offsets[start], corpus.sentence_offsets[end - 1]
        assert tokens[1] - tokens[0] < 29  # without its last sentence, the run would not fill the sequence


def test_training_is_masked_anew_and_evaluation_is_not(corpus: TextCorpus) -> None:
    training, evaluation = (TextReader(corpus, text_spec(), seed=1, training=t) for t in (True, False))
    for data, changes in ((training, True), (evaluation, False)):
        once, again, later = (data.read(key).arrays for key in ((0, 3), (0, 3), (1, 3)))
        assert all(np.array_equal(once[k], again[k]) for k in once)
        assert changes != np.array_equal(once["masked_positions"], later["masked_positions"])


def test_wrong_text_settings_are_named(tmp_path: Path) -> None:
    def build(content: str, model: BertModel = BERT, **changes: Any) -> None:
        (tmp_path / "a.txt").write_text(content, encoding="utf-8")
        open_text(tmp_path, model, text_spec(**changes), 0, training=True)

    with pytest.raises(UserError, match="holds a single document"):
        build("one\ndocument\n")
    with pytest.raises(UserError, match=r"data.sequence_length 4 is too short"):
        build("one\n\ntwo\n", sequence_length=4)
    small = BERT.model_copy(update={"vocab_size": 4095})
    with pytest.raises(UserError, match=r"english-4096 has 4096 entries, but model.vocab_size is 4095"):
        build("one\n\ntwo\n", small)
    (tmp_path / "v.vocab").write_text("\n".join(SPECIAL), encoding="utf-8")
    with pytest.raises(UserError, match="no word"):
        build("one\n\ntwo\n", vocabulary=str(tmp_path / "v.vocab"))


# Samples in HDF5


def make(recipe: Recipe, folder: Path) -> Path:
    for part in recipe.parts():
        (folder / part.name).parent.mkdir(parents=True, exist_ok=True)
        # As a worker process would get them.
        pickle.loads(pickle.dumps(recipe)).write(pickle.loads(pickle.dumps(part)), folder / part.name)
    recipe.finish(folder)
    return folder


def foreign(folder: Path, rows: int = 5, **changes: Any) -> Path:
    """A file as NVIDIA's scripts write it: gzip, 0 in unused places, another suffix."""
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 4096, (rows, 64))
    ids[:, 0], ids[:, 30], ids[:, 59], ids[:, 60:] = CLS, SEP, SEP, 0
    place = np.arange(64)
    positions = np.zeros((rows, 10), dtype=np.int64)
    positions[:, :9] = np.sort(rng.permuted(np.tile(np.arange(1, 30), (rows, 1)), axis=1)[:, :9])
    labels = np.where(positions > 0, rng.integers(5, 4096, (rows, 10)), 0)
    datasets: dict[str, tuple[Any, str]] = {
        "input_ids": (ids, "i4"),
        "input_mask": (np.tile(place < 60, (rows, 1)), "i1"),
        "segment_ids": (np.tile((place > 30) & (place < 60), (rows, 1)), "i1"),
        "masked_lm_positions": (positions, "i4"),
        "masked_lm_ids": (labels, "i4"),
        "next_sentence_labels": (np.arange(rows) % 2, "i1"),
    }
    datasets.update(changes)
    path = folder / "part_00000_of_00500.hdf5"
    with h5py.File(path, "w") as file:
        for key, (data, dtype) in datasets.items():
            if data is not None:
                file.create_dataset(key, data=np.asarray(data), dtype=dtype, compression="gzip")
    return path


@pytest.mark.parametrize("predictions", [4, 10, 20])
def test_a_file_as_nvidia_writes_it(tmp_path: Path, predictions: int) -> None:
    path = foreign(tmp_path)
    data = open_text(path, BERT, text_spec(max_predictions=predictions), 0, training=True)
    assert isinstance(data, PretrainingHdf5Reader)
    with h5py.File(path) as file:
        positions, labels = file["masked_lm_positions"][...], file["masked_lm_ids"][...]
    for row in range(5):
        a = pickle.loads(pickle.dumps(data)).read((0, row)).arrays
        used = min(9, predictions)
        assert a["masked_weights"].tolist() == [1.0] * used + [0.0] * (predictions - used)
        assert a["masked_positions"][:used].tolist() == positions[row, :used].tolist()
        assert a["masked_ids"][:used].tolist() == labels[row, :used].tolist()
        assert int(a["next_sentence"]) == row % 2
        assert int(a["attention_mask"].sum()) == 60
    assert TextSamples().verify(path, WITH_VOCABULARY) == []


def variable(fixed: Path, path: Path) -> None:
    """The samples of a file of the fixed layout in that of variable length."""
    with h5py.File(fixed) as old, h5py.File(path, "w") as new:
        for key, dtype, length in (
            ("input_ids", "int16", 60),
            ("segment_ids", "int8", 60),
            ("masked_lm_positions", "int16", 9),
            ("masked_lm_ids", "int16", 9),
        ):
            made = new.create_dataset(key, (5,), dtype=h5py.vlen_dtype(np.dtype(dtype)))
            for row in range(5):
                made[row] = old[key][row, :length]
        new.create_dataset("next_sentence_labels", data=old["next_sentence_labels"][...], dtype="i1")


def test_a_file_of_variable_length(tmp_path: Path) -> None:
    fixed = foreign(tmp_path)
    path = tmp_path / "eval_varlength.hdf"
    variable(fixed, path)
    one, other = (open_text(p, BERT, text_spec(), 0, training=True) for p in (fixed, path))
    for row in range(5):
        a, b = one.read((0, row)).arrays, other.read((0, row)).arrays
        assert all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
    assert TextSamples().verify(path, WITH_VOCABULARY) == []
    short = open_text(path, BERT, text_spec(sequence_length=59), 0, training=True)
    with pytest.raises(BadSampleError, match=r"eval_varlength.hdf', row 2: 60 tokens, at most 59 are expected"):
        short.read((0, 2))


def spoil(key: str, row: int, column: int, value: int) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        place = row if file[key].ndim == 1 else (row, column)
        file[key][place] = value

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (spoil("input_ids", 2, 5, 4096), "input_ids holds an id out of range of a vocabulary of 4096"),
        (spoil("input_ids", 2, 5, -1), "input_ids holds an id out of range"),
        (spoil("input_mask", 2, 5, 0), "input_mask is not ones and then zeros"),
        (spoil("segment_ids", 2, 5, 2), "segment_ids holds other than 0 and 1"),
        (spoil("masked_lm_positions", 2, 8, 60), "masked_lm_positions is outside the tokens"),
        (spoil("masked_lm_ids", 2, 0, 5000), "masked_lm_ids holds an id out of range"),
        (spoil("next_sentence_labels", 2, 0, 3), "next_sentence_labels is neither 0 nor 1"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, change: Callable[[Any], None], told: str) -> None:
    path = foreign(tmp_path)
    with h5py.File(path, "r+") as file:
        change(file)
    data = open_text(path, BERT, text_spec(), 0, training=True)
    data.read((0, 1))
    with pytest.raises(BadSampleError) as raised:
        data.read((0, 2))
    assert f"part_00000_of_00500.hdf5', row 2: {told}" in str(raised.value)
    assert [line.startswith(f"{path.name}: row 2: {told}") for line in TextSamples().verify(path, WITH_VOCABULARY)] == [
        True
    ]
    assert BatchReader(data, "skip")[[(0, 2)]].failures == [str(raised.value)]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"input_mask": (None, "")}, "no dataset 'input_mask'"),
        ({"input_ids": (np.zeros((5, 64)), "f4")}, "input_ids is float32 of shape (5, 64)"),
        ({"next_sentence_labels": (np.zeros((5, 1)), "i1")}, "next_sentence_labels is int8 of shape (5, 1)"),
        ({"segment_ids": (np.zeros((5, 63)), "i1")}, "segment_ids has shape (5, 63), which does not fit input_ids"),
        ({"masked_lm_ids": (np.zeros((4, 10)), "i4")}, "masked_lm_ids has shape (4, 10)"),
        ({"packed_input_len": (np.zeros(5), "i2")}, "samples are packed"),
    ],
)
def test_wrong_layouts_are_named(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    path = foreign(tmp_path, **changes)
    with pytest.raises(UserError) as raised:
        open_text(tmp_path, BERT, text_spec(), 0, training=True)
    assert f"part_00000_of_00500.hdf5': {told}" in str(raised.value)
    assert "\n" not in str(raised.value)
    (line,) = TextSamples().verify(path, Checking())
    assert told in line


@pytest.mark.parametrize(("at", "told"), [(8, "the heap at byte"), (24, "of a heap has a size of")])
def test_a_damaged_heap_is_told_before_the_library_goes_round_in_it(tmp_path: Path, at: int, told: str) -> None:
    path = tmp_path / "a.h5"
    variable(foreign(tmp_path), path)
    assert TextSamples().verify(path, WITH_VOCABULARY) == []
    content = bytearray(path.read_bytes())
    heap = content.index(b"GCOL")
    for filling in (bytes(40), b"\xff" * 40):
        content[heap + at : heap + at + 40] = filling
        path.write_bytes(content)
        (line,) = TextSamples().verify(path, WITH_VOCABULARY)
        assert line.startswith("a.h5: damaged HDF5: ")
        assert told in line


def test_a_shape_that_no_file_can_hold_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for key, dtype in (("input_ids", "i4"), ("input_mask", "i1"), ("segment_ids", "i1")):
            file.create_dataset(key, (2, 1 << 40), dtype, chunks=(1, 64))
        for key in ("masked_lm_positions", "masked_lm_ids"):
            file.create_dataset(key, (2, 10), "i4", chunks=(1, 10))
        file.create_dataset("next_sentence_labels", (2,), "i1", chunks=(1,))
    (line,) = TextSamples().verify(path, Checking())
    assert line.startswith("a.h5: input_ids of shape (2, 1099511627776) was never written: ")
    with pytest.raises(UserError, match=r"a.h5': input_ids of shape \(2, 1099511627776\) was never written"):
        open_text(path, BERT, text_spec(), 0, training=True)


def test_samples_that_do_not_fit_the_settings(tmp_path: Path) -> None:
    foreign(tmp_path)
    with pytest.raises(UserError, match=r"has samples of 64 tokens, data.sequence_length is 32"):
        open_text(tmp_path, BERT, text_spec(sequence_length=32), 0, training=True)
    (tmp_path / "part_00000_of_00500.hdf5").rename(tmp_path / "b.h5")
    foreign(tmp_path, masked_lm_positions=(np.ones((5, 11)), "i4"), masked_lm_ids=(np.ones((5, 11)), "i4"))
    with pytest.raises(UserError, match=r"part_0.*64 tokens and 11 predictions|b.h5': .*64 tokens and 10 predictions"):
        open_text(tmp_path, BERT, text_spec(), 0, training=True)
    small = BERT.model_copy(update={"vocab_size": 100})
    (tmp_path / "b.h5").unlink()
    with pytest.raises(BadSampleError, match="vocabulary of 100"):
        open_text(tmp_path, small, text_spec(), 0, training=True).read((0, 0))


# Splits and the embedded text


@pytest.fixture
def small_text(monkeypatch: pytest.MonkeyPatch) -> tuple[TextDocument, ...]:
    documents = tuple(
        TextDocument(f"d{i:02d}", tuple(f"Document {i} has sentence {j} of é." for j in range(5 + i)))
        for i in range(40)
    )
    monkeypatch.setattr("dlbench.datasets.making.computed_recipes.python_documents", lambda: documents)
    return documents


def test_embedded_text_keeps_validation_apart(small_text: tuple[TextDocument, ...], tmp_path: Path) -> None:
    recipe = TextRecipe(validation_share=0.2)
    make(recipe, tmp_path)
    assert [(p.name, p.count) for p in recipe.parts()] == [
        ("train/text-00000.txt", 32),
        ("validation/text-00000.txt", 8),
    ]
    written = []
    for part in recipe.parts():
        blocks = (tmp_path / part.name).read_text(encoding="utf-8").rstrip("\n").split("\n\n")
        written += [tuple(block.split("\n")) for block in blocks]
    assert sorted(written) == sorted(document.sentences for document in small_text)
    assert "Python Software Foundation License" in (tmp_path / "LICENSES").read_text(encoding="utf-8")
    assert RawText().verify(tmp_path / "train", WITH_VOCABULARY) == []


@pytest.fixture(scope="module")
def embedded() -> tuple[TextDocument, ...]:
    return python_documents()


def test_embedded_text_is_real_and_large_enough(embedded: tuple[TextDocument, ...]) -> None:
    assert len({d.name for d in embedded}) == len(embedded) > 200
    assert sum(len(sentence) for d in embedded for sentence in d.sentences) > 1_000_000
    lines = [s for d in embedded for s in d.sentences]
    assert all(s == s.strip() and s and "\n" not in s for s in lines)
    assert not any(s.startswith(">>>") for d in embedded if d.name.startswith("module/") for s in d.sentences)
    # A long sentence in two documents could stand in training and validation.
    homes = Counter(s for d in embedded for s in set(d.sentences) if len(s) >= 40)
    assert set(homes.values()) == {1}


def test_python_without_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlbench.datasets.making.computed_recipes.sysconfig.get_path", lambda _name: str(tmp_path))
    (tmp_path / "only.py").write_text('"""One module."""\n', encoding="utf-8")
    with pytest.raises(EnvironmentLacksError, match=r"are not in .* \(1 modules with docstrings\); use a Python that"):
        python_documents.__wrapped__()


# Verification of text


def test_bad_text_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One document.\n\nAnother ☃ document.\n", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"fine\nnot \xff fine\n")
    (tmp_path / "c.txt").write_bytes(b"\n \n")
    lines: list[str] = []
    for workers in (1, 2):
        checking = Checking(vocabulary="english-4096", workers=workers, on_remark=lines.append)
        found = RawText().verify(tmp_path, checking)
        assert [line.partition(";")[0] for line in found] == ["b.txt: line 2: not UTF-8", "c.txt: contains no text"]
    assert lines[-2] == "2 documents in 3 files"
    assert lines[-1].endswith("tokens are [UNK]")
    assert RawText().verify(tmp_path / "a.txt", Checking()) == []
    (tmp_path / "d.txt").write_text("alone\n", encoding="utf-8")
    assert "a single document" in RawText().verify(tmp_path / "d.txt", Checking())[0]
    with pytest.raises(UserError, match="no such file or folder"):
        RawText().verify(tmp_path / "missing", Checking())
