"""Candidate shards with one key need the same bytes; those that differ in anything that counts have keys of their own."""

from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from torch import nn

from hydra_tune.shard.analysis.graph_analysis import placeholders
from hydra_tune.shard.capture.batch import flatten
from hydra_tune.shard.partition.shard_equivalence import ShardSignatureBuilder
from hydra_tune.shard.partition.subgraph import cut_shard
from tests.unit.shard.bench import bench, parity_bench, task_of, vectors


def likenesses(made):
    return ShardSignatureBuilder(made.captured, made.analysis, made.pilot._inputs)


def groups(made):
    """Candidates between neighbouring and next-but-one cuts, by key."""
    found = defaultdict(list)
    tells, edges = likenesses(made), [0, *made.analysis.cuts, made.end]
    for first, last in (*pairwise(edges), *zip(edges, edges[4:], strict=False), *zip(edges, edges[9:], strict=False)):
        found[tells.of(first, last).key].append((first, last))
    unknown = found.pop(None, [])
    return [spans for spans in found.values() if len(spans) > 1], unknown


def runs(made, span):
    """Bytes of a candidate that recomputes its activations, and of the same candidate if it keeps them."""
    shard = cut_shard(made.captured, made.analysis, *span)
    return made.pilot._run(shard), made.pilot._run_keeping(shard) if shard.last < made.end else None


class Deep(nn.Module):
    """Equal layers, but that one has no gradient, one has a tied weight, and one's result is used far behind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU()) for _ in range(8)])
        self.layers[2].requires_grad_(requires_grad=False)
        self.layers[6][0].weight = self.layers[5][0].weight
        self.head = nn.Linear(8, 1)

    def forward(self, values):
        kept = None
        for number, layer in enumerate(self.layers):
            values = layer(values)
            kept = values if number == 3 else kept
        return self.head(torch.dropout(values, 0.1, True) + kept)


def deep():
    return bench(task_of(Deep()), vectors(), alignment=64)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name", ["vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gpt2_attention")), "cnn"]
)
def test_candidates_of_one_key_need_the_same(name):
    made = parity_bench(name)
    alike, _ = groups(made)
    assert alike, "a model of equal layers"
    for spans in alike:
        assert runs(made, spans[0]) == runs(made, spans[-1]), spans


def test_so_do_those_of_a_model_whose_layers_differ_in_details():
    made = deep()
    alike, unknown = groups(made)
    assert not unknown
    for spans in alike:
        found = [runs(made, span) for span in spans]
        assert len(set(found)) == 1, spans


def test_what_a_likeness_says_of_the_state_is_what_the_shard_has():
    made = deep()
    tells, edges = likenesses(made), [0, *made.analysis.cuts, made.end]
    for first, last in zip(edges, edges[5:], strict=False):
        assert tells.of(first, last).state == cut_shard(made.captured, made.analysis, first, last).state


@pytest.mark.parametrize("what", ["frozen", "tied", "used behind"])
def test_what_counts_is_in_the_key(what):
    """The layers' linears: the second stands for all, the one that differs has another key."""
    made = deep()
    tells = likenesses(made)
    linears = [i for i, node in enumerate(made.captured.nodes) if "linear" in str(node.target)]
    span = 4  # a linear, a counter of batches, a normalisation, an activation
    keys = [tells.of(first, first + span).key for first in linears]
    assert keys[1] == keys[7]
    assert keys[{"frozen": 2, "tied": 5, "used behind": 4}[what]] != keys[1]


def test_an_operator_that_is_none_of_torchs_has_no_key():
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

        def forward(self, values):
            with torch.no_grad():
                shift = values.mean()
            return self.layers(values + shift)

    made = bench(task_of(Region()), vectors())
    if not any("wrap" in str(node.target) for node in made.captured.nodes):
        pytest.skip("this torch captures the region's operators themselves")
    tells = likenesses(made)
    assert tells.of(0, made.end).key is None
    assert placeholders(made.captured, made.specs, flatten(made.batch).tensors, made.pilot._mode)
