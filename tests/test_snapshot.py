"""The cache on disk: every byte comes back, the wrong one is refused, a damaged one costs only the cache."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_world import geometry
from test_cache_outline import ONE_TIER, TWO_TIERS, used_cache

from penelope_jax import snapshot
from penelope_jax.cache_outline import outline_of
from penelope_jax.config import EngineConfig
from penelope_jax.driver import Driver, HashExecutor
from penelope_jax.errors import InputError
from penelope_jax.event_log import EventLogWriter
from penelope_jax.executor import JaxExecutor
from penelope_jax.invariants import check_cache, check_idle
from penelope_jax.models import random_weights
from penelope_jax.models.layers import device_mesh
from penelope_jax.moves import Move, MoveKind
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import CacheState
from penelope_jax.snapshot import check_snapshot, restore_snapshot, save_snapshot

TWO = dataclasses.replace(TWO_TIERS, weights_fingerprint="0123abcd")
ONE = dataclasses.replace(ONE_TIER, weights_fingerprint="0123abcd")


def executor_of(config: EngineConfig, dtype: str = "bfloat16", mesh: tuple[int, int] = (1, 1), layers: int = 2):
    model = dataclasses.replace(geometry(4, 4, 8, 32, dtype), vocab_size=100, num_layers=layers)
    return JaxExecutor(
        model,
        random_weights.random_params(model, device_mesh(*mesh)),
        num_pages=config.num_device_pages,
        page_size=config.page_size,
        max_context=64,
        max_segments=2,
        max_step_tokens=16,
        num_host_pages=config.num_host_pages + config.num_swap_pages,
    )


def fill(executor: JaxExecutor, cache: CacheState, seed: int = 0) -> None:
    """Gives every page of both tiers bytes of its own, of all bit patterns."""
    random = np.random.default_rng(seed)
    dtype, shape = executor.kv_pool.dtype, executor.kv_pool.shape[1:]
    for tier, write in ((Tier.DEVICE, executor.write_pages), (Tier.HOST, executor.write_host_pages)):
        ids = [node.page_ids[node.tiers == tier] for node in cache.nodes.values()]
        ids = np.concatenate([np.empty(0, np.int32), *ids])
        words = random.integers(0, 256, (len(ids), *shape, dtype.itemsize), np.uint8)
        write(ids, words.view(dtype)[..., 0])


def contents(cache: CacheState, executor: JaxExecutor) -> dict[tuple[str, bytes], bytes]:
    """Returns the bytes of every resident page, by namespace and history up to the page."""
    found = {}
    for namespace, root in cache.roots.items():
        stack = [(cache.nodes[root], b"")]
        while stack:
            node, history = stack.pop()
            for page in np.flatnonzero(node.page_ids != NO_PAGE).tolist():
                read = executor.read_pages if node.tiers[page] == Tier.DEVICE else executor.read_host_pages
                name = history + node.tokens[: (page + 1) * 4 * cache.page_size]
                found[namespace, name] = read([int(node.page_ids[page])]).tobytes()
            stack.extend((cache.nodes[child], history + node.tokens) for child in node.children.values())
    return found


@pytest.fixture(scope="module")
def cache() -> CacheState:
    return used_cache(TWO)


@pytest.fixture(scope="module")
def executor(cache) -> JaxExecutor:
    executor = executor_of(TWO)
    fill(executor, cache)
    return executor


@pytest.fixture(scope="module")
def target() -> JaxExecutor:
    """Where snapshots are restored."""
    return executor_of(TWO)


@pytest.fixture(scope="module")
def expected(cache, executor) -> dict[tuple[str, bytes], bytes]:
    return contents(cache, executor)


@pytest.fixture(scope="module")
def saved(cache, executor, tmp_path_factory) -> pathlib.Path:
    """A directory with a snapshot in many small parts."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "_CHUNK_BYTES", 20 * executor.host_pages.page_bytes)
        done = save_snapshot(directory, TWO, cache, executor)
    assert done.path == directory / "snapshot-0" and done.num_pages == cache.num_resident
    parts = [f"pages-{index}" for index in range(-(-cache.num_resident // 20))]
    assert len(parts) >= 3 and sorted(path.name for path in done.path.iterdir()) == ["cache.json", *parts, "tree"]
    return directory


@pytest.mark.parametrize("mesh", [(1, 1), (1, 4)])
def test_every_byte_comes_back(saved, cache, expected, mesh):
    other = executor_of(TWO, mesh=mesh)
    restored = restore_snapshot(saved, TWO, other)
    assert (restored.num_left_out, restored.problem) == (0, "")
    assert restored.num_device + restored.num_host == cache.num_resident
    check_cache(restored.cache)
    check_idle(restored.cache)
    assert contents(restored.cache, other) == expected
    driver = Driver(TWO, HashExecutor(90), cache=restored.cache)
    assert driver.idle and driver.state.cache is restored.cache
    # Control: one bit of one page.
    other.flip_bit(int(restored.cache.device.num_pages) - 1)
    assert contents(restored.cache, other) != expected


def test_another_dtype_and_one_tier(tmp_path):
    cache, executor = used_cache(ONE), executor_of(ONE, "float32")
    fill(executor, cache)
    saved = save_snapshot(tmp_path, ONE, cache, executor)
    assert saved.num_bytes == saved.num_pages * executor.kv_pool[0].nbytes
    other = executor_of(ONE, "float32")
    assert contents(restore_snapshot(tmp_path, ONE, other).cache, other) == contents(cache, executor)


@pytest.mark.parametrize(("device_tokens", "host_tokens"), [(80, 40), (48, 0), (400, 0)])
def test_a_smaller_cache_gets_the_newest_and_says_so(saved, expected, caplog, device_tokens, host_tokens):
    config = dataclasses.replace(TWO, device_tokens=device_tokens, host_tokens=host_tokens)
    other = executor_of(config)
    restored = restore_snapshot(saved, config, other)
    found = contents(restored.cache, other)
    number = len(expected)
    kept = min(number, (device_tokens + host_tokens) // 4)
    assert len(found) == kept and found.items() <= expected.items()
    assert restored.num_left_out == number - kept
    told = f"{saved / 'snapshot-0'}: {number - kept} of {number} saved pages have no room and are left out."
    assert (told in caplog.text) == (kept < number)
    check_cache(restored.cache)


def test_what_is_not_there_is_no_problem(tmp_path, target, caplog):
    for directory in (tmp_path, tmp_path / "not there"):
        restored = restore_snapshot(directory, TWO, target)
        assert restored[1:] == (0, 0, 0, "") and not restored.cache.nodes
    assert not caplog.records and not (tmp_path / "not there").exists()


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({"weights_fingerprint": "ffff"}, {}, "holds weights with fingerprint 0123abcd; this engine has ffff."),
        ({}, {"dtype": "float32"}, "holds K/V of dtype bfloat16; this engine has float32."),
        (
            {"page_size": 8, "host_tokens": 80, "swap_tokens": 8},
            {},
            "holds pages whose size in tokens is 4; this engine has 8.",
        ),
        (
            {},
            {"layers": 1},
            (
                "holds pages of shape [layers, 2, kv heads, tokens, head dim] [2, 2, 4, 4, 8]; this engine has "
                "[1, 2, 4, 4, 8]."
            ),
        ),
    ],
)
def test_another_cache_is_refused(saved, changes, model, message):
    config = dataclasses.replace(TWO, **changes)
    for use in (check_snapshot, restore_snapshot):
        with pytest.raises(InputError) as caught:
            use(saved, config, executor_of(config, **model))
        assert str(caught.value) == f"{saved / 'snapshot-0'}: {message} Choose another directory, or remove it."


def test_what_is_right_missing_or_damaged_is_not_refused(saved, tmp_path, target):
    check_snapshot(saved, TWO, target)
    check_snapshot(tmp_path, TWO, target)
    (tmp_path / "snapshot-0").mkdir()
    (tmp_path / "snapshot-0" / "cache.json").write_text("nonsense")
    check_snapshot(tmp_path, TWO, target)


def damaged(path: pathlib.Path, how: str) -> None:
    data = path.read_bytes()
    match how:
        case "gone":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "changed":
            place = len(data) // 2
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "changed"])
def test_damage_costs_the_cache_and_gives_no_wrong_byte(saved, tmp_path, target, how, caplog):
    """Each file of the snapshot in turn: nothing is restored, and a warning says why."""
    files = sorted(path.relative_to(saved) for path in saved.rglob("*") if path.is_file())
    assert len(files) > 20
    for number, name in enumerate(files):
        directory = tmp_path / str(number)
        shutil.copytree(saved, directory)
        damaged(directory / name, how)
        if (saved / name).read_bytes() == b"" and how != "gone":
            continue
        caplog.clear()
        restored = restore_snapshot(directory, TWO, target)
        check_idle(restored.cache)
        assert restored.cache.num_resident == 0 and restored.problem.startswith(f"{directory / 'snapshot-0'}: ")
        assert f"{directory / 'snapshot-0'}: the saved cache is damaged and is not used: " in caplog.text
        if name.name != "cache.json":
            part = name.relative_to("snapshot-0")
            word = {"gone": f"{part} is missing.", "changed": f"the checksum of {part} is wrong."}
            assert restored.problem.endswith(word.get(how, f"the size of {part} is wrong."))


