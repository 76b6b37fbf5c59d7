"""Records and summaries, against hand-computed values."""

import json
import math

import numpy as np
import pytest

from penelope_jax.events import Admitted, Finished, RequestMetrics, Sampled
from penelope_jax.ideal_cache import IdealCache, IdealHit
from penelope_jax.metrics import Recorder, distribution, summarize, write_json, write_records

PAGE = 4
C = 100.0  # linear cost
KEYS = [
    "config",
    "requests",
    "ttft_s",
    "jct_s",
    "hit_rate",
    "tokens",
    "recompute_units",
    "evicted_pages",
    "moved_pages",
    "swapped_loads",
    "lost_90",
    "per_request",
    "run",
]


def tokens(start, stop):
    return np.arange(start, stop, dtype=np.int32)


def metrics(prompt_len, *spans, match_stop=None):
    """Metrics of a prompt that computes `spans`; what lies below `match_stop` refills holes."""
    match_stop = spans[-1][0] if match_stop is None else match_stop
    refilled = sum(min(stop, match_stop) - start for start, stop in spans if start < match_stop)
    return RequestMetrics(
        prompt_len=prompt_len,
        device_hit=match_stop - refilled,
        host_hit=0,
        refilled=refilled,
        new=prompt_len - match_stop,
        compute_spans=spans,
        refilled_units=0.0,
        compute_units=1.0,
        scoring_units=2.0,
    )


def serve(recorder, request_id, session_id, turn, prompt, cost, *, num_outputs=2, arrival_s=0.0, times=(1.0, 2.0)):
    recorder.submitted(request_id, session_id, turn, prompt, arrival_s)
    recorder.update(Admitted(request_id=request_id, metrics=cost), arrival_s)
    for index in range(num_outputs):
        sampled = Sampled(request_id=request_id, token=900 + index, logprob=-1.0, position=len(prompt) + index)
        recorder.update(sampled, times[0] + index)
    finished = Finished(request_id=request_id, reason="length", metrics=cost, output_len=num_outputs, num_retractions=0)
    return recorder.update(finished, times[1])


def test_ideal_cache_holds_whole_pages_and_leaves_a_token_to_compute():
    cache = IdealCache(PAGE)
    assert cache.look(tokens(0, 10), "a") == IdealHit(0, 0)
    cache.add(tokens(0, 10), "a")
    assert cache.look(tokens(0, 10), "a") == IdealHit(8, 0)
    assert cache.look(tokens(0, 8), "a") == IdealHit(4, 0)  # a full hit recomputes the last page
    assert cache.look(tokens(0, 9), "b") == IdealHit(8, 8)
    assert cache.look(np.append(tokens(0, 5), 77), "a") == IdealHit(4, 0)
    assert cache.look(tokens(0, 10), "a", namespace="salt") == IdealHit(0, 0)
    assert cache.num_pages == 2


def test_ideal_cache_knows_which_pages_other_sessions_used():
    cache = IdealCache(PAGE)
    cache.add(np.append(tokens(0, 4), tokens(50, 54)), "a")
    cache.add(np.append(tokens(0, 4), tokens(60, 64)), "b")
    assert cache.look(np.append(tokens(0, 4), tokens(50, 60)), "a") == IdealHit(8, 4)
    assert cache.look(np.append(tokens(0, 4), tokens(50, 60)), "c") == IdealHit(8, 8)
    # The same tokens behind another page are another page.
    assert cache.look(np.append(tokens(60, 64), tokens(50, 60)), "a") == IdealHit(0, 0)


def test_recomputed_is_what_was_computed_below_the_ideal_hit():
    recorder = Recorder(PAGE, C)
    serve(recorder, 0, "a", 0, tokens(0, 20), metrics(20, (0, 20)))
    # The history is 22 tokens, of which 21 have K/V: 5 pages. The next prompt refills [4, 8) and computes [16, 30).
    prompt = np.concatenate([tokens(0, 20), [900, 901], tokens(50, 58)]).astype(np.int32)
    serve(recorder, 1, "a", 1, prompt, metrics(30, (4, 8), (16, 30)))
    first, second = recorder.records
    assert (first.ideal_hit, first.recomputed, first.recompute_units) == (0, 0, 0)
    assert (second.ideal_hit, second.recomputed) == (20, 8)
    assert second.recompute_units == sum(C + p for p in (4, 5, 6, 7, 16, 17, 18, 19))
    assert second.device_hit + second.host_hit + second.refilled + second.new == second.prompt_len