def test_a_file_too_many(saved, tmp_path, target):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "snapshot-0" / "tree" / "more").write_text("")
    assert restore_snapshot(tmp_path, TWO, target).problem.endswith(": tree/more does not belong there.")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1]", "cache.json is no JSON object."),
        ("nonsense", "Expecting value: line 1 column 1 (char 0)"),
        ({"format": 9}, "cache.json: format 9 is not supported; supported: 1."),
        ({"chunk_pages": 19}, "cache.json: its checksum is wrong."),
        ({"checksum": None}, "cache.json: its checksum is wrong."),
        ({"namespaces": ["", "other"]}, "cache.json: its checksum is wrong."),
        ({"weights_fingerprint": "ffff"}, "cache.json: its checksum is wrong."),
    ],
)
def test_a_header_that_lies(saved, tmp_path, target, text, problem):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "snapshot-0" / "cache.json"
    if isinstance(text, dict):
        text = json.dumps(json.loads(path.read_text()) | text)
    path.write_text(text)
    restored = restore_snapshot(tmp_path, TWO, target)
    assert restored.problem == f"{tmp_path / 'snapshot-0'}: {problem}" and not restored.cache.nodes


def test_what_has_the_right_checksums_is_still_looked_at(saved, tmp_path, cache, executor, target, monkeypatch):
    """A fault of the program that saved: a tree that contradicts itself, or is of other pages."""
    outline, sources = outline_of(cache)
    for wrong, problem in (
        (dataclasses.replace(outline, ages=outline.ages * 0), "two nodes have one age."),
        (dataclasses.replace(outline, tokens=outline.tokens[:-1]), f"{len(outline.rows)} pages have"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "outline_of", lambda _cache, wrong=wrong: (wrong, sources))
            save_snapshot(tmp_path, TWO, cache, executor)
        assert problem in restore_snapshot(tmp_path, TWO, target).problem


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), ValueError("broken")])
@pytest.mark.parametrize("at", ["pages-0", "tree"])
def test_a_save_that_does_not_end_leaves_the_one_before(
    tmp_path, cache, executor, target, expected, monkeypatch, error, at
):
    save_snapshot(tmp_path, TWO, cache, executor)
    real = snapshot._write

    def write(directory, arrays):
        if directory.name == at:
            raise error
        real(directory, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_write", write)
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else InputError) as caught:
            save_snapshot(tmp_path, TWO, cache, executor)
    if not isinstance(error, KeyboardInterrupt):
        assert str(caught.value) == f"{tmp_path}: the cache was not saved: {error}"
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot-0"]
    assert contents(restore_snapshot(tmp_path, TWO, target).cache, target) == expected