def test_a_request_lost_its_private_history_at_nine_tenths_of_it():
    recorder = Recorder(PAGE, C)
    serve(recorder, 0, "a", 0, np.append(tokens(0, 8), tokens(100, 141)), metrics(49, (0, 49)), num_outputs=1)
    serve(recorder, 1, "b", 0, np.append(tokens(0, 8), tokens(200, 203)), metrics(11, (8, 11)), num_outputs=1)
    longer = np.concatenate([tokens(0, 8), tokens(100, 141), tokens(300, 310)]).astype(np.int32)
    # 40 tokens are session a's own: 36 of them are nine tenths.
    serve(recorder, 2, "a", 1, longer, metrics(59, (8, 44), (48, 59)), num_outputs=1)
    serve(recorder, 3, "a", 2, longer, metrics(59, (8, 40), (48, 59)), num_outputs=1)
    record = recorder.records[2]
    assert (record.ideal_hit, record.shared_prefix, record.recomputed_private) == (48, 8, 36)
    assert [record.lost_private for record in recorder.records] == [False, False, True, False]
    document = summarize(recorder.records, last_turns={}, evicted_pages=0, config={}, run={})
    lost, kept = sum(C + p for p in range(8, 44)), recorder.records[3].recompute_units
    assert document["lost_90"] == {"requests": 1, "recompute_share": lost / (lost + kept)}


def test_recomputing_the_shared_prefix_does_not_count_as_private():
    recorder = Recorder(PAGE, C)
    serve(recorder, 0, "a", 0, tokens(0, 9), metrics(9, (0, 9)))
    serve(recorder, 1, "b", 0, tokens(0, 9), metrics(9, (0, 9)))
    assert recorder.records[1].recomputed == 8
    assert not recorder.records[1].lost_private


def test_the_summary_has_the_documented_keys_and_values():
    recorder = Recorder(PAGE, C)
    serve(recorder, 0, "a", 0, tokens(0, 20), metrics(20, (0, 20)), arrival_s=0.5, times=(2.0, 4.0))
    serve(recorder, 1, "a", 1, tokens(0, 30), metrics(30, (20, 30)), arrival_s=5.0, times=(8.0, 9.0))
    serve(recorder, 2, "b", 0, tokens(0, 25), metrics(25, (4, 8), (20, 25)), arrival_s=6.0, times=(6.5, 9.5))
    document = summarize(
        recorder.records,
        last_turns={"a": 1, "b": 1},
        evicted_pages=7,
        config={"policy": "penelope"},
        run={"seed": 3},
        per_request="requests.jsonl",
    )
    assert list(document) == KEYS
    assert document["requests"] == 3
    assert document["ttft_s"] == distribution([1.5, 3.0, 0.5])
    assert document["jct_s"] == distribution([8.5])  # session b is not complete
    assert document["tokens"] == {"prompt": 75, "device_hit": 36, "host_hit": 0, "refilled": 4, "new": 35}
    assert document["hit_rate"] == 36 / 75
    # A cache that never evicts would have held 24 tokens of the last prompt, through session a.
    assert document["recompute_units"] == sum(C + p for p in (*range(4, 8), *range(20, 24)))
    assert (document["evicted_pages"], document["moved_pages"], document["swapped_loads"]) == (7, 0, 0)
    assert document["per_request"] == "requests.jsonl"
    assert document["run"] == {"seed": 3, "recomputed_tokens": 8}


def test_distribution():
    assert distribution([3.0, 1.0, 2.0]) == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": pytest.approx(2.98)}
    assert distribution([]) == {"mean": None, "p50": None, "p90": None, "p99": None}


def test_an_empty_run_has_a_summary():
    document = summarize([], last_turns={}, evicted_pages=0, config={}, run={})
    assert document["hit_rate"] is None and document["lost_90"] == {"requests": 0, "recompute_share": 0.0}


def test_the_reply_is_returned_and_aborted_requests_leave_no_record():
    recorder = Recorder(PAGE, C)
    np.testing.assert_array_equal(serve(recorder, 0, "a", 0, tokens(0, 9), metrics(9, (0, 9))), [900, 901])
    recorder.submitted(1, "b", 0, tokens(0, 9), 0.0)
    finished = Finished(request_id=1, reason="abort", metrics=None, output_len=0, num_retractions=0)
    assert len(recorder.update(finished, 1.0)) == 0
    assert len(recorder.records) == 1
    assert recorder.update(finished, 1.0) is None  # a request it never saw


def test_files_are_written_whole(tmp_path):
    recorder = Recorder(PAGE, C)
    serve(recorder, 0, "a", 0, tokens(0, 9), metrics(9, (0, 9)), arrival_s=0.25)
    write_records(tmp_path / "requests.jsonl", recorder.records)
    (line,) = (tmp_path / "requests.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["ttft_s"] == 0.75 and record["session_id"] == "a" and record["new"] == 9
    write_json(tmp_path / "out.json", {"a": 1})
    with pytest.raises(ValueError):
        write_json(tmp_path / "out.json", {"a": math.nan})
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": 1}
    assert not list(tmp_path.glob("*.part"))