def test_a_save_takes_the_place_of_those_before_and_of_what_was_left_of_one(
    tmp_path, cache, executor, target, expected
):
    (tmp_path / "writing" / "tree").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    for number in range(3):
        assert save_snapshot(tmp_path, TWO, cache, executor).path.name == f"snapshot-{number}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "snapshot-2"]
    shutil.copytree(tmp_path / "snapshot-2", tmp_path / "snapshot-10")
    (tmp_path / "snapshot-2" / "cache.json").unlink()
    assert contents(restore_snapshot(tmp_path, TWO, target).cache, target) == expected


def test_two_processes_do_not_save_into_one_directory_at_once(tmp_path, cache, executor, target, expected, monkeypatch):
    """Else one would give its tree and its checksums to pages of the other."""
    refused = []
    real = snapshot._write

    def write(directory, arrays):
        real(directory, arrays)
        if directory.name == "tree":
            with pytest.raises(InputError) as caught:  # another descriptor is as good as another process
                save_snapshot(tmp_path, TWO, used_cache(TWO), executor)
            refused.append(str(caught.value))

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_write", write)
        save_snapshot(tmp_path, TWO, cache, executor)
    assert refused == [f"{tmp_path}: the cache was not saved: another process is saving its cache there."]
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot-0"]
    assert contents(restore_snapshot(tmp_path, TWO, target).cache, target) == expected
    assert save_snapshot(tmp_path, TWO, cache, executor).path.name == "snapshot-1"


def test_a_file_system_without_locks_is_none_the_less_written_to(tmp_path, cache, executor, monkeypatch, caplog):
    def flock(_descriptor, _how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(snapshot.fcntl, "flock", flock)
    assert save_snapshot(tmp_path, TWO, cache, executor).path.is_dir()
    assert f"{tmp_path}: cannot be locked, Operation not supported; no other process may save there." in caplog.text


def test_a_directory_that_cannot_be(tmp_path, cache, executor):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / 'file'}: the cache was not saved: ")):
        save_snapshot(tmp_path / "file", TWO, cache, executor)


def test_a_cache_in_use_is_not_saved(tmp_path, cache, executor):
    ids = np.zeros(1, np.int32)
    move = Move(move_id=0, kind=MoveKind.LOAD, device_ids=ids, host_ids=ids)
    moving = dataclasses.replace(cache, moves=cache.moves.set(0, move))
    with pytest.raises(ValueError, match="^0 pins are out and 1 moves under way; both must be 0.$"):
        save_snapshot(tmp_path, TWO, moving, executor)
    nameless = dataclasses.replace(TWO, weights_fingerprint="")
    for use in (
        lambda: save_snapshot(tmp_path, nameless, cache, executor),
        lambda: restore_snapshot(tmp_path, nameless, executor),
    ):
        with pytest.raises(ValueError, match="weights_fingerprint is ''"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_one_process_only(tmp_path, cache, executor, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for use in (
        lambda: save_snapshot(tmp_path, TWO, cache, executor),
        lambda: restore_snapshot(tmp_path, TWO, executor),
    ):
        with pytest.raises(ValueError, match="^a cache over 2 processes cannot be saved or restored; supported: 1.$"):
            use()


def test_a_log_begins_with_an_empty_cache(tmp_path, cache):
    message = f"^an event log begins with an empty cache; this one holds {cache.num_resident} pages.$"
    with EventLogWriter(tmp_path / "log", TWO) as log, pytest.raises(ValueError, match=message):
        Driver(TWO, HashExecutor(90), log=log, cache=cache)


def test_bytes_are_written_to_any_number_of_pages(executor):
    pool = np.array(executor.kv_pool)
    random = np.random.default_rng(3)
    for number in (0, 1, 5, 30):
        ids = random.permutation(30)[:number]
        pages = random.random((number, *pool.shape[1:])).astype(pool.dtype)
        before = executor.read_pages(ids)
        executor.write_pages(ids, pages)
        assert executor.read_pages(ids).tobytes() == pages.tobytes()
        executor.write_pages(ids, before)
    assert np.asarray(executor.kv_pool).tobytes() == pool.tobytes()
    with pytest.raises(ValueError, match=r"page_id=30 must be in \[0, 30\)"):
        executor.write_pages([30], pool[:1])
    with pytest.raises(
        ValueError, match=r"pages are float32\[1, 2, 2, 4, 4, 8\]; must be bfloat16\[1, 2, 2, 4, 4, 8\]"
    ):
        executor.write_pages([3], pool[:1].astype(jnp.float32))
